"""End leases and messages of one organisation beside a backlog of another."""

import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

import pytest

from delivery.maintenance.expiry import BATCH, DeliveryExpirer, expire_leases
from rooms.clock import SystemClock
from rooms.db.leases.release import LeaseQueries
from rooms.db.queue.expire import ExpiryBatch, ExpiryQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.state_machine import State, SubscriptionType
from tests.support.installation import Installation, ago
from tests.support.manual_clock import ManualClock

STATEMENTS = 4
"""Enough for another organisation, and not for the backlogs."""
BATCHES = 6


class Term:
    """A `should_continue` that says yes so many times; None: always."""

    def __init__(self, statements: int | None = None) -> None:
        self._left = statements

    def __call__(self) -> bool:
        if self._left is not None:
            self._left -= 1
        return self._left is None or self._left >= 0


async def other_organisation(installation: Installation, number: int) -> Installation:
    """Return another organisation of the same installation, with a room of its own."""
    identity = OrganisationId(f"01900000-0000-7000-8000-{number:012}")
    await installation._insert("organisations", {"id": identity, "name": f"other-{number}"})
    other = dataclasses.replace(installation, organisation=identity, room=RoomId(number))
    await other.make_room(other.room)
    return other


async def lapse(installation: Installation, count: int, until: datetime) -> SubscriptionId:
    """Let so many leases of a new subscription lapse, all at this time."""
    subscription = await installation.subscribe(SubscriptionType.PULL)
    await installation.publish_many(subscription, count)
    await installation.rows("DELETE FROM outbox WHERE subscription_id = %s", subscription)
    await installation.rows(
        "WITH d AS (UPDATE deliveries SET state = 'leased' WHERE subscription_id = %s RETURNING *)"
        " INSERT INTO leases (room_id, id, subscription_id, generation, until)"
        " SELECT room_id, id, subscription_id, generation, %s FROM d",
        subscription,
        until,
    )
    return subscription


async def expire(installation: Installation, count: int, expires_at: datetime) -> SubscriptionId:
    """Let so many queued deliveries of a new subscription expire, all at this time."""
    subscription = await installation.subscribe()
    await installation.publish_many(subscription, count)
    for table in ("deliveries", "outbox"):
        await installation.rows(
            f"UPDATE {table} SET expires_at = %s WHERE subscription_id = %s",
            expires_at,
            subscription,
        )
    return subscription


async def states(installation: Installation, subscription: SubscriptionId) -> Counter[str]:
    found = await installation.rows(
        "SELECT state::text FROM deliveries WHERE subscription_id = %s", subscription
    )
    return Counter(row["state"] for row in found)


async def test_lapsed_leases_of_another_organisation_are_not_waited_for(
    installation: Installation, writer: LogWriter
) -> None:
    other = await other_organisation(installation, 8)
    many = await lapse(installation, BATCHES * BATCH, ago(10))
    one = await lapse(other, 1, ago(5))
    notified: list[SubscriptionId] = []
    await expire_leases(LeaseQueries(writer), notified.append, Term(STATEMENTS))
    assert await states(other, one) == {State.QUEUED: 1}
    assert one in notified
    assert (await states(installation, many))[State.LEASED] > BATCH
    await expire_leases(LeaseQueries(writer), notified.append, Term())
    assert await states(installation, many) == {State.QUEUED: BATCHES * BATCH}
    assert await installation.value("SELECT count(*) FROM leases") == 0


async def test_expired_messages_of_another_organisation_are_not_waited_for(
    installation: Installation, writer: LogWriter
) -> None:
    other = await other_organisation(installation, 8)
    many = await expire(installation, BATCHES * BATCH, ago(10))
    one = await expire(other, 1, ago(5))
    expirer = DeliveryExpirer(ExpiryQueries(writer), SystemClock())
    await expirer.run(Term(STATEMENTS))
    assert await states(other, one) == {State.EXPIRED: 1}
    assert (await states(installation, many))[State.QUEUED] > BATCH
    await expirer.run(Term())
    assert await states(installation, many) == {State.EXPIRED: BATCHES * BATCH}
    assert await installation.value("SELECT at FROM upkeep_marks WHERE name = 'expiry'") > ago(5)


class ReleasingQueries(ExpiryQueries):
    """Release the claim of one delivery in the second turn, seconds after the run began."""

    def __init__(
        self, writer: LogWriter, clock: ManualClock, release: Callable[[], Awaitable[object]]
    ) -> None:
        super().__init__(writer)
        self._test_clock = clock
        self._release = release
        self._turns = 0

    async def expire_in_turn(
        self, low: datetime, *, limit: int, excluded: Sequence[OrganisationId]
    ) -> ExpiryBatch:
        self._turns += 1
        batch = await super().expire_in_turn(low, limit=limit, excluded=excluded)
        if self._turns == 2:
            await self._release()
            self._test_clock.now_s += 2.0
        return batch


async def test_a_message_that_was_under_way_waits_for_no_backlog_of_another_organisation(
    installation: Installation, writer: LogWriter
) -> None:
    other = await other_organisation(installation, 8)
    many = await expire(installation, BATCHES * BATCH, ago(10))
    one = await expire(other, 1, ago(5))
    claim = "UPDATE outbox SET claimed_until = now() + %s * interval '1 hour' WHERE subscription_id = %s"
    await installation.rows(claim, 1, one)
    clock = ManualClock()
    queries = ReleasingQueries(writer, clock, lambda: installation.rows(claim, -1, one))
    await DeliveryExpirer(queries, clock).run(Term(STATEMENTS + 3))
    assert await states(other, one) == {State.EXPIRED: 1}
    assert (await states(installation, many))[State.QUEUED] > BATCH


@pytest.mark.parametrize("ending", ["leases", "messages"])
async def test_two_backlogs_are_ended_side_by_side(
    installation: Installation, writer: LogWriter, ending: str
) -> None:
    first, second = installation, await other_organisation(installation, 8)
    make = lapse if ending == "leases" else expire
    older = await make(first, BATCHES * BATCH, ago(60))
    newer = await make(second, BATCHES * BATCH, ago(5))

    async def run(term: Term) -> None:
        if ending == "leases":
            await expire_leases(LeaseQueries(writer), lambda _: None, term)
        else:
            await DeliveryExpirer(ExpiryQueries(writer), SystemClock()).run(term)

    before, after = (
        (State.LEASED, State.QUEUED) if ending == "leases" else (State.QUEUED, State.EXPIRED)
    )
    await run(Term(2 * STATEMENTS))
    left = [(await states(first, older))[before], (await states(second, newer))[before]]
    assert all(left)
    assert max(left) < BATCHES * BATCH
    await run(Term())
    assert await states(first, older) == await states(second, newer) == {after: BATCHES * BATCH}
