"""A ward as its worker sees it: a process that is started when it is needed, and may die of what it is given."""

import asyncio
import itertools
import logging
import signal
import sys
from contextlib import suppress
from typing import Final

from delivery.errors import AttemptCrashedError, WardUnavailableError
from delivery.isolation.frames import packed, read
from delivery.target_policy import TargetPolicy
from rooms.domain.attempt import Answer, ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.target import Target

_log = logging.getLogger(__name__)

_START_S: Final = 60.0
_GRACE_S: Final = 15.0
"""So much later than its time-out an attempt has not hung in its endpoint, but in its process."""
_IDLE_S: Final = 30.0


class _Running:
    """One process, and who waits for its answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._asks = process.stdin
        self._answers = process.stdout
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self.idle: asyncio.TimerHandle | None = None
        self.over = False
        """Nobody reads its answers any more."""

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    async def ready(self) -> bool:
        """Whether it came up."""
        try:
            async with asyncio.timeout(_START_S):
                return await read(self._answers) is not None
        except TimeoutError:
            return False

    async def ask(
        self,
        target: Target,
        headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
        within_s: float,
    ) -> Answer:
        """One attempt. TimeoutError: no answer in `within_s`."""
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        where = {"scheme": target.scheme, "host": target.host, "port": target.port, "path": target.path}
        said = {"number": number, "target": where, "organisation": organisation, "timeout_s": timeout_s}
        try:
            self._asks.write(packed(said, headers, body))
            async with asyncio.timeout(within_s):
                return await answer
        finally:
            del self._waiting[number]

    async def read(self) -> None:
        """Hand answers over until it ends; what is under way then has crashed."""
        while (frame := await read(self._answers)) is not None:
            said, head, _ = frame
            waiting = self._waiting.get(said["number"])
            if waiting is None or waiting.done():
                continue
            waiting.set_result(
                Answer(
                    status=said["status"],
                    error=None if said["error"] is None else ErrorClass(said["error"]),
                    detail=said["detail"],
                    body_head=head,
                    retry_after=said["retry_after"],
                    latency_ms=said["latency_ms"],
                )
            )
        ended = _ended(await self.process.wait())
        self.over = True
        left = [waiting for waiting in self._waiting.values() if not waiting.done()]
        if left:
            _log.warning("a ward ended by %s with %d attempts under way", ended, len(left))
        for waiting in left:
            waiting.set_exception(AttemptCrashedError(f"its process ended by {ended}"))

    def end(self) -> None:
        """At once."""
        if self.idle is not None:
            self.idle.cancel()
        with suppress(ProcessLookupError):
            self.process.kill()


class Ward:
    """Attempts in another process, one that ends when nothing was attempted for half a minute. Call `close` at the end."""

    def __init__(self, targets: TargetPolicy, *, grace_s: float = _GRACE_S) -> None:
        self._targets = targets
        self._grace_s = grace_s
        self._running: _Running | None = None
        self._readings = set[asyncio.Task[None]]()
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The process that the next attempt is made by; None where it will be a new one."""
        return None if self._running is None else self._running.process.pid

    async def send(
        self, target: Target, headers: bytes, body: bytes, *, organisation: OrganisationId, timeout_s: float
    ) -> Answer:
        """One attempt. AttemptCrashedError: the process died, or hung so that it was killed; it may have been another's
        fault. WardUnavailableError: there is no such process, and nothing was attempted.
        """
        running = await self._started()
        within_s = timeout_s + self._grace_s
        try:
            return await running.ask(
                target, headers, body, organisation=organisation, timeout_s=timeout_s, within_s=within_s
            )
        except TimeoutError as exc:
            self._part_with(running)
            raise AttemptCrashedError(f"its process hung for {within_s:g} s") from exc
        finally:
            if not running.busy and running is self._running:
                running.idle = asyncio.get_running_loop().call_later(_IDLE_S, self._part_with, running)

    async def close(self) -> None:
        """End the process, and whatever it has under way."""
        if self._running is not None:
            self._part_with(self._running)
        if self._readings:
            await asyncio.wait(self._readings)

    def _part_with(self, running: _Running) -> None:
        if self._running is running:
            self._running = None
        running.end()

    async def _started(self) -> _Running:
        async with self._starting:
            if self._running is not None and not self._running.over:
                if self._running.idle is not None:
                    self._running.idle.cancel()
                return self._running
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "delivery.isolation", self._targets.to_text(),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                )  # fmt: skip
            except OSError as exc:
                raise WardUnavailableError(f"no process can be started: {exc}") from exc
            running = _Running(process)
            try:
                up = await running.ready()
            except asyncio.CancelledError:
                running.end()
                raise
            if not up:
                running.end()
                await process.wait()
                raise WardUnavailableError("its process did not come up")
            self._running = running
            task = asyncio.create_task(running.read())
            self._readings.add(task)
            task.add_done_callback(lambda task: self._over(running, task))
            return running

    def _over(self, running: _Running, task: asyncio.Task[None]) -> None:
        self._readings.discard(task)
        self._part_with(running)


def _ended(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
