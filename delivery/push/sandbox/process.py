"""Start and use sandbox processes, which may crash during an attempt.

Worker and process exchange frames through pipes: three sizes, a JSON object, and two byte strings.
"""

import asyncio
import itertools
import json
import logging
import math
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from delivery.push.errors import (
    AttemptCrashedError,
    ClaimExpiredError,
    ResourceShortageError,
    SandboxUnavailableError,
)
from delivery.push.http.ssrf import TargetPolicy
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl

_log = logging.getLogger(__name__)

_START_S: Final = 60.0
_GRACE_S: Final = 15.0
"""An attempt that exceeds its time-out by this much hangs in its process, not in its endpoint."""
_IDLE_S: Final = 30.0
_SIZES: Final = struct.Struct("!III")

Frame = tuple[dict[str, Any], bytes, bytes]


def encode_frame(header: Mapping[str, Any], first: bytes = b"", second: bytes = b"") -> bytes:
    """Return a frame as the bytes that go through a pipe."""
    text = json.dumps(header).encode()
    return b"".join((_SIZES.pack(len(text), len(first), len(second)), text, first, second))


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Return the next frame; None if the other process is gone."""
    try:
        sizes = _SIZES.unpack(await reader.readexactly(_SIZES.size))
        text, first, second = [await reader.readexactly(size) for size in sizes]
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return json.loads(text), first, second


class _SandboxChild:
    """Hold one process and the attempts that wait for its results."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._request_ids = itertools.count()
        self._pending: dict[int, asyncio.Future[AttemptResult]] = {}
        self.idle_timer: asyncio.TimerHandle | None = None
        self.closed = False
        """Its results are not read any more."""

    @property
    def takes_attempts(self) -> bool:
        """Return False once the process is known to end. A write would raise on uvloop then."""
        return not self.closed and not self._stdin.is_closing()

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    async def wait_ready(self) -> bool:
        """Wait for the process, and return whether it is ready."""
        try:
            async with asyncio.timeout(_START_S):
                return await read_frame(self._stdout) is not None
        except TimeoutError:
            return False

    async def send(
        self,
        target: PushUrl,
        headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
        result_timeout_s: float,
    ) -> AttemptResult:
        """Make one attempt. TimeoutError: no result within `result_timeout_s`."""
        number = next(self._request_ids)
        pending: asyncio.Future[AttemptResult] = asyncio.get_running_loop().create_future()
        self._pending[number] = pending
        request = {
            "number": number,
            "target": {
                "scheme": target.scheme,
                "host": target.host,
                "port": target.port,
                "path": target.path,
            },
            "organisation": organisation,
            "timeout_s": timeout_s,
        }
        try:
            self._stdin.write(encode_frame(request, headers, body))
            async with asyncio.timeout(result_timeout_s):
                return await pending
        finally:
            del self._pending[number]

    async def read_results(self) -> None:
        """Pass on results until the process ends; attempts in progress then have crashed."""
        while (frame := await read_frame(self._stdout)) is not None:
            response, body_head, _ = frame
            pending = self._pending.get(response["number"])
            if pending is None or pending.done():
                continue
            if "shortage" in response:
                pending.set_exception(ResourceShortageError(response["shortage"]))
                continue
            pending.set_result(
                AttemptResult(
                    status=response["status"],
                    error=None if response["error"] is None else ErrorClass(response["error"]),
                    detail=response["detail"],
                    body_head=body_head,
                    retry_after=response["retry_after"],
                    latency_ms=response["latency_ms"],
                )
            )
        cause = _exit_description(await self.process.wait())
        self.closed = True
        crashed = [pending for pending in self._pending.values() if not pending.done()]
        if crashed:
            _log.warning(
                "a sandbox process ended by %s with %d attempts in progress", cause, len(crashed)
            )
        for pending in crashed:
            pending.set_exception(AttemptCrashedError(f"its process ended by {cause}"))

    def kill(self) -> None:
        """Kill the process at once."""
        if self.idle_timer is not None:
            self.idle_timer.cancel()
        with suppress(ProcessLookupError):
            self.process.kill()


class SandboxProcess:
    """Make attempts in a process, which ends after 30 s without any. Call `close` at the end."""

    def __init__(
        self,
        target_policy: TargetPolicy,
        *,
        grace_s: float = _GRACE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._target_policy = target_policy
        self._monotonic = monotonic
        self._grace_s = grace_s
        self._child: _SandboxChild | None = None
        self._reader_tasks = set[asyncio.Task[None]]()
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Return the process that makes the next attempt; None if it will be a new one."""
        return None if self._child is None else self._child.process.pid

    async def send(
        self,
        target: PushUrl,
        headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
        start_before: float = math.inf,
    ) -> AttemptResult:
        """Make one attempt, which begins before `start_before` (monotonic seconds).

        AttemptCrashedError: the process died, or hung and was killed; another attempt may be the
        cause. Nothing was attempted: SandboxUnavailableError, if no process could be started,
        ClaimExpiredError, if none was ready in time, ResourceShortageError.
        """
        child = await self._ensure_started(start_before)
        result_timeout_s = timeout_s + self._grace_s
        try:
            self._check_deadline(start_before)
            return await child.send(
                target,
                headers,
                body,
                organisation=organisation,
                timeout_s=timeout_s,
                result_timeout_s=result_timeout_s,
            )
        except TimeoutError as exc:
            self._discard(child)
            raise AttemptCrashedError(f"its process hung for {result_timeout_s:g} s") from exc
        finally:
            if not child.busy and child is self._child:
                child.idle_timer = asyncio.get_running_loop().call_later(
                    _IDLE_S, self._discard, child
                )

    async def close(self) -> None:
        """End the process and its attempts in progress."""
        if self._child is not None:
            self._discard(self._child)
        if self._reader_tasks:
            await asyncio.wait(self._reader_tasks)

    def _discard(self, child: _SandboxChild) -> None:
        if self._child is child:
            self._child = None
        child.kill()

    def _check_deadline(self, start_before: float) -> None:
        if self._monotonic() >= start_before:
            raise ClaimExpiredError("the claim ran out before a sandbox process was ready")

    async def _ensure_started(self, start_before: float) -> _SandboxChild:
        async with self._starting:
            if self._child is not None and self._child.takes_attempts:
                if self._child.idle_timer is not None:
                    self._child.idle_timer.cancel()
                return self._child
            self._check_deadline(start_before)
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "delivery.push.sandbox", self._target_policy.to_text(),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                )  # fmt: skip
            except OSError as exc:
                raise SandboxUnavailableError(f"no process can be started: {exc}") from exc
            child = _SandboxChild(process)
            try:
                ready = await child.wait_ready()
            except asyncio.CancelledError:
                child.kill()
                raise
            if not ready or not child.takes_attempts:
                child.kill()
                await process.wait()
                raise SandboxUnavailableError("the process did not become ready")
            self._child = child
            task = asyncio.create_task(child.read_results())
            self._reader_tasks.add(task)
            task.add_done_callback(lambda task: self._on_reader_done(child, task))
            return child

    def _on_reader_done(self, child: _SandboxChild, reader_task: asyncio.Task[None]) -> None:
        self._reader_tasks.discard(reader_task)
        self._discard(child)


def _exit_description(code: int) -> str:
    """Describe how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
