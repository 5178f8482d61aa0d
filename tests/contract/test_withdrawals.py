"""Withdrawing and moving against everybody who has the same delivery in hand, both orders of each forced."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from datetime import UTC, datetime, timedelta

import pytest

from rooms.domain.copy import Copy
from rooms.domain.due import Due
from rooms.domain.place import EMBEDDED, Place, Shape
from rooms.domain.states import State, SubscriptionType
from rooms.storage.claims import Claims
from rooms.storage.horizon import come_due
from rooms.storage.outcomes import Outcome, Outcomes
from rooms.storage.relay import KIND, Outgoing
from rooms.storage.withdrawals import Fate, Told, move, withdraw
from rooms.storage.writer import Writer
from tests.installation import Installation, ago, installed, now_ms, until
from tests.pushing import answered
from tests.relaying import IN_BOTH_SHAPES, RELAYED

PUSH, PULL = SubscriptionType.PUSH, SubscriptionType.PULL
HOUR = Due(wait_ms=3_600_000)
CLAIM = "UPDATE outbox SET claimed_until = now() + interval '1 hour', worker = %s"


@pytest.fixture
async def worker(database: str, shape: Shape) -> AsyncIterator[Writer]:
    async with Writer(database, kind="worker", shape=shape) as writer:
        yield writer


async def queued(installation: Installation, kind: SubscriptionType = PUSH, *, place: Place | None = None) -> Copy:
    """A delivery that is due, in the place where the shape has it, or in this one."""
    (copy,) = await installation.publish(await installation.subscribe(kind), kind=kind)
    await installation.queue(copy)
    if place is not None:
        await installation.rows("UPDATE outbox SET kind = %s", int(place))
        if place >= Place.PUSH_LATER:
            await installation.rows("UPDATE deliveries SET state = 'scheduled'")
    return copy


async def fates(work: Awaitable[list[Told]]) -> list[Fate]:
    return [told.fate for told in await work]


async def waiting_for_a_lock(installation: Installation) -> None:
    async def waits() -> bool:
        found = await installation.rows(
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        return bool(found)

    await until(waits, "somebody who waits for the other's commit")


async def assert_withdrawn(installation: Installation, copy: Copy) -> None:
    row = await installation.delivery(copy)
    assert (row["state"], row["reason"], row["due_at"]) == (State.CANCELLED, "withdrawn", None)
    assert [await installation.work(table, copy) for table in ("outbox", "held", "leases")] == [None] * 3
    assert (await installation.kinds(copy))[-1] == "cancelled"


@IN_BOTH_SHAPES
@pytest.mark.row("E2")
async def test_who_has_claimed_first_keeps_it(
    installation: Installation, writer: Writer, worker: Writer, database: str
) -> None:
    """Oracle: the claim is not committed when the withdrawal (and a move) meets it; both find it in flight."""
    place = None if installation.shape is EMBEDDED else Place.PUSH_SENT
    copy = await queued(installation, place=place)
    for work in (withdraw(writer, copy.message_id), move(writer, copy.message_id, HOUR)):
        async with installed(database) as other, other.connection.transaction():
            await other.rows(CLAIM, worker.id)
            task = asyncio.create_task(fates(work))
            await waiting_for_a_lock(installation)
        assert await task == [Fate.IN_FLIGHT]
        assert await installation.state(copy) is State.QUEUED
        await installation.rows("UPDATE outbox SET claimed_until = '-infinity', worker = NULL")
    assert await fates(withdraw(writer, copy.message_id)) == [Fate.DONE]


@pytest.mark.parametrize("shape", [RELAYED])
@pytest.mark.row("E2")
async def test_a_copy_of_what_was_withdrawn_is_over_on_arrival(
    installation: Installation, writer: Writer, worker: Writer
) -> None:
    copy = await queued(installation, place=Place.PUSH_SENT)
    assert await fates(withdraw(writer, copy.message_id)) == [Fate.DONE]
    claims = Claims(worker)
    assert await claims.take([copy], claim_s=60, deadline=0, now_ms=now_ms(), dead=()) == []
    (standing,) = (await claims.look([copy])).values()
    assert (standing.known, standing.wait_s) == (True, None)
    await assert_withdrawn(installation, copy)


@pytest.mark.parametrize("shape", [RELAYED])
@pytest.mark.row("E2")
async def test_what_was_moved_is_a_step_that_no_copy_stands_for(
    installation: Installation, writer: Writer, worker: Writer
) -> None:
    """Oracle: the copy in the broker is over; the next step waits beyond the horizon, then is to be sent, once."""
    copy = await queued(installation, place=Place.PUSH_SENT)
    assert await fates(move(writer, copy.message_id, HOUR)) == [Fate.DONE]
    claims = Claims(worker)
    assert await claims.take([copy], claim_s=60, deadline=0, now_ms=now_ms(), dead=()) == []
    (standing,) = (await claims.look([copy])).values()
    assert standing.wait_s is None
    row = await installation.work("outbox", copy)
    assert row is not None
    assert (row["kind"], row["generation"], row["attempt"]) == (Place.PUSH_LATER, 1, 0)
    assert await installation.state(copy) is State.SCHEDULED
    assert (await come_due(writer, buckets=range(8), limit=9)).moved == 0

    past = Due.of(delay_ms=None, deliver_at=datetime.now(UTC) - timedelta(days=1))
    assert await fates(move(writer, copy.message_id, past)) == [Fate.DONE]
    row = await installation.work("outbox", copy)
    assert row is not None
    assert (row["kind"], row["generation"]) == (Place.PUSH_TO_SEND, 2)
    assert await installation.state(copy) is State.QUEUED


@pytest.mark.parametrize("shape", [RELAYED])
@pytest.mark.row("E2")
async def test_a_relay_that_is_just_sending_marks_nothing_of_what_was_withdrawn(
    installation: Installation, writer: Writer, database: str
) -> None:
    push, pull, native = [await queued(installation, kind) for kind in (PUSH, PULL, PULL)]
    await installation.change(native.subscription_id, native_password="hashed")
    async with Writer(database, kind=KIND) as relay:
        outgoing = Outgoing(relay)
        batch = await outgoing.claim(limit=9, claim_s=60, deadline=0, now_ms=now_ms(), low_us=[0] * 10, dead=())
        assert len(batch.copies) == 3
        for copy in (push, pull):
            assert await fates(withdraw(writer, copy.message_id)) == [Fate.DONE]
        # A client of its own may have read it by now: nobody asks it whether the copy is stale.
        assert await fates(withdraw(writer, native.message_id)) == [Fate.IN_FLIGHT]
        assert (await outgoing.mark(batch.copies))[0] == 1
    for copy in (push, pull):
        await assert_withdrawn(installation, copy)
    assert await fates(withdraw(writer, native.message_id)) == [Fate.DONE]


@IN_BOTH_SHAPES
@pytest.mark.row("E2")
async def test_a_retry_that_is_just_being_decided_is_withdrawn_at_its_new_step(
    installation: Installation, writer: Writer, database: str
) -> None:
    """Oracle: the withdrawal waits for the decision, and then finds the row at the next attempt."""
    copy = await queued(installation)
    async with installed(database) as other, other.connection.transaction():
        await other.rows("UPDATE deliveries SET attempt = 1, due_at = now() + interval '1 hour'")
        await other.rows("UPDATE outbox SET attempt = 1, due_at = now() + interval '1 hour'")
        task = asyncio.create_task(fates(withdraw(writer, copy.message_id)))
        await waiting_for_a_lock(installation)
    assert await task == [Fate.DONE]
    await assert_withdrawn(installation, copy)
    assert (await installation.journey(copy))[-1]["attempt"] == 1


@IN_BOTH_SHAPES
@pytest.mark.row("E2")
async def test_a_success_that_comes_after_the_withdrawal_changes_nothing(
    installation: Installation, writer: Writer, worker: Writer
) -> None:
    copy = await queued(installation)
    assert await fates(withdraw(writer, copy.message_id)) == [Fate.DONE]
    outcome = Outcome(copy=copy, to=State.DELIVERED, answer=answered(200))
    assert await Outcomes(worker).decide([outcome], worker=worker.id) == 0
    assert (await installation.delivery(copy))["state"] == State.CANCELLED


@pytest.mark.parametrize("shape", [RELAYED])
@pytest.mark.row("E2")
@pytest.mark.row("E6")
async def test_what_is_withdrawn_or_put_off_does_not_come_due(
    installation: Installation, writer: Writer, database: str
) -> None:
    """Oracle: whoever comes first, the look into the buckets or the publisher, the other acts on what is then."""
    withdrawn = await queued(installation, place=Place.PUSH_LATER)
    async with installed(database) as other, other.connection.transaction():
        await other.rows("UPDATE outbox SET due_at = now() + interval '1 day'")
        task = asyncio.create_task(come_due(writer, buckets=range(8), limit=9))
        await waiting_for_a_lock(installation)
    assert (await task).moved == 0, "it was put off meanwhile"
    await installation.rows("UPDATE outbox SET due_at = %s", ago())
    async with Writer(database, kind="upkeep", shape=RELAYED) as upkeep:
        assert (await come_due(upkeep, buckets=range(8), limit=9)).moved == 1
        assert await fates(withdraw(writer, withdrawn.message_id)) == [Fate.DONE]
    await assert_withdrawn(installation, withdrawn)
