"""Check work whose message is gone: the process that finds it sidelines it, without delay for other work."""

import asyncio
from datetime import UTC, datetime

import pytest

from delivery.brokers.postgres import PostgresConsumer
from delivery.doctor.checks import DeliveryCheck
from rooms.db.connection import open_connection
from rooms.db.jobs.replay import ReplayBatch, ReplayQueries
from rooms.db.leases.release import LeaseQueries
from rooms.db.queue.claims import Outbox
from rooms.db.queue.holds import HeldGroup, Holds
from rooms.db.queue.integrity import IntegrityCheck
from rooms.db.retention.bounded_locks import prepare_session
from rooms.db.retention.cleanup import clean_default_partitions
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import PRIORITIES, DeliveryTask
from rooms.domain.ids import JobId, replayed_id
from rooms.domain.state_machine import Reason, State, SubscriptionType
from rooms.domain.work_location import WorkLocation
from tests.integration.delivery.maintenance.test_service import ask
from tests.support.installation import PATIENCE_S, Installation, ago, installed, now_ms, until
from tests.support.old_messages import GONE, NOW, found, write

CREDIT = 3


async def lost(installation: Installation, *copies: DeliveryTask) -> None:
    for copy in copies:
        await installation.rows("DELETE FROM messages WHERE id = %s", copy.message_id)


async def lease(installation: Installation, copy: DeliveryTask, until_at: datetime) -> None:
    await installation.rows(
        "INSERT INTO leases (room_id, id, subscription_id, generation, until) VALUES (%s, %s, %s, %s, %s)",
        copy.room_id, copy.delivery_id, copy.subscription_id, copy.generation, until_at,
    )  # fmt: skip


async def hold(installation: Installation, copy: DeliveryTask) -> None:
    await installation.rows(
        "UPDATE deliveries SET reason = %s WHERE id = %s", Reason.PAUSED, copy.delivery_id
    )
    await installation.rows(
        "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason) VALUES (%s, %s, %s, 4, 0, %s)",
        copy.room_id, copy.delivery_id, copy.subscription_id, Reason.PAUSED,
    )  # fmt: skip


async def blocked(installation: Installation) -> None:
    """Wait until a session waits for another's commit."""

    async def waits() -> bool:
        return bool(
            await installation.rows(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
        )

    await until(waits, "a transaction that waits for another's commit")


async def assert_sidelined(
    installation: Installation, copy: DeliveryTask, *, generation: int = 0
) -> None:
    """Sidelined as an orphan, once, and nowhere else."""
    row = await installation.delivery(copy)
    assert (row["state"], row["reason"], row["generation"]) == (
        "sidelined",
        Reason.ORPHAN,
        generation,
    )
    aside = await installation.work("sidelined", copy)
    assert aside is not None
    assert (aside["generation"], aside["reason"]) == (generation, Reason.ORPHAN)
    assert [await installation.work(table, copy) for table in ("outbox", "held", "leases")] == [
        None
    ] * 3
    assert (await installation.kinds(copy)).count("sidelined") == 1


async def test_one_that_changes_while_another_is_sidelined_is_seen_as_it_is_then(
    installation: Installation,
) -> None:
    """A worker's session is not isolated, and PostgreSQL 18 may crash where such a statement looks at a changed row again."""
    subscription = await installation.subscribe()
    copies = [copy for _ in range(4) for copy in await installation.publish(subscription)]
    await installation.queue(*copies)
    await lost(installation, *copies)
    async with (
        LogWriter(installation.url, kind="worker", durable=False, isolated=False) as worker,
        installed(installation.url) as other,
        installed(installation.url) as third,
    ):
        async with other.connection.transaction():
            # The statement goes through them in the order of their work rows, and waits at the first one.
            await other.rows(
                "SELECT FROM deliveries WHERE id = %s FOR UPDATE", copies[0].delivery_id
            )
            claiming = asyncio.create_task(
                Outbox(worker).claim(
                    limit=9,
                    claim_s=60,
                    deadline=0,
                    now_ms=now_ms(),
                    watermarks_us=(0,) * PRIORITIES,
                    dead_workers=(),
                    excluded=frozenset(),
                )
            )
            await asyncio.wait(
                [claiming, asyncio.create_task(blocked(installation))],
                return_when=asyncio.FIRST_COMPLETED,
            )
            assert not claiming.done(), claiming.result()
            await third.rows("UPDATE outbox SET delay_ms = 7 WHERE id <> %s", copies[0].delivery_id)
        async with asyncio.timeout(PATIENCE_S):
            claim = await claiming
        assert (claim.row_count, list(claim.tasks)) == (len(copies), [])
        mine = [row["writer_seq"] for row in await installation.rows(
            "SELECT writer_seq FROM delivery_log WHERE writer_id = %s ORDER BY 1", worker.id
        )]  # fmt: skip
    for copy in copies:
        await assert_sidelined(installation, copy)
    assert mine == [1, 2, 3, 4]


async def test_a_whole_batch_of_them_does_not_block_the_rows_behind_it(
    installation: Installation,
) -> None:
    """Neither sleep nor low-water mark: this consumer would not look again before the test is over."""
    subscription = await installation.subscribe()
    gone = [copy for _ in range(2 * CREDIT) for copy in await installation.publish(subscription)]
    await installation.queue(*gone, due=ago(60))
    await lost(installation, *gone)
    (there,) = await installation.publish(subscription)
    await installation.queue(there)
    async with PostgresConsumer(
        installation.url, credit=CREDIT, claim_s=60, poll_s=10 * PATIENCE_S
    ) as consumer:
        batches = aiter(consumer.batches())
        async with asyncio.timeout(PATIENCE_S):
            assert [copy.delivery_id for copy in await anext(batches)] == [there.delivery_id]
    for copy in gone:
        await assert_sidelined(installation, copy)


@pytest.mark.parametrize("how", ["its time", "nack", "last nack", "expiry"])
async def test_an_expired_lease_sidelines_it(
    installation: Installation, writer: LogWriter, how: str
) -> None:
    subscription = await installation.subscribe(
        SubscriptionType.PULL, max_receives=1 if how == "last nack" else None
    )
    over = how in {"its time", "expiry"}
    (copy,) = await installation.publish(
        subscription,
        kind=SubscriptionType.PULL,
        state=State.LEASED,
        lifetime_s=-1 if how == "expiry" else None,
    )
    await lease(installation, copy, ago(1 if over else -3600))
    await lost(installation, copy)
    ends = LeaseQueries(writer)
    if over:
        assert await ends.expire(limit=10) == (1, [])
    else:
        given = (bytes.fromhex(copy.delivery_id.replace("-", "")), bytes(4))
        _, settled, queued = await ends.nack(
            installation.room, subscription, installation.organisation, [given], delay_ms=0
        )
        assert (set(settled), queued) == ({0}, False)
    if how == "expiry":
        assert await installation.state(copy) is State.EXPIRED
        assert await installation.kinds(copy) == ["expired"]
    else:
        await assert_sidelined(installation, copy, generation=1)
    assert await ends.expire(limit=10) == (0, [])
    assert len(await installation.kinds(copy)) == 1


async def test_what_was_held_is_logged_when_it_goes_on(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription, state=State.HELD)
    await hold(installation, copy)
    await lost(installation, copy)
    assert await Holds(writer).release(HeldGroup(subscription, Reason.PAUSED), limit=5) == 1
    assert await installation.kinds(copy) == ["released"]


@pytest.mark.parametrize("kind", SubscriptionType)
async def test_a_replay_gives_nothing_that_is_just_being_taken_leave_of(
    installation: Installation, writer: LogWriter, kind: SubscriptionType
) -> None:
    """The replay has seen the message.

    Before it gives it, retention takes what has no day, and the message with it.
    """
    born = datetime(2019, 1, 5, tzinfo=UTC)
    old = await write(installation, await installation.subscribe(), State.DELIVERED, born=born)
    kept = await write(installation, await installation.subscribe(), State.SIDELINED, born=born)
    subscription = await installation.subscribe(kind)
    job = JobId(
        await ask(
            installation,
            "replay",
            age_s=0.0,
            room_id=installation.room,
            subscription_id=subscription,
        )
    )
    messages = sorted([old.message, kept.message])
    batch = ReplayBatch(
        version=(await ReplayQueries(writer).interests(subscription)).version,
        deliveries=[(message, replayed_id(message, job, 0)) for message in messages],
        last=messages[-1],
        scanned=2,
        unwanted=0,
    )
    async with installed(installation.url) as other, other.connection.transaction():
        await other.rows("SELECT FROM jobs FOR UPDATE")
        giving = asyncio.create_task(
            ReplayQueries(writer).insert(job, None, subscription, batch, expired=False)
        )
        await blocked(installation)
        async with open_connection(installation.url, name="rooms retention") as connection:
            assert await prepare_session(connection)
            assert await clean_default_partitions(connection, NOW, None, lambda: True)
    async with asyncio.timeout(PATIENCE_S):
        assert await giving is not None
    assert await found(installation, old) == GONE
    given = await installation.rows(
        "SELECT message_id FROM deliveries WHERE subscription_id = %s", subscription
    )
    assert [row["message_id"] for row in given] == [kept.message]
    assert await installation.value("SELECT count(*) FROM outbox") == 1


async def examined(writer: LogWriter, *, mend: bool = False) -> dict[str, tuple[int, int]]:
    """Return what the doctor finds: how many, and how many of them were repaired."""
    reported = await DeliveryCheck(IntegrityCheck(writer), lambda: None).run(repair=mend)
    return {finding.description: (finding.count, finding.repaired) for finding in reported}


async def test_the_doctor_finds_and_sidelines_them(
    installation: Installation, writer: LogWriter
) -> None:
    push, pull = await installation.subscribe(), await installation.subscribe(SubscriptionType.PULL)
    waiting = [
        *await installation.publish(push),
        *await installation.publish(pull, kind=SubscriptionType.PULL, generation=2, attempt=1),
        *await installation.publish(push, state=State.SCHEDULED),
    ]
    await installation.queue(*waiting)
    (held,) = await installation.publish(push, state=State.HELD)
    await hold(installation, held)
    (fine,) = await installation.publish(push)
    await installation.queue(fine)
    await lost(installation, *waiting, held)
    said = "waiting deliveries without their message"
    assert await examined(writer) == {said: (4, 0)}
    assert await examined(writer, mend=True) == {said: (4, 4)}
    for copy in (*waiting, held):
        await assert_sidelined(installation, copy, generation=copy.generation)
    assert await installation.state(fine) is State.QUEUED
    assert await examined(writer) == {}


@pytest.mark.parametrize(
    "who", ["a worker", "the broker", "a consumer", "none: it is sidelined", "none: it has ended"]
)
async def test_the_doctor_leaves_what_needs_no_message(
    installation: Installation, writer: LogWriter, who: str
) -> None:
    """A worker with a copy has all it needs to send; the worker decides what becomes of it."""
    states = {
        "a consumer": State.LEASED,
        "none: it is sidelined": State.SIDELINED,
        "none: it has ended": State.DELIVERED,
    }
    state = states.get(who, State.QUEUED)
    (copy,) = await installation.publish(await installation.subscribe(), state=state)
    match who:
        case "a worker":
            await installation.queue(copy)
            await installation.rows(
                "UPDATE outbox SET claimed_until = now() + interval '1 h', worker = %s", writer.id
            )
        case "the broker":
            await installation.queue(copy)
            await installation.rows("UPDATE outbox SET kind = %s", int(WorkLocation.PUSH_AT_BROKER))
        case "a consumer":
            await lease(installation, copy, ago(-3600))
        case "none: it is sidelined":
            await installation.rows(
                "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason) VALUES (%s, %s, %s, 0, 'orphan')",
                copy.room_id, copy.delivery_id, copy.subscription_id,
            )  # fmt: skip
    await lost(installation, copy)
    assert await examined(writer, mend=True) == {}
    assert await installation.state(copy) is state
