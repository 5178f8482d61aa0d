"""A ward's process: attempts what it is told on standard input, answers on standard output, ends when its worker does.

Run as `python -m delivery.isolation POLICY`, which is a `TargetPolicy` as text.
"""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from delivery.isolation.frames import packed, read
from delivery.sender import HttpSender
from delivery.target_policy import TargetPolicy
from rooms.domain.ids import OrganisationId
from rooms.domain.target import Target
from rooms.log_lines import warn_safely


def _first_to_go() -> None:
    # Where memory runs out, it is this process that is to be ended, and not the worker beside it.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


async def _serve(policy: TargetPolicy, answers: int) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with policy.open_guard() as guard:
        async with HttpSender(guard) as sender:
            await _answer(reader, sender, answers)


async def _answer(reader: asyncio.StreamReader, sender: HttpSender, answers: int) -> None:
    under_way = set[asyncio.Task[None]]()

    async def attempt(said: dict[str, Any], headers: bytes, body: bytes) -> None:
        answer = await sender.send(
            Target(**said["target"]),
            headers,
            body,
            organisation=OrganisationId(said["organisation"]),
            timeout_s=said["timeout_s"],
        )
        told = {
            "number": said["number"],
            "status": answer.status,
            "error": answer.error,
            "detail": answer.detail,
            "retry_after": answer.retry_after,
            "latency_ms": answer.latency_ms,
        }
        _write(answers, packed(told, answer.body_head))

    _write(answers, packed({"ready": True}))
    while (frame := await read(reader)) is not None:
        task = asyncio.create_task(attempt(*frame))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    for task in under_way:
        task.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)


def _write(answers: int, frame: bytes) -> None:
    # An answer is small and the worker always reads: waiting for it here is shorter than any other way.
    left = memoryview(frame)
    while left:
        left = left[os.write(answers, left) :]


def main() -> None:
    """Until standard input ends. Signals that are meant for the worker, which drains, are the worker's alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _first_to_go()
    warn_safely()
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever else would be printed is no answer
    with suppress(BrokenPipeError):
        asyncio.run(_serve(TargetPolicy.from_text(sys.argv[1]), answers))


if __name__ == "__main__":
    main()
