"""Works side by side: no more than there are hands, and an error that leaves nothing half done."""

import asyncio

import pytest

from delivery.teamwork import together


async def test_no_more_are_at_work_than_there_are_hands_and_all_get_their_turn() -> None:
    at_work, most = 0, 0
    done: list[int] = []

    async def work(item: int) -> None:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0)
        at_work -= 1
        done.append(item)

    await together(work, range(10), at_a_time=3)
    assert most == 3
    assert sorted(done) == list(range(10))


async def test_after_an_error_nothing_is_begun_and_what_is_under_way_ends() -> None:
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
        await together(work, range(5), at_a_time=2)
    assert (begun, ended) == ([0, 1], [1])
