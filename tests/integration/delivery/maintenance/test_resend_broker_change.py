"""An installation gets another broker, or gives it up: the work that the former shape left goes this one's way."""

from datetime import datetime

import pytest

from delivery.maintenance.resend import BrokerMigration
from rooms.clock import SystemClock
from rooms.db.queue.broker_change import START, migrate_page
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import State, SubscriptionType
from rooms.domain.work_location import (
    AT_BROKER,
    POSTGRES_MODE,
    SCHEDULED,
    TO_RELAY,
    BrokerMode,
    WorkLocation,
)
from tests.support.installation import Installation, ago
from tests.support.push_worker import StoppedClock
from tests.support.relay import RELAYED, places

PUSH, PULL = SubscriptionType.PUSH, SubscriptionType.PULL
HERE = (WorkLocation.PUSH_LOCAL, WorkLocation.PULL_LOCAL)
PAGE = 2


def always() -> bool:
    return True


async def insert_work(
    installation: Installation, place: WorkLocation, *, due: datetime | None = None
) -> DeliveryTask:
    """Insert a delivery whose work row is in `place`."""
    kind = PULL if place & 1 else PUSH
    state = State.SCHEDULED if place in SCHEDULED else State.QUEUED
    (copy,) = await installation.publish(
        await installation.subscribe(kind), kind=kind, state=state, attempt=2
    )
    await installation.queue(copy, due=due)
    await installation.rows(
        "UPDATE outbox SET kind = %s WHERE id = %s", int(place), copy.delivery_id
    )
    return copy


async def test_what_another_broker_was_to_carry_is_taken_from_here(
    installation: Installation, database: str
) -> None:
    """Oracle: whatever place it stood in it is queued here, due when it was, under the next generation, and logged."""
    places_before = (*TO_RELAY, *AT_BROKER, *SCHEDULED, *HERE)
    copies = {
        place: await insert_work(installation, place, due=ago(-3600)) for place in places_before
    }
    dues = await installation.rows("SELECT id, due_at FROM outbox ORDER BY id")
    rung: list[SubscriptionId | None] = []
    async with LogWriter(database, kind="chores", broker_mode=POSTGRES_MODE) as writer:
        duty = BrokerMigration(
            writer, lambda subscription=None: rung.append(subscription), SystemClock()
        )
        await duty.run(always)
    assert await places(installation) == {WorkLocation.PUSH_LOCAL: 4, WorkLocation.PULL_LOCAL: 4}
    assert await installation.states() == {State.QUEUED: 8}
    assert await installation.rows("SELECT id, due_at FROM outbox ORDER BY id") == dues
    for place, copy in copies.items():
        moved = place not in HERE
        row, work = await installation.delivery(copy), await installation.work("outbox", copy)
        assert work is not None
        assert (
            (row["generation"], row["attempt"])
            == (work["generation"], work["attempt"])
            == (int(moved), 2)
        )
        logged = [
            (step["kind"], step["generation"], step["detail"])
            for step in await installation.journey(copy)
        ]
        assert logged == [("restored", 1, "another_broker")] * moved
    assert set(rung) == {
        None,
        *(
            copies[place].subscription_id
            for place in places_before
            if place & 1 and place not in HERE
        ),
    }


async def test_what_waited_here_is_carried_by_the_other_broker(
    installation: Installation, database: str
) -> None:
    """Oracle: what is due soon must be sent, what is due beyond the lookahead is scheduled.

    Rows in the right location are untouched.
    """
    near = [await insert_work(installation, place, due=ago(-50)) for place in HERE]
    far = [await insert_work(installation, place, due=ago(-3600)) for place in HERE]
    others = [
        await insert_work(installation, place) for place in (*TO_RELAY, *AT_BROKER, *SCHEDULED)
    ]
    async with LogWriter(database, kind="chores", broker_mode=RELAYED) as writer:
        duty = BrokerMigration(writer, lambda subscription=None: None, SystemClock())
        await duty.run(always)
    assert await places(installation) == {
        WorkLocation.PUSH_TO_RELAY: 2, WorkLocation.PULL_TO_RELAY: 2, WorkLocation.PUSH_AT_BROKER: 1, WorkLocation.PULL_AT_BROKER: 1,
        WorkLocation.PUSH_SCHEDULED: 2, WorkLocation.PULL_SCHEDULED: 2,
    }  # fmt: skip
    for copy in near:
        row = await installation.delivery(copy)
        assert (row["state"], row["generation"], row["attempt"]) == (State.QUEUED, 1, 2)
    for copy in far:
        row = await installation.delivery(copy)
        assert (row["state"], row["generation"], row["attempt"]) == (State.SCHEDULED, 1, 2)
    assert {(await installation.delivery(copy))["generation"] for copy in others} == {0}


@pytest.mark.parametrize(
    ("shape", "place", "to"),
    [
        (POSTGRES_MODE, WorkLocation.PUSH_AT_BROKER, WorkLocation.PUSH_LOCAL),
        (RELAYED, WorkLocation.PUSH_LOCAL, WorkLocation.PUSH_TO_RELAY),
    ],
)
async def test_claimed_rows_of_the_former_mode_are_left_until_they_are_free(
    installation: Installation,
    database: str,
    shape: BrokerMode,
    place: WorkLocation,
    to: WorkLocation,
) -> None:
    """A worker that lives on finishes what it has begun.

    What it had when it died moves, though its claim runs on.
    """
    copy = await insert_work(installation, place)
    async with LogWriter(database, kind="chores", broker_mode=shape) as writer:
        async with LogWriter(database, kind="worker") as worker:
            await installation.rows(
                "UPDATE outbox SET claimed_until = now() + interval '1 hour', worker = %s",
                worker.id,
            )
            step = await migrate_page(writer, START, limit=10)
            assert (step.migrated, step.claimed) == (0, 1)
            assert await places(installation) == {place: 1}
        await installation.gone("rooms worker")
        step = await migrate_page(writer, START, limit=10)
        assert (step.migrated, step.claimed) == (1, 0)
    assert await places(installation) == {to: 1}
    work = await installation.work("outbox", copy)
    assert work is not None
    assert work["worker"] is None


async def test_it_goes_page_by_page_and_looks_again_ever_later(
    installation: Installation, database: str
) -> None:
    """A row that a process of the former mode leaves afterwards is found too.

    A check that is not due costs nothing.
    """
    await installation.publish_many(await installation.subscribe(), 5)
    clock = StoppedClock()
    async with LogWriter(database, kind="chores", broker_mode=RELAYED) as writer:
        after, moved, pages = START, 0, 0
        while True:
            step = await migrate_page(writer, after, limit=PAGE)
            if step.last is None:
                break
            after, moved, pages = step.last, moved + step.migrated, pages + 1
        assert (moved, pages) == (5, 3)

        duty = BrokerMigration(writer, lambda subscription=None: None, clock)
        await duty.run(always)
        await insert_work(installation, WorkLocation.PUSH_LOCAL)
        await duty.run(always)
        assert await places(installation) == {
            WorkLocation.PUSH_TO_RELAY: 5,
            WorkLocation.PUSH_LOCAL: 1,
        }
        clock.ahead_s += 1.1
        await duty.run(always)
        assert await places(installation) == {WorkLocation.PUSH_TO_RELAY: 6}
        for _ in range(12):
            clock.ahead_s += 601
            await duty.run(always)
        await insert_work(installation, WorkLocation.PUSH_LOCAL)
        clock.ahead_s += 500
        await duty.run(always)
        assert (await places(installation))[WorkLocation.PUSH_LOCAL] == 1
        clock.ahead_s += 101
        await duty.run(always)
        assert await places(installation) == {WorkLocation.PUSH_TO_RELAY: 7}


async def test_nothing_is_scanned_if_no_row_can_be_elsewhere(
    installation: Installation, database: str
) -> None:
    """Oracle: without the mark of another broker, a sent row (no index has it) is not searched.

    With the mark it is, and the mark is deleted a day after it was last set.
    """
    await insert_work(installation, WorkLocation.PUSH_AT_BROKER)
    clock = StoppedClock()
    async with (
        LogWriter(database, kind="chores", broker_mode=POSTGRES_MODE) as writer,
        LogWriter(database, kind="chores", broker_mode=RELAYED) as other,
    ):
        await BrokerMigration(writer, lambda subscription=None: None, clock).run(always)
        assert await places(installation) == {WorkLocation.PUSH_AT_BROKER: 1}
        await BrokerMigration(other, lambda subscription=None: None, clock).run(always)
        await BrokerMigration(writer, lambda subscription=None: None, clock).run(always)
        assert await places(installation) == {WorkLocation.PUSH_LOCAL: 1}
        for old, left in ((False, 1), (True, 0)):
            if old:
                await installation.rows("UPDATE upkeep_marks SET at = now() - interval '25 hours'")
            await BrokerMigration(writer, lambda subscription=None: None, clock).run(always)
            assert (
                await installation.value("SELECT count(*) FROM upkeep_marks WHERE name = 'relayed'")
                == left
            )
