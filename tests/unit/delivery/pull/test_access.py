"""Check which consumers a check looks at: those that something has changed for, or all."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import pytest

from delivery.pull import access
from delivery.pull.access import AccessMonitor, Loss, WatchedConsumer
from delivery.pull.target import PullTarget
from rooms.domain.ids import KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope

OWNER = OrganisationId("owner")
PRINCIPAL = Principal(
    key_id=KeyId("key"), organisation_id=OWNER, scopes=frozenset({Scope.SUBSCRIBE})
)


class Looks:
    """Remember what each statement looks for; `gone` are the subscriptions that have ended."""

    def __init__(self) -> None:
        self.asked: list[set[str]] = []
        self.gone: set[str] = set()
        self.called = asyncio.Event()

    async def __call__(
        self, _writer: object, queues: Sequence[tuple[RoomId, SubscriptionId]]
    ) -> tuple[frozenset[SubscriptionId], Mapping[SubscriptionId, float]]:
        self.asked.append({subscription for _, subscription in queues})
        self.called.set()
        return frozenset(one for _, one in queues if one in self.gone), {}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    found = Looks()
    monkeypatch.setattr(access, "find_stopped", found)
    monkeypatch.setattr(access, "CHECK_INTERVAL_S", 60.0)
    return found


@pytest.fixture
async def monitor(looks: Looks) -> AsyncIterator[AccessMonitor]:
    async with AccessMonitor(cast(Any, None)) as opened:
        yield opened


def watch(
    monitor: AccessMonitor, room: int, *names: str, losses: list[Loss] | None = None
) -> WatchedConsumer:
    targets = [PullTarget(RoomId(room), SubscriptionId(name), OWNER) for name in names]
    return monitor.watch(PRINCIPAL, targets, (losses if losses is not None else []).append)


async def comes(looks: Looks, count: int) -> None:
    async with asyncio.timeout(10):
        while len(looks.asked) < count:
            looks.called.clear()
            await looks.called.wait()


async def test_a_change_of_a_room_is_checked_for_its_consumers_only(
    monitor: AccessMonitor, looks: Looks
) -> None:
    losses: list[Loss] = []
    watch(monitor, 1, "a", "b", losses=losses)
    other = watch(monitor, 2, "c", losses=losses)
    monitor.on_change([RoomId(3)])
    looks.gone = {"b", "c"}
    monitor.on_change([RoomId(1)])
    await comes(looks, 1)
    assert looks.asked == [{"a", "b"}]
    assert losses == [Loss.DELETED]
    monitor.check_soon(other)
    await comes(looks, 2)
    assert looks.asked[1:] == [{"c"}]
    monitor.on_change([])
    await comes(looks, 3)
    assert looks.asked[2:] == [{"a", "b", "c"}]


async def test_all_are_checked_once_an_interval(
    looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "CHECK_INTERVAL_S", 0.01)
    async with AccessMonitor(cast(Any, None)) as monitor:
        watch(monitor, 1, "a")
        watch(monitor, 2, "c")
        await comes(looks, 2)
    assert looks.asked[:2] == [{"a", "c"}] * 2


async def test_many_are_looked_up_in_pages(
    monitor: AccessMonitor, looks: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_PAGE", 3)
    losses: list[Loss] = []
    for number in range(4):
        watch(monitor, 1, f"{number}a", f"{number}b", losses=losses)
    looks.gone = {"3b"}
    monitor.on_change([RoomId(1)])
    await comes(looks, 2)
    await asyncio.sleep(0)
    assert looks.asked == [{"0a", "0b", "1a", "1b"}, {"2a", "2b", "3a", "3b"}]
    assert losses == [Loss.DELETED]


async def test_nothing_is_kept_of_consumers_that_are_forgotten(
    monitor: AccessMonitor, looks: Looks
) -> None:
    consumers = [watch(monitor, 1, "a", "b"), watch(monitor, 1, "a"), watch(monitor, 2, "c")]
    monitor.on_change([])
    for consumer in consumers:
        monitor.forget(consumer)
    assert not monitor._consumers
    assert not monitor._by_room
    assert not monitor._asked
    for _ in range(10):
        await asyncio.sleep(0)
    assert looks.asked == []
