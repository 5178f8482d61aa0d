"""Test what the cache of endpoints keeps, and what it loads again."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, cast

import pytest

from delivery.push import endpoints
from delivery.push.endpoints import Endpoint, EndpointCache
from rooms.db.connection import PersistentConnection
from rooms.db.queue.endpoints import EndpointRecord
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from tests.unit.delivery.push.test_endpoints import RECORD, SEAL, TASK


class Subscriptions:
    """Hold subscriptions by id, count loads, and give them to a cache."""

    def __init__(self) -> None:
        self.records: dict[SubscriptionId, EndpointRecord] = {}
        self.loads = 0
        self.cache = EndpointCache(
            cast("PersistentConnection", cast("Any", self)),
            SEAL,
            set_status_reason=lambda _record, _reason: None,
        )

    async def run(self, _: Callable[..., object]) -> dict[SubscriptionId, EndpointRecord]:
        self.loads += 1
        return self.records

    def add(
        self, room: int, numbers: Iterable[int], *, ordered: bool, owner: str = "owner"
    ) -> list[SubscriptionId]:
        added = [SubscriptionId(f"01900000-0000-7000-8{n:03x}-{room:012x}") for n in numbers]
        for one in added:
            self.records[one] = replace(
                RECORD,
                room_id=RoomId(room),
                subscription_id=one,
                ordered=ordered,
                organisation_id=OrganisationId(owner),
            )
        return added

    async def load(self, wanted: Collection[SubscriptionId], now: float = 100.0) -> int:
        """Return how many loads it took to find these."""
        before = self.loads
        await self.cache.current(wanted, now)
        return self.loads - before


@pytest.mark.parametrize("rooms", [frozenset({"7", "9"}), frozenset[str]()])
async def test_only_changed_endpoints_are_loaded_again(rooms: frozenset[str]) -> None:
    stored = Subscriptions()
    changed, other = stored.add(7, range(3), ordered=False), stored.add(8, [1], ordered=False)
    assert await stored.load([*changed, *other]) == 1
    assert await stored.load([*changed, *other]) == 0
    stored.cache.invalidate(rooms)
    assert await stored.load(other) == (0 if rooms else 1)
    assert await stored.load(changed) == 1


async def test_a_change_of_one_room_costs_nothing_for_endpoints_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One organisation may change its settings again and again; 20,000 endpoints are cached."""
    stored = Subscriptions()
    await stored.load([*stored.add(7, range(500), ordered=False)])
    looked_at: list[str] = []

    def look_at(identity: str) -> RoomId:
        looked_at.append(identity)
        return RoomId(7)

    monkeypatch.setattr(endpoints, "room_of", look_at)
    stored.cache.invalidate(frozenset({"8"}))
    assert not looked_at


@pytest.mark.parametrize("of_tasks", [True, False])
async def test_what_changes_during_a_load_of_others_is_returned_as_it_is_then(
    of_tasks: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """Else a lane would get the settings that the worker's tick has just replaced."""
    stored = Subscriptions()
    changed, deleted, other = stored.add(7, range(3), ordered=False)
    await stored.load([changed, deleted])
    load, loading, may_end = stored.run, asyncio.Event(), asyncio.Event()

    async def run(query: Callable[..., object]) -> dict[SubscriptionId, EndpointRecord]:
        if not loading.is_set():
            loading.set()
            await may_end.wait()
        return await load(query)

    stored.run = run  # type: ignore[assignment, method-assign]
    wanted = [changed, deleted, other]
    tasks = [
        replace(TASK, subscription_id=one, subscription_version=RECORD.version) for one in wanted
    ]
    finding = asyncio.create_task(
        stored.cache.for_tasks(tasks, 100.0) if of_tasks else stored.cache.current(wanted, 100.0)
    )
    await loading.wait()
    stored.records[changed] = replace(stored.records[changed], version=RECORD.version + 1)
    del stored.records[deleted]
    stored.cache.invalidate(frozenset())
    await stored.load([changed, deleted])
    may_end.set()
    found = await finding
    assert isinstance(newest := found[changed], Endpoint)
    assert newest.record.version == RECORD.version + 1
    assert found[deleted] is None
    assert isinstance(found[other], Endpoint)


async def test_a_subscription_that_is_gone_is_no_longer_known_as_ordered() -> None:
    stored = Subscriptions()
    ordered = stored.add(7, range(3), ordered=True)
    await stored.load([*ordered, *stored.add(7, [9], ordered=False)])
    assert stored.cache.ordered_subscriptions == set(ordered)
    stored.cache.invalidate(frozenset({"7"}))
    assert stored.cache.ordered_subscriptions == set(ordered), "attempts of these may end now"
    del stored.records[ordered[0]]
    await stored.load(ordered)
    assert stored.cache.ordered_subscriptions == set(ordered[1:])


async def test_no_more_are_known_as_ordered_than_are_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Subscriptions may be made and deleted for ever, and none of them is asked for again."""
    monkeypatch.setattr(endpoints, "_MAX_CACHED", 4)
    stored = Subscriptions()
    for room in range(1, 20):
        await stored.load(stored.add(room, range(2), ordered=True))
        stored.cache.invalidate(frozenset({str(room)}))
    assert len(stored.cache.ordered_subscriptions) == 4
    assert set(stored.cache._by_room) == {"18", "19"}


async def test_an_organisation_with_many_endpoints_displaces_only_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoints, "_MAX_CACHED", 10)
    stored = Subscriptions()
    small = stored.add(7, range(3), ordered=False, owner="small")
    await stored.load(small)
    large = stored.add(8, range(50), ordered=False, owner="large")
    await stored.load(large)
    assert await stored.load(small) == 0
    assert await stored.load(large[-7:]) == 0
    assert await stored.load(large[:1]) == 1
    for gone in large:
        del stored.records[gone]
    await stored.load(large, now=200.0)
    assert await stored.load(small) == 0, "deleted subscriptions are still the organisation's"
