"""Waiting for the first of several events, and for the end of a term."""

import asyncio

import pytest

from delivery.maintenance.task import Term, next_term, wait_first
from tests.support import virtual_time
from tests.support.shifting_membership import ShiftingMembership

PARTITION = "upkeep/leases"


async def fail() -> None:
    raise ConnectionError("cut")


async def test_the_error_of_the_first_to_end_is_raised() -> None:
    with pytest.raises(ConnectionError, match="cut"):
        await wait_first(asyncio.Event().wait(), fail())


async def test_what_has_not_ended_in_time_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def wait_in_vain() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await wait_first(wait_in_vain(), timeout_s=0.01)
    assert cancelled.is_set()


async def test_a_lost_term_stops_a_task_before_its_next_statement() -> None:
    """Assign the partition elsewhere, or here again in another epoch: the term ends at once."""
    membership = ShiftingMembership({PARTITION: 3})
    stop = asyncio.Event()
    turn = await next_term(membership, PARTITION, stop)
    assert turn is not None
    assert turn.is_current()
    async with turn:
        resting = asyncio.create_task(turn.sleep(3600))
        await asyncio.sleep(0)
        membership.set_epochs({PARTITION: 4})
        await asyncio.wait_for(resting, 10)
        assert not turn.is_current()
    membership.set_epochs({})
    following = asyncio.create_task(next_term(membership, PARTITION, stop))
    await asyncio.sleep(0)
    membership.set_epochs({PARTITION: 5})
    turn = await asyncio.wait_for(following, 10)
    assert turn is not None
    assert turn.epoch == 5
    stop.set()
    assert not turn.is_current()
    assert await next_term(membership, PARTITION, stop) is None


def test_a_sleep_ends_with_its_term() -> None:
    async def main() -> float:
        loop, membership, stop = (
            asyncio.get_running_loop(),
            ShiftingMembership({PARTITION: 1}),
            asyncio.Event(),
        )
        async with Term(membership, PARTITION, 1, stop) as term:
            loop.call_later(2, membership.set_epochs, {PARTITION: 1})
            loop.call_later(5, membership.set_epochs, {PARTITION: 2})
            await term.sleep(60)
        return loop.time()

    assert virtual_time.run(main()) == 5


def test_a_term_that_comes_back_sleeps_as_before() -> None:
    """The store is away until the deadline, and answers again: the epoch is still the same."""

    async def main() -> list[float]:
        loop, membership, stop = (
            asyncio.get_running_loop(),
            ShiftingMembership({PARTITION: 1}),
            asyncio.Event(),
        )
        ends = []
        async with Term(membership, PARTITION, 1, stop) as term:
            for epochs in ({}, {PARTITION: 1}):
                membership.set_epochs(epochs)
                await asyncio.sleep(1)
            for _ in range(3):
                await term.sleep(10)
                ends.append(loop.time())
            loop.call_later(3, stop.set)
            await term.sleep(10)
            ends.append(loop.time())
        return ends

    assert virtual_time.run(main()) == [12, 22, 32, 35]
