"""The statements of the sideline: what they move, what they refuse, and what they clear away."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from rooms.db.connection import open_engine, psycopg_url
from rooms.db.queries.deliveries import redeliver
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.sideline import queries
from rooms.db.sideline.entries import EntryRef, SidelineEntries
from rooms.db.sideline.queries import (
    SidelineFilter,
    oldest_sidelined,
    sideline_count,
    sideline_page,
    sideline_summary,
)
from rooms.db.sideline.shovel import MoveResult, ShovelOutcome, ShovelQueries
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId, first_id
from rooms.domain.magazine import Slot
from rooms.domain.state_machine import Reason, State, SubscriptionType
from rooms.domain.work_location import relayed_mode
from tests.support.installation import Installation

OFTEN = 5
START = (RoomId(-(1 << 31)), DeliveryId(first_id(0)))


@pytest.fixture
def sidelines(writer: LogWriter) -> SidelineEntries:
    return SidelineEntries(writer)


@pytest.fixture
def shovels(writer: LogWriter) -> ShovelQueries:
    return ShovelQueries(writer)


async def sideline(
    installation: Installation,
    subscription: SubscriptionId,
    *,
    reason: Reason = Reason.ATTEMPTS_EXHAUSTED,
    lifetime_s: float | None = None,
    correlation_id: str | None = None,
    event_type: str = "order.created",
    kind: SubscriptionType = SubscriptionType.PUSH,
) -> DeliveryTask:
    """A delivery that the worker's own statement sidelined."""
    (copy,) = await installation.publish(
        subscription,
        lifetime_s=lifetime_s,
        correlation_id=correlation_id,
        event_type=event_type,
        kind=kind,
    )
    await installation.queue(copy)
    async with LogWriter(installation.url, kind="settler") as writer:
        moved = await OutcomeQueries(writer).decide(
            [DeliveryOutcome(task=copy, state=State.SIDELINED, reason=reason)], worker=1
        )
    assert moved == 1
    return copy


async def waiting(sidelines: SidelineEntries) -> list[SubscriptionId]:
    return [one.subscription for one in await sidelines.list_unloaded_sidelines(None)]


async def steps(sidelines: SidelineEntries) -> list[EntryRef]:
    found = await sidelines.list_unloaded(await waiting(sidelines), limit=1000)
    assert not found.is_full
    return [one.ref for one in found.entries]


async def test_what_is_sidelined_waits_to_be_loaded_with_all_that_is_known(
    installation: Installation, sidelines: SidelineEntries
) -> None:
    copy = await sideline(
        installation, await installation.subscribe(), reason=Reason.TERMINAL_STATUS
    )
    page = await sidelines.list_unloaded(await waiting(sidelines), limit=10)
    (one,) = page.entries
    assert (page.is_full, page.reached) == (False, 1)
    assert one.ref == EntryRef(
        delivery_id=copy.delivery_id, subscription_id=copy.subscription_id, generation=0, slot=None
    )
    assert (one.reason, one.message_id, one.correlation_id) == (
        "terminal_status",
        copy.message_id,
        copy.correlation_id,
    )
    assert (one.shovels, one.event_type, one.event_version) == (0, "order.created", 3)


async def test_a_page_of_unloaded_entries_says_if_there_may_be_more(
    installation: Installation, sidelines: SidelineEntries
) -> None:
    subscription = await installation.subscribe()
    first, _ = [await sideline(installation, subscription) for _ in range(2)]
    page = await sidelines.list_unloaded([subscription], limit=1)
    (one,) = page.entries
    assert (one.ref.delivery_id, page.is_full, page.reached) == (first.delivery_id, True, 1)


async def test_unloaded_entries_come_in_the_order_of_the_given_subscriptions(
    installation: Installation, sidelines: SidelineEntries
) -> None:
    one, other, third = [await installation.subscribe() for _ in range(3)]
    copies = [await sideline(installation, at) for at in (one, other, third, other)]
    page = await sidelines.list_unloaded([other, one, third], limit=3)
    assert [entry.ref.delivery_id for entry in page.entries] == [
        copies[n].delivery_id for n in (1, 3, 0)
    ]
    assert (page.is_full, page.reached) == (True, 2)
    page = await sidelines.list_unloaded([other, one, third], limit=5)
    assert (len(page.entries), page.is_full, page.reached) == (4, False, 3)


async def test_subscriptions_with_unloaded_entries_are_listed_once_each_in_pages(
    installation: Installation, sidelines: SidelineEntries
) -> None:
    subscriptions = sorted([await installation.subscribe() for _ in range(3)])
    await installation.subscribe()
    for subscription in subscriptions * 2:
        await sideline(installation, subscription)
    listed = await sidelines.list_unloaded_sidelines(None, limit=2)
    assert [one.subscription for one in listed] == subscriptions[:2]
    assert {one.organisation for one in listed} == {installation.organisation}
    listed = await sidelines.list_unloaded_sidelines(subscriptions[1], limit=2)
    assert [one.subscription for one in listed] == subscriptions[2:]
    await installation.rows("DELETE FROM subscriptions WHERE id = %s", subscriptions[2])
    (gone,) = await sidelines.list_unloaded_sidelines(subscriptions[1], limit=2)
    assert (gone.subscription, gone.organisation) == (subscriptions[2], None)


async def test_a_loaded_entry_waits_no_more_and_is_recorded_once(
    installation: Installation, sidelines: SidelineEntries
) -> None:
    await sideline(installation, await installation.subscribe())
    (step,) = await steps(sidelines)
    placed = EntryRef(
        **{name: getattr(step, name) for name in ("delivery_id", "subscription_id", "generation")},
        slot=Slot(3, 9),
    )
    assert await sidelines.record_loaded([placed]) == []
    assert await steps(sidelines) == []
    assert await sidelines.list_placed(START, limit=10) == [(placed, True)]
    # A second loader that worked on the same row learns that its entry is one too many.
    other = EntryRef(
        **{name: getattr(step, name) for name in ("delivery_id", "subscription_id", "generation")},
        slot=Slot(1, 1),
    )
    assert await sidelines.record_loaded([other]) == [other]


async def test_rows_of_several_sidelines_are_listed_on_from_a_position_in_each(
    installation: Installation, sidelines: SidelineEntries
) -> None:
    one, other = [await installation.subscribe() for _ in range(2)]
    copies = [await sideline(installation, at) for at in (one, other, one, other)]
    found = await sidelines.list_placed_of({other: None, one: None}, limit=3)
    assert [row.ref.delivery_id for row in found] == [copies[n].delivery_id for n in (1, 3, 0)]
    assert {row.sidelined for row in found} == {True}
    positions = {other: found[0].position, one: found[2].position}
    found = await sidelines.list_placed_of(positions, limit=3)
    assert [row.ref.delivery_id for row in found] == [copies[n].delivery_id for n in (3, 2)]


async def test_sidelines_are_listed_with_their_organisation(
    installation: Installation, sidelines: SidelineEntries
) -> None:
    first, second, _ = sorted([await installation.subscribe() for _ in range(3)])
    for subscription in (first, second):
        await sidelines.record_magazine(subscription, shards=4)
    (found,) = await sidelines.list_sidelines(first)
    assert (found.subscription, found.organisation) == (second, installation.organisation)


async def test_what_the_magazine_lost_is_loaded_again(
    installation: Installation, sidelines: SidelineEntries
) -> None:
    await sideline(installation, await installation.subscribe())
    (step,) = await steps(sidelines)
    placed = EntryRef(
        delivery_id=step.delivery_id,
        subscription_id=step.subscription_id,
        generation=0,
        slot=Slot(0, 4),
    )
    await sidelines.record_loaded([placed])
    elsewhere = EntryRef(
        delivery_id=step.delivery_id,
        subscription_id=step.subscription_id,
        generation=0,
        slot=Slot(0, 5),
    )
    assert await sidelines.record_lost([elsewhere]) == 0
    assert await sidelines.record_lost([placed]) == 1
    assert await steps(sidelines) == [step]


@pytest.mark.parametrize("kind", list(SubscriptionType))
async def test_a_shovel_queues_anew(
    installation: Installation,
    sidelines: SidelineEntries,
    shovels: ShovelQueries,
    kind: SubscriptionType,
) -> None:
    copy = await sideline(installation, await installation.subscribe(kind), kind=kind)
    (step,) = await steps(sidelines)
    assert await shovels.shovel([step], max_shovels=OFTEN) == [
        MoveResult(ShovelOutcome.QUEUED, kind)
    ]
    row = await installation.delivery(copy)
    assert (row["state"], row["generation"], row["attempt"], row["shovels"]) == ("queued", 1, 0, 1)
    work = await installation.work("outbox", copy)
    assert work is not None
    assert (work["kind"], work["generation"], work["attempt"]) == (
        kind is SubscriptionType.PULL,
        1,
        0,
    )
    assert (await installation.kinds(copy))[-1] == "shoveled"
    assert await installation.work("sidelined", copy) is None
    assert await shovels.shovel([step], max_shovels=OFTEN) == [MoveResult(ShovelOutcome.STALE)]


async def test_a_shovel_sends_to_the_relay_where_there_is_one(installation: Installation) -> None:
    copy = await sideline(installation, await installation.subscribe())
    async with LogWriter(
        installation.url, kind="chores", broker_mode=relayed_mode(lookahead_ms=60_000)
    ) as writer:
        found = await steps(SidelineEntries(writer))
        assert await ShovelQueries(writer).shovel(found, max_shovels=OFTEN) == [
            MoveResult(ShovelOutcome.QUEUED, "PUSH")
        ]
    work = await installation.work("outbox", copy)
    assert work is not None
    assert work["kind"] == 2


async def test_a_shovel_does_not_renew_a_lifetime(
    installation: Installation, sidelines: SidelineEntries, shovels: ShovelQueries
) -> None:
    copy = await sideline(installation, await installation.subscribe(), lifetime_s=60)
    await installation.rows(
        "UPDATE deliveries SET expires_at = now() - interval '1 s' WHERE room_id = %s AND id = %s",
        copy.room_id, copy.delivery_id,
    )  # fmt: skip
    assert await shovels.shovel(await steps(sidelines), max_shovels=OFTEN) == [
        MoveResult(ShovelOutcome.EXPIRED, "PUSH")
    ]
    assert await installation.state(copy) is State.EXPIRED
    assert await installation.work("outbox", copy) is None


async def test_poison_does_not_circle_for_ever(
    installation: Installation, sidelines: SidelineEntries, shovels: ShovelQueries
) -> None:
    copy = await sideline(installation, await installation.subscribe())
    await installation.rows("UPDATE deliveries SET shovels = 2 WHERE id = %s", copy.delivery_id)
    (step,) = await steps(sidelines)
    assert await shovels.shovel([step], max_shovels=2) == [
        MoveResult(ShovelOutcome.TOO_OFTEN, "PUSH")
    ]
    assert await installation.state(copy) is State.SIDELINED
    assert await shovels.shovel([step], max_shovels=3) == [MoveResult(ShovelOutcome.QUEUED, "PUSH")]


async def test_a_batch_answers_for_each_by_its_position(
    installation: Installation, sidelines: SidelineEntries, shovels: ShovelQueries
) -> None:
    subscription = await installation.subscribe()
    copies = [await sideline(installation, subscription) for _ in range(3)]
    await installation.rows(
        "UPDATE deliveries SET shovels = 9 WHERE id = %s", copies[0].delivery_id
    )
    await installation.rows(
        "UPDATE deliveries SET generation = 7 WHERE id = %s", copies[1].delivery_id
    )
    every = [
        EntryRef(
            delivery_id=copy.delivery_id, subscription_id=subscription, generation=0, slot=None
        )
        for copy in copies
    ]
    reported = await shovels.shovel(every, max_shovels=OFTEN)
    assert reported is not None
    assert [result.outcome for result in reported] == [
        ShovelOutcome.TOO_OFTEN,
        ShovelOutcome.STALE,
        ShovelOutcome.QUEUED,
    ]


async def test_a_purge_ends_it(
    installation: Installation, sidelines: SidelineEntries, shovels: ShovelQueries
) -> None:
    copy = await sideline(installation, await installation.subscribe())
    (step,) = await steps(sidelines)
    assert await shovels.purge([step]) == [MoveResult(ShovelOutcome.PURGED)]
    assert await installation.state(copy) is State.PURGED
    assert (await installation.kinds(copy))[-1] == "purged"
    assert await shovels.purge([step]) == [MoveResult(ShovelOutcome.STALE)]


@pytest.mark.parametrize("method", ["shovel", "purge"])
async def test_a_locked_row_is_busy_and_stays(
    installation: Installation, sidelines: SidelineEntries, shovels: ShovelQueries, method: str
) -> None:
    """Only the row whose delivery is still sidelined: of the other it does not matter."""
    subscription = await installation.subscribe()
    copies = [await sideline(installation, subscription) for _ in range(3)]
    await installation.rows(
        "UPDATE deliveries SET generation = 7 WHERE id = %s", copies[0].delivery_id
    )
    refs = [
        EntryRef(
            delivery_id=copy.delivery_id, subscription_id=subscription, generation=0, slot=None
        )
        for copy in copies
    ]
    more = {"max_shovels": OFTEN} if method == "shovel" else {}
    moved = ShovelOutcome.QUEUED if method == "shovel" else ShovelOutcome.PURGED
    async with await psycopg.AsyncConnection.connect(psycopg_url(installation.url)) as holder:
        await holder.execute(
            "SELECT FROM sidelined WHERE id = ANY (%s::uuid[]) FOR UPDATE",
            ([copy.delivery_id for copy in copies[:2]],),
        )
        results = await getattr(shovels, method)(refs, **more)
        await holder.rollback()
    assert [result.outcome for result in results] == [
        ShovelOutcome.STALE,
        ShovelOutcome.BUSY,
        moved,
    ]
    assert await installation.state(copies[1]) is State.SIDELINED
    assert [result.outcome for result in await getattr(shovels, method)(refs, **more)] == [
        ShovelOutcome.STALE,
        moved,
        ShovelOutcome.STALE,
    ]


async def test_a_moved_delivery_comes_with_the_slot_that_was_recorded_last(
    installation: Installation, sidelines: SidelineEntries, shovels: ShovelQueries
) -> None:
    """The loader may record it after the shovel has read the row."""
    subscription = await installation.subscribe()
    for _ in range(2):
        await sideline(installation, subscription)
    refs = await steps(sidelines)
    await sidelines.record_loaded(
        [replace(ref, slot=Slot(2, pointer)) for pointer, ref in enumerate(refs)]
    )
    queued = await shovels.shovel(refs[:1], max_shovels=OFTEN)
    assert queued == [MoveResult(ShovelOutcome.QUEUED, "PUSH", Slot(2, 0))]
    assert await shovels.purge(refs[1:]) == [MoveResult(ShovelOutcome.PURGED, None, Slot(2, 1))]


async def test_a_redelivered_delivery_is_in_no_sideline(
    installation: Installation, sidelines: SidelineEntries, writer: LogWriter
) -> None:
    copy = await sideline(installation, await installation.subscribe())
    await redeliver(writer, installation.organisation, copy.delivery_id)
    assert await steps(sidelines) == []
    assert (await installation.delivery(copy))["shovels"] == 1


async def test_rows_that_mean_nothing_are_cleared_away(
    installation: Installation, sidelines: SidelineEntries
) -> None:
    subscription = await installation.subscribe()
    late, kept = [await sideline(installation, subscription) for _ in range(2)]
    async with LogWriter(installation.url, kind="settler") as writer:
        await OutcomeQueries(writer).decide(
            [DeliveryOutcome(task=late, state=State.DELIVERED)], worker=1
        )
    assert await installation.work("sidelined", late) is not None
    assert [step.delivery_id for step in await steps(sidelines)] == [kept.delivery_id]
    assert await installation.work("sidelined", late) is None
    (step,) = await steps(sidelines)
    placed = EntryRef(
        delivery_id=step.delivery_id, subscription_id=subscription, generation=0, slot=Slot(0, 0)
    )
    await sidelines.record_loaded([placed])
    await installation.rows(
        "UPDATE deliveries SET state = 'cancelled' WHERE id = %s", kept.delivery_id
    )
    assert await sidelines.list_placed(START, limit=10) == [(placed, False)]
    assert await sidelines.next_pointer(subscription) == 1
    assert await sidelines.delete_stale([placed]) == 1
    assert await sidelines.list_placed(START, limit=10) == []


async def test_a_sideline_is_browsed_by_all_that_it_keeps(installation: Installation) -> None:
    subscription, other = await installation.subscribe(), await installation.subscribe()
    first = await sideline(installation, subscription, correlation_id="c-1")
    second = await sideline(
        installation, subscription, reason=Reason.TERMINAL_STATUS, event_type="order.paid"
    )
    await sideline(installation, other)
    await installation.rows(
        "UPDATE deliveries SET last_status = 503, last_error = 'Connect: 100%% refused' WHERE id = %s",
        first.delivery_id,
    )
    now = datetime.now(UTC)
    wanted = {
        SidelineFilter(): [first, second],
        SidelineFilter(reason=Reason.TERMINAL_STATUS): [second],
        SidelineFilter(event_type="order.created"): [first],
        SidelineFilter(error="100% REFUSED"): [first],
        SidelineFilter(error="10_%"): [],
        SidelineFilter(correlation_ids=("c-1", "c-2")): [first],
        SidelineFilter(deliveries=(second.delivery_id,)): [second],
        SidelineFilter(since=now - timedelta(minutes=1), until=now + timedelta(minutes=1)): [
            first,
            second,
        ],
        SidelineFilter(until=now - timedelta(minutes=1)): [],
    }
    engine = open_engine(installation.url, size=1)
    try:
        async with engine.connect() as connection:
            for asked, expected in wanted.items():
                page = await sideline_page(
                    connection, installation.room, subscription, asked, after=None, limit=10
                )
                assert [one.ref.delivery_id for one in page] == [
                    copy.delivery_id for copy in expected
                ], asked
                assert await sideline_count(
                    connection, installation.room, subscription, asked
                ) == len(expected)
            page = await sideline_page(
                connection, installation.room, subscription, SidelineFilter(), after=None, limit=1
            )
            oldest = await oldest_sidelined(connection, installation.room, subscription)
            assert oldest == page[0].sidelined_at
            page = await sideline_page(
                connection,
                installation.room,
                subscription,
                SidelineFilter(),
                after=page[0].position,
                limit=10,
            )
            assert [one.ref.delivery_id for one in page] == [second.delivery_id]
            summary = await sideline_summary(
                connection, installation.room, subscription, SidelineFilter()
            )
            assert summary == {"attempts_exhausted": 1, "terminal_status": 1}
    finally:
        await engine.dispose()


@pytest.mark.parametrize("window", [1, 2, 100])
async def test_the_oldest_entry_is_found_behind_those_of_deliveries_that_went_on(
    installation: Installation, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """A late success moves a delivery, and its entry stays until the audit."""
    monkeypatch.setattr(queries, "_MIN_SCANNED", window)
    subscription = await installation.subscribe()
    copies = [await sideline(installation, subscription) for _ in range(5)]
    for copy in copies[:3]:
        await installation.rows(
            "UPDATE deliveries SET state = 'delivered' WHERE id = %s RETURNING 1", copy.delivery_id
        )
    engine = open_engine(installation.url, size=1)
    try:
        async with engine.connect() as connection:
            room = installation.room
            oldest = await oldest_sidelined(connection, room, subscription)
            assert oldest == await installation.value(
                "SELECT since FROM sidelined WHERE id = %s", copies[3].delivery_id
            )
            page = await sideline_page(
                connection, room, subscription, SidelineFilter(), after=None, limit=2
            )
    finally:
        await engine.dispose()
    assert [one.ref.delivery_id for one in page] == [copy.delivery_id for copy in copies[3:]]
