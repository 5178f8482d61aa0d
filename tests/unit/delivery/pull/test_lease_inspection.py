"""Test in which order the leases of streams are inspected, with a store in memory."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from delivery.pull import lease_inspection
from delivery.pull.lease_inspection import LeaseInspection
from delivery.pull.requests import Lease
from delivery.pull.target import PullTarget
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.errors import StorageUnavailableError


class FakeStream:
    """A stream that has no credit left, and waits for the end of its leases."""

    def __init__(self, organisation: str, leases: int) -> None:
        key = PullTarget(RoomId(1), SubscriptionId(organisation), OrganisationId(organisation))
        self.targets = [key]
        self.inspected = 0
        self.unsettled: dict[Lease, PullTarget] = {
            (number.to_bytes(16, "big"), bytes(4)): key for number in range(leases)
        }

    @property
    def needs_inspection(self) -> bool:
        return bool(self.unsettled)

    def on_inspected(self) -> None:
        self.inspected += 1


class FakeStore:
    """Leases of which all last, except those of the organisation `ended`."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.ended = ""
        self.on_inspect: Callable[[], None] = lambda: None
        self.refused = ""

    async def inspect(self, deliveries: Sequence[tuple[Any, str, bytes]]) -> Mapping[int, Any]:
        owners = [owner for _, owner, _ in deliveries]
        self.asked.append(owners)
        await asyncio.sleep(0)
        self.on_inspect()
        if self.refused in owners:
            raise StorageUnavailableError("away")
        live = SimpleNamespace(leased=True, generation=0)
        return {index: live for index, owner in enumerate(owners) if owner != self.ended}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_inspection, "INSPECTION_INTERVAL_S", 0)
    monkeypatch.setattr(lease_inspection, "_INSPECTION_SHARE", 0)
    monkeypatch.setattr(lease_inspection, "MAX_INSPECTED", 10)


async def inspect(
    store: FakeStore, streams: dict[FakeStream, None], until: Callable[[], bool]
) -> None:
    def forget(key: PullTarget, leases: Sequence[Lease]) -> None:
        for stream in streams:
            if stream.targets == [key]:
                for lease in leases:
                    stream.unsettled.pop(lease, None)

    inspection = LeaseInspection(store, streams, forget)  # type: ignore[arg-type]
    has_streams = asyncio.Event()
    has_streams.set()
    task = asyncio.create_task(inspection.run_forever(has_streams))
    try:
        async with asyncio.timeout(10):
            while not until():  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0)
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_an_organisation_waits_for_one_batch_of_each_other() -> None:
    store, victim = FakeStore(), FakeStream("victim", 3)
    store.ended = "victim"
    streams = dict.fromkeys([*(FakeStream("many", 100) for _ in range(20)), victim])
    await inspect(store, streams, lambda: not victim.unsettled)
    assert [set(owners) for owners in store.asked] == [{"many"}, {"victim"}]


async def test_a_stream_that_starves_later_has_its_turn_in_the_next_one() -> None:
    """Let another organisation's leases be under inspection meanwhile."""
    store, victim = FakeStore(), FakeStream("victim", 3)
    store.ended = "victim"
    streams = dict.fromkeys(FakeStream("many", 1000) for _ in range(5))

    def starve() -> None:
        if len(store.asked) == 7:
            streams[victim] = None

    store.on_inspect = starve
    await inspect(store, streams, lambda: len(store.asked) > 7 and not victim.unsettled)
    assert len(store.asked) <= 9


async def test_streams_of_one_organisation_take_turns_too() -> None:
    store, large, small = FakeStore(), FakeStream("many", 1000), FakeStream("many", 3)
    await inspect(store, dict.fromkeys([large, small]), lambda: bool(small.inspected))
    assert len(store.asked) == 2
    assert not large.inspected
    assert small.inspected == 1


async def test_all_leases_are_inspected_and_small_batches_share_statements() -> None:
    store = FakeStore()
    streams = [FakeStream(str(number), 3) for number in range(4)] + [FakeStream("large", 25)]
    large = streams[-1]
    await inspect(store, dict.fromkeys(streams), lambda: bool(large.inspected))
    assert [len(owners) for owners in store.asked[:3]] == [10, 10, 10]
    assert sum(owners.count("large") for owners in store.asked) >= 25
    assert max(map(len, store.asked)) == 10


async def test_a_turn_that_failed_is_followed_by_the_organisations_it_did_not_reach() -> None:
    store, last = FakeStore(), FakeStream("last", 30)
    store.refused = "first"
    streams = dict.fromkeys([FakeStream("first", 1000), last])
    await inspect(store, streams, lambda: bool(last.inspected))
    assert [set(owners) for owners in store.asked[:2]] == [{"first"}, {"last"}]


async def test_a_closed_stream_is_not_inspected_to_its_end() -> None:
    store, closed, other = FakeStore(), FakeStream("many", 1000), FakeStream("other", 100)
    streams = dict.fromkeys([closed, other])

    def close() -> None:
        streams.pop(closed, None)

    store.on_inspect = close
    await inspect(store, streams, lambda: bool(other.inspected))
    assert sum("many" in owners for owners in store.asked) <= 2
