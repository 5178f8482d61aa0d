"""Messages in a broker without a waiting row: counted, left to readers, and removed by a repair.

Oracle: a message that can be delivered is delivered once; one without a delivery is sidelined as an
orphan before the broker deletes it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime

import pytest

from delivery.doctor.checks import DoctorFinding
from delivery.doctor.orphans import SurplusTaskCheck
from rooms.clock import SystemClock
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import State, SubscriptionType
from rooms.domain.work_location import WorkLocation, relayed_mode
from rooms.errors import BrokerUnavailableError, StorageUnavailableError
from tests.support.fake_broker import MemoryBroker
from tests.support.installation import PATIENCE_S, Installation, installed

RELAYED = relayed_mode(lookahead_ms=3_600_000)
PULL = SubscriptionType.PULL


@pytest.fixture
async def installation(database: str) -> AsyncIterator[Installation]:
    async with installed(database, RELAYED) as installation:
        yield installation


@pytest.fixture
async def writer(database: str) -> AsyncIterator[LogWriter]:
    async with LogWriter(database, kind="doctor", broker_mode=RELAYED) as writer:
        yield writer


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


async def examined(
    writer: LogWriter, broker: MemoryBroker, *, mend: bool = False
) -> list[DoctorFinding]:
    return await SurplusTaskCheck(writer, broker, SystemClock(), settle_s=0, drain_quiet_s=0.2).run(
        repair=mend
    )


async def sent(
    installation: Installation, broker: MemoryBroker, count: int = 1
) -> tuple[SubscriptionId, Sequence[DeliveryTask]]:
    """Return a PULL subscription, and messages of it that are in the broker by their rows."""
    subscription = await installation.subscribe(PULL)
    copies = [(await installation.publish(subscription, kind=PULL))[0] for _ in range(count)]
    await installation.queue(*copies)
    await installation.rows("UPDATE outbox SET kind = %s", int(WorkLocation.PULL_AT_BROKER))
    await broker.create_queues([subscription])
    await broker.send(copies, not_before=[datetime.now(UTC)] * count)
    return subscription, copies


async def lost(installation: Installation, *copies: DeliveryTask) -> None:
    """Delete the rows, as a restore of PostgreSQL to an earlier time does."""
    for copy in copies:
        await installation.rows("DELETE FROM outbox WHERE id = %s", copy.delivery_id)
        await installation.rows("DELETE FROM deliveries WHERE id = %s", copy.delivery_id)
        await installation.rows("DELETE FROM messages WHERE id = %s", copy.message_id)


async def test_messages_with_waiting_rows_are_no_surplus(
    installation: Installation, writer: LogWriter, broker: MemoryBroker
) -> None:
    await sent(installation, broker, 3)
    assert await examined(writer, broker) == []
    assert await examined(writer, broker, mend=True) == []
    assert broker.opened == 0


async def test_messages_of_a_lost_time_are_counted_and_sidelined_as_orphans(
    installation: Installation, writer: LogWriter, broker: MemoryBroker
) -> None:
    subscription, copies = await sent(installation, broker, 4)
    await lost(installation, *copies[1:])
    (finding,) = await examined(writer, broker)
    assert (finding.count, finding.repaired, finding.open_count, list(finding.examples)) == (
        3,
        0,
        0,
        [subscription],
    )
    assert (broker.opened, await broker.depth(subscription)) == (0, 4)
    (finding,) = await examined(writer, broker, mend=True)
    assert (finding.count, finding.repaired) == (3, 3)
    assert "3 are sidelined as orphans now" in finding.advice
    assert await broker.depth(subscription) == 1
    for copy in copies[1:]:
        row = await installation.delivery(copy)
        assert (row["state"], row["reason"]) == (State.SIDELINED, "orphan")
    assert (await installation.delivery(copies[0]))["state"] == State.QUEUED
    assert await installation.work("outbox", copies[0]) is not None
    assert await examined(writer, broker) == []


async def test_outdated_messages_are_removed_without_effect(
    installation: Installation, writer: LogWriter, broker: MemoryBroker
) -> None:
    subscription, (copy,) = await sent(installation, broker)
    await installation.rows("DELETE FROM outbox")
    await installation.rows("UPDATE deliveries SET state = 'cancelled'")
    (finding,) = await examined(writer, broker, mend=True)
    assert finding.repaired == 1
    assert "1 were outdated, 0 are sidelined as orphans" in finding.advice
    assert await broker.depth(subscription) == 0
    assert (await installation.delivery(copy))["state"] == State.CANCELLED


async def test_a_message_stays_in_the_broker_if_its_orphan_row_fails(
    installation: Installation,
    writer: LogWriter,
    broker: MemoryBroker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let PostgreSQL fail before the orphan's row: the message is the only copy."""
    subscription, copies = await sent(installation, broker, 2)
    await lost(installation, *copies)

    async def away(*_: object) -> tuple[int, int]:
        raise StorageUnavailableError("away")

    with monkeypatch.context() as patched:
        patched.setattr("delivery.doctor.orphans.create_orphan_rows", away)
        with pytest.raises(StorageUnavailableError):
            await examined(writer, broker, mend=True)
    assert await broker.depth(subscription) == 2
    assert [finding.repaired for finding in await examined(writer, broker, mend=True)] == [2]


async def test_a_busy_queue_is_withheld_for_a_moment_only(
    installation: Installation, writer: LogWriter, broker: MemoryBroker
) -> None:
    """Messages come faster than the queue would count as read to its end."""
    subscription, (surplus, waiting) = await sent(installation, broker, 2)
    await lost(installation, surplus)
    repair = asyncio.create_task(
        SurplusTaskCheck(
            writer, broker, SystemClock(), settle_s=0, drain_quiet_s=PATIENCE_S, drain_max_s=0.2
        ).run(repair=True)
    )
    due = {waiting.dedup_id}
    async with asyncio.timeout(PATIENCE_S):
        while not broker.takers(subscription):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)
        while not repair.done():
            (copy,) = await installation.publish(subscription, kind=PULL)
            await installation.queue(copy)
            await installation.rows("UPDATE outbox SET kind = %s", int(WorkLocation.PULL_AT_BROKER))
            await broker.send([copy], not_before=[datetime.now(UTC)])
            due.add(copy.dedup_id)
        (finding,) = await repair
        assert (finding.count, finding.repaired) == (1, 1)
        async with broker.consume(credit=2 * len(due), subscription=subscription) as consumer:
            batches = consumer.batches()
            while due:
                due -= {copy.dedup_id for copy in await anext(batches)}


async def test_native_queues_are_not_drained(
    installation: Installation, writer: LogWriter, broker: MemoryBroker
) -> None:
    subscription, copies = await sent(installation, broker, 2)
    await lost(installation, *copies)
    await installation.rows(
        "UPDATE subscriptions SET native_password = 'hash' WHERE id = %s", subscription
    )
    assert await examined(writer, broker, mend=True) == []
    assert await broker.depth(subscription) == 2


async def test_an_unavailable_broker_raises_unavailable(
    writer: LogWriter, broker: MemoryBroker
) -> None:
    broker.away()
    with pytest.raises(BrokerUnavailableError):
        await examined(writer, broker)
