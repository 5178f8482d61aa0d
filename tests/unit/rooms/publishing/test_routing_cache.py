"""Test how routing tables are cached: who waits for a load, and which table is displaced."""

import asyncio

import pytest

from rooms.db.publish.routing import RoutingRecord, VersionRecord
from rooms.domain.ids import OrganisationId, RoomId
from rooms.errors import NotFoundError
from rooms.publishing.routing_cache import RoutingCache
from tests.unit.rooms.publishing.test_routing import ROOM, a_plan


async def test_a_hundred_that_ask_at_once_cause_at_most_two_loads() -> None:
    loads = 0

    async def load(room: RoomId) -> RoutingRecord:
        nonlocal loads
        loads += 1
        await asyncio.sleep(0)
        return a_plan()

    planner = RoutingCache(load)
    await asyncio.gather(*[planner.get(ROOM) for _ in range(100)])
    assert loads == 1
    await asyncio.gather(*[planner.reload(ROOM) for _ in range(100)])
    assert loads <= 3


async def test_a_fresh_plan_was_read_after_it_was_asked_for() -> None:
    """A load that was under way when the room changed is no answer to who asks after the change."""
    version = 1
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def load(room: RoomId) -> RoutingRecord:
        record = a_plan(plan_version=version)
        reading.set()
        await go_on.wait()
        return record

    planner = RoutingCache(load)
    early = asyncio.create_task(planner.get(ROOM))
    await reading.wait()
    version = 2
    late = asyncio.create_task(planner.reload(ROOM))
    await asyncio.sleep(0)
    go_on.set()
    assert (await early).plan_version == 1
    assert (await late).plan_version == 2


async def test_a_room_that_does_not_exist_is_not_found() -> None:
    async def load(room: RoomId) -> RoutingRecord | None:
        return a_plan() if room == ROOM else None

    planner = RoutingCache(load)
    assert (await planner.get(ROOM)).room_id == ROOM
    for ask in (planner.get, planner.reload):
        with pytest.raises(NotFoundError):
            await ask(RoomId(1))


async def test_an_organisation_with_large_tables_displaces_its_own_only() -> None:
    loads: list[RoomId] = []
    theirs = OrganisationId("theirs")

    async def load(room: RoomId) -> RoutingRecord:
        loads.append(room)
        if room == ROOM:
            return a_plan()
        large = VersionRecord("a", 1, "x" * 10_000)
        return a_plan(room_id=room, organisation_id=theirs, versions=(large,))

    planner = RoutingCache(load, max_bytes=35_000)
    await planner.get(ROOM)
    for number in range(1, 6):
        await planner.get(RoomId(number))
    assert planner.cached(ROOM) is not None
    assert [number for number in range(1, 6) if planner.cached(RoomId(number))] == [3, 4, 5]
    await planner.reload(RoomId(5))  # it takes its own place
    assert [number for number in range(1, 6) if planner.cached(RoomId(number))] == [3, 4, 5]
    planner.invalidate()
    for number in range(3):
        await planner.get(RoomId(100 + number))
    assert all(planner.cached(RoomId(100 + number)) for number in range(3))
    await planner.get(ROOM)
    assert planner.cached(ROOM) is not None


async def test_a_table_larger_than_the_cache_is_used_nevertheless() -> None:
    async def load(room: RoomId) -> RoutingRecord:
        return a_plan(versions=(VersionRecord("a", 1, "x" * 10_000),))

    planner = RoutingCache(load, max_bytes=100)
    assert (await planner.get(ROOM)).route("a", None).version == 1
