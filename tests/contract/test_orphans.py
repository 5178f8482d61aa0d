"""Work whose message is gone: whoever meets it lets it rest, keeps nobody else waiting, and nothing makes more of it."""

import asyncio
from datetime import UTC, datetime

import pytest

from delivery.doctor.deliveries import DeliveryExamination
from rooms.brokers.postgres import PostgresConsumer
from rooms.domain.copy import PRIORITIES, Copy
from rooms.domain.ids import JobId, replayed_id
from rooms.domain.place import Place
from rooms.domain.states import Reason, State, SubscriptionType
from rooms.storage.engine import connection_for
from rooms.storage.holds import Held, Holds
from rooms.storage.lease_ends import LeaseEnds
from rooms.storage.outbox import Outbox
from rooms.storage.patience import prepare
from rooms.storage.remains import empty_rest
from rooms.storage.replays import Batch, Replays
from rooms.storage.standing import Standing
from rooms.storage.writer import Writer
from tests.contract.test_upkeep import ask
from tests.installation import PATIENCE_S, Installation, ago, installed, now_ms, until
from tests.past import GONE, NOW, found, write

CREDIT = 3


async def lost(installation: Installation, *copies: Copy) -> None:
    for copy in copies:
        await installation.rows("DELETE FROM messages WHERE id = %s", copy.message_id)


async def lease(installation: Installation, copy: Copy, until_at: datetime) -> None:
    await installation.rows(
        "INSERT INTO leases (room_id, id, subscription_id, generation, until) VALUES (%s, %s, %s, %s, %s)",
        copy.room_id, copy.delivery_id, copy.subscription_id, copy.generation, until_at,
    )  # fmt: skip


async def hold(installation: Installation, copy: Copy) -> None:
    await installation.rows("UPDATE deliveries SET reason = %s WHERE id = %s", Reason.PAUSED, copy.delivery_id)
    await installation.rows(
        "INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason) VALUES (%s, %s, %s, 4, 0, %s)",
        copy.room_id, copy.delivery_id, copy.subscription_id, Reason.PAUSED,
    )  # fmt: skip


async def blocked(installation: Installation) -> None:
    """Until somebody waits for another's commit."""

    async def waits() -> bool:
        return bool(
            await installation.rows(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
        )

    await until(waits, "somebody who waits for another's commit")


async def assert_at_rest(installation: Installation, copy: Copy, *, generation: int = 0) -> None:
    """Sidelined as an orphan, once, and nowhere else."""
    row = await installation.delivery(copy)
    assert (row["state"], row["reason"], row["generation"]) == ("sidelined", Reason.ORPHAN, generation)
    aside = await installation.work("sidelined", copy)
    assert aside is not None
    assert (aside["generation"], aside["reason"]) == (generation, Reason.ORPHAN)
    assert [await installation.work(table, copy) for table in ("outbox", "held", "leases")] == [None] * 3
    assert (await installation.kinds(copy)).count("sidelined") == 1


async def test_one_that_changes_while_another_is_sidelined_is_seen_as_it_is_then(installation: Installation) -> None:
    """A worker's session is not isolated, and PostgreSQL 18 may crash where such a statement looks at a changed row again."""
    subscription = await installation.subscribe()
    copies = [copy for _ in range(4) for copy in await installation.publish(subscription)]
    await installation.queue(*copies)
    await lost(installation, *copies)
    async with (
        Writer(installation.url, kind="worker", durable=False, isolated=False) as worker,
        installed(installation.url) as other,
        installed(installation.url) as third,
    ):
        async with other.connection.transaction():
            # The statement goes through them in the order of their work rows, and waits at the first one.
            await other.rows("SELECT FROM deliveries WHERE id = %s FOR UPDATE", copies[0].delivery_id)
            claiming = asyncio.create_task(
                Outbox(worker).claim(
                    limit=9,
                    claim_s=60,
                    deadline=0,
                    now_ms=now_ms(),
                    low=(0,) * PRIORITIES,
                    dead=(),
                    excluded=frozenset(),
                )
            )
            await asyncio.wait(
                [claiming, asyncio.create_task(blocked(installation))], return_when=asyncio.FIRST_COMPLETED
            )
            assert not claiming.done(), claiming.result()
            await third.rows("UPDATE outbox SET delay_ms = 7 WHERE id <> %s", copies[0].delivery_id)
        async with asyncio.timeout(PATIENCE_S):
            claim = await claiming
        assert (claim.found, list(claim.copies)) == (len(copies), [])
        mine = [row["writer_seq"] for row in await installation.rows(
            "SELECT writer_seq FROM delivery_log WHERE writer_id = %s ORDER BY 1", worker.id
        )]  # fmt: skip
    for copy in copies:
        await assert_at_rest(installation, copy)
    assert mine == [1, 2, 3, 4]


async def test_a_whole_batch_of_them_does_not_keep_what_stands_behind_from_a_worker(installation: Installation) -> None:
    """Neither sleep nor low-water mark: this consumer would not look again before the test is over."""
    subscription = await installation.subscribe()
    gone = [copy for _ in range(2 * CREDIT) for copy in await installation.publish(subscription)]
    await installation.queue(*gone, due=ago(60))
    await lost(installation, *gone)
    (there,) = await installation.publish(subscription)
    await installation.queue(there)
    async with PostgresConsumer(installation.url, credit=CREDIT, claim_s=60, poll_s=10 * PATIENCE_S) as consumer:
        batches = aiter(consumer.batches())
        async with asyncio.timeout(PATIENCE_S):
            assert [copy.delivery_id for copy in await anext(batches)] == [there.delivery_id]
    for copy in gone:
        await assert_at_rest(installation, copy)


@pytest.mark.parametrize("how", ["its time", "nack", "last nack", "expiry"])
async def test_a_lease_that_ends_lets_it_rest(installation: Installation, writer: Writer, how: str) -> None:
    subscription = await installation.subscribe(SubscriptionType.PULL, max_receives=1 if how == "last nack" else None)
    over = how in {"its time", "expiry"}
    (copy,) = await installation.publish(
        subscription, kind=SubscriptionType.PULL, state=State.LEASED, lifetime_s=-1 if how == "expiry" else None
    )
    await lease(installation, copy, ago(1 if over else -3600))
    await lost(installation, copy)
    ends = LeaseEnds(writer)
    if over:
        assert await ends.end(limit=10) == (1, [])
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
        await assert_at_rest(installation, copy, generation=1)
    assert await ends.end(limit=10) == (0, [])
    assert len(await installation.kinds(copy)) == 1


async def test_what_was_held_is_logged_when_it_goes_on(installation: Installation, writer: Writer) -> None:
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription, state=State.HELD)
    await hold(installation, copy)
    await lost(installation, copy)
    assert await Holds(writer).release(Held(subscription, Reason.PAUSED), limit=5) == 1
    assert await installation.kinds(copy) == ["released"]


@pytest.mark.parametrize("kind", SubscriptionType)
async def test_a_replay_gives_nothing_that_is_just_being_taken_leave_of(
    installation: Installation, writer: Writer, kind: SubscriptionType
) -> None:
    """The replay has seen the message; before it gives it, retention takes what has no day, and the message with it."""
    born = datetime(2019, 1, 5, tzinfo=UTC)
    old = await write(installation, await installation.subscribe(), State.DELIVERED, born=born)
    kept = await write(installation, await installation.subscribe(), State.SIDELINED, born=born)
    subscription = await installation.subscribe(kind)
    job = JobId(await ask(installation, "replay", age_s=0.0, room_id=installation.room, subscription_id=subscription))
    messages = sorted([old.message, kept.message])
    batch = Batch(
        given=[(message, replayed_id(message, job, 0)) for message in messages], last=messages[-1], seen=2, passed=0
    )
    async with installed(installation.url) as other, other.connection.transaction():
        await other.rows("SELECT FROM jobs FOR UPDATE")
        giving = asyncio.create_task(Replays(writer).give(job, None, subscription, batch, expired=False))
        await blocked(installation)
        async with connection_for(installation.url, name="rooms retention") as connection:
            assert await prepare(connection)
            assert await empty_rest(connection, NOW, None, lambda: True)
    async with asyncio.timeout(PATIENCE_S):
        assert await giving is not None
    assert await found(installation, old) == GONE
    given = await installation.rows("SELECT message_id FROM deliveries WHERE subscription_id = %s", subscription)
    assert [row["message_id"] for row in given] == [kept.message]
    assert await installation.value("SELECT count(*) FROM outbox") == 1


async def examined(writer: Writer, *, mend: bool = False) -> dict[str, tuple[int, int]]:
    """What the doctor finds: how many, and how many of them were put right."""
    told = await DeliveryExamination(Standing(writer), lambda: None).run(mend=mend)
    return {finding.what: (finding.count, finding.mended) for finding in told}


async def test_the_doctor_finds_them_and_lets_them_rest(installation: Installation, writer: Writer) -> None:
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
    said = "waiting, and their message is not there"
    assert await examined(writer) == {said: (4, 0)}
    assert await examined(writer, mend=True) == {said: (4, 4)}
    for copy in (*waiting, held):
        await assert_at_rest(installation, copy, generation=copy.generation)
    assert await installation.state(fine) is State.QUEUED
    assert await examined(writer) == {}


@pytest.mark.parametrize("who", ["a worker", "the broker", "a consumer", "nobody: it rests", "nobody: it is over"])
async def test_the_doctor_leaves_what_needs_no_message(installation: Installation, writer: Writer, who: str) -> None:
    """Who has a copy has all there is to send; what becomes of it then is decided there."""
    states = {"a consumer": State.LEASED, "nobody: it rests": State.SIDELINED, "nobody: it is over": State.DELIVERED}
    state = states.get(who, State.QUEUED)
    (copy,) = await installation.publish(await installation.subscribe(), state=state)
    match who:
        case "a worker":
            await installation.queue(copy)
            await installation.rows("UPDATE outbox SET claimed_until = now() + interval '1 h', worker = %s", writer.id)
        case "the broker":
            await installation.queue(copy)
            await installation.rows("UPDATE outbox SET kind = %s", int(Place.PUSH_SENT))
        case "a consumer":
            await lease(installation, copy, ago(-3600))
        case "nobody: it rests":
            await installation.rows(
                "INSERT INTO sidelined (room_id, id, subscription_id, generation, reason) VALUES (%s, %s, %s, 0, 'orphan')",
                copy.room_id, copy.delivery_id, copy.subscription_id,
            )  # fmt: skip
    await lost(installation, copy)
    assert await examined(writer, mend=True) == {}
    assert await installation.state(copy) is state
