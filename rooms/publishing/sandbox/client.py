"""Run checks in processes with a deadline and bounded memory, shared fairly by organisations.

Only a process can be stopped at a deadline: a thread cannot, and the libraries may hold the
interpreter's lock. Each organisation has a limit of processes, and organisations take turns.
"""

import asyncio
import logging
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Self

from rooms.errors import TransientError
from rooms.fair_slots import FairSlots
from rooms.metrics import Metrics
from rooms.publishing.sandbox.frames import (
    CHECK_FAILED,
    HEADER,
    Check,
    CheckJob,
    CheckOutcome,
    FilterTask,
    decode_outcome,
    encode_frame,
    make_job,
)

_log = logging.getLogger(__name__)

MAX_WAITING: Final = 32
"""Most requests of one organisation that wait for a slot."""
_WAIT_TIMEOUT_S: Final = 20.0
_START_TIMEOUT_S: Final = 60.0
_IDLE_TIMEOUT_S: Final = 60.0
_MAX_DEATHS_PER_REQUEST: Final = 3
"""A request's checks are given up after so many processes died with them."""
_FILTERS_PER_REQUEST_TIME: Final = 4
"""One filter may use this fraction of a request's CPU time."""
_HANG_FACTOR: Final = 20
"""A process hangs if it runs this many times longer than its limit of CPU time."""
_CHECK_SIGNALS: Final = (
    signal.SIGPROF,
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGTRAP,
)
"""Signals that a check causes: out of time, memory or stack. Others may come from an operator."""
_MAX_FRAME_BYTES: Final = 64 * 1024 * 1024


class _ProcessDiedError(Exception):
    """Report that the process ended before its job."""

    def __init__(self, reason: str, *, caused_by_check: bool) -> None:
        """Set whether the check ended the process."""
        super().__init__(reason)
        self.caused_by_check = caused_by_check


class CheckSandbox:
    """Start and share the sandbox processes of one API process. An async context manager."""

    def __init__(self, *, processes: int, cpu_ms: int, memory_bytes: int, metrics: Metrics) -> None:
        """Set the limits. `cpu_ms` is for all checks of one request."""
        self.cpu_ms = cpu_ms
        self._memory_bytes = memory_bytes
        self._slots = FairSlots(
            processes,
            max_per_tenant=max(1, processes // 2),
            max_waiting=MAX_WAITING,
            refusal="too many requests of the organisation wait for long validations",
        )
        self._idle: list[_CheckProcess] = []
        self._retiring: set[asyncio.Task[None]] = set()
        self._processes: set[_CheckProcess] = set()
        self._outcomes = metrics.sandboxed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for process in list(self._processes):
            await self._end(process)
        if self._retiring:
            await asyncio.wait(self._retiring)

    async def run(self, tenant: str, checks: Sequence[Check]) -> list[CheckOutcome]:
        """Run the checks of one request. The outcome of a check that was ended is `late`.

        RateLimitedError: too many requests of the tenant wait. TransientError: no process was free
        in time.
        """
        done: list[CheckOutcome] = []
        try:
            async with asyncio.timeout(_WAIT_TIMEOUT_S) as patience, self._slots.slot(tenant):
                patience.reschedule(None)
                await self._run_checks(checks, done)
        except TimeoutError as exc:
            self._outcomes.labels("refused").inc()
            raise TransientError("the validation waited too long for a sandbox process") from exc
        except TransientError:
            self._outcomes.labels("refused").inc()
            raise
        for name, count in Counter("late" if one.late else "done" for one in done).items():
            self._outcomes.labels(name).inc(count)
        return done

    async def _run_checks(self, checks: Sequence[Check], done: list[CheckOutcome]) -> None:
        loop, left_ms, lost = asyncio.get_running_loop(), float(self.cpu_ms), 0
        filter_ms = self.cpu_ms / _FILTERS_PER_REQUEST_TIME
        while len(done) < len(checks):
            process = await self._get_process()
            # Checks of less than a millisecond are done even where no time is left.
            job = make_job(checks, len(done), cpu_ms=left_ms, filter_ms=filter_ms)
            found: list[CheckOutcome] = []
            begun_s = loop.time()
            try:
                await process.run_job(job, found, self.cpu_ms / 1000 * _HANG_FACTOR)
            except _ProcessDiedError as exc:
                await self._end(process)
                lost += 1
                left_ms -= sum(one.cpu_ms for one in found)
                listing = bool(found) and not found[-1].final
                if listing:
                    found.pop()
                done += found
                if exc.caused_by_check:
                    _log.warning(
                        "a check ended its sandbox process with %s and counts as late", exc
                    )
                    # Its CPU time is unknown: at most its share, and at most the elapsed time.
                    is_filter = isinstance(job.tasks[len(found)], FilterTask)
                    left_ms -= min(
                        filter_ms if is_filter else self.cpu_ms, (loop.time() - begun_s) * 1000
                    )
                    done.append(CheckOutcome(final=not listing, late=True))
                elif lost >= _MAX_DEATHS_PER_REQUEST:
                    raise TransientError(f"sandbox processes end with {exc}") from exc
                if left_ms <= 0 or lost >= _MAX_DEATHS_PER_REQUEST:
                    done += [CheckOutcome(late=True) for _ in checks[len(done) :]]
            except BaseException:
                await self._end(process)
                raise
            else:
                done += found
                left_ms -= sum(one.cpu_ms for one in found)
                self._keep_idle(process)

    async def _get_process(self) -> "_CheckProcess":
        while self._idle:
            process = self._idle.pop()
            process.stop_idle_timer()
            if process.is_alive:
                return process
            await self._end(process)
        try:
            process = await _CheckProcess.start(self._memory_bytes)
        except OSError as exc:
            raise TransientError(f"cannot start a sandbox process: {exc}") from exc
        self._processes.add(process)
        return process

    def _keep_idle(self, process: "_CheckProcess") -> None:
        self._idle.append(process)
        process.start_idle_timer(_IDLE_TIMEOUT_S, lambda: self._retire(process))

    def _retire(self, process: "_CheckProcess") -> None:
        self._idle.remove(process)
        task = asyncio.create_task(self._end(process))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _end(self, process: "_CheckProcess") -> None:
        self._processes.discard(process)
        await process.end()


class _CheckProcess:
    """Run jobs in one sandbox process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._jobs = process.stdin
        self._outcomes = process.stdout
        self._idle_timer: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, memory_bytes: int) -> "_CheckProcess":
        """Start a process. OSError: it cannot be started."""
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rooms.publishing.sandbox", str(memory_bytes),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                limit=_MAX_FRAME_BYTES,
            )
        )  # fmt: skip

    @property
    def is_alive(self) -> bool:
        # The pipe may be closed before the end is noticed. A write to it raises on uvloop.
        return self._process.returncode is None and not self._jobs.is_closing()

    async def run_job(self, job: CheckJob, found: list[CheckOutcome], backstop_s: float) -> None:
        """Run a job, and append an outcome to `found` for each task.

        _ProcessDiedError: the process ended, or exceeded its deadline.
        """
        try:
            async with asyncio.timeout(_START_TIMEOUT_S + backstop_s):
                # It may have died since it was started: a write would raise on uvloop.
                if self._jobs.is_closing():
                    raise ConnectionResetError("its pipe is closed")
                self._jobs.write(encode_frame(job))
                await self._jobs.drain()
                while len(found) < len(job.tasks) or not found[-1].final:
                    (size,) = HEADER.unpack(await self._outcomes.readexactly(HEADER.size))
                    outcome = decode_outcome(await self._outcomes.readexactly(size))
                    if found and not found[-1].final:
                        found[-1] = outcome
                    else:
                        found.append(outcome)
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            code = await self._process.wait()
            raise _ProcessDiedError(
                _exit_text(code), caused_by_check=code == CHECK_FAILED or -code in _CHECK_SIGNALS
            ) from exc
        except TimeoutError as exc:
            raise _ProcessDiedError("its deadline", caused_by_check=True) from exc

    def start_idle_timer(self, seconds: float, then: Callable[[], None]) -> None:
        """Call a function after this time without a job."""
        self._idle_timer = asyncio.get_running_loop().call_later(seconds, then)

    def stop_idle_timer(self) -> None:
        """Cancel the timer, as there is a job."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    async def end(self) -> None:
        """Kill the process."""
        self.stop_idle_timer()
        with suppress(ProcessLookupError):
            self._process.kill()
        self._jobs.close()
        with suppress(ConnectionError):
            await self._jobs.wait_closed()
        await self._outcomes.read()
        await self._process.wait()


def _exit_text(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
