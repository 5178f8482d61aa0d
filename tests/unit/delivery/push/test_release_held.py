"""Test how held deliveries are released: in turns, with a pause after each."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import pytest

from delivery.push import release_held
from delivery.push.endpoints import Endpoint, EndpointCache, EndpointLookup
from delivery.push.release_held import HeldReleaser
from rooms.clock import SystemClock
from rooms.db.queue.holds import HeldGroup, HeldPage, Holds
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.state_machine import Reason
from tests.unit.delivery.push.test_endpoints import RECORD, SEAL

TURN_S = 0.25
REAL_SLEEP = asyncio.sleep


class Watch(SystemClock):
    """Advance only by sleeps and statements."""

    def __init__(self) -> None:
        self.at = 100.0

    def monotonic(self) -> float:
        return self.at


class Shelf:
    """Hold deliveries of each subscription; a release takes a while."""

    def __init__(self, watch: Watch, **left: int) -> None:
        self.left = {SubscriptionId(name): count for name, count in left.items()}
        self.released: list[tuple[str, int, float]] = []
        self.page = 1000
        self.parts: list[tuple[str, str] | None] = []
        self._watch = watch

    async def held(self, after: tuple[str, str] | None = None) -> HeldPage:
        self.parts.append(after)
        names = sorted(name for name, count in self.left.items() if count)
        page = [name for name in names if after is None or name > after[0]][: self.page]
        return HeldPage(
            groups=[HeldGroup(name, Reason.SATURATED) for name in page],
            last=(page[-1], Reason.SATURATED) if len(page) == self.page else None,
        )

    async def release(self, held: HeldGroup, *, limit: int) -> int:
        self._watch.at += TURN_S
        count = min(limit, self.left[held.subscription])
        self.left[held.subscription] -= count
        self.released.append((held.subscription, count, self._watch.at))
        return count


class Book:
    """Return an endpoint for every subscription."""

    async def current(
        self, identities: Iterable[SubscriptionId], _now: float
    ) -> dict[SubscriptionId, EndpointLookup]:
        return {
            identity: Endpoint(replace(RECORD, subscription_id=identity), SEAL)
            for identity in identities
        }


def releaser(
    shelf: Shelf, book: Book, watch: Watch, capacity: Callable[[Endpoint], int | None]
) -> HeldReleaser:
    return HeldReleaser(
        holds=cast("Holds", shelf),
        endpoints=cast("EndpointCache", book),
        clock=watch,
        capacity=capacity,
        on_released=lambda _identity, _count: None,
        on_none_held=lambda _identity: None,
    )


async def test_subscriptions_take_turns_with_a_pause_after_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leave most of PostgreSQL's time to others, and give every lane its turn."""
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

    monkeypatch.setattr(release_held, "asyncio", type("Loop", (), {"sleep": staticmethod(sleep)}))
    reported: list[Any] = []
    emptied: list[SubscriptionId] = []
    running = asyncio.create_task(
        HeldReleaser(
            holds=cast("Holds", shelf),
            endpoints=cast("EndpointCache", Book()),
            clock=watch,
            capacity=lambda _endpoint: 10,
            on_released=lambda identity, count: reported.append((identity, count)),
            on_none_held=emptied.append,
        ).run()
    )
    async with asyncio.timeout(30):
        await done.wait()
    running.cancel()
    assert [name for name, _, _ in shelf.released][:3] == ["a", "b", "c"]
    assert reported == [(name, count) for name, count, _ in shelf.released if count]
    assert sum(count for _, count in reported) == 35
    assert sorted(emptied) == ["b", "c"], "the queue of a is unknown before the next look"
    for (_, _, before), (_, _, after) in zip(shelf.released, shelf.released[1:], strict=False):
        assert after - before >= TURN_S * 3, "a turn, and a rest of twice as long"


@pytest.mark.parametrize(("reason", "most_s"), [(Reason.SATURATED, 0.2), (Reason.PAUSED, 1.0)])
async def test_saturated_lanes_are_scanned_more_often(
    monkeypatch: pytest.MonkeyPatch, reason: Reason, most_s: float
) -> None:
    """Scan often: only releases bring it tasks while publishers hold new messages."""
    watch = Watch()
    shelf = Shelf(watch, a=5)
    rests: list[float] = []
    done = asyncio.Event()

    async def held(_after: tuple[str, str] | None = None) -> HeldPage:
        return HeldPage([HeldGroup(SubscriptionId("a"), reason)], None)

    async def sleep(seconds: float) -> None:
        rests.append(seconds)
        watch.at += seconds
        if len(rests) == 6:
            done.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(shelf, "held", held)
    monkeypatch.setattr(release_held, "asyncio", type("Loop", (), {"sleep": staticmethod(sleep)}))
    running = asyncio.create_task(releaser(shelf, Book(), watch, lambda _endpoint: None).run())
    async with asyncio.timeout(30):
        await done.wait()
    running.cancel()
    assert max(rests) == most_s
    assert shelf.released == []


class Offices(Book):
    """Return endpoints of the organisation that a subscription's name begins with."""

    async def current(
        self, identities: Iterable[SubscriptionId], _now: float
    ) -> dict[SubscriptionId, EndpointLookup]:
        return {
            identity: Endpoint(
                replace(
                    RECORD,
                    subscription_id=identity,
                    organisation_id=OrganisationId(identity.partition("_")[0]),
                ),
                SEAL,
            )
            for identity in identities
        }


async def releases(
    monkeypatch: pytest.MonkeyPatch, shelf: Shelf, watch: Watch, is_done: Callable[[], bool]
) -> list[str]:
    """Release until it is done; return the subscriptions in the order of their turns."""
    done = asyncio.Event()

    async def sleep(seconds: float) -> None:
        watch.at += seconds
        if is_done():
            done.set()
            await asyncio.Event().wait()
        await REAL_SLEEP(0)

    monkeypatch.setattr(release_held, "asyncio", type("Loop", (), {"sleep": staticmethod(sleep)}))
    running = asyncio.create_task(releaser(shelf, Offices(), watch, lambda _endpoint: 10).run())
    async with asyncio.timeout(30):
        await done.wait()
    running.cancel()
    return [name for name, _, _ in shelf.released]


async def test_an_organisation_waits_for_one_turn_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one has hundreds of subscriptions, and a round has time for one or two."""
    watch = Watch()
    shelf = Shelf(watch, **{f"many_{number:03}": 1 for number in range(300)}, one_x=30)
    one = SubscriptionId("one_x")
    names = await releases(monkeypatch, shelf, watch, lambda: not shelf.left[one])
    assert names.count("one_x") == 3
    assert len(names) <= 8, "it has every second turn or more"
    others = [name for name in names if name != "one_x"]
    assert len(set(others)) == len(others), "those of the other one have their turns in order"


async def test_what_is_left_of_one_part_has_a_turn_in_each_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of one organisation are listed in parts; another need not wait for all of them."""
    watch = Watch()
    shelf = Shelf(watch, a_only=50, **{f"b_{number:03}": 100 for number in range(60)})
    shelf.page = 5
    only = SubscriptionId("a_only")
    names = await releases(monkeypatch, shelf, watch, lambda: not shelf.left[only])
    assert names.count("a_only") == 5
    assert len(names) <= 10, "it has every second turn"
    assert None not in shelf.parts[1:], "it is not listed a second time"


async def test_all_parts_are_listed_and_nothing_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch()
    shelf = Shelf(watch, **{f"b_{number:03}": 5 for number in range(60)})
    shelf.page = 5
    names = await releases(monkeypatch, shelf, watch, lambda: not any(shelf.left.values()))
    assert sorted(set(names)) == sorted(shelf.left)
