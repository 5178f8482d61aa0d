"""Try jobs again that must not fail, because what they do could not be requested a second time.

Their objects are hidden from the API or suspended until they are done. Operators see the reason in
the job's `error`, which stays until a step succeeds. The log has each kind of error once an hour,
since one cause may let ten thousand jobs fail.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.domain.ids import JobId
from rooms.errors import DeliveryError, TransientError

_log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 10.0
"""Pause after the first failure of a job; it doubles with each further one, up to the longest."""
MAX_PAUSE_S: Final = 600.0
LOG_EVERY_S: Final = 3600.0
"""Time after which an error of the same kind is logged again."""
_MAX_DOUBLINGS: Final = 6
_MAX_KEPT: Final = 10_000
"""Jobs whose failures are remembered; one that is forgotten begins with the first pause again."""


class InvalidJobError(DeliveryError):
    """Report that a job asks for what must not be done: it fails, and is not tried again."""


@dataclass(slots=True)
class _JobFailures:
    """Hold how often a job has failed in this process."""

    count: int = 0
    is_shown: bool = False
    """The last error is in the job's record."""


@dataclass(slots=True)
class _ErrorKind:
    """Hold when a kind of error was logged, by the monotonic clock, and how often it came since."""

    logged_at: float
    since: int = 0


class JobRetries:
    """Run steps of jobs, and snooze those that fail, each time for longer."""

    def __init__(
        self, job_queue: JobQueue, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._job_queue = job_queue
        self._monotonic = monotonic
        self._failures: dict[JobId, _JobFailures] = {}
        self._kinds: dict[tuple[str, type[Exception]], _ErrorKind] = {}
        """By the kind of the job and the type of the error."""

    async def run(self, job: OpenJob, step: Awaitable[bool]) -> bool:
        """Return whether the job is finished; if its step fails, snooze the job and return False.

        TransientError, InvalidJobError: as the step raised it.
        """
        try:
            done = await step
        except TransientError:
            raise
        except InvalidJobError:
            self._failures.pop(job.id, None)
            raise
        except Exception as exc:  # noqa: BLE001 - any error is shown, and the job tried again
            await self._snooze(job, exc)
            return False
        failures = self._failures.get(job.id)
        if failures is None:
            return done
        if done:
            del self._failures[job.id]
            _log.info("job %s (%s) is done after %d failures", job.id, job.kind, failures.count)
        elif failures.is_shown:
            await self._job_queue.record_progress(job)
            failures.is_shown = False
        return done

    async def _snooze(self, job: OpenJob, error: Exception) -> None:
        failures = self._failures.get(job.id)
        if failures is None:
            if len(self._failures) >= _MAX_KEPT:
                del self._failures[next(iter(self._failures))]
            failures = self._failures[job.id] = _JobFailures()
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures.count, _MAX_DOUBLINGS))
        failures.count += 1
        self._log_error(job, error)
        await self._job_queue.snooze_job(job, pause_s, error=f"{type(error).__name__}: {error}")
        failures.is_shown = True

    def _log_error(self, job: OpenJob, error: Exception) -> None:
        now_s = self._monotonic()
        kind = self._kinds.get((job.kind, type(error)))
        if kind is not None and now_s < kind.logged_at + LOG_EVERY_S:
            kind.since += 1
            return
        self._kinds[job.kind, type(error)] = _ErrorKind(logged_at=now_s)
        _log.error(
            "job %s (%s) failed, and is tried again after pauses of %d to %d s;"
            " %d such failures since the last line on one",
            job.id,
            job.kind,
            FIRST_PAUSE_S,
            MAX_PAUSE_S,
            0 if kind is None else kind.since,
            exc_info=error,
        )
