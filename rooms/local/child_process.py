"""Keep a child process alive: start it, wait for it to be ready, restart it, stop it."""

import asyncio
import errno
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast
from urllib.parse import urlsplit

from rooms.local import process_table
from rooms.local.errors import StartError
from rooms.local.log_file import WARNING_PATTERN, RotatingLog
from rooms.local.run_as import RunAs, launch_command

_MIN_RESTART_DELAY_S = 0.1
_MAX_RESTART_DELAY_S = 1.0
_STABLE_AFTER_S = 10.0
_DEATHS_LOGGED = 3
_LOG_INTERVAL_S = 60.0
_KILL_GRACE_S = 5.0
_OUTPUT_DRAIN_S = 0.5
_POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_MAX_DEATHS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """Describe a program to keep alive.

    `env` is added to the supervisor's environment. `listens_on` is a host and a port, which are
    checked before the first start. `ready` reports whether the program serves. `prepare` blocks and
    runs before each start; `run_as` is called after it. The kernel sends `parent_death_signal` when
    the supervisor dies. `escalation_signals` follow `stop_signal` when stopping takes too long.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    escalation_signals: Sequence[signal.Signals] = (signal.SIGKILL,)
    parent_death_signal: signal.Signals = signal.SIGKILL
    listens_on: tuple[str, int] | None = None
    ready: Callable[[], Awaitable[bool]] | None = None
    ready_timeout_s: float = 60.0
    prepare: Callable[[], None] | None = None
    run_as: Callable[[], RunAs | None] = lambda: None
    warning_pattern: re.Pattern[str] = WARNING_PATTERN


class ChildMonitor:
    """Run one child until `stop`. An instance runs only once."""

    def __init__(
        self,
        child: Child,
        *,
        environment: Mapping[str, str],
        run_dir: Path,
        log_file: RotatingLog,
        log_line: Callable[[str], None],
    ) -> None:
        self.child = child
        self.log_file = log_file
        self.deaths = 0
        self.failure: Exception | None = None
        self._environment = {**environment, **child.env}
        self._pid_file = run_dir / f"{child.name}.pid"
        self._log_line = log_line
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._started = False
        self._logged_at = 0.0
        self._unlogged_deaths = 0

    async def run(self) -> None:
        """Keep the child alive until `stop`.

        An error of its very first start is stored in `failure`, if its readiness is checked. Other
        errors only delay the next start.
        """
        pause_s = 0.0
        try:
            while not self._stopping.is_set():
                started_at = asyncio.get_running_loop().time()
                if (how := await self._run_once()) is None:
                    break
                if self._stopping.is_set():
                    break
                self.deaths += 1
                lived_s = asyncio.get_running_loop().time() - started_at
                pause_s = (
                    0.0 if lived_s > _STABLE_AFTER_S or self.deaths == 1 else _next_delay(pause_s)
                )
                self._log_death(how, started_at + lived_s, steady=lived_s > _STABLE_AFTER_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            self._stopped.set()

    def _log_death(self, ending: str, now: float, *, steady: bool) -> None:
        # A child that dies repeatedly would write a line per second.
        if not steady and self.deaths > _DEATHS_LOGGED and now < self._logged_at + _LOG_INTERVAL_S:
            self._unlogged_deaths += 1
            return
        before = (
            f" ({self._unlogged_deaths} more times since the last report)"
            if self._unlogged_deaths
            else ""
        )
        self._log_line(
            f"{self.child.name} {ending}{before}; restarting it (log: {self.log_file.path})"
        )
        self._logged_at, self._unlogged_deaths = now, 0

    async def stop(self, *, deadline: float, urgent: asyncio.Event) -> None:
        """Stop the child. Escalate at `deadline` (of the loop's clock), or when `urgent` is set."""
        self._stopping.set()
        signals = [self.child.stop_signal, *self.child.escalation_signals]
        if urgent.is_set() and len(signals) > 1:
            signals = signals[1:]
        for place, number in enumerate(signals):
            self._signal(number)
            cancel_wait = urgent if place == 0 and not urgent.is_set() else None
            limit_s = deadline - asyncio.get_running_loop().time() if cancel_wait else _KILL_GRACE_S
            if await self._wait_stopped(max(0.0, limit_s), cancel_wait):
                return
            self._log_line(f"{self.child.name} has not stopped yet; sending the next signal")
        await self._stopped.wait()

    async def _run_once(self) -> str | None:
        """Run the child once. Return a description of its end, or None if it did not start."""
        try:
            if self.child.prepare is not None:
                await asyncio.to_thread(self.child.prepare)
            if self._stopping.is_set():
                return None
            process, output = await self._spawn()
        except Exception as exc:  # noqa: BLE001 - reported by the first start, retried by later ones
            # Only a child with a check of its readiness is waited for, and can fail the start.
            if not self._started and self.child.ready is not None:
                self.failure = exc
                return None
            return f"could not start: {exc}"
        self._started = True
        self._process = process
        if self._stopping.is_set():
            self._signal(self.child.stop_signal)
        with suppress(OSError):
            process_table.write_pid_file(self._pid_file, process.pid, self.child.argv)
        async with self.log_file.copy_output(output, drain_s=_OUTPUT_DRAIN_S):
            code = await process.wait()
            # End processes that the child left behind.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        with suppress(OSError):
            self._pid_file.unlink()
        return _describe_exit(code)

    async def _spawn(self) -> tuple[asyncio.subprocess.Process, BinaryIO]:
        # Not asyncio's pipe: wait() would block while a grandchild holds its other end.
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *launch_command(
                    self.child.argv,
                    run_as=self.child.run_as(),
                    parent_death_signal=self.child.parent_death_signal,
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=self._environment,
                cwd=self.child.cwd,
                # Ctrl-C reaches the whole foreground group, but children must stop in order.
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return process, cast("BinaryIO", os.fdopen(reading, "rb", buffering=0))

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _wait_stopped(self, limit_s: float, urgent: asyncio.Event | None) -> bool:
        waits = [asyncio.create_task(self._stopped.wait())]
        if urgent is not None:
            waits.append(asyncio.create_task(urgent.wait()))
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._stopped.is_set()


def _next_delay(pause_s: float) -> float:
    return min(_MAX_RESTART_DELAY_S, max(_MIN_RESTART_DELAY_S, pause_s * 2))


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"


def http_ready(url: str) -> Callable[[], Awaitable[bool]]:
    """Return a check that succeeds when a GET of this http address is answered with 200."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "") or "/"
    request = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()

    async def ready() -> bool:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
                try:
                    writer.write(request)
                    status = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError):
            return False
        return status.split()[1:2] == [b"200"]

    return ready


async def ensure_can_listen(child: Child) -> None:
    """Raise StartError if the child cannot listen on its address, such as one that is in use."""
    if child.listens_on is None:
        return
    host, port = child.listens_on
    try:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), host, port)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise StartError(
                f"{host}:{port} is in use by another process: stop it, "
                "or set ROOMS_LISTEN to another port"
            ) from exc
        raise StartError(
            f"cannot listen on {host}:{port}: {exc.strerror}; set ROOMS_LISTEN to another address"
        ) from exc
    server.close()


async def wait_ready(monitor: ChildMonitor) -> None:
    """Wait until a started child is ready; return at once if it has no check.

    Raises StartError with the end of its log if it keeps dying or takes too long, or the error that
    prevented its start.
    """
    child = monitor.child
    if child.ready is None:
        return
    try:
        async with asyncio.timeout(child.ready_timeout_s):
            while monitor.failure is None and monitor.deaths <= _MAX_DEATHS:
                if await child.ready():
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError as exc:
        raise StartError(
            _not_ready_message(monitor, f"was not ready within {child.ready_timeout_s:g} s")
        ) from exc
    if monitor.failure is not None:
        raise monitor.failure
    raise StartError(
        _not_ready_message(monitor, f"died {monitor.deaths} times before it was ready")
    )


def _not_ready_message(monitor: ChildMonitor, problem: str) -> str:
    log = monitor.log_file
    return f"{monitor.child.name} {problem}; its log is {log.path} and ends with:\n{log.tail()}"
