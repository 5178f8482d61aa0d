"""Operational events: written with what they are about, batched once, and to those only who may see them."""

import asyncio
import itertools
import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from delivery.maintenance import operational_events as task_module
from delivery.maintenance.operational_events import MAX_LISTED, OperationalEvents
from rooms.clock import SystemClock
from rooms.db.connection import connect, open_engine
from rooms.db.operational.batches import BURST, BatchQueries, EventGroup
from rooms.db.operational.completion import CompletionQueries
from rooms.db.operational.outbox import MAX_WAITING
from rooms.db.publish.routing import load_routing
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.queue.throttle import SharedLaneState
from rooms.db.writer import LogWriter
from rooms.domain.attempt import AttemptResult
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, IdGenerator, MessageId, OrganisationId, SubscriptionId
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.push_url import MAX_URL
from rooms.domain.state_machine import Reason, State, SubscriptionType
from rooms.errors import StorageRefusedError, StorageUnavailableError
from tests.support.installation import Installation, now_ms

ALL = sorted(OperationalEvent)
SIDELINED = OperationalEvent.DELIVERY_SIDELINED
MAX_PAYLOAD = 256 * 1024
PRIVATE = ("secret", "token", "their answer")


def always() -> bool:
    return True


class Once:
    """A `should_continue` that says yes this many times."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self) -> bool:
        self.count -= 1
        return self.count >= 0


@pytest.fixture
async def writer(database: str) -> AsyncIterator[LogWriter]:
    async with LogWriter(database, kind="settler") as opened:
        yield opened


def task(writer: LogWriter) -> OperationalEvents:
    return OperationalEvents(
        writer, SystemClock(), IdGenerator(random.getrandbits), notify_queued=lambda _: None
    )


async def switch(installation: Installation, *events: OperationalEvent) -> None:
    await installation.rows(
        "UPDATE rooms SET operational_events = %s WHERE id = %s", list(events), installation.room
    )


async def operational(installation: Installation, **columns: Any) -> SubscriptionId:
    return await installation.subscribe(
        **{"name": "~operational", "operational": True, "event_types": "[]", **columns}
    )


async def organisation(installation: Installation, name: str) -> OrganisationId:
    identity = OrganisationId(installation.ids.generate_global(now_ms()))
    await installation.rows("INSERT INTO organisations (id, name) VALUES (%s, %s)", identity, name)
    return identity


async def sideline(writer: LogWriter, copies: Sequence[DeliveryTask]) -> None:
    failed = AttemptResult(
        status=500, error=None, detail="", body_head=b"", retry_after=None, latency_ms=1.0
    )
    outcomes = [
        DeliveryOutcome(copy, State.SIDELINED, failed, reason=Reason.ATTEMPTS_EXHAUSTED)
        for copy in copies
    ]
    assert await OutcomeQueries(writer).decide(outcomes, worker=1) == len(copies)


async def sidelined(
    installation: Installation, writer: LogWriter, subscription: SubscriptionId, count: int = 1
) -> None:
    copies = [copy for _ in range(count) for copy in await installation.publish(subscription)]
    await installation.queue(*copies)
    await sideline(writer, copies)


async def received(
    installation: Installation, subscription: SubscriptionId
) -> list[dict[str, Any]]:
    """The payloads of the messages to a subscription, oldest first."""
    rows = await installation.rows(
        "SELECT m.payload FROM deliveries d JOIN messages m ON m.room_id = d.room_id AND m.id = d.message_id"
        " WHERE d.subscription_id = %s ORDER BY d.id",
        subscription,
    )
    return [json.loads(row["payload"]) for row in rows]


async def waiting(installation: Installation) -> tuple[int, int]:
    """Return how many events wait with details, and how many are only counted."""
    kept = await installation.value("SELECT count(*) FROM operational_outbox")
    counted = await installation.value(
        "SELECT coalesce(sum(total), 0)::int8 FROM operational_overflow"
    )
    return kept, counted


async def no_rate(installation: Installation) -> None:
    """Let the next batch go at once."""
    await installation.rows("UPDATE operational_pace SET spent_until = '-infinity'")


@pytest.mark.parametrize(
    ("room_ms", "own_ms", "life_s"),
    [(None, None, None), (0, 5_000, 5), (60_000, None, 60), (60_000, 5_000, 5), (4_000, 5_000, 4)],
)
async def test_a_message_about_events_lives_as_long_as_its_subscription_lets_it(
    installation: Installation,
    writer: LogWriter,
    room_ms: int | None,
    own_ms: int | None,
    life_s: int | None,
) -> None:
    await installation.rows("UPDATE rooms SET message_expiration_ms = %s", room_ms)
    await switch(installation, *ALL)
    recipient = await operational(installation, message_expiration_ms=own_ms)
    await sidelined(installation, writer, await installation.subscribe())
    await task(writer).run(always)
    life = await installation.value(
        "SELECT extract(epoch FROM expires_at - due_at)::int4 FROM deliveries"
        " WHERE subscription_id = %s",
        recipient,
    )
    assert life == life_s


async def test_nothing_is_written_unless_it_is_switched_on_and_has_a_receiver(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    await switch(installation, *ALL)
    await sidelined(installation, writer, subscription)
    assert await waiting(installation) == (0, 0), "there is no recipient"
    reported = await operational(installation)
    await switch(installation, *(event for event in ALL if event is not SIDELINED))
    await sidelined(installation, writer, subscription)
    assert await waiting(installation) == (0, 0), "it is not switched on"
    await switch(installation, SIDELINED)
    await sidelined(installation, writer, subscription)
    assert await waiting(installation) == (1, 0)
    await task(writer).run(always)
    (message,) = await received(installation, reported)
    assert (message["type"], message["room_id"], message["total"]) == (
        "rooms.delivery.sidelined",
        installation.room,
        1,
    )
    (event,) = message["events"]
    assert (event["subscription_id"], event["reason"]) == (subscription, "attempts_exhausted")
    assert await waiting(installation) == (0, 0)


async def test_a_message_about_events_is_a_delivery_with_work_and_a_log(
    installation: Installation, writer: LogWriter
) -> None:
    reported = await operational(installation)
    await switch(installation, SIDELINED)
    await sidelined(installation, writer, await installation.subscribe())
    await task(writer).run(always)
    (delivery,) = await installation.rows(
        "SELECT * FROM deliveries WHERE subscription_id = %s", reported
    )
    assert delivery["state"] == "queued"
    (work,) = await installation.rows("SELECT * FROM outbox WHERE id = %s", delivery["id"])
    assert work["kind"] == int(installation.shape.push)
    log = await installation.rows(
        "SELECT kind FROM delivery_log WHERE message_id = %s ORDER BY writer_seq",
        delivery["message_id"],
    )
    assert [row["kind"] for row in log] == ["published", "enqueued"]


async def test_a_storm_gives_few_messages_with_the_total(
    installation: Installation, writer: LogWriter
) -> None:
    """10,000 sidelined deliveries, and maintenance that comes by ever again while it lasts."""
    reported = await operational(installation)
    await switch(installation, SIDELINED)
    subscription = await installation.subscribe()
    batch = 500
    runs = 20
    for n in range(runs):
        await installation.publish_many(subscription, batch)
        rows = await installation.rows(
            "SELECT d.room_id, d.id, d.message_id FROM deliveries d WHERE subscription_id = %s AND state = 'queued'",
            subscription,
        )
        (sample,) = await installation.publish(subscription)
        copies = [
            copy_of(sample, DeliveryId(str(row["id"])), MessageId(str(row["message_id"])))
            for row in rows
        ]
        await sideline(writer, copies)
        if n > runs // 2:
            await task(writer).run(always)
        else:
            assert await waiting(installation) == (
                min((n + 1) * batch + n, MAX_WAITING),
                max((n + 1) * batch + n - MAX_WAITING, 0),
            )
    messages = await received(installation, reported)
    assert 1 <= len(messages) <= BURST
    await no_rate(installation)
    await task(writer).run(always)
    messages = await received(installation, reported)
    assert len(messages) <= BURST + 1
    sent = await installation.value("SELECT count(*) FROM deliveries WHERE state = 'sidelined'")
    assert sent >= runs * batch
    assert sum(message["total"] for message in messages) == sent
    assert all(len(message["events"]) <= MAX_LISTED for message in messages)
    assert await waiting(installation) == (0, 0)


def copy_of(sample: DeliveryTask, delivery: DeliveryId, message: MessageId) -> DeliveryTask:
    return DeliveryTask(
        **{
            name: getattr(sample, name)
            for name in DeliveryTask.__dataclass_fields__
            if name not in {"delivery_id", "message_id"}
        },
        delivery_id=delivery,
        message_id=message,
    )


async def test_without_maintenance_the_tables_are_bounded_for_each_organisation(
    installation: Installation, writer: LogWriter
) -> None:
    """Events of one organisation do not take the place of another's."""
    reported = await operational(installation)
    await switch(installation, SIDELINED)
    other = await organisation(installation, "theirs")
    loud = await installation.subscribe()
    quiet = await installation.subscribe(organisation_id=other)
    await sidelined(installation, writer, loud, MAX_WAITING + 3)
    await sidelined(installation, writer, quiet)
    assert await waiting(installation) == (MAX_WAITING + 1, 3)
    await task(writer).run(always)
    (message,) = await received(installation, reported)
    assert message["total"] == MAX_WAITING + 4
    assert await waiting(installation) == (0, 0)


async def test_the_events_of_loud_organisations_delay_none_of_a_quiet_one(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, SIDELINED)
    loud = [await organisation(installation, name) for name in ("one", "two", "three")]
    quiet = await organisation(installation, "quiet")
    assert quiet > max(loud), "it is read last"
    reported = await operational(installation, organisation_id=quiet)
    every = await operational(installation)
    rows = """
        INSERT INTO operational_outbox (room_id, event, organisation_id, data)
        SELECT %s, %s, %s, jsonb_build_object('n', n) FROM generate_series(1, %s) n"""
    total = 0
    for organisation_id, count in [*((one, MAX_WAITING) for one in loud), (quiet, 2)]:
        await installation.rows(rows, installation.room, SIDELINED, organisation_id, count)
        total += count
    await task(writer).run(always)
    (message,) = await received(installation, reported)
    assert (message["total"], [one["n"] for one in message["events"]]) == (2, [1, 2])
    await no_rate(installation)
    await task(writer).run(always)
    assert await waiting(installation) == (0, 0)
    assert sum(one["total"] for one in await received(installation, every)) == total
    assert len(await received(installation, reported)) == 1


async def test_another_organisation_gets_only_what_is_about_its_own_subscriptions(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, *ALL)
    ours = await operational(installation)
    theirs, others = [await organisation(installation, name) for name in ("theirs", "others")]
    reported = await operational(installation, organisation_id=theirs)
    own = await installation.subscribe()
    foreign = await installation.subscribe(
        organisation_id=theirs, push_url="https://hooks.example.com:8443/secret/path?token=1"
    )
    stranger = await installation.subscribe(organisation_id=others)
    for subscription in (own, foreign, stranger):
        await sidelined(installation, writer, subscription)
    await task(writer).run(always)
    (message,) = await received(installation, reported)
    assert message["total"] == 1
    (event,) = message["events"]
    assert event["subscription_id"] == foreign
    text = json.dumps(message)
    assert own not in text
    assert stranger not in text
    (whole,) = await received(installation, ours)
    assert whole["total"] == 3
    assert {one["subscription_id"] for one in whole["events"]} == {own, foreign, stranger}
    (seen,) = (one for one in whole["events"] if one["subscription_id"] == foreign)
    assert (seen["target"], seen["organisation"]) == ("https://hooks.example.com:8443", "theirs")
    assert "secret" not in json.dumps(whole)
    assert "token" not in json.dumps(whole)


async def test_what_waits_beyond_the_limit_is_counted_for_its_own_organisation_only(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, SIDELINED)
    theirs = await organisation(installation, "theirs")
    reported = await operational(installation, organisation_id=theirs)
    foreign = await installation.subscribe(organisation_id=theirs)
    await sidelined(installation, writer, await installation.subscribe(), MAX_WAITING + 5)
    assert await waiting(installation) == (0, 0), "no subscriber receives what is about the owner's"
    await operational(installation)
    await sidelined(installation, writer, await installation.subscribe(), MAX_WAITING + 5)
    await sidelined(installation, writer, foreign, 2)
    await task(writer).run(always)
    (message,) = await received(installation, reported)
    assert message["total"] == 2


async def test_a_pending_recipient_gets_nothing(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, SIDELINED)
    theirs = await organisation(installation, "theirs")
    await operational(installation, organisation_id=theirs, status="pending")
    foreign = await installation.subscribe(organisation_id=theirs)
    await sidelined(installation, writer, foreign)
    assert await waiting(installation) == (0, 0)
    reported = await operational(installation)
    await sidelined(installation, writer, foreign)
    await task(writer).run(always)
    (delivery,) = await installation.rows("SELECT * FROM deliveries WHERE state = 'queued'")
    assert str(delivery["subscription_id"]) == reported


async def test_what_happens_to_operational_messages_causes_no_events(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, *ALL)
    theirs = await organisation(installation, "theirs")
    recipients = [
        await operational(installation, circuit_failures=1),
        await operational(installation, organisation_id=theirs, circuit_failures=1),
    ]
    lanes = SharedLaneState(writer)
    for reported in recipients:
        await sidelined(installation, writer, reported)
        assert await lanes.open_circuit(await installation.endpoint_record(reported), open_ms=1000)
        assert await lanes.close_circuit(await installation.endpoint_record(reported))
        assert await lanes.mark_failing(await installation.endpoint_record(reported))
        assert await lanes.clear_failing(await installation.endpoint_record(reported))
        assert await lanes.disable(
            await installation.endpoint_record(reported),
            reason="gone",
        )
    before = await installation.value("SELECT count(*) FROM messages")
    assert await waiting(installation) == (0, 0)
    await task(writer).run(always)
    assert await installation.value("SELECT count(*) FROM messages") == before


async def test_circuits_and_recoveries_are_reported_once_though_two_workers_see_them(
    installation: Installation, database: str, writer: LogWriter
) -> None:
    await switch(installation, *ALL)
    reported = await operational(installation)
    subscription = await installation.subscribe(circuit_failures=3)
    async with LogWriter(database, kind="settler") as other:
        lanes = [SharedLaneState(one) for one in (writer, other)]
        tried = await installation.endpoint_record(subscription)
        await asyncio.gather(*(one.open_circuit(tried, open_ms=1000) for one in lanes))
        tried = await installation.endpoint_record(subscription)
        await asyncio.gather(*(one.close_circuit(tried) for one in lanes))
        tried = await installation.endpoint_record(subscription)
        await asyncio.gather(*(one.mark_failing(tried) for one in lanes))
        tried = await installation.endpoint_record(subscription)
        await asyncio.gather(*(one.clear_failing(tried) for one in lanes))
    await task(writer).run(always)
    messages = await received(installation, reported)
    assert sorted((one["type"], one["total"]) for one in messages) == [
        ("rooms.circuit.closed", 1),
        ("rooms.circuit.opened", 1),
        ("rooms.endpoint.recovered", 1),
    ]
    (recovered,) = (one for one in messages if one["type"] == "rooms.endpoint.recovered")
    assert recovered["events"][0]["cause"] == "succeeded"


async def test_a_batch_that_another_process_has_taken_is_not_sent_again(
    installation: Installation, database: str, writer: LogWriter
) -> None:
    """A leader that was frozen between reading and writing writes nothing when it goes on."""
    await switch(installation, SIDELINED)
    reported = await operational(installation)
    subscription = await installation.subscribe()
    await sidelined(installation, writer, subscription, MAX_WAITING + 2)
    frozen = BatchQueries(writer)
    (group,) = await frozen.groups((-1, ""))
    read = await frozen.read(group)
    async with LogWriter(database, kind="settler") as other:
        await task(other).run(always)
        await sidelined(installation, other, subscription, 3)
    assert not await frozen.take(read, [])
    assert await waiting(installation) == (3, 0), "what came since is still there"
    (message,) = await received(installation, reported)
    assert message["total"] == MAX_WAITING + 2


async def test_an_event_that_commits_between_reading_and_writing_is_in_the_next_batch(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, SIDELINED)
    reported = await operational(installation)
    subscription = await installation.subscribe()
    await sidelined(installation, writer, subscription, MAX_WAITING + 2)
    queries = BatchQueries(writer)
    (group,) = await queries.groups((-1, ""))
    read = await queries.read(group)
    await sidelined(installation, writer, subscription, 4)
    assert await queries.take(read, [])
    assert await waiting(installation) == (0, 4)
    await task(writer).run(always)
    (message,) = await received(installation, reported)
    assert message["total"] == 4


async def test_killed_at_each_statement_every_event_is_reported_once(
    installation: Installation, database: str, writer: LogWriter
) -> None:
    """The oracle: totals of all messages add up to what was sidelined, and nothing waits."""
    await switch(installation, SIDELINED, OperationalEvent.MESSAGE_COMPLETED)
    reported = await operational(installation)
    subscription = await installation.subscribe()
    written = 0
    for statement, answered in itertools.product(range(6), (True, False)):
        await sidelined(installation, writer, subscription, 3)
        written += 3
        await no_rate(installation)
        async with LogWriter(database, kind="doomed") as doomed:
            await kill_at(doomed, installation, statement, before=answered)
            with pytest.raises(StorageUnavailableError):
                await task(doomed).run(always)
    await no_rate(installation)
    await task(writer).run(always)
    messages = await received(installation, reported)
    assert sum(one["total"] for one in messages) == written
    assert sorted(event["delivery_id"] for one in messages for event in one["events"]) == sorted(
        str(row["id"])
        for row in await installation.rows("SELECT id FROM deliveries WHERE state = 'sidelined'")
    )
    assert await waiting(installation) == (0, 0)


async def kill_at(
    doomed: LogWriter, installation: Installation, statement: int, *, before: bool
) -> None:
    """End the writer's session before its statement of this number runs, or after its commit."""
    run, count = doomed.run, itertools.count()

    async def counted(text: str, parameters: Sequence[Any] | dict[str, Any]) -> Any:
        is_last = next(count) == statement
        if is_last and before:
            assert await installation.terminate("rooms doomed") == 1
        rows = await run(text, parameters)
        if is_last:
            assert await installation.terminate("rooms doomed") == 1
            raise StorageUnavailableError("the connection broke")
        return rows

    doomed.run = counted  # type: ignore[method-assign, assignment]


async def track(installation: Installation, *copies: DeliveryTask) -> None:
    """The row that the publish of these deliveries, of one message, has written."""
    enqueued = b"".join(
        bytes.fromhex(one.subscription_id.replace("-", ""))
        + bytes.fromhex(one.delivery_id.replace("-", ""))
        + (1).to_bytes(4, "big")
        for one in copies
    )
    await installation.rows(
        "INSERT INTO operational_messages (room_id, id, enqueued) VALUES (%s, %s, %s)",
        copies[0].room_id,
        copies[0].message_id,
        enqueued,
    )


async def look_again(installation: Installation) -> None:
    await installation.rows("UPDATE operational_messages SET check_at = now()")


async def end(installation: Installation, copy: DeliveryTask, state: State) -> None:
    await installation.rows(
        "UPDATE deliveries SET state = %s WHERE id = %s", state.value, copy.delivery_id
    )


async def test_a_message_is_completed_once_when_its_last_delivery_ends(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, OperationalEvent.MESSAGE_COMPLETED)
    reported = await operational(installation)
    copies = await installation.publish(*[await installation.subscribe() for _ in range(3)])
    await track(installation, *copies)
    for copy, state in zip(
        copies, (State.DELIVERED, State.SIDELINED, State.DELIVERED), strict=True
    ):
        assert await CompletionQueries(writer).find() == 1
        assert await CompletionQueries(writer).find() == 0, "it is looked at again later"
        assert await waiting(installation) == (0, 0)
        await end(installation, copy, state)
        await look_again(installation)
    await task(writer).run(always)
    (message,) = await received(installation, reported)
    (event,) = message["events"]
    assert event["message_id"] == copies[0].message_id
    assert event["deliveries"] == {"delivered": 2, "sidelined": 1}
    assert await installation.value("SELECT count(*) FROM operational_messages") == 0
    await end(installation, copies[1], State.QUEUED)
    await end(installation, copies[1], State.DELIVERED)
    await no_rate(installation)
    await task(writer).run(always)
    assert len(await received(installation, reported)) == 1, "a shovel does not complete it again"


async def test_completion_is_only_for_the_owner(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, *ALL)
    theirs = await organisation(installation, "theirs")
    reported = await operational(installation, organisation_id=theirs)
    (copy,) = await installation.publish(
        await installation.subscribe(organisation_id=theirs), state=State.DELIVERED
    )
    await track(installation, copy)
    await task(writer).run(always)
    assert await installation.value("SELECT count(*) FROM operational_messages") == 0
    assert await waiting(installation) == (0, 0)
    await operational(installation)
    (copy,) = await installation.publish(copy.subscription_id, state=State.DELIVERED)
    await track(installation, copy)
    await task(writer).run(always)
    assert await received(installation, reported) == []


async def test_two_that_find_a_message_completed_write_one_event(
    installation: Installation, database: str, writer: LogWriter
) -> None:
    await switch(installation, OperationalEvent.MESSAGE_COMPLETED)
    await operational(installation)
    subscription = await installation.subscribe()
    for _ in range(20):
        (copy,) = await installation.publish(subscription, state=State.DELIVERED)
        await track(installation, copy)
    async with LogWriter(database, kind="settler") as other:
        await asyncio.gather(*(CompletionQueries(one).find() for one in (writer, other) * 2))
    assert await waiting(installation) == (20, 0)


async def test_a_message_without_deliveries_is_completed_at_once(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, OperationalEvent.MESSAGE_COMPLETED)
    reported = await operational(installation)
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.rows(
        "INSERT INTO operational_messages (room_id, id, enqueued) VALUES (%s, %s, '')",
        copy.room_id,
        copy.message_id,
    )
    await task(writer).run(always)
    (message,) = await received(installation, reported)
    assert message["events"][0]["deliveries"] == {}


async def test_routing_says_whether_completion_is_asked_for(installation: Installation) -> None:
    engine = open_engine(installation.url, size=1)

    async def tracks() -> bool:
        record = await load_routing(engine, installation.room)
        assert record is not None
        return record.tracks_completion

    try:
        assert not await tracks()
        await switch(installation, OperationalEvent.MESSAGE_COMPLETED)
        assert not await tracks(), "it has no recipient"
        await operational(installation)
        assert await tracks()
    finally:
        await engine.dispose()


async def test_pull_recipients_get_work_for_their_queue(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, SIDELINED)
    reported = await operational(installation, kind=SubscriptionType.PULL)
    notified: list[SubscriptionId | None] = []
    await sidelined(installation, writer, await installation.subscribe())
    events = OperationalEvents(
        writer,
        SystemClock(),
        IdGenerator(random.getrandbits),
        notify_queued=notified.append,
    )
    await events.run(always)
    (work,) = await installation.rows("SELECT * FROM outbox WHERE subscription_id = %s", reported)
    assert work["kind"] == int(installation.shape.pull)
    assert notified == [reported]


async def test_a_room_that_is_being_deleted_gets_no_messages(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, SIDELINED)
    reported = await operational(installation)
    await sidelined(installation, writer, await installation.subscribe())
    await installation.rows("UPDATE rooms SET deleting = true")
    await task(writer).run(always)
    assert await received(installation, reported) == []


async def test_the_disabling_shows_the_owner_the_host_and_the_subscriber_everything(
    installation: Installation, writer: LogWriter
) -> None:
    ours = await operational(installation)
    theirs = await organisation(installation, "theirs")
    reported = await operational(installation, organisation_id=theirs)
    foreign = await installation.subscribe(
        organisation_id=theirs, push_url="https://hooks.example.com/secret?token=1"
    )
    assert await SharedLaneState(writer).disable(
        await installation.endpoint_record(foreign),
        reason="HTTP 410: their answer",
    )
    waits = json.dumps(await installation.value("SELECT data FROM operational_outbox"))
    assert not [one for one in PRIVATE if one in waits], "the version before shows it to the owner"
    await task(writer).run(always)
    (whole,) = await received(installation, reported)
    assert (whole["push_url"], whole["reason"]) == (
        "https://hooks.example.com/secret?token=1",
        "HTTP 410: their answer",
    )
    (seen,) = await received(installation, ours)
    assert (seen["type"], seen["push_url"]) == (
        "rooms.endpoint.disabled",
        "https://hooks.example.com",
    )
    assert "reason" not in seen
    for message in (whole, seen):
        (entry,) = message["events"]
        assert message["total"] == 1
        for name in ("subscription_id", "name", "disabled_at"):
            assert message[name] == entry[name]
        assert (entry["subscription_id"], entry["target"]) == (foreign, "https://hooks.example.com")
    assert whole["events"][0]["reason"] == whole["reason"]
    assert seen["organisation_id"] == theirs
    assert not [text for text in PRIVATE if text in json.dumps(seen)]


async def test_an_endpoint_that_is_resumed_before_its_message_shows_its_host(
    installation: Installation, writer: LogWriter
) -> None:
    """The URL may be another one by now, and the reason that of another time."""
    ours = await operational(installation)
    lanes = SharedLaneState(writer)
    subscription = await installation.subscribe(push_url="https://hooks.example.com/old")
    assert await lanes.disable(await installation.endpoint_record(subscription), reason="first")
    await installation.change(
        subscription, status="active", status_reason=None, push_url="https://other.example.com/new"
    )
    assert await lanes.disable(await installation.endpoint_record(subscription), reason="second")
    await task(writer).run(always)
    (message,) = await received(installation, ours)
    first, second = message["events"]
    assert first["target"] == message["push_url"] == "https://hooks.example.com"
    assert not {"push_url", "reason"} & set(first)
    assert "reason" not in message
    assert (second["push_url"], second["reason"]) == ("https://other.example.com/new", "second")


async def test_many_disabled_endpoints_give_few_messages(
    installation: Installation, writer: LogWriter
) -> None:
    """All endpoints behind one gateway answer 410, and maintenance comes by while they do."""
    ours = await operational(installation)
    lanes = SharedLaneState(writer)
    found = [await installation.subscribe(name=f"gone-{number}") for number in range(12)]
    for pair in zip(found[::2], found[1::2], strict=True):
        for one in pair:
            assert await lanes.disable(await installation.endpoint_record(one), reason="HTTP 410")
        await task(writer).run(always)
    assert len(await received(installation, ours)) == BURST
    await no_rate(installation)
    await task(writer).run(always)
    messages = await received(installation, ours)
    assert len(messages) == BURST + 1
    assert [one["total"] for one in messages] == [2] * len(messages)
    assert [one["subscription_id"] for one in messages] == found[::2]
    assert [e["subscription_id"] for one in messages for e in one["events"]] == found


async def test_every_disabled_endpoint_is_listed_though_another_organisation_has_many(
    installation: Installation, writer: LogWriter
) -> None:
    """The oracle: each recipient's lists together are its disabled endpoints, each once."""
    ours = await operational(installation)
    theirs = await organisation(installation, "theirs")
    reported = await operational(installation, organisation_id=theirs)
    loud = await installation.subscribe(organisation_id=theirs)
    own = await installation.subscribe()
    many = 2 * MAX_LISTED + 30
    for whose, one, count in (
        (theirs, loud, many),
        (installation.organisation, own, 2),
    ):
        await installation.rows(
            "INSERT INTO operational_outbox (room_id, event, organisation_id, subscription_id, data)"
            " SELECT %s, 'rooms.endpoint.disabled', %s, %s,"
            " jsonb_build_object('n', n, 'disabled_at', now()) FROM generate_series(1, %s) n",
            *(installation.room, whose, one, count),
        )
    await task(writer).run(always)
    (first,) = await received(installation, ours)
    assert [one["n"] for one in first["events"] if one["subscription_id"] == own] == [1, 2]
    assert (first["total"], len(first["events"])) == (MAX_LISTED, MAX_LISTED)
    for _ in range(3):
        await task(writer).run(always)
    assert await waiting(installation) == (0, 0)
    for recipient, about in ((ours, {loud: many, own: 2}), (reported, {loud: many})):
        messages = await received(installation, recipient)
        assert all(one["total"] == len(one["events"]) <= MAX_LISTED for one in messages)
        listed = [(e["subscription_id"], e["n"]) for one in messages for e in one["events"]]
        assert sorted(listed) == sorted(
            (one, n) for one, count in about.items() for n in range(1, count + 1)
        )


async def test_long_urls_and_reasons_make_no_message_longer_than_a_publisher_may_send(
    installation: Installation, writer: LogWriter
) -> None:
    """Each endpoint has its host in the list of the owner, and all of it in its subscriber's."""
    ours = await operational(installation)
    theirs = await organisation(installation, "theirs")
    reported = await operational(installation, organisation_id=theirs)
    url = f"https://hooks.example.com/{'a' * MAX_URL}"[:MAX_URL]
    lanes, found = SharedLaneState(writer), []
    for _ in range(MAX_LISTED):
        one = await installation.subscribe(organisation_id=theirs, push_url=url)
        tried = await installation.endpoint_record(one)
        assert await lanes.disable(tried, reason="HTTP 410: " + "é" * MAX_URL)
        found.append(one)
    for _ in range(BURST):
        await task(writer).run(always)
    assert await waiting(installation) == (0, 0)
    for recipient in (ours, reported):
        messages = await received(installation, recipient)
        assert [e["subscription_id"] for one in messages for e in one["events"]] == found
    sizes = await installation.rows("SELECT octet_length(payload) AS size FROM messages")
    assert max(row["size"] for row in sizes) <= MAX_PAYLOAD
    whole = await received(installation, reported)
    assert {(e["push_url"], len(e["reason"])) for one in whole for e in one["events"]} == {
        (url, MAX_URL + 10)
    }


async def test_each_organisation_has_its_turns_in_the_list_of_any_kind(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, SIDELINED)
    ours = await operational(installation)
    theirs = await organisation(installation, "theirs")
    for whose, count in ((theirs, MAX_LISTED + 50), (installation.organisation, 2)):
        await installation.rows(
            "INSERT INTO operational_outbox (room_id, event, organisation_id, data)"
            " SELECT %s, %s, %s, jsonb_build_object('of', %s::text) FROM generate_series(1, %s)",
            *(installation.room, SIDELINED, whose, whose, count),
        )
    await task(writer).run(always)
    (message,) = await received(installation, ours)
    assert (message["total"], len(message["events"])) == (MAX_LISTED + 52, MAX_LISTED)
    assert [one["of"] for one in message["events"]].count(installation.organisation) == 2


async def test_a_term_that_ends_leaves_the_rest_for_the_next(
    installation: Installation, writer: LogWriter
) -> None:
    await switch(installation, SIDELINED)
    reported = await operational(installation)
    await sidelined(installation, writer, await installation.subscribe())
    await task(writer).run(Once(2))
    assert await waiting(installation) == (1, 0)
    await task(writer).run(always)
    assert len(await received(installation, reported)) == 1


async def rooms_with_an_event(
    installation: Installation, owner: OrganisationId, *numbers: int
) -> None:
    """Add an event to rooms of an organisation, which are made first if there are none."""
    await installation.rows(
        "INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms, delivery_delay_multiplier, delivery_attempts, operational_events)"
        " SELECT n, %s, 'room-' || n, 50, 2.0, 3, %s FROM unnest(%s::int4[]) n ON CONFLICT DO NOTHING",
        owner, [SIDELINED], list(numbers),
    )  # fmt: skip
    await installation.rows(
        "INSERT INTO operational_outbox (room_id, event, organisation_id, at, data)"
        " SELECT n, %s, %s, now(), '{}' FROM unnest(%s::int4[]) n",
        SIDELINED,
        owner,
        list(numbers),
    )


async def rooms_in_order(
    events: OperationalEvents, monkeypatch: pytest.MonkeyPatch, *, runs: int
) -> list[list[int]]:
    """Run so often; return the rooms of each run's batches in their order."""
    order: list[int] = []
    make = events._make_batch

    async def recorded(group: EventGroup) -> None:
        order.append(group.room)
        await make(group)

    monkeypatch.setattr(events, "_make_batch", recorded)
    found = []
    for _ in range(runs):
        order.clear()
        await events.run(always)
        found.append(list(order))
    return found


async def test_an_owner_waits_for_one_batch_of_each_other_owner(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = await organisation(installation, "small")
    await rooms_with_an_event(installation, installation.organisation, *range(100, 104))
    await rooms_with_an_event(installation, small, 900, 901)
    found = await rooms_in_order(task(writer), monkeypatch, runs=2)
    assert found == [[100, 900, 101, 901, 102, 103], []]


async def test_what_comes_during_a_run_waits_for_the_next_which_comes_soon(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rooms that had a batch come behind the others, so none of an owner starves."""
    monkeypatch.setattr(task_module, "MAX_BATCHES", 2)
    large, small = installation.organisation, await organisation(installation, "small")
    await rooms_with_an_event(installation, large, *range(100, 104))
    events = task(writer)
    assert await rooms_in_order(events, monkeypatch, runs=1) == [[100, 101]]
    await rooms_with_an_event(installation, large, 100, 101)
    await rooms_with_an_event(installation, small, 900)
    found = await rooms_in_order(events, monkeypatch, runs=4)
    assert found == [[102, 900], [103, 100], [101], []]


async def test_every_owner_has_a_batch_in_a_run_however_many_they_are(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_module, "MAX_BATCHES", 1)
    for number in range(3):
        owner = await organisation(installation, f"owner {number}")
        await rooms_with_an_event(installation, owner, 100 * (number + 1), 100 * (number + 1) + 1)
    found = await rooms_in_order(task(writer), monkeypatch, runs=3)
    assert found == [[100, 200, 300], [101, 201, 301], []]


async def test_a_refused_batch_keeps_no_other_group_from_being_reported(
    installation: Installation, database: str, writer: LogWriter
) -> None:
    """Groups come in one order, so the one that is refused again and again may be the first."""
    await switch(installation, *ALL)
    reported = await operational(installation)
    await sidelined(installation, writer, await installation.subscribe(), 2)
    await installation.rows(
        "UPDATE operational_outbox SET event = %s WHERE id = (SELECT min(id) FROM operational_outbox)",
        OperationalEvent.CIRCUIT_OPENED,
    )
    async with LogWriter(database, kind="settler", lock_timeout_ms=50) as impatient:
        async with await connect(database, name="a test") as other, other.transaction():
            await other.execute(
                "SELECT FROM operational_outbox WHERE event = %s FOR UPDATE",
                [OperationalEvent.CIRCUIT_OPENED],
            )
            with pytest.raises(StorageRefusedError):
                await task(impatient).run(always)
        assert [one["type"] for one in await received(installation, reported)] == [SIDELINED]
        await task(impatient).run(always)
    assert len(await received(installation, reported)) == 2
    assert await waiting(installation) == (0, 0)
