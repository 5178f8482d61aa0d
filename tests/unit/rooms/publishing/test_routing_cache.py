"""Test how routing tables are cached: who waits for a load, and which table is displaced."""

import asyncio
from typing import Any

import msgspec
import pytest

from rooms.db.publish.routing import RoutingRecord, VersionRecord
from rooms.domain.ids import OrganisationId, RoomId
from rooms.errors import NotFoundError, RateLimitedError, StorageRefusedError
from rooms.publishing import routing_cache
from rooms.publishing.cel_filter import MessageFilter
from rooms.publishing.routing_cache import (
    MAX_LOADS,
    MAX_VERSION_READS,
    MAX_WAITING,
    FindPlanVersion,
    LoadRouting,
    RoutingCache,
)
from tests.unit.rooms.publishing.test_routing import ROOM, a_filtered_plan, a_plan, route_parts

ASKER = OrganisationId("asker")


def a_cache(
    load: LoadRouting, find_plan_version: FindPlanVersion | None = None, **bounds: Any
) -> RoutingCache:
    """Return a cache that reads a room's version from its record, unless it is given."""

    async def find_version(room: RoomId) -> int | None:
        record = await load(room)
        return None if record is None else record.plan_version

    return RoutingCache(load, find_plan_version or find_version, **bounds)


async def test_a_hundred_that_ask_at_once_cause_at_most_two_loads() -> None:
    loads = 0

    async def load(room: RoomId) -> RoutingRecord:
        nonlocal loads
        loads += 1
        await asyncio.sleep(0)
        return a_plan()

    planner = a_cache(load)
    await asyncio.gather(*[planner.get(ROOM, ASKER) for _ in range(100)])
    assert loads == 1
    await asyncio.gather(*[planner.reload(ROOM, ASKER) for _ in range(100)])
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

    planner = a_cache(load)
    early = asyncio.create_task(planner.get(ROOM, ASKER))
    await reading.wait()
    version = 2
    late = asyncio.create_task(planner.reload(ROOM, ASKER))
    await asyncio.sleep(0)
    go_on.set()
    assert (await early).plan_version == 1
    assert (await late).plan_version == 2


async def test_a_room_that_does_not_exist_is_not_found() -> None:
    async def load(room: RoomId) -> RoutingRecord | None:
        return a_plan() if room == ROOM else None

    planner = a_cache(load)
    assert (await planner.get(ROOM, ASKER)).room_id == ROOM
    for ask in (planner.get, planner.reload):
        with pytest.raises(NotFoundError):
            await ask(RoomId(1), ASKER)


async def test_a_change_of_a_room_keeps_the_filters_that_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version, record = 1, a_filtered_plan(2, 1)

    async def load(room: RoomId) -> RoutingRecord:
        return msgspec.structs.replace(record, room_id=room, plan_version=version)

    async def compiled(room: RoomId) -> MessageFilter:
        table = await planner.get(room, ASKER)
        route = table.route("t0", None)
        assert table.prepare_filters(route, 1, 10**9)
        return table.filters[route.filtered[0].id, route.filtered[0].version]

    planner, other = a_cache(load), RoomId(ROOM + 1)
    first = await compiled(ROOM)
    version = 2
    planner.invalidate([ROOM])
    assert planner.cached(ROOM) is None
    assert await compiled(ROOM) is first
    monkeypatch.setattr(routing_cache, "MAX_KEPT_CHARACTERS", 2 * len("payload == 1"))
    second = await compiled(other)
    planner.invalidate([ROOM, other])
    assert await compiled(other) is second, "those of the last one are kept"
    assert await compiled(ROOM) is not first


async def test_an_organisation_with_large_tables_displaces_its_own_only() -> None:
    loads: list[RoomId] = []
    theirs = OrganisationId("theirs")

    async def load(room: RoomId) -> RoutingRecord:
        loads.append(room)
        if room == ROOM:
            return a_plan()
        large = VersionRecord("a", 1, "x" * 10_000)
        return a_plan(room_id=room, organisation_id=theirs, versions=(large,))

    planner = a_cache(load, max_bytes=35_000)
    await planner.get(ROOM, ASKER)
    for number in range(1, 6):
        await planner.get(RoomId(number), ASKER)
    assert planner.cached(ROOM) is not None
    assert [number for number in range(1, 6) if planner.cached(RoomId(number))] == [3, 4, 5]
    await planner.reload(RoomId(5), ASKER)  # it takes its own place
    assert [number for number in range(1, 6) if planner.cached(RoomId(number))] == [3, 4, 5]
    planner.invalidate()
    for number in range(3):
        await planner.get(RoomId(100 + number), ASKER)
    assert all(planner.cached(RoomId(100 + number)) for number in range(3))
    await planner.get(ROOM, ASKER)
    assert planner.cached(ROOM) is not None


async def test_a_table_larger_than_the_cache_is_used_nevertheless() -> None:
    async def load(room: RoomId) -> RoutingRecord:
        return a_plan(versions=(VersionRecord("a", 1, "x" * 10_000),))

    planner = a_cache(load, max_bytes=100)
    assert (await planner.get(ROOM, ASKER)).route("a", None).version == 1


async def test_a_table_that_has_not_changed_is_not_loaded_again() -> None:
    """Only its version is read, for all that ask meanwhile at once."""
    loads, version = 0, 1
    reads = 0

    async def load(_: RoomId) -> RoutingRecord:
        nonlocal loads
        loads += 1
        return a_plan(plan_version=version)

    async def find_version(_: RoomId) -> int | None:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0)
        return version or None

    planner = a_cache(load, find_version)
    table = await planner.get(ROOM, ASKER)
    for _ in range(10):
        found = await asyncio.gather(*[planner.reload(ROOM, ASKER) for _ in range(10)])
        assert all(one is table for one in found)
    assert loads == 1
    assert reads <= 20
    version = 2
    assert (await planner.reload(ROOM, ASKER)).plan_version == 2
    assert loads == 2
    version = 0
    with pytest.raises(NotFoundError):
        await planner.reload(ROOM, ASKER)
    assert planner.cached(ROOM) is None


async def test_few_rooms_are_read_at_a_time() -> None:
    reading = {"loads": 0, "versions": 0}
    most = dict(reading)

    async def count(what: str) -> None:
        reading[what] += 1
        most[what] = max(most[what], reading[what])
        await asyncio.sleep(0)
        reading[what] -= 1

    async def load(room: RoomId) -> RoutingRecord:
        await count("loads")
        return a_plan(room_id=room)

    async def find_version(_: RoomId) -> int | None:
        await count("versions")
        return 1

    planner = a_cache(load, find_version)
    rooms = [RoomId(number) for number in range(1, 21)]
    askers = [OrganisationId(str(number % 4)) for number in range(20)]
    await asyncio.gather(*map(planner.get, rooms, askers))
    await asyncio.gather(*map(planner.reload, rooms, askers))
    assert most == {"loads": MAX_LOADS, "versions": MAX_VERSION_READS}


async def test_who_waits_too_long_for_a_read_is_refused() -> None:
    go_on = asyncio.Event()

    async def load(room: RoomId) -> RoutingRecord:
        await go_on.wait()
        return a_plan(room_id=room)

    planner = a_cache(load, wait_s=0.01)
    reading = [
        asyncio.create_task(planner.get(RoomId(1 + n), OrganisationId(str(n))))
        for n in range(MAX_LOADS)
    ]
    await asyncio.sleep(0)
    with pytest.raises(StorageRefusedError):
        await planner.get(ROOM, ASKER)
    go_on.set()
    await asyncio.gather(*reading)
    assert (await planner.get(ROOM, ASKER)).room_id == ROOM


class SlowRooms:
    """Load every room but ROOM only once `go_on` is set."""

    def __init__(self) -> None:
        self.loads: list[RoomId] = []
        self.go_on = asyncio.Event()
        self.cache = a_cache(self._load)

    async def _load(self, room: RoomId) -> RoutingRecord:
        self.loads.append(room)
        if room != ROOM:
            await self.go_on.wait()
        return a_plan(room_id=room)

    def ask(self, room: int, asker: str) -> asyncio.Task[Any]:
        """Ask for a room's table."""
        return asyncio.create_task(self.cache.get(RoomId(room), OrganisationId(asker)))


async def test_slow_loads_of_an_organisation_hold_up_no_other() -> None:
    slow = SlowRooms()
    theirs = [slow.ask(number, "theirs") for number in range(1, 101)]
    await asyncio.sleep(0)
    table = await asyncio.wait_for(slow.cache.get(ROOM, ASKER), 1)
    assert table.room_id == ROOM
    assert slow.loads == [RoomId(1), ROOM]
    slow.go_on.set()
    await asyncio.gather(*theirs)


async def test_a_turn_that_another_organisation_waits_for_holds_up_none_at_that_room() -> None:
    """Anybody may ask for a room, even one without access to it."""
    slow = SlowRooms()
    theirs = [slow.ask(1, "theirs"), slow.ask(ROOM, "theirs")]
    await asyncio.sleep(0)
    assert (await asyncio.wait_for(slow.cache.get(ROOM, ASKER), 1)).room_id == ROOM
    slow.go_on.set()
    await asyncio.gather(*theirs)
    assert slow.loads == [RoomId(1), ROOM]


async def test_organisations_that_ask_for_one_room_share_a_load() -> None:
    slow = SlowRooms()
    asking = [slow.ask(1, str(number)) for number in range(50)]
    slow.go_on.set()
    await asyncio.gather(*asking)
    assert len(slow.loads) <= MAX_LOADS


async def test_publishes_beyond_the_bound_are_refused_of_their_organisation_only() -> None:
    slow = SlowRooms()
    theirs = [slow.ask(number, "theirs") for number in range(1, MAX_WAITING + 2)]
    await asyncio.sleep(0)
    with pytest.raises(RateLimitedError):
        await slow.cache.get(RoomId(MAX_WAITING + 2), OrganisationId("theirs"))
    assert (await slow.cache.get(ROOM, ASKER)).room_id == ROOM
    slow.go_on.set()
    await asyncio.gather(*theirs)


async def test_an_older_read_does_not_replace_a_newer_one() -> None:
    version, first = 1, asyncio.Event()
    begun = asyncio.Event()

    async def load(room: RoomId) -> RoutingRecord:
        record = a_plan(plan_version=version)
        if record.plan_version == 1:
            begun.set()
            await first.wait()
        return record

    cache = a_cache(load)
    early = asyncio.create_task(cache.get(ROOM, OrganisationId("early")))
    await begun.wait()
    version = 2
    assert (await cache.reload(ROOM, OrganisationId("late"))).plan_version == 2
    first.set()
    assert (await early).plan_version == 1
    cached = cache.cached(ROOM)
    assert cached is not None
    assert cached.plan_version == 2


async def test_routes_that_grow_displace_tables_of_their_organisation_only() -> None:
    theirs = OrganisationId("theirs")
    large = a_filtered_plan(50, 20)

    async def load(room: RoomId) -> RoutingRecord:
        if room == ROOM:
            return a_plan()
        return msgspec.structs.replace(large, room_id=room, organisation_id=theirs)

    planner = a_cache(load, max_bytes=2_000_000)
    tables = [await planner.get(RoomId(number), ASKER) for number in (ROOM, 1, 2, 3)]
    kept = tables
    for part in range(10):
        route_parts(tables[3], large, part)
        kept = [table for table in tables if planner.cached(table.room_id) is table]
        assert sum(table.weight.bytes for table in kept) < 2_000_000
    assert tables[0] in kept
    assert tables[1] not in kept
    # A table that was displaced may still be used, and is counted no more.
    route_parts(tables[1], large, 10)
    assert planner.cached(ROOM) is tables[0]
