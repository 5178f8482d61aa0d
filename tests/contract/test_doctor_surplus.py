"""Copies that a broker has and no row waits for: counted, left to their readers, and taken out by a repair.

Oracle: what can be delivered is delivered, once; what has no delivery rests as an orphan before the broker forgets it.
"""

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime

import pytest

from delivery.doctor.findings import Finding
from delivery.doctor.surplus import SurplusExamination
from rooms.clock import SystemClock
from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.domain.place import Place, relayed
from rooms.domain.states import State, SubscriptionType
from rooms.errors import BrokerUnavailableError, StorageUnavailableError
from rooms.storage.writer import Writer
from tests.copies import MemoryBroker
from tests.installation import Installation, installed

RELAYED = relayed(horizon_ms=3_600_000)
PULL = SubscriptionType.PULL


@pytest.fixture
async def installation(database: str) -> AsyncIterator[Installation]:
    async with installed(database, RELAYED) as installation:
        yield installation


@pytest.fixture
async def writer(database: str) -> AsyncIterator[Writer]:
    async with Writer(database, kind="doctor", shape=RELAYED) as writer:
        yield writer


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


async def examined(writer: Writer, broker: MemoryBroker, *, mend: bool = False) -> list[Finding]:
    return await SurplusExamination(writer, broker, SystemClock(), patience_s=0, quiet_s=0.2).run(mend=mend)


async def sent(
    installation: Installation, broker: MemoryBroker, count: int = 1
) -> tuple[SubscriptionId, Sequence[Copy]]:
    """A PULL subscription, and copies of its that are in the broker, their rows saying so."""
    subscription = await installation.subscribe(PULL)
    copies = [(await installation.publish(subscription, kind=PULL))[0] for _ in range(count)]
    await installation.queue(*copies)
    await installation.rows("UPDATE outbox SET kind = %s", int(Place.PULL_SENT))
    await broker.ensure([subscription])
    await broker.send(copies, not_before=[datetime.now(UTC)] * count)
    return subscription, copies


async def lost(installation: Installation, *copies: Copy) -> None:
    """PostgreSQL was restored to a time before these."""
    for copy in copies:
        await installation.rows("DELETE FROM outbox WHERE id = %s", copy.delivery_id)
        await installation.rows("DELETE FROM deliveries WHERE id = %s", copy.delivery_id)
        await installation.rows("DELETE FROM messages WHERE id = %s", copy.message_id)


async def test_copies_that_rows_wait_for_are_none_too_many(
    installation: Installation, writer: Writer, broker: MemoryBroker
) -> None:
    await sent(installation, broker, 3)
    assert await examined(writer, broker) == []
    assert await examined(writer, broker, mend=True) == []
    assert broker.opened == 0


async def test_copies_of_a_lost_time_are_counted_and_become_orphans(
    installation: Installation, writer: Writer, broker: MemoryBroker
) -> None:
    subscription, copies = await sent(installation, broker, 4)
    await lost(installation, *copies[1:])
    (finding,) = await examined(writer, broker)
    assert (finding.count, finding.mended, finding.open, list(finding.examples)) == (3, 0, 0, [subscription])
    assert (broker.opened, await broker.depth(subscription)) == (0, 4)
    (finding,) = await examined(writer, broker, mend=True)
    assert (finding.count, finding.mended) == (3, 3)
    assert "3 rest as orphans now" in finding.advice
    assert await broker.depth(subscription) == 1
    for copy in copies[1:]:
        row = await installation.delivery(copy)
        assert (row["state"], row["reason"]) == (State.SIDELINED, "orphan")
    assert (await installation.delivery(copies[0]))["state"] == State.QUEUED
    assert await installation.work("outbox", copies[0]) is not None
    assert await examined(writer, broker) == []


async def test_copies_of_steps_that_are_over_are_forgotten_and_change_nothing(
    installation: Installation, writer: Writer, broker: MemoryBroker
) -> None:
    subscription, (copy,) = await sent(installation, broker)
    await installation.rows("DELETE FROM outbox")
    await installation.rows("UPDATE deliveries SET state = 'cancelled'")
    (finding,) = await examined(writer, broker, mend=True)
    assert finding.mended == 1
    assert "1 were of steps that are over, 0 rest as orphans" in finding.advice
    assert await broker.depth(subscription) == 0
    assert (await installation.delivery(copy))["state"] == State.CANCELLED


async def test_what_the_record_of_an_orphan_fails_on_stays_in_the_broker(
    installation: Installation, writer: Writer, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL goes away between the copy and its row: the copy is the only one there is."""
    subscription, copies = await sent(installation, broker, 2)
    await lost(installation, *copies)

    async def away(*_: object) -> tuple[int, int]:
        raise StorageUnavailableError("away")

    with monkeypatch.context() as patched:
        patched.setattr("delivery.doctor.surplus.adopt", away)
        with pytest.raises(StorageUnavailableError):
            await examined(writer, broker, mend=True)
    assert await broker.depth(subscription) == 2
    assert [finding.mended for finding in await examined(writer, broker, mend=True)] == [2]


async def test_a_native_queue_is_its_readers(installation: Installation, writer: Writer, broker: MemoryBroker) -> None:
    subscription, copies = await sent(installation, broker, 2)
    await lost(installation, *copies)
    await installation.rows("UPDATE subscriptions SET native_password = 'hash' WHERE id = %s", subscription)
    assert await examined(writer, broker, mend=True) == []
    assert await broker.depth(subscription) == 2


async def test_a_broker_that_is_away_is_nothing_to_count(writer: Writer, broker: MemoryBroker) -> None:
    broker.away()
    with pytest.raises(BrokerUnavailableError):
        await examined(writer, broker)
