"""Run a sandbox process: read attempts from standard input, write results to standard output.

Run as `python -m delivery.push.sandbox POLICY`; POLICY is a `TargetPolicy` as text. The process
ends with its standard input, and so with its worker.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from delivery.push.errors import ResourceShortageError
from delivery.push.http.client import HttpSender
from delivery.push.http.ssrf import TargetPolicy
from delivery.push.sandbox.process import encode_frame, read_frame
from rooms.domain.attempt import unexpected_failure
from rooms.domain.ids import OrganisationId
from rooms.domain.push_url import PushUrl
from rooms.safe_text import log_warnings_safely

_log = logging.getLogger(__name__)


def _prefer_oom_kill() -> None:
    # If memory runs out, the kernel must end this process and not the worker.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


async def _serve(policy: TargetPolicy, result_fd: int) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    with policy.open_guard() as guard:
        async with HttpSender(guard) as sender:
            await _handle_requests(reader, sender, result_fd)


async def _handle_requests(
    reader: asyncio.StreamReader, sender: HttpSender, result_fd: int
) -> None:
    tasks = set[asyncio.Task[None]]()

    async def attempt(request: dict[str, Any], headers: bytes, body: bytes) -> None:
        started = time.monotonic()
        try:
            result = await sender.send(
                PushUrl(**request["target"]),
                headers,
                body,
                organisation=OrganisationId(request["organisation"]),
                timeout_s=request["timeout_s"],
            )
        except ResourceShortageError as exc:
            shortage = {"number": request["number"], "shortage": str(exc)}
            _write_frame(result_fd, encode_frame(shortage))
            return
        except Exception as exc:  # noqa: BLE001 - without a result the process would seem to hang
            _log.exception("the sender failed")
            result = unexpected_failure(exc, (time.monotonic() - started) * 1000)
        response = {
            "number": request["number"],
            "status": result.status,
            "error": result.error,
            "detail": result.detail,
            "retry_after": result.retry_after,
            "latency_ms": result.latency_ms,
        }
        _write_frame(result_fd, encode_frame(response, result.body_head))

    _write_frame(result_fd, encode_frame({"ready": True}))
    while (frame := await read_frame(reader)) is not None:
        task = asyncio.create_task(attempt(*frame))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _write_frame(result_fd: int, frame: bytes) -> None:
    # A result is small and the worker always reads, so a blocking write is fastest.
    rest = memoryview(frame)
    while rest:
        rest = rest[os.write(result_fd, rest) :]


def main() -> None:
    """Serve attempts until standard input ends."""
    # The worker drains on these signals, and needs its sandboxes until then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _prefer_oom_kill()
    log_warnings_safely()
    result_fd = os.dup(1)
    os.dup2(2, 1)  # anything printed must not mix with results
    with suppress(BrokenPipeError):
        asyncio.run(_serve(TargetPolicy.from_text(sys.argv[1]), result_fd))


if __name__ == "__main__":
    main()
