"""Processes for checks that may take too long: ended at their deadline, bounded in memory, shared fairly between organisations.

No thread can be stopped, and the libraries may keep the interpreter's lock: only a process can be given a deadline.
"""

import asyncio
import logging
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from rooms.errors import TransientError
from rooms.metrics import Metrics
from rooms.publishing.fair_slots import FairSlots
from rooms.publishing.sandbox_frames import HEADER, Check, FilterCheck, Job, Outcome, packed, read_outcome

_log = logging.getLogger(__name__)

MAX_WAITING: Final = 32
"""Requests of one organisation that may wait for a slot."""
_WAIT_S: Final = 20.0
_START_S: Final = 60.0
_IDLE_S: Final = 60.0
_LOST: Final = 3
"""A job that so many processes died of is given up."""
_FILTERS: Final = 4
"""One filter has this part of a job's CPU time."""
_BACKSTOP: Final = 20
"""A process that has used no CPU time for so many times its deadline hangs."""
_GUILTY: Final = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP)
"""How a process ends by what it was doing: out of time, memory or stack. Another may have been ended by the operator."""
_LIMIT: Final = 64 * 1024 * 1024


class _DiedError(Exception):
    """The process ended before the job did."""

    def __init__(self, how: str, *, guilty: bool) -> None:
        """`guilty`: what it was doing ended it."""
        super().__init__(how)
        self.guilty = guilty


class Sandbox:
    """The processes of one API process, started when they are needed. An async context manager."""

    def __init__(self, *, processes: int, cpu_ms: int, memory_bytes: int, metrics: Metrics) -> None:
        """`cpu_ms`: what the checks of one request may take in all."""
        self.cpu_ms = cpu_ms
        self._memory_bytes = memory_bytes
        self._slots = FairSlots(processes, share=max(1, processes // 2), waiting=MAX_WAITING)
        self._idle: list[_Process] = []
        self._retiring: set[asyncio.Task[None]] = set()
        self._running: set[_Process] = set()
        self._outcomes = metrics.sandboxed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in list(self._running):
            await self._end(process)
        if self._retiring:
            await asyncio.wait(self._retiring)

    async def run(self, tenant: str, checks: Sequence[Check]) -> list[Outcome]:
        """Do these checks of one request and return an outcome for each; what was ended is `late`.

        RateLimitedError: too many of the tenant's requests wait. TransientError: no process could be had in time.
        """
        done: list[Outcome] = []
        try:
            async with asyncio.timeout(_WAIT_S) as patience, self._slots.slot(tenant):
                patience.reschedule(None)
                await self._do(checks, done)
        except TimeoutError as exc:
            self._outcomes.labels("refused").inc()
            raise TransientError("long validations have waited for too long") from exc
        except TransientError:
            self._outcomes.labels("refused").inc()
            raise
        for name, count in Counter("late" if one.late else "done" for one in done).items():
            self._outcomes.labels(name).inc(count)
        return done

    async def _do(self, checks: Sequence[Check], done: list[Outcome]) -> None:
        loop, left_ms, lost = asyncio.get_running_loop(), float(self.cpu_ms), 0
        while len(done) < len(checks):
            if left_ms <= 0 or lost >= _LOST:
                done += [Outcome(late=True) for _ in checks[len(done) :]]
                return
            process = await self._process()
            rest = checks[len(done) :]
            each_ms = [self.cpu_ms / _FILTERS if isinstance(check, FilterCheck) else self.cpu_ms for check in rest]
            found: list[Outcome] = []
            begun_s = loop.time()
            try:
                await process.do(Job(left_ms, each_ms, list(rest)), found, self.cpu_ms / 1000 * _BACKSTOP)
            except _DiedError as exc:
                await self._end(process)
                lost += 1
                left_ms -= sum(one.cpu_ms for one in found)
                listing = bool(found) and not found[-1].final
                if listing:
                    found.pop()
                done += found
                if exc.guilty:
                    _log.warning("a check ended its sandbox process by %s, and counts as late", exc)
                    # What it took is gone with it: at most its share, and at most what the clock says.
                    left_ms -= min(each_ms[len(found)], (loop.time() - begun_s) * 1000)
                    done.append(Outcome(final=not listing, late=True))
                elif lost >= _LOST:
                    raise TransientError(f"sandbox processes end by {exc}") from exc
            except BaseException:
                await self._end(process)
                raise
            else:
                done += found
                self._rest(process)

    async def _process(self) -> "_Process":
        while self._idle:
            process = self._idle.pop()
            process.stay()
            if process.lives:
                return process
            await self._end(process)
        try:
            process = await _Process.start(self._memory_bytes)
        except OSError as exc:
            raise TransientError(f"no sandbox process can be started: {exc}") from exc
        self._running.add(process)
        return process

    def _rest(self, process: "_Process") -> None:
        self._idle.append(process)
        process.until_idle(_IDLE_S, lambda: self._retire(process))

    def _retire(self, process: "_Process") -> None:
        self._idle.remove(process)
        task = asyncio.create_task(self._end(process))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _end(self, process: "_Process") -> None:
        self._running.discard(process)
        await process.end()


class _Process:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._jobs = process.stdin
        self._outcomes = process.stdout
        self._idle: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, memory_bytes: int) -> "_Process":
        """Start one. OSError: there can be none."""
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rooms.publishing.sandbox_process", str(memory_bytes),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LIMIT,
            )
        )  # fmt: skip

    @property
    def lives(self) -> bool:
        return self._process.returncode is None

    async def do(self, job: Job, found: list[Outcome], backstop_s: float) -> None:
        """Do a job; `found` grows by an outcome for each check. _DiedError: the process ended, or had to be."""
        try:
            async with asyncio.timeout(_START_S + backstop_s):
                self._jobs.write(packed(job))
                await self._jobs.drain()
                while len(found) < len(job.checks) or not found[-1].final:
                    (size,) = HEADER.unpack(await self._outcomes.readexactly(HEADER.size))
                    outcome = read_outcome(await self._outcomes.readexactly(size))
                    if found and not found[-1].final:
                        found[-1] = outcome
                    else:
                        found.append(outcome)
        except (asyncio.IncompleteReadError, ConnectionError) as exc:
            code = await self._process.wait()
            raise _DiedError(_ended(code), guilty=code > 0 or -code in _GUILTY) from exc
        except TimeoutError as exc:
            raise _DiedError("its deadline", guilty=True) from exc

    def until_idle(self, seconds: float, then: Callable[[], None]) -> None:
        """Call this when so much time is over without a job."""
        self._idle = asyncio.get_running_loop().call_later(seconds, then)

    def stay(self) -> None:
        """There is a job."""
        if self._idle is not None:
            self._idle.cancel()

    async def end(self) -> None:
        """End at once."""
        self.stay()
        with suppress(ProcessLookupError):
            self._process.kill()
        self._jobs.close()
        with suppress(ConnectionError):
            await self._jobs.wait_closed()
        await self._outcomes.read()
        await self._process.wait()


def _ended(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"
