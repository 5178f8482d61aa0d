"""Check slots: none has more than its share, and turns go round between tenants."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from rooms.errors import RateLimitedError
from rooms.fair_slots import FairSlots


def some_slots(slots: int, *, max_waiting: int) -> FairSlots:
    """Return slots of which a tenant has one."""
    return FairSlots(slots, max_per_tenant=1, max_waiting=max_waiting, refusal="too many")


async def test_a_tenant_has_its_share_and_leaves_the_rest_to_others() -> None:
    slots = some_slots(2, max_waiting=10)
    order: list[str] = []
    let_go = asyncio.Event()

    async def hold(name: str) -> None:
        async with slots.slot(name[0]):
            order.append(name)
            await let_go.wait()

    async with asyncio.TaskGroup() as group:
        for name in ("a1", "a2", "a3"):
            group.create_task(hold(name))
        await settled()
        assert order == ["a1"]
        group.create_task(hold("b1"))
        await settled()
        assert order == ["a1", "b1"]
        let_go.set()
    assert sorted(order) == ["a1", "a2", "a3", "b1"]


async def test_turns_go_round() -> None:
    slots = some_slots(1, max_waiting=10)
    order: list[str] = []

    async def use(name: str) -> None:
        async with slots.slot(name[0]):
            order.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name in ("a1", "a2", "a3", "a4", "b1", "c1"):
            group.create_task(use(name))
    assert order == ["a1", "a2", "b1", "c1", "a3", "a4"]


async def test_more_than_may_wait_are_refused_and_others_are_not() -> None:
    slots = some_slots(1, max_waiting=1)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(slots.slot("a"))
        waiting = asyncio.create_task(stack.enter_async_context(slots.slot("a")))
        await settled()
        with pytest.raises(RateLimitedError):
            async with slots.slot("a"):
                pass
        other = asyncio.create_task(stack.enter_async_context(slots.slot("b")))
        await settled()
        assert not other.done()
        for task in (waiting, other):
            task.cancel()
        await asyncio.gather(waiting, other, return_exceptions=True)


async def test_one_that_stops_waiting_leaves_no_trace() -> None:
    slots = some_slots(1, max_waiting=1)
    async with slots.slot("a"):
        for _ in range(3):
            waiting = asyncio.create_task(_used(slots, "a"))
            await settled()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
    await _used(slots, "a")
    await _used(slots, "b")


async def test_a_slot_granted_to_one_that_has_just_been_cancelled_is_given_on() -> None:
    slots = some_slots(1, max_waiting=5)
    holding = asyncio.create_task(_used(slots, "a"))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(_used(slots, "b"))
    await settled()
    waiting.cancel()
    await asyncio.gather(holding, waiting, return_exceptions=True)
    await asyncio.wait_for(_used(slots, "c"), 10)


async def settled() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def _used(slots: FairSlots, tenant: str) -> None:
    async with slots.slot(tenant):
        await asyncio.sleep(0)


async def test_a_slot_that_comes_free_in_the_moment_a_wait_is_cancelled_goes_to_the_next() -> None:
    """The wait ends as cancelled, and as nothing else: its deadline must stay a deadline."""
    slots = some_slots(1, max_waiting=10)
    async with AsyncExitStack() as holding:
        await holding.enter_async_context(slots.slot("a"))
        async with AsyncExitStack() as stack:
            late = asyncio.create_task(stack.enter_async_context(slots.slot("a")))
            next_one = asyncio.create_task(stack.enter_async_context(slots.slot("b")))
            await settled()
            late.cancel()
            await holding.aclose()
            with pytest.raises(asyncio.CancelledError):
                await late
            await next_one
    async with slots.slot("a"):
        pass
