"""Commit outcomes of delivery tasks in batches that grow with the load."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Clock

_log = logging.getLogger(__name__)

_COMMIT_OUTAGE: Final = "commits of outcomes failed"
_BATCH: Final = 400
_LINGER_S: Final = 0.01
_LONG_LINGER_S: Final = 0.03
_LINGER_MIN_BATCH: Final = 4
_LONG_LINGER_MIN_BATCH: Final = 20
"""After a batch of this size more outcomes are likely, so the next commit lingers for them."""
LATE_AFTER_S: Final = 5.0
_RETRY_S: Final = (0.05, 0.1, 0.2, 0.5)


def _without_response_text(outcome: DeliveryOutcome) -> DeliveryOutcome | None:
    """Return the outcome without the endpoint's text, its only unchecked part, or None."""
    result = outcome.result
    if result is None or not (result.detail or result.body_head):
        return None
    return replace(outcome, result=replace(result, detail="", body_head=b""))


def _first_repetition(outcomes: Sequence[DeliveryOutcome]) -> int:
    """Return how many outcomes there are before the second one of a delivery."""
    seen: set[DeliveryId] = set()
    for index, outcome in enumerate(outcomes):
        if outcome.task.delivery_id in seen:
            return index
        seen.add(outcome.task.delivery_id)
    return len(outcomes)


class OutcomeWriter:
    """Collect outcomes by `add`, which never blocks, and commit them in `run`."""

    def __init__(
        self,
        outcomes: OutcomeQueries,
        *,
        on_committed: Callable[[Sequence[DeliveryOutcome]], Awaitable[None]],
        on_rejected: Callable[[DeliveryTask], None],
        clock: Clock,
    ) -> None:
        """Call `on_committed` with what was recorded.

        `on_rejected` gets each task whose outcome PostgreSQL never accepts.
        """
        self._outcomes = outcomes
        self._on_committed = on_committed
        self._on_rejected = on_rejected
        self._clock = clock
        self._committing_since = math.inf
        self._waited_count = 0
        """Pending outcomes that waited behind a late commit: their claims may have ended."""
        self._caught_up = asyncio.Event()
        self._caught_up.set()
        self.late_count = 0
        """The times that the writer was late and has caught up since."""
        self._pending: list[DeliveryOutcome] = []
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.worker = 0
        """The writer id of the claims, for the delivery log."""

    def add(self, outcome: DeliveryOutcome) -> None:
        """Queue an outcome for the next commit."""
        self._pending.append(outcome)
        if len(self._pending) == 1:
            self._idle.clear()
            self._wake.set()

    def is_late(self, now: float) -> bool:
        """Return whether commits take so long that further attempts should wait for them."""
        return self._waited_count > 0 or now - self._committing_since > LATE_AFTER_S

    async def wait_until_caught_up(self) -> None:
        """Wait until a late commit has ended, and those of all that waited behind it."""
        await self._caught_up.wait()

    async def drain(self) -> None:
        """Wait until every outcome added so far is committed."""
        await self._idle.wait()

    async def run(self) -> None:
        """Commit until cancelled. While PostgreSQL is unavailable, outcomes wait here."""
        last_size = 0
        while True:
            if not self._pending:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            if last_size >= _LINGER_MIN_BATCH and len(self._pending) < _BATCH:
                await asyncio.sleep(
                    _LONG_LINGER_S if last_size >= _LONG_LINGER_MIN_BATCH else _LINGER_S
                )
            batch = self._next_batch()
            last_size = len(batch)
            self._committing_since = self._clock.monotonic()
            self._caught_up.clear()
            if recorded := await self._commit(batch):
                await self._on_committed(recorded)
            self._end_commit(last_size)

    def _end_commit(self, size: int) -> None:
        took_long = self._clock.monotonic() - self._committing_since > LATE_AFTER_S
        was_late = took_long or self._waited_count > 0
        self._waited_count = len(self._pending) if took_long else max(0, self._waited_count - size)
        self._committing_since = math.inf
        if not self._waited_count:
            self.late_count += was_late
            self._caught_up.set()

    def _next_batch(self) -> Sequence[DeliveryOutcome]:
        """Remove and return the first outcomes, up to the second one of a delivery.

        A delivery has two if its claim ended during an attempt and it was claimed again.
        """
        batch = self._pending[:_BATCH]
        if len({outcome.task.delivery_id for outcome in batch}) < len(batch):
            batch = batch[: _first_repetition(batch)]
        self._pending = self._pending[len(batch) :]
        return batch

    async def _commit(self, outcomes: Sequence[DeliveryOutcome]) -> Sequence[DeliveryOutcome]:
        """Return those that were recorded: all, unless PostgreSQL never accepts some of them."""
        tries, in_doubt = 0, False
        while True:
            try:
                await self._outcomes.decide(outcomes, worker=self.worker, in_doubt=in_doubt)
            except (StorageUnavailableError, StorageRefusedError) as exc:
                in_doubt = in_doubt or isinstance(exc, StorageUnavailableError)
                OUTAGES.record_failure(exc, _COMMIT_OUTAGE)
                await asyncio.sleep(_RETRY_S[min(tries, len(_RETRY_S) - 1)])
                tries += 1
            except Exception:  # noqa: BLE001 - an outcome that PostgreSQL never accepts must not stop all others
                if len(outcomes) > 1:
                    return [one for outcome in outcomes for one in await self._commit([outcome])]
                if (without_text := _without_response_text(outcomes[0])) is not None:
                    return await self._commit([without_text])
                _log.exception(
                    "cannot record an outcome; its task is claimed again later: %r", outcomes[0]
                )
                self._on_rejected(outcomes[0].task)
                return ()
            else:
                OUTAGES.record_success(_COMMIT_OUTAGE)
                return outcomes
