"""How the refill shares its time: turn by turn, and resting after each."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest

from delivery import refill
from delivery.endpoint import Endpoint
from delivery.endpoints import Endpoints, Known
from delivery.refill import Refill
from rooms.clock import SystemClock
from rooms.domain.ids import SubscriptionId
from rooms.domain.states import Reason
from rooms.storage.holds import Held, Holds
from tests.unit.test_endpoint import RECORD, SEAL

TURN_S = 0.25


class Watch(SystemClock):
    """A clock that goes on when somebody sleeps, or a statement runs."""

    def __init__(self) -> None:
        self.at = 100.0

    def monotonic(self) -> float:
        return self.at


class Shelf:
    """So many held deliveries of each subscription; to release some takes a while."""

    def __init__(self, watch: Watch, **left: int) -> None:
        self.left = {SubscriptionId(name): count for name, count in left.items()}
        self.released: list[tuple[str, int, float]] = []
        self._watch = watch

    async def held(self) -> list[Held]:
        return [Held(name, Reason.SATURATED) for name, count in self.left.items() if count]

    async def release(self, held: Held, *, limit: int) -> int:
        self._watch.at += TURN_S
        count = min(limit, self.left[held.subscription])
        self.left[held.subscription] -= count
        self.released.append((held.subscription, count, self._watch.at))
        return count


class Book:
    """Every subscription has an endpoint."""

    async def current(self, identities: Iterable[SubscriptionId], _now: float) -> dict[SubscriptionId, Known]:
        return {identity: Endpoint(replace(RECORD, subscription_id=identity), SEAL) for identity in identities}


async def test_turns_go_round_and_each_is_followed_by_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lets go of many lanes' deliveries leaves most of PostgreSQL's time to others, and no lane waits for another's last."""
    watch = Watch()
    shelf = Shelf(watch, a=20, b=3, c=12)
    rests: list[float] = []
    done = asyncio.Event()

    async def sleep(seconds: float) -> None:
        rests.append(seconds)
        watch.at += seconds
        if not any(shelf.left.values()):
            done.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(refill, "asyncio", type("Loop", (), {"sleep": staticmethod(sleep)}))
    told: list[Any] = []
    emptied: list[SubscriptionId] = []
    running = asyncio.create_task(
        Refill(
            holds=cast("Holds", shelf),
            endpoints=cast("Endpoints", Book()),
            clock=watch,
            room=lambda _endpoint: 10,
            released=lambda identity, count: told.append((identity, count)),
            emptied=emptied.append,
        ).run()
    )
    async with asyncio.timeout(30):
        await done.wait()
    running.cancel()
    assert [name for name, _, _ in shelf.released][:3] == ["a", "b", "c"]
    assert told == [(name, count) for name, count, _ in shelf.released if count]
    assert sum(count for _, count in told) == 35
    assert sorted(emptied) == ["b", "c"], "of a nobody knows before the next look"
    for (_, _, before), (_, _, after) in zip(shelf.released, shelf.released[1:], strict=False):
        assert after - before >= TURN_S * 3, "a turn, and a rest of twice as long"


@pytest.mark.parametrize(("reason", "most_s"), [(Reason.SATURATED, 0.2), (Reason.PAUSED, 1.0)])
async def test_a_lane_that_was_saturated_is_looked_at_soon(
    monkeypatch: pytest.MonkeyPatch, reason: Reason, most_s: float
) -> None:
    """Nothing but the refill brings it anything once publishers hold what is for it."""
    watch = Watch()
    shelf = Shelf(watch, a=5)
    rests: list[float] = []
    done = asyncio.Event()

    async def held() -> list[Held]:
        return [Held(SubscriptionId("a"), reason)]

    async def sleep(seconds: float) -> None:
        rests.append(seconds)
        watch.at += seconds
        if len(rests) == 6:
            done.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(shelf, "held", held)
    monkeypatch.setattr(refill, "asyncio", type("Loop", (), {"sleep": staticmethod(sleep)}))
    running = asyncio.create_task(
        Refill(
            holds=cast("Holds", shelf),
            endpoints=cast("Endpoints", Book()),
            clock=watch,
            room=lambda _endpoint: None,
            released=lambda _identity, _count: None,
            emptied=lambda _identity: None,
        ).run()
    )
    async with asyncio.timeout(30):
        await done.wait()
    running.cancel()
    assert max(rests) == most_s
    assert shelf.released == []
