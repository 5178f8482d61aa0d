"""Where another library's threads cross into the loop: in order, and each call by itself."""

import asyncio
from typing import Any

from delivery.elections.crossing import Crossing


async def test_calls_come_in_order_and_one_that_fails_takes_none_along() -> None:
    loop = asyncio.get_running_loop()
    reported: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reported.append(context))
    crossing, came, done = Crossing(), list[int](), asyncio.Event()

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
