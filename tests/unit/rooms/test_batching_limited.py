"""Test concurrent work with a limit, and its end after an error."""

import asyncio

import pytest

from rooms.batching import for_each_limited


async def test_concurrency_is_limited_and_every_item_is_done() -> None:
    at_work, most = 0, 0
    done: list[int] = []

    async def work(item: int) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0)
        at_work -= 1
        done.append(item)

    await for_each_limited(work, range(10), limit=3)
    assert most == 3
    assert sorted(done) == list(range(10))


async def test_after_an_error_nothing_begins_and_running_work_ends() -> None:
    both, failed = asyncio.Event(), asyncio.Event()
    begun: list[int] = []
    ended: list[int] = []

    async def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            await both.wait()
            failed.set()
            raise ValueError("the first")
        both.set()
        await failed.wait()
        await asyncio.sleep(0)
        ended.append(item)
        if item == 1:
            raise ValueError("a later one")

    with pytest.raises(ValueError, match="the first"):
        await for_each_limited(work, range(5), limit=2)
    assert (begun, ended) == ([0, 1], [1])
