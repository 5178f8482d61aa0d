"""Check cancelling and rescheduling against each process that has the delivery, in both orders."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime, timedelta

import pytest

from rooms.db.queue.broker_claims import BrokerClaims
from rooms.db.queue.lookahead import stage_due
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.queue.relay import RELAY_WRITER_KIND, RelayOutbox
from rooms.db.queue.withdraw import (
    ChangeOutcome,
    DeliveryChange,
    cancel_message,
    reschedule_message,
)
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.message import DeliverySchedule
from rooms.domain.state_machine import State, SubscriptionType
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode, WorkLocation
from tests.support.installation import Installation, ago, installed, until
from tests.support.push_worker import answered
from tests.support.relay import IN_BOTH_SHAPES, RELAYED

PUSH, PULL = SubscriptionType.PUSH, SubscriptionType.PULL
HOUR = DeliverySchedule(delay_ms=3_600_000)
CLAIM = "UPDATE outbox SET claimed_until = now() + interval '1 hour', worker = %s"


@pytest.fixture
async def worker(database: str, shape: BrokerMode) -> AsyncIterator[LogWriter]:
    async with LogWriter(database, kind="worker", broker_mode=shape) as writer:
        yield writer


async def queued(
    installation: Installation, kind: SubscriptionType = PUSH, *, place: WorkLocation | None = None
) -> DeliveryTask:
    """A delivery that is due, in the place where the shape has it, or in this one."""
    (copy,) = await installation.publish(await installation.subscribe(kind), kind=kind)
    await installation.queue(copy)
    if place is not None:
        await installation.rows("UPDATE outbox SET kind = %s", int(place))
        if place >= WorkLocation.PUSH_SCHEDULED:
            await installation.rows("UPDATE deliveries SET state = 'scheduled'")
    return copy


async def fates(work: Awaitable[list[DeliveryChange]]) -> list[ChangeOutcome]:
    return [reported.outcome for reported in await work]


async def waiting_for_a_lock(installation: Installation) -> None:
    async def waits() -> bool:
        found = await installation.rows(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return bool(found)

    await until(waits, "a session that waits for another commit")


async def assert_withdrawn(installation: Installation, copy: DeliveryTask) -> None:
    row = await installation.delivery(copy)
    assert (row["state"], row["reason"], row["due_at"]) == (State.CANCELLED, "withdrawn", None)
    assert [await installation.work(table, copy) for table in ("outbox", "held", "leases")] == [
        None
    ] * 3
    assert (await installation.kinds(copy))[-1] == "cancelled"


@IN_BOTH_SHAPES
async def test_the_first_claim_keeps_it(
    installation: Installation, writer: LogWriter, worker: LogWriter, database: str
) -> None:
    """Oracle: the claim is not committed when the withdrawal (and a move) meets it.

    Both find it in flight.
    """
    place = None if installation.shape is POSTGRES_MODE else WorkLocation.PUSH_AT_BROKER
    copy = await queued(installation, place=place)
    for work in (
        cancel_message(writer, copy.message_id),
        reschedule_message(writer, copy.message_id, HOUR),
    ):
        async with installed(database) as other, other.connection.transaction():
            await other.rows(CLAIM, worker.id)
            task = asyncio.create_task(fates(work))
            await waiting_for_a_lock(installation)
        assert await task == [ChangeOutcome.IN_FLIGHT]
        assert await installation.state(copy) is State.QUEUED
        await installation.rows("UPDATE outbox SET claimed_until = '-infinity', worker = NULL")
    assert await fates(cancel_message(writer, copy.message_id)) == [ChangeOutcome.DONE]


@pytest.mark.parametrize("shape", [RELAYED])
async def test_a_copy_of_what_was_withdrawn_is_over_on_arrival(
    installation: Installation, writer: LogWriter, worker: LogWriter
) -> None:
    copy = await queued(installation, place=WorkLocation.PUSH_AT_BROKER)
    assert await fates(cancel_message(writer, copy.message_id)) == [ChangeOutcome.DONE]
    claims = BrokerClaims(worker)
    assert await claims.claim([copy], claim_s=60, deadline=0, dead_workers=()) == []
    (standing,) = (await claims.inspect([copy])).values()
    assert (standing.exists, standing.wait_s) == (True, None)
    await assert_withdrawn(installation, copy)


@pytest.mark.parametrize("shape", [RELAYED])
async def test_a_rescheduled_delivery_has_a_version_without_a_copy(
    installation: Installation, writer: LogWriter, worker: LogWriter
) -> None:
    """Oracle: the copy in the broker is over.

    The next version waits beyond the lookahead, and is sent once.
    """
    copy = await queued(installation, place=WorkLocation.PUSH_AT_BROKER)
    assert await fates(reschedule_message(writer, copy.message_id, HOUR)) == [ChangeOutcome.DONE]
    claims = BrokerClaims(worker)
    assert await claims.claim([copy], claim_s=60, deadline=0, dead_workers=()) == []
    (standing,) = (await claims.inspect([copy])).values()
    assert standing.wait_s is None
    row = await installation.work("outbox", copy)
    assert row is not None
    assert (row["kind"], row["generation"], row["attempt"]) == (WorkLocation.PUSH_SCHEDULED, 1, 0)
    assert await installation.state(copy) is State.SCHEDULED
    assert (await stage_due(writer, shards=range(8), limit=9)).staged == 0

    past = DeliverySchedule.from_request(
        delay_ms=None, deliver_at=datetime.now(UTC) - timedelta(days=1)
    )
    assert await fates(reschedule_message(writer, copy.message_id, past)) == [ChangeOutcome.DONE]
    row = await installation.work("outbox", copy)
    assert row is not None
    assert (row["kind"], row["generation"]) == (WorkLocation.PUSH_TO_RELAY, 2)
    assert await installation.state(copy) is State.QUEUED


@pytest.mark.parametrize("shape", [RELAYED])
async def test_a_relay_that_is_just_sending_marks_nothing_of_what_was_withdrawn(
    installation: Installation, writer: LogWriter, database: str
) -> None:
    push, pull, native = [await queued(installation, kind) for kind in (PUSH, PULL, PULL)]
    await installation.change(native.subscription_id, native_password="hashed")
    async with LogWriter(database, kind=RELAY_WRITER_KIND) as relay:
        outgoing = RelayOutbox(relay)
        batch = await outgoing.claim(
            limit=9, claim_s=60, deadline=0, watermarks_us=[0] * 10, dead_relays=()
        )
        assert len(batch.tasks) == 3
        for copy in (push, pull):
            assert await fates(cancel_message(writer, copy.message_id)) == [ChangeOutcome.DONE]
        # A client of the broker may have read it by now, without a check whether the copy is stale.
        assert await fates(cancel_message(writer, native.message_id)) == [ChangeOutcome.IN_FLIGHT]
        assert (await outgoing.mark_sent(batch.tasks))[0] == 1
    for copy in (push, pull):
        await assert_withdrawn(installation, copy)
    assert await fates(cancel_message(writer, native.message_id)) == [ChangeOutcome.DONE]


@IN_BOTH_SHAPES
async def test_a_retry_that_is_just_being_decided_is_withdrawn_at_its_new_step(
    installation: Installation, writer: LogWriter, database: str
) -> None:
    """Oracle: the withdrawal waits for the decision, and then finds the row at the next attempt."""
    copy = await queued(installation)
    async with installed(database) as other, other.connection.transaction():
        await other.rows("UPDATE deliveries SET attempt = 1, due_at = now() + interval '1 hour'")
        await other.rows("UPDATE outbox SET attempt = 1, due_at = now() + interval '1 hour'")
        task = asyncio.create_task(fates(cancel_message(writer, copy.message_id)))
        await waiting_for_a_lock(installation)
    assert await task == [ChangeOutcome.DONE]
    await assert_withdrawn(installation, copy)
    assert (await installation.journey(copy))[-1]["attempt"] == 1


@IN_BOTH_SHAPES
async def test_a_success_that_comes_after_the_withdrawal_changes_nothing(
    installation: Installation, writer: LogWriter, worker: LogWriter
) -> None:
    copy = await queued(installation)
    assert await fates(cancel_message(writer, copy.message_id)) == [ChangeOutcome.DONE]
    outcome = DeliveryOutcome(task=copy, state=State.DELIVERED, result=answered(200))
    assert await OutcomeQueries(worker).decide([outcome], worker=worker.id) == 0
    assert (await installation.delivery(copy))["state"] == State.CANCELLED


@pytest.mark.parametrize("shape", [RELAYED])
async def test_what_is_withdrawn_or_put_off_does_not_come_due(
    installation: Installation, writer: LogWriter, database: str
) -> None:
    """Oracle: whichever comes first, the staging scan or the publisher, the other acts on the new state."""
    withdrawn = await queued(installation, place=WorkLocation.PUSH_SCHEDULED)
    async with installed(database) as other, other.connection.transaction():
        await other.rows("UPDATE outbox SET due_at = now() + interval '1 day'")
        task = asyncio.create_task(stage_due(writer, shards=range(8), limit=9))
        await waiting_for_a_lock(installation)
    assert (await task).staged == 0, "it was put off meanwhile"
    await installation.rows("UPDATE outbox SET due_at = %s", ago())
    async with LogWriter(database, kind="upkeep", broker_mode=RELAYED) as upkeep:
        assert (await stage_due(upkeep, shards=range(8), limit=9)).staged == 1
        assert await fates(cancel_message(writer, withdrawn.message_id)) == [ChangeOutcome.DONE]
    await assert_withdrawn(installation, withdrawn)
