"""Keep PostgreSQL and the processes of Rooms alive, and stop all of them in order."""

import asyncio
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rooms.local.child_process import Child, ChildMonitor, ensure_can_listen, wait_ready
from rooms.local.early_writeback import writing_early
from rooms.local.log_file import RotatingLog
from rooms.local.pidfile import MARKER_VARIABLE, child_marker, lock_data_dir
from rooms.local.postgres import EmbeddedPostgres
from rooms.safe_text import lines_safe

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FOUNDATION_STOP_S = 15.0
# The process that sent a statement reports its errors.
_POSTGRES_WARNINGS = re.compile(r"PANIC|No space left|could not (write|extend|fsync)")
_ANY_LINE = re.compile("")
# Recovery after a crash reads up to max_wal_size.
_POSTGRES_TIMEOUT_S = 600.0


class SupervisorRun:
    """Run monitors as tasks of one group. Children stop first, in order, then foundations."""

    def __init__(
        self,
        *,
        foundations: Sequence[ChildMonitor],
        monitors: Sequence[ChildMonitor],
        drain_s: float,
    ) -> None:
        self.foundations = foundations
        self.monitors = monitors
        self._drain_s = drain_s
        self._stopping = asyncio.Event()
        self._urgent = asyncio.Event()
        self._tasks: dict[ChildMonitor, asyncio.Task[None]] = {}

    async def run(self, start: Callable[[], Coroutine[None, None, None]]) -> None:
        """Start, wait for `stop`, and stop everything. Then raise what `start` raised."""
        failure: BaseException | None = None
        async with asyncio.TaskGroup() as self._group:
            try:
                failure = await self._wait_for_stop(start)
            finally:
                await self._stop_all()
        if failure is not None:
            raise failure

    def start(self, monitor: ChildMonitor) -> None:
        self._tasks[monitor] = self._group.create_task(monitor.run(), name=monitor.child.name)

    def stop(self) -> None:
        """Stop in order. A second call stops without waiting."""
        if self._stopping.is_set():
            self._urgent.set()
        self._stopping.set()

    @contextmanager
    def stop_on_signals(self, log_line: Callable[[str], None]) -> Iterator[None]:
        """Let SIGINT, SIGTERM and SIGHUP stop this run; SIGHUP not if it is ignored (nohup)."""
        loop = asyncio.get_running_loop()
        numbers = [
            number
            for number in STOP_SIGNALS
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
        ]

        def stop() -> None:
            log_line(
                "stopping at once"
                if self._stopping.is_set()
                else "stopping; repeat the signal to stop at once"
            )
            self.stop()

        for number in numbers:
            loop.add_signal_handler(number, stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def _wait_for_stop(
        self, start: Callable[[], Coroutine[None, None, None]]
    ) -> BaseException | None:
        starting = asyncio.create_task(start())
        stop_requested = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([starting, stop_requested], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return None
            if (failure := starting.exception()) is None:
                await stop_requested
            return failure
        finally:
            starting.cancel()
            stop_requested.cancel()

    async def _stop_all(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_s
        running = [monitor for monitor in self.monitors if monitor in self._tasks]
        stops: list[asyncio.Task[None]] = []
        for place, monitor in enumerate(running):
            stops.append(asyncio.create_task(monitor.stop(deadline=deadline, urgent=self._urgent)))
            # A child that drains slowly must not use up the time of the next ones.
            await asyncio.wait(
                stops[-1:], timeout=max(0.0, deadline - loop.time()) / (len(running) - place)
            )
        if stops:
            await asyncio.wait(stops)
        for foundation in reversed(self.foundations):
            if foundation in self._tasks:
                await foundation.stop(
                    deadline=loop.time() + _FOUNDATION_STOP_S, urgent=self._urgent
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Describe what is running, once all of it is ready."""

    database_url: str
    log_dir: Path
    took_s: float


def print_line(line: str) -> None:
    # The processes continue when the terminal is closed.
    with suppress(OSError):
        sys.stderr.write(f"rooms: {lines_safe(line)}\n")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervisor:
    """Run PostgreSQL and the foundations, then `migrate`, then the children.

    PostgreSQL runs only without `database_url`. The children stop in their order, then the
    foundations.

    Children get `environment`, DATABASE_URL and their own `env`. Their output goes to
    `<data>/log/<name>.log`. Warnings in it, and the supervisor's own messages, also go to
    `log_line`. `on_ready` is called once, when every child is ready. SIGINT, SIGTERM and SIGHUP
    stop everything. All children together have `drain_s`. A second signal does not wait.
    """

    data: Path
    children: Sequence[Child]
    environment: Mapping[str, str]
    foundations: Sequence[Child] = ()
    database_url: str | None = None
    migrate: Callable[[str], None] | None = None
    on_ready: Callable[[Started], None] | None = None
    drain_s: float = 15.0
    log_line: Callable[[str], None] = print_line

    async def run(self) -> None:
        """Run until stopped. Call it from the main thread.

        Raises DataInUseError, IdentityError, InitialisationError, StartError, or what `migrate`
        raises. Every process has ended by then.
        """
        data = self.data.absolute()
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        logs = data / "log"
        logs.mkdir(mode=0o700, exist_ok=True)
        with ExitStack() as stack:
            run = stack.enter_context(lock_data_dir(data))
            own = stack.enter_context(
                _open_log(logs, "supervisor", echo=self.log_line, warnings=_ANY_LINE)
            )

            def make_monitor(child: Child, environment: Mapping[str, str]) -> ChildMonitor:
                log = stack.enter_context(
                    _open_log(
                        logs,
                        child.name,
                        echo=lambda line: own.write(f"{child.name}: {line}"),
                        warnings=child.warning_pattern,
                    )
                )
                return ChildMonitor(
                    child, environment=environment, run_dir=run, log_file=log, log_line=own.write
                )

            foundations = []
            if (url := self.database_url) is None:
                server = EmbeddedPostgres(data)
                url = server.url
                foundations.append(make_monitor(_postgres_child(server), server.environment))
                stack.enter_context(writing_early(server.folder))
            environment = {
                **self.environment,
                "DATABASE_URL": url,
                MARKER_VARIABLE: child_marker(data),
            }
            foundations += [make_monitor(child, environment) for child in self.foundations]
            monitors = [make_monitor(child, environment) for child in self.children]
            session = SupervisorRun(
                foundations=foundations, monitors=monitors, drain_s=self.drain_s
            )
            with session.stop_on_signals(own.write):
                await session.run(lambda: self._start(session, url, logs))

    async def _start(self, run: SupervisorRun, url: str, logs: Path) -> None:
        clock = asyncio.get_running_loop().time
        started_at = clock()
        for foundation in run.foundations:
            run.start(foundation)
            await wait_ready(foundation)
        if self.migrate is not None:
            await asyncio.to_thread(self.migrate, url)
        for monitor in run.monitors:
            await ensure_can_listen(monitor.child)
            run.start(monitor)
        for monitor in run.monitors:
            await wait_ready(monitor)
        if self.on_ready is not None:
            self.on_ready(Started(database_url=url, log_dir=logs, took_s=clock() - started_at))


def _postgres_child(server: EmbeddedPostgres) -> Child:
    async def is_ready() -> bool:
        return await asyncio.to_thread(server.is_ready)

    return Child(
        name="postgres",
        argv=server.argv(),
        cwd=Path("/"),
        stop_signal=server.stop_signal,
        escalation_signals=server.escalation_signals,
        parent_death_signal=server.stop_signal,
        prepare=server.prepare,
        run_as=lambda: server.run_as,
        ready=is_ready,
        ready_timeout_s=_POSTGRES_TIMEOUT_S,
        warning_pattern=_POSTGRES_WARNINGS,
    )


@contextmanager
def _open_log(
    log_dir: Path, name: str, *, echo: Callable[[str], None], warnings: re.Pattern[str]
) -> Iterator[RotatingLog]:
    log = RotatingLog(log_dir / f"{name}.log", echo=echo, warning_pattern=warnings)
    try:
        yield log
    finally:
        log.close()
