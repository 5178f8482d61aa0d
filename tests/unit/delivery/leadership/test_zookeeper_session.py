"""The bridge from other threads to the loop: order, and isolation of calls."""

import asyncio
from typing import Any

from delivery.leadership.zookeeper_session import LoopBridge


async def test_calls_run_in_order_and_a_failure_stops_no_other() -> None:
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    crossing, came, done = LoopBridge(), list[int](), asyncio.Event()

    def fail() -> None:
        raise RuntimeError("what a callback may do")

    def from_a_thread() -> None:
        crossing.call(came.append, 1)
        crossing.call(fail)
        crossing.call(came.append, 2)
        crossing.call(done.set)

    await asyncio.to_thread(from_a_thread)
    await asyncio.wait_for(done.wait(), 60)
    assert came == [1, 2]
    assert [str(context["exception"]) for context in reported] == ["what a callback may do"]
