"""One child process, kept alive: started, started again when it dies, and stopped when it is told to."""

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from rooms.embedded import processes
from rooms.embedded.identity import Identity, launched
from rooms.embedded.logbook import WARNINGS, Logbook

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_STEADY_AFTER_S = 10.0
_FIRST_DEATHS = 3
_BETWEEN_LINES_S = 60.0
_KILL_GRACE_S = 5.0
_LAST_WORDS_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A program to keep alive.

    `env` comes on top of what the supervisor gives to all. `ready` says whether it serves. `prepare` blocks, and comes
    before each start; `identity` is asked after it. `death` is the signal by which the kernel ends it when the supervisor is gone.
    `impatient` are the signals that follow `stop_signal`, when that has taken too long.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    impatient: Sequence[signal.Signals] = (signal.SIGKILL,)
    death: signal.Signals = signal.SIGKILL
    ready: Callable[[], Awaitable[bool]] | None = None
    ready_timeout_s: float = 60.0
    prepare: Callable[[], None] | None = None
    identity: Callable[[], Identity | None] = lambda: None
    warnings: re.Pattern[str] = WARNINGS


class Keeper:
    """Runs one child until `stop`. Not to be run twice."""

    def __init__(
        self, child: Child, *, environment: Mapping[str, str], run: Path, book: Logbook, say: Callable[[str], None]
    ) -> None:
        self.child = child
        self.book = book
        self.deaths = 0
        self.failure: Exception | None = None
        self._environment = {**environment, **child.env}
        self._record = run / f"{child.name}.pid"
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._started = False
        self._said_at = 0.0
        self._unsaid = 0

    async def run(self) -> None:
        """Keep it alive until `stop`. What keeps it from its very first start is left in `failure`; later it is tried again."""
        pause_s = 0.0
        try:
            while not self._stopping.is_set():
                began = asyncio.get_running_loop().time()
                if (how := await self._live()) is None:
                    break
                if self._stopping.is_set():
                    break
                self.deaths += 1
                lived_s = asyncio.get_running_loop().time() - began
                pause_s = 0.0 if lived_s > _STEADY_AFTER_S or self.deaths == 1 else _longer(pause_s)
                self._say_death(how, began + lived_s, steady=lived_s > _STEADY_AFTER_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            self._stopped.set()

    def _say_death(self, how: str, now: float, *, steady: bool) -> None:
        # One that dies again and again would fill the log, a line a second.
        if not steady and self.deaths > _FIRST_DEATHS and now < self._said_at + _BETWEEN_LINES_S:
            self._unsaid += 1
            return
        before = f", after {self._unsaid} deaths since the last such line" if self._unsaid else ""
        self._say(f"{self.child.name} {how}{before}; starting it again (log: {self.book.path})")
        self._said_at, self._unsaid = now, 0

    async def stop(self, *, deadline: float, hurry: asyncio.Event) -> None:
        """Ask it to end, then insist: at the deadline (of the loop's clock), or as soon as there is a hurry."""
        self._stopping.set()
        signals = [self.child.stop_signal, *self.child.impatient]
        if hurry.is_set() and len(signals) > 1:
            signals = signals[1:]
        for place, number in enumerate(signals):
            self._signal(number)
            patience = hurry if place == 0 and not hurry.is_set() else None
            limit_s = deadline - asyncio.get_running_loop().time() if patience else _KILL_GRACE_S
            if await self._ends_within(max(0.0, limit_s), patience):
                return
            self._say(f"{self.child.name} has not stopped yet; insisting")
        await self._stopped.wait()

    async def _live(self) -> str | None:
        """One life of the child, from its start to its end, which is returned in words; None when there was none."""
        try:
            if self.child.prepare is not None:
                await asyncio.to_thread(self.child.prepare)
            if self._stopping.is_set():
                return None
            process, output = await self._spawn()
        except Exception as exc:  # noqa: BLE001 - whatever it is, the first start tells it and later ones try again
            if not self._started:
                self.failure = exc
                return None
            return f"could not start: {exc}"
        self._started = True
        self._process = process
        if self._stopping.is_set():
            self._signal(self.child.stop_signal)
        with suppress(OSError):
            processes.record(self._record, process.pid, self.child.argv)
        async with self.book.following(output, patience_s=_LAST_WORDS_S):
            code = await process.wait()
            # Processes of its own that it left behind.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        with suppress(OSError):
            self._record.unlink()
        return _ending(code)

    async def _spawn(self) -> tuple[asyncio.subprocess.Process, BinaryIO]:
        # A pipe of our own: with asyncio's, wait() does not return while a grandchild holds the other end.
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *launched(self.child.argv, identity=self.child.identity(), death=self.child.death),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=self._environment,
                cwd=self.child.cwd,
                # Ctrl-C reaches the whole foreground group; the order of stopping is ours to give.
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

    async def _ends_within(self, limit_s: float, hurry: asyncio.Event | None) -> bool:
        waits = [asyncio.create_task(self._stopped.wait())]
        if hurry is not None:
            waits.append(asyncio.create_task(hurry.wait()))
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._stopped.is_set()


def _longer(pause_s: float) -> float:
    return min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, pause_s * 2))


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by {known.get(-code, f'signal {-code}')}"
