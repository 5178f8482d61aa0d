"""Check publishing on PostgreSQL: rows, plans, keys, batches.

And that both HTTP paths answer alike.
"""

import asyncio
import itertools
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event

from rooms.api.app import create_app
from rooms.api.deps import ApiServices
from rooms.app.api import make_asgi, open_services
from rooms.db.catalog.api_keys import create_key, new_key
from rooms.db.connection import transaction
from rooms.db.notify import Channel, Notifier
from rooms.db.publish.insert import InsertConflict
from rooms.db.publish.request_rows import InsertRows
from rooms.db.publish.routing import RoutingRecord
from rooms.domain.ids import KeyId, OrganisationId, RoomId, created_ms
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import (
    ConflictError,
    InvalidError,
    NotFoundError,
    StorageRefusedError,
    TooLargeError,
)
from rooms.publishing import prepare
from rooms.publishing.commit_outcomes import PLAN_CHANGED, CommitOutcome, IdReused, Settle
from rooms.publishing.deferred_checks import ChecksPendingError, DeferredChecks
from rooms.publishing.prepare import SLICE_NS, SLICE_ROWS
from rooms.publishing.request import decode_batch
from rooms.publishing.routing import RoutingTable
from rooms.publishing.routing_cache import MAX_LOADS, MAX_VERSION_READS
from rooms.settings import read_settings
from tests.support.publisher import Desk, House, make_id, open_desk


@pytest.fixture
def house(database: str) -> House:
    return House(database)


@pytest.fixture
async def desk(database: str) -> AsyncIterator[Desk]:
    async with open_desk(database, ROOMS_MAX_PAYLOAD_BYTES="4096", ROOMS_MAX_BATCH="50") as desk:
        yield desk


def a_message(**fields: Any) -> bytes:
    return json.dumps({"event_type": "order.created", "payload": {"amount": 1}, **fields}).encode()


def a_batch(*messages: dict[str, Any]) -> bytes:
    return json.dumps(
        {
            "messages": [
                {"event_type": "order.created", "payload": 1, **message} for message in messages
            ]
        }
    ).encode()


def a_room(house: House, *kinds: str) -> RoomId:
    room = house.room()
    house.event_type(room)
    for kind in kinds:
        house.subscription(room, kind)
    return room


async def send(
    desk: Desk, house: House, room: RoomId, body: bytes, key: str | None = None
) -> dict[str, Any]:
    answer = await desk.publisher.publish(house.principal, room, body, key)
    assert answer.status == 202
    found: dict[str, Any] = json.loads(answer.body)
    return found


async def test_one_publish_writes_everything_that_must_follow(desk: Desk, house: House) -> None:
    room = house.room(expiration_ms=3_600_000)
    house.event_type(room, schemas=[None, None])
    push = house.subscription(room, "PUSH", version=7)
    pull = house.subscription(room, "PULL")
    payload = '{"amount" : 1.50,  "text":"\\u00fc ü"}'
    body = (
        '{"event_type":"order.created","payload":'
        + payload
        + ',"priority":9,"ttl_ms":60000,"correlation_id":"c\\"1",'
        '"headers":{"X-Trace":"a b"},"ordering_key":"customer 5"}'
    )
    answer = await send(desk, house, room, body.encode())
    destinations = [f"room-{room}::subscription-{push}", f"room-{room}::subscription-{pull}"]
    message_id = answer["message_id"]
    assert answer == {
        "message_id": message_id,
        "correlation_id": 'c"1',
        "destinations": destinations,
        "destination_count": 2,
    }

    [message] = house.run(
        "SELECT id::text, event_type, event_version, priority, fanout, expires_at - published_at, publisher_id::text,"
        " correlation_id, ordering_key, headers, payload FROM messages WHERE room_id = %s", room,
    )  # fmt: skip
    assert message == (
        message_id, "order.created", 2, 9, 2, timedelta(minutes=1), house.principal.key_id, 'c"1', "customer 5",
        b'{"X-Trace":"a b"}', payload.encode(),
    )  # fmt: skip

    deliveries = house.run(
        "SELECT d.id::text, d.message_id::text, d.subscription_id::text, d.state::text, d.generation, d.attempt,"
        " d.expires_at = m.expires_at, o.kind, o.priority, o.generation, o.attempt, o.due_at <= now(),"
        " o.expires_at = m.expires_at FROM deliveries d JOIN messages m ON m.room_id = d.room_id AND m.id = d.message_id"
        " JOIN outbox o ON o.room_id = d.room_id AND o.id = d.id ORDER BY o.kind"
    )
    assert [row[1:] for row in deliveries] == [
        (message_id, push, "queued", 0, 0, True, 0, 9, 0, 0, True, True),
        (message_id, pull, "queued", 0, 0, True, 1, 9, 0, 0, True, True),
    ]
    assert {created_ms(row[0]) for row in deliveries} == {created_ms(message_id)}

    log = house.run(
        "SELECT kind, message_id::text, subscription_id::text, generation, attempt, event_type, event_version, fanout,"
        " payload_bytes, policy_version, correlation_id FROM delivery_log ORDER BY writer_seq"
    )
    assert log == [
        (
            "published",
            message_id,
            None,
            None,
            None,
            "order.created",
            2,
            2,
            len(payload.encode()),
            None,
            'c"1',
        ),
        ("enqueued", message_id, push, 0, 0, "order.created", 2, None, None, 7, 'c"1'),
        ("enqueued", message_id, pull, 0, 0, "order.created", 2, None, None, 1, 'c"1'),
    ]


async def test_a_plain_message_takes_the_defaults(desk: Desk, house: House) -> None:
    room = a_room(house, "PUSH")
    answer = await send(desk, house, room, a_message())
    assert answer["correlation_id"] == answer["message_id"]
    [row] = house.run("SELECT priority, expires_at, headers, ordering_key FROM messages")
    assert row == (4, None, None, None)


async def test_the_log_of_a_writer_has_no_gap(desk: Desk, house: House) -> None:
    room = a_room(house, "PUSH", "PULL")
    await asyncio.gather(*[send(desk, house, room, a_message()) for _ in range(60)])
    with pytest.raises(InvalidError):
        await send(desk, house, room, a_message(event_type="none"))
    await desk.publisher.publish_batch(house.principal, room, a_batch({}, {}), None)
    rows = house.run(
        "SELECT writer_id, array_agg(writer_seq ORDER BY writer_seq) FROM delivery_log GROUP BY 1"
    )
    assert [numbers for _, numbers in rows] == [list(range(1, 62 * 3 + 1))]


async def test_requests_that_arrive_together_share_a_commit(
    desk: Desk, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = a_room(house, "PUSH")
    committer = desk.publisher._committers.plain
    write, groups = committer._write, [0]

    async def write_when_all_wait(group: Sequence[InsertRows]) -> InsertConflict:
        """Hold the first group until all others have arrived, however busy the machine is."""
        while sum(groups) + len(group) + committer._queues.count < 100:  # noqa: ASYNC110 - a count
            await asyncio.sleep(0.001)
        groups.append(len(group))
        return await write(group)

    monkeypatch.setattr(committer, "_write", write_when_all_wait)
    await asyncio.gather(*[send(desk, house, room, a_message()) for _ in range(100)])
    [(messages, commits)] = house.run(
        "SELECT count(*), count(DISTINCT xid::text) FROM delivery_log WHERE kind = 'published'"
    )
    assert messages == 100
    assert commits == 2


async def test_paused_and_disabled_subscriptions_get_it_and_deleted_ones_do_not(
    desk: Desk, house: House
) -> None:
    room = a_room(house)
    expected = {
        house.subscription(room, status=status) for status in ("active", "paused", "disabled")
    }
    house.subscription(room, status="deleted")
    answer = await send(desk, house, room, a_message())
    assert {text.partition("subscription-")[2] for text in answer["destinations"]} == expected


async def test_without_subscriptions_it_is_accepted_all_the_same(desk: Desk, house: House) -> None:
    room = a_room(house)
    house.subscription(room, event_types=[{"name": "other"}])
    assert (await send(desk, house, room, a_message()))["destinations"] == []
    assert house.run("SELECT fanout FROM messages") == [(0,)]
    assert house.run("SELECT kind, fanout FROM delivery_log") == [("published", 0)]


async def test_destinations_narrow_and_never_widen(desk: Desk, house: House) -> None:
    room = a_room(house)
    one, two = house.subscription(room), house.subscription(room)
    deaf = house.subscription(room, event_types=[{"name": "other"}])
    wanted = f"room-{room}::subscription-{two}"
    assert (await send(desk, house, room, a_message(destinations=[wanted, wanted])))[
        "destinations"
    ] == [wanted]
    assert house.run("SELECT subscription_id::text FROM deliveries") == [(two,)]
    wrong = [f"room-{room}::subscription-{deaf}", f"room-1::subscription-{one}", "nonsense"]
    with pytest.raises(InvalidError) as refused:
        await send(desk, house, room, a_message(destinations=[wanted, *wrong]))
    assert [problem.field for problem in refused.value.problems] == [
        f"destinations[{index}]" for index in (1, 2, 3)
    ]


async def test_types_versions_and_schemas_are_checked(desk: Desk, house: House) -> None:
    room = house.room()
    house.event_type(room, schemas=[None, {"properties": {"amount": {"type": "integer"}}}])
    await send(desk, house, room, a_message(version=1, payload={"amount": "any"}))
    await send(desk, house, room, a_message(payload={"amount": 5}))
    for fields, wrong in (
        ({"payload": {"amount": "5"}}, "payload.amount"),
        ({"version": 3}, "version"),
        ({"event_type": "none"}, "event_type"),
        ({"event_type": "none\x00"}, "event_type"),
    ):
        with pytest.raises(InvalidError) as refused:
            await send(desk, house, room, a_message(**fields))
        assert [problem.field for problem in refused.value.problems] == [wrong]
    with pytest.raises(InvalidError) as refused:
        await desk.publisher.publish_batch(
            house.principal,
            room,
            a_batch({"version": 1}, {"payload": {"amount": 0.5}}, {"version": 9}),
            None,
        )
    assert [problem.field for problem in refused.value.problems] == [
        "messages[1].payload.amount",
        "messages[2].version",
    ]
    assert house.count("messages") == 2


async def test_a_batch_is_published_whole_or_not_at_all(desk: Desk, house: House) -> None:
    room = a_room(house, "PUSH")
    answer = await desk.publisher.publish_batch(
        house.principal, room, a_batch(*({"correlation_id": f"c{n}"} for n in range(50))), None
    )
    reported = json.loads(answer.body)["messages"]
    assert [one["correlation_id"] for one in reported] == [f"c{n}" for n in range(50)]
    kept = house.run("SELECT id::text, correlation_id FROM messages ORDER BY id")
    assert kept == [(one["message_id"], one["correlation_id"]) for one in reported]
    assert house.count("deliveries") == 50
    for bad in (a_batch({}, {"event_type": "none"}), a_batch(*[{}] * 51), a_batch()):
        with pytest.raises(InvalidError):
            await desk.publisher.publish_batch(house.principal, room, bad, None)
    assert house.count("messages") == 50


async def test_a_payload_has_a_limit(desk: Desk, house: House) -> None:
    room = a_room(house)
    await send(desk, house, room, a_message(payload="x" * 4094))
    with pytest.raises(TooLargeError):
        await send(desk, house, room, a_message(payload="x" * 4095))
    with pytest.raises(TooLargeError, match=r"messages\[1\]"):
        await desk.publisher.publish_batch(
            house.principal, room, a_batch({}, {"payload": "x" * 5000}), None
        )
    assert house.count("messages") == 1


async def test_another_organisation_sees_no_room(desk: Desk, house: House) -> None:
    room = a_room(house)
    await send(desk, house, room, a_message())
    stranger = Principal(
        key_id=KeyId(str(uuid.uuid4())),
        organisation_id=OrganisationId(str(uuid.uuid4())),
        scopes=frozenset({Scope.PUBLISH}),
    )
    for body in (a_message(), b"nonsense"):
        with pytest.raises(NotFoundError):
            await desk.publisher.publish(stranger, room, body, None)


# --- plans that grow old ------------------------------------------------------------------------------------------


async def test_from_its_commit_on_every_publish_reaches_a_subscription(
    database: str, house: House
) -> None:
    """Two processes, each with a plan of its own, and no notification of the change."""
    room = a_room(house)
    async with open_desk(database) as one, open_desk(database) as other:
        for desk in (one, other):
            assert (await send(desk, house, room, a_message()))["destinations"] == []
        for _ in range(3):
            added = house.subscription(room)
            for desk in (one, other):
                answers = await asyncio.gather(
                    *[send(desk, house, room, a_message()) for _ in range(8)]
                )
                assert all(
                    f"room-{room}::subscription-{added}" in answer["destinations"]
                    for answer in answers
                )
    [(lost,)] = house.run(
        "SELECT count(*) FROM messages m WHERE fanout <> (SELECT count(*) FROM deliveries d WHERE d.message_id = m.id)"
    )
    assert lost == 0


async def test_a_publish_under_way_while_rooms_change_misses_nothing(
    desk: Desk, house: House
) -> None:
    room = a_room(house)
    stop = asyncio.Event()

    async def keep_publishing() -> int:
        count = 0
        while not stop.is_set():
            await send(desk, house, room, a_message())
            count += 1
        return count

    publishers = [asyncio.create_task(keep_publishing()) for _ in range(8)]
    for _ in range(10):
        added = await asyncio.to_thread(house.subscription, room)
        assert f"subscription-{added}" in str(await send(desk, house, room, a_message()))
    stop.set()
    published = sum(await asyncio.gather(*publishers)) + 10
    assert house.count("messages") == published
    [(deliveries, fanouts)] = house.run(
        "SELECT (SELECT count(*) FROM deliveries), (SELECT sum(fanout) FROM messages)"
    )
    assert deliveries == fanouts


async def test_a_room_that_changes_often_still_takes_messages(desk: Desk, house: House) -> None:
    """Another organisation may pause and resume its subscription as fast as it can."""
    room = a_room(house)
    read, changes = desk.planner._load, iter(range(6))

    async def change_after_reading(wanted: RoomId) -> RoutingRecord | None:
        found = await read(wanted)
        if next(changes, None) is not None:
            await asyncio.to_thread(house.run, house.bump(room))
        return found

    desk.planner._load = change_after_reading
    await send(desk, house, room, a_message())
    assert next(changes, None) is None
    assert house.count("messages") == 1


async def test_what_an_old_plan_does_not_know_is_looked_up(desk: Desk, house: House) -> None:
    room = a_room(house)
    await send(desk, house, room, a_message())
    house.event_type(room, "order.paid")
    await send(desk, house, room, a_message(event_type="order.paid"))
    house.change(room, "UPDATE rooms SET message_expiration_ms = 1000")
    await send(desk, house, room, a_message(correlation_id="short"))
    assert house.run(
        "SELECT expires_at IS NOT NULL FROM messages WHERE correlation_id = 'short'"
    ) == [(True,)]


@pytest.mark.parametrize("how", ["UPDATE rooms SET deleting = true", "DELETE FROM rooms"])
async def test_a_deleted_room_takes_no_more(desk: Desk, house: House, how: str) -> None:
    room = a_room(house, "PUSH")
    await send(desk, house, room, a_message())
    house.run(how)
    with pytest.raises(NotFoundError):
        await send(desk, house, room, a_message())
    assert house.count("messages") == 1


async def test_one_rooms_change_does_not_fail_the_others_in_its_group(
    desk: Desk, house: House
) -> None:
    rooms = [a_room(house, "PUSH") for _ in range(4)]
    for room in rooms:
        await send(desk, house, room, a_message())
    gone, changed, *_ = rooms
    house.run("DELETE FROM rooms WHERE id = %s", gone)
    house.subscription(changed)
    outcomes = await asyncio.gather(
        *[send(desk, house, room, a_message()) for room in rooms for _ in range(5)],
        return_exceptions=True,
    )
    assert all(isinstance(outcome, NotFoundError) for outcome in outcomes[:5])
    assert [
        len(outcome["destinations"]) for outcome in outcomes[5:] if isinstance(outcome, dict)
    ] == [2] * 5 + [1] * 10


# --- idempotency keys ---------------------------------------------------------------------------------------------


async def test_a_repeated_key_gets_the_first_answer(desk: Desk, house: House) -> None:
    room, other = a_room(house, "PUSH"), a_room(house, "PUSH")
    first = await desk.publisher.publish(house.principal, room, a_message(), "k")
    again = await desk.publisher.publish(house.principal, room, a_message(), "k")
    assert (first.replayed, again.replayed) == (False, True)
    assert (again.status, again.body) == (202, first.body)
    assert house.count("messages") == 1
    for attempt in (
        desk.publisher.publish(house.principal, room, a_message(priority=1), "k"),
        desk.publisher.publish(house.principal, room, a_message(event_type="none"), "k"),
        desk.publisher.publish_batch(house.principal, room, a_message(), "k"),
    ):
        with pytest.raises(ConflictError):
            await attempt
    elsewhere = await desk.publisher.publish(house.principal, other, a_message(), "k")
    assert not elsewhere.replayed


async def test_a_repeated_batch_gets_the_first_answer(desk: Desk, house: House) -> None:
    room = a_room(house, "PUSH")
    first = await desk.publisher.publish_batch(house.principal, room, a_batch({}, {}), "k")
    again = await desk.publisher.publish_batch(house.principal, room, a_batch({}, {}), "k")
    assert again.replayed
    assert again.body == first.body
    with pytest.raises(ConflictError):
        await desk.publisher.publish_batch(house.principal, room, a_batch({}), "k")
    assert house.count("messages") == 2


async def test_identical_requests_at_once_make_one_message(database: str, house: House) -> None:
    """Ten identical requests in each of two processes, for each of five keys, beside others without a key."""
    room = a_room(house, "PUSH")
    async with open_desk(database) as one, open_desk(database) as other:
        answers = await asyncio.gather(
            *[
                desk.publisher.publish(
                    house.principal, room, a_message(correlation_id=f"c{key}"), f"key-{key}"
                )
                for _ in range(10)
                for key in range(5)
                for desk in (one, other)
            ],
            *[
                desk.publisher.publish(house.principal, room, a_message(), None)
                for desk in (one, other)
                for _ in range(20)
            ],
        )
    keyed = answers[:100]
    assert len({answer.body for answer in keyed}) == 5
    assert sum(not answer.replayed for answer in keyed) == 5
    assert house.run("SELECT count(*) FROM messages WHERE correlation_id LIKE 'c_'") == [(5,)]
    assert house.count("messages") == 45
    assert house.count("deliveries") == 45


async def test_different_bodies_with_one_key_at_once_accept_one(desk: Desk, house: House) -> None:
    room = a_room(house)
    outcomes = await asyncio.gather(
        *[
            desk.publisher.publish(house.principal, room, a_message(priority=n), "k")
            for n in range(10)
        ],
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, ConflictError) for outcome in outcomes) == 9
    assert house.count("messages") == 1


async def test_the_first_answer_outlives_the_event_type(desk: Desk, house: House) -> None:
    room = a_room(house)
    first = await desk.publisher.publish(house.principal, room, a_message(), "k")
    house.change(room, "DELETE FROM event_types")
    again = await desk.publisher.publish(house.principal, room, a_message(), "k")
    assert again.replayed
    assert again.body == first.body


async def test_a_key_is_free_again_after_a_day(desk: Desk, house: House) -> None:
    room = a_room(house)
    first = await desk.publisher.publish(house.principal, room, a_message(), "k")
    house.run("UPDATE idempotency_keys SET created_at = now() - interval '25 hours'")
    second = await desk.publisher.publish(house.principal, room, a_message(), "k")
    third = await desk.publisher.publish(house.principal, room, a_message(), "k")
    assert first.body != second.body == third.body
    assert (second.replayed, third.replayed) == (False, True)
    assert house.count("messages") == 2


# --- afterwards ---------------------------------------------------------------------------------------------------


async def test_a_commit_wakes_workers_and_the_pullers_of_its_subscriptions(
    database: str, desk: Desk, house: House
) -> None:
    room = a_room(house, "PUSH")
    pull = house.subscription(room, "PULL")
    heard: asyncio.Queue[tuple[Channel, frozenset[str]]] = asyncio.Queue()

    def hearing(channel: Channel) -> Callable[[frozenset[str]], None]:
        return lambda names: heard.put_nowait((channel, names))

    hear = {channel: hearing(channel) for channel in (Channel.PUSH, Channel.PULL)}
    async with Notifier(database, listeners=hear):
        assert {(await asyncio.wait_for(heard.get(), 30))[0] for _ in range(2)} == {
            Channel.PUSH,
            Channel.PULL,
        }
        await send(desk, house, room, a_message())
        woken = [await asyncio.wait_for(heard.get(), 30) for _ in range(2)]
    assert dict(woken) == {Channel.PUSH: frozenset(), Channel.PULL: frozenset({pull})}


async def test_the_metrics_count_messages(desk: Desk, house: House) -> None:
    room = a_room(house)
    await send(desk, house, room, a_message(), "k")
    await send(desk, house, room, a_message(), "k")
    await desk.publisher.publish_batch(house.principal, room, a_batch({}, {}, {}), None)
    with pytest.raises(InvalidError):
        await send(desk, house, room, a_message(event_type="none"))
    text = desk.metrics.render().decode()
    for line in (
        'rooms_publishes_total{outcome="accepted"} 4.0',
        'rooms_publishes_total{outcome="duplicate"} 1.0',
        'rooms_publishes_total{outcome="invalid"} 1.0',
        "rooms_publish_latency_seconds_count 2.0",
    ):
        assert line in text


# --- both ways ----------------------------------------------------------------------------------------------------

GOOD = {"event_type": "order.created", "payload": {"amount": 1}}
REQUESTS: dict[str, dict[str, Any]] = {
    "good": {"json": GOOD, "status": 202},
    "everything": {
        "json": {**GOOD, "version": 1, "priority": 0, "ttl_ms": 5, "correlation_id": "c", "headers": {"x": "y"}, "ordering_key": "o"},
        "status": 202,
    },
    "keyed": {"json": GOOD, "headers": {"Idempotency-Key": "k"}, "status": 202},
    "keyed again": {"json": GOOD, "headers": {"Idempotency-Key": "k"}, "status": 202},
    "keyed otherwise": {"json": {**GOOD, "priority": 1}, "headers": {"Idempotency-Key": "k"}, "status": 409},
    "bad key": {"json": GOOD, "headers": {"Idempotency-Key": "k k"}, "status": 422},
    "empty key": {"json": GOOD, "headers": {"Idempotency-Key": ""}, "status": 422},
    "long key": {"json": GOOD, "headers": {"Idempotency-Key": "k" * 256}, "status": 422},
    "form": {"content": b"a=b", "headers": {"Content-Type": "application/x-www-form-urlencoded"}, "status": 400},
    "empty": {"content": b"", "status": 400},
    "no json": {"content": b"{", "status": 400},
    "no utf-8": {"content": b'{"event_type":"order.created","payload":"\xff"}', "status": 400},
    "surrogate": {"content": b'{"event_type":"order.created","payload":"\\udfff"}', "status": 400},
    "deep": {"content": b'{"payload":' + b"[" * 50_000, "status": 400},
    "nul": {"content": b'{"event_type":"order.created\\u0000","payload":1}', "status": 422},
    "array": {"json": [], "status": 422},
    "wrong fields": {"json": {"event_type": 1, "zork": 2, "priority": 99}, "status": 422},
    "unknown type": {"json": {**GOOD, "event_type": "none"}, "status": 422},
    "no fit": {"json": {**GOOD, "payload": {"amount": "x"}}, "status": 422},
    "large payload": {"json": {**GOOD, "payload": "x" * 5000}, "status": 413},
    "large body": {"content": b"x" * 70_000, "status": 413},
    "large body in chunks": {"chunks": [b"x" * 40_000] * 2, "status": 413},
    "chunks": {"chunks": [b'{"event_type":"order.cre', b'ated",', b'"payload":1}'], "status": 202},
    "query": {"json": GOOD, "query": "?a=1", "status": 422},
    "no key": {"json": GOOD, "headers": {"Authorization": ""}, "status": 401},
    "unknown key": {"json": GOOD, "headers": {"Authorization": "Bearer rooms_" + "x" * 43}, "status": 401},
    "wrong scope": {"json": GOOD, "as": "subscribe", "status": 403},
    "wrong scope and body": {"content": b"{", "as": "subscribe", "status": 403},
    "stranger": {"json": GOOD, "as": "stranger", "status": 404},
    "no room": {"json": GOOD, "room": "5", "status": 404},
    "no number": {"json": GOOD, "room": "abc", "status": 404},
    "large number": {"json": GOOD, "room": "99999999999", "status": 404},
    "other digits": {"json": GOOD, "room": "٣", "status": 404},
    "batch": {"json": {"messages": [GOOD, GOOD]}, "batch": True, "status": 202},
    "batch keyed": {"json": {"messages": [GOOD]}, "batch": True, "headers": {"Idempotency-Key": "b"}, "status": 202},
    "batch keyed again": {"json": {"messages": [GOOD]}, "batch": True, "headers": {"Idempotency-Key": "b"}, "status": 202},
    "batch with a single's key": {"json": {"messages": [GOOD]}, "batch": True, "headers": {"Idempotency-Key": "k"}, "status": 409},
    "batch of none": {"json": {"messages": []}, "batch": True, "status": 422},
    "batch with bad ones": {"json": {"messages": [GOOD, {}, {**GOOD, "event_type": "none"}]}, "batch": True, "status": 422},
    "batch of junk": {"content": b"[[", "batch": True, "status": 400},
}  # fmt: skip


def _comparable(response: httpx.Response, room: RoomId) -> tuple[Any, ...]:
    """All of an answer but what must differ: the ids that each made on its own, and its room's number."""
    text = response.text.replace(str(room), "ROOM")
    for message_id in re.findall(r'"message_id":"([^"]+)"', text):
        text = text.replace(message_id, "ID")
    names = ("content-type", "idempotent-replayed", "retry-after", "www-authenticate", "allow")
    assert response.headers["content-length"] == str(len(response.content))
    return response.status_code, re.sub(r"subscription-[0-9a-f-]{36}", "SUBSCRIPTION", text), [
        response.headers.get(name) for name in names
    ]  # fmt: skip


def _document(services: ApiServices) -> dict[str, Any]:
    return create_app(services).openapi_schema.to_schema()


@pytest.mark.blocking("it builds two applications, as a process does before it serves")
async def test_the_front_and_litestar_answer_alike(
    database: str, house: House, tmp_path: Path
) -> None:
    environment = {
        "ROOMS_DATA": str(tmp_path), "ROOMS_MAX_PAYLOAD_BYTES": "4096", "ROOMS_MAX_BODY_BYTES": "65536",
    }  # fmt: skip
    texts = {
        name: new_key(lambda n: uuid.uuid4().bytes * 2)
        for name in ("publish", "subscribe", "stranger")
    }
    stranger = House(database)
    answers: list[dict[str, Any]] = []
    async with open_services(read_settings(environment), database) as services:
        async with transaction(services.engine) as connection:
            for name, text in texts.items():
                owner = stranger.organisation if name == "stranger" else house.organisation
                scope = Scope.SUBSCRIBE if name == "subscribe" else Scope.PUBLISH
                await create_key(
                    connection,
                    new_id=make_id(RoomId(0)),
                    organisation=owner,
                    name=name,
                    scopes=[scope],
                    text=text,
                )
        for make in (make_asgi, create_app):
            app = await asyncio.to_thread(make, services)
            room = house.room()
            house.event_type(room, schemas=[{"properties": {"amount": {"type": "integer"}}}])
            house.subscription(room)
            found: dict[str, Any] = {}
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]  # httpx wants mutable scopes
            async with httpx.AsyncClient(transport=transport, base_url="http://rooms") as client:
                for name, request in REQUESTS.items():
                    number = request.get("room", str(room))
                    path = f"/v1/rooms/{number}/messages" + (
                        "/batch" if request.get("batch") else ""
                    )
                    content = request.get("content")
                    if "chunks" in request:
                        content = _in_chunks(request["chunks"])
                    headers = {
                        "Authorization": f"Bearer {texts[request.get('as', 'publish')]}",
                        **request.get("headers", {}),
                    }
                    response = await client.post(
                        path + request.get("query", ""),
                        json=request.get("json"),
                        content=content,
                        headers=headers,
                    )
                    assert response.status_code == request["status"], (name, response.text)
                    found[name] = _comparable(response, room)
            answers.append(found)
        document = await asyncio.to_thread(_document, services)
    front, litestar = answers
    for name in REQUESTS:
        assert front[name] == litestar[name], name
    for path in ("/v1/rooms/{room_id}/messages", "/v1/rooms/{room_id}/messages/batch"):
        operation = document["paths"][path]["post"]
        assert set(operation["responses"]) >= {
            "202",
            "400",
            "401",
            "403",
            "404",
            "409",
            "413",
            "422",
            "429",
            "503",
        }
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert "event_type" in str(schema)
        assert any(parameter["name"] == "Idempotency-Key" for parameter in operation["parameters"])


async def _in_chunks(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def test_a_filter_decides_a_message_at_a_time(desk: Desk, house: House) -> None:
    room = house.room()
    house.event_type(room)
    large = house.subscription(room, "PUSH", wanted="payload.amount > 10")
    everything = house.subscription(room, "PULL")
    tenants = house.subscription(room, "PULL", wanted="headers['x-tenant'] == 'acme'")

    def places(*subscriptions: str) -> list[str]:
        return [f"room-{room}::subscription-{subscription}" for subscription in subscriptions]

    assert (await send(desk, house, room, a_message()))["destinations"] == places(
        everything, tenants
    )  # no such header
    acme, other = {"headers": {"X-Tenant": "acme"}}, {"headers": {"x-tenant": "other"}}
    answer = await desk.publisher.publish_batch(
        house.principal,
        room,
        a_batch(
            {"payload": {"amount": 11}, **acme},
            {"payload": {"amount": 1}, **other},
            {"payload": {"amount": 99}, **other, "destinations": places(large, tenants)},
        ),
        None,
    )
    reported = [message["destinations"] for message in json.loads(answer.body)["messages"]]
    assert reported == [places(large, everything, tenants), places(everything), places(large)]
    kept = house.run(
        "SELECT m.fanout, array_agg(d.subscription_id::text ORDER BY d.subscription_id) FROM messages m"
        " JOIN deliveries d ON d.room_id = m.room_id AND d.message_id = m.id GROUP BY m.id, m.fanout ORDER BY m.fanout, 2"
    )
    assert kept == [
        (1, [large]),
        (1, [everything]),
        (2, [everything, tenants]),
        (3, [large, everything, tenants]),
    ]
    assert b"rooms_filter_errors_total 1.0" in desk.metrics.render()

    house.change(
        room,
        f"UPDATE subscriptions SET filter = 'payload.amount < 5', version = version + 1"
        f" WHERE room_id = {room} AND id = '{large}'",
    )
    found = await send(desk, house, room, a_message(payload={"amount": 1}, **other))
    assert found["destinations"] == places(large, everything)


async def test_a_message_without_subscribers_is_kept_without_deliveries(
    desk: Desk, house: House
) -> None:
    room = house.room()
    house.event_type(room)
    house.subscription(room, "PUSH", wanted="false")
    assert (await send(desk, house, room, a_message()))["destinations"] == []
    assert (house.count("messages"), house.count("deliveries"), house.count("outbox")) == (1, 0, 0)


async def _routes(desk: Desk, house: House, room: RoomId) -> RoutingTable:
    """Return the routes of a room, which a publish has loaded."""
    await desk.publisher.publish(house.principal, room, a_message(), None)
    table = desk.planner.cached(room)
    assert table is not None
    return table


async def _count_turns_during(
    preparing: Coroutine[Any, Any, InsertRows],
) -> tuple[InsertRows, int]:
    """Return the rows, and how often the loop ran something else meanwhile."""
    turns, done = 0, asyncio.Event()

    async def count_turns() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    rows = await preparing
    done.set()
    await counting
    return rows, turns


async def test_a_slow_machine_lets_other_requests_go_on_after_fewer_messages(
    database: str, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let two messages take the time of a slice, while the rows of all fit into one."""
    room = a_room(house, "PUSH")
    async with open_desk(database, ROOMS_MAX_BATCH="400") as desk:
        table = await _routes(desk, house, room)
        messages = decode_batch(a_batch(*[{}] * 400), 400)
        ticks = itertools.count(0, SLICE_NS // 2)
        monkeypatch.setattr(prepare, "perf_counter_ns", lambda: next(ticks))
        rows, turns = await _count_turns_during(
            desk.publisher._preparation.in_slices(
                table, house.principal, None, messages, refused={}, answered={}
            )
        )
    assert rows.row_count == 800 < SLICE_ROWS
    assert turns >= 190


async def test_a_large_batch_lets_other_requests_go_on_while_it_is_prepared(
    database: str, house: House
) -> None:
    """It takes tens of milliseconds, for which the messages of all others would wait."""
    room = a_room(house, *["PUSH"] * 20)
    async with open_desk(database, ROOMS_MAX_BATCH="500") as desk:
        preparation = desk.publisher._preparation
        table = await _routes(desk, house, room)
        messages = decode_batch(a_batch(*[{}] * 500), 500)
        rows, turns = await _count_turns_during(
            preparation.in_slices(table, house.principal, None, messages, refused={}, answered={})
        )
        assert rows.row_count == 500 * 21
        assert turns >= rows.row_count // SLICE_ROWS - 1
        assert len(json.loads(rows.answer)["messages"]) == 500


async def test_batches_beside_each_other_take_turns_with_their_slices(
    database: str, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run one slice a round of the loop, and slices of the two organisations in turn."""
    room = a_room(house, "PUSH")
    async with open_desk(database, ROOMS_MAX_BATCH="400") as desk:
        table = await _routes(desk, house, room)
        ticks = itertools.count(0, SLICE_NS // 2)
        monkeypatch.setattr(prepare, "perf_counter_ns", lambda: next(ticks))
        done: list[str] = []

        async def prepare_batch(organisation: str, count: int) -> InsertRows:
            rows = await desk.publisher._preparation.in_slices(
                table,
                replace(house.principal, organisation_id=OrganisationId(organisation)),
                None,
                decode_batch(a_batch(*[{}] * count), 400),
                refused={},
                answered={},
            )
            done.append(organisation)
            return rows

        async def prepare_all() -> InsertRows:
            large = [prepare_batch("large", 400) for _ in range(4)]
            *_, rows = await asyncio.gather(*large, prepare_batch("small", 40))
            return rows

        _, turns = await _count_turns_during(prepare_all())
    assert done == ["small", *["large"] * 4]
    # Two messages a slice.
    assert turns >= 4 * 190 + 18


async def test_a_batch_whose_room_changes_while_it_is_prepared_reaches_the_new_subscription(
    database: str, house: House
) -> None:
    room = a_room(house, *["PUSH"] * 20)
    async with open_desk(database, ROOMS_MAX_BATCH="500") as desk:
        await desk.publisher.publish(house.principal, room, a_message(), None)
        publishing = asyncio.create_task(
            desk.publisher.publish_batch(house.principal, room, a_batch(*[{}] * 500), None)
        )
        await asyncio.sleep(0)
        assert not publishing.done()
        added = house.subscription(room)
        assert (await publishing).status == 202
    found = house.run("SELECT count(*) FROM deliveries WHERE subscription_id = %s", added)
    assert found == [(500,)]


# Publishes that need no wait


async def submitted(
    desk: Desk, principal: Principal, room: RoomId, body: bytes
) -> tuple[bytes | None, CommitOutcome | Exception]:
    """Return the answer of `publish_nowait` and what its commit was settled with."""
    settled: asyncio.Future[CommitOutcome | Exception] = asyncio.get_running_loop().create_future()
    answer = desk.publisher.publish_nowait(principal, room, body, settled.set_result)
    return answer, None if answer is None else await settled


async def test_a_publish_that_needs_no_wait_writes_the_same(desk: Desk, house: House) -> None:
    room = a_room(house, "PUSH", "PULL")
    first = await send(desk, house, room, a_message())
    answer, outcome = await submitted(desk, house.principal, room, a_message())
    assert outcome is None
    second = json.loads(answer or b"")
    assert second["destinations"] == first["destinations"]
    rows = house.run(
        "SELECT id::text, event_type, fanout, publisher_id::text, publisher_organisation_id,"
        " application, payload FROM messages ORDER BY id"
    )
    assert [row[0] for row in rows] == [first["message_id"], second["message_id"]]
    assert rows[0][1:] == rows[1][1:]
    assert house.count("deliveries") == house.count("outbox") == 4


async def test_what_needs_more_is_left_to_the_other_way(desk: Desk, house: House) -> None:
    """Nothing is submitted, and the routes are not known, the message is wrong, or not plain."""
    room = a_room(house, "PUSH")
    assert await submitted(desk, house.principal, room, a_message()) == (None, None)
    await send(desk, house, room, a_message())
    restricted = replace(house.principal, event_types=("order.*",))
    other = replace(house.principal, organisation_id=House(house.url).organisation)
    for principal, body in (
        (house.principal, b"{"),
        (house.principal, a_message(event_type="order.unknown")),
        (house.principal, a_message(payload="x" * 5000)),
        (house.principal, a_message(signature="e30..c2ln")),
        (restricted, a_message()),
        (other, a_message()),
    ):
        assert await submitted(desk, principal, room, body) == (None, None), body
    assert house.count("messages") == 1


async def test_a_conflict_of_a_publish_writes_nothing(desk: Desk, house: House) -> None:
    room = a_room(house, "PUSH")
    await send(desk, house, room, a_message(id="order-1"))
    answer, outcome = await submitted(desk, house.principal, room, a_message(id="order-1"))
    assert answer is not None
    assert isinstance(outcome, IdReused)
    house.subscription(room, "PUSH")
    answer, outcome = await submitted(desk, house.principal, room, a_message())
    assert answer is not None
    assert outcome is PLAN_CHANGED
    assert house.count("messages") == 1


async def test_a_publish_to_very_many_is_submitted_with_large_ones(
    desk: Desk, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.publishing.group_commit.LARGE_ROWS", 2)
    room = a_room(house, "PUSH", "PUSH", "PUSH")
    await send(desk, house, room, a_message())
    groups: list[int] = []

    def submit(rows: InsertRows, settle: Settle) -> None:
        groups.append(rows.row_count)
        settle(None)

    monkeypatch.setattr(desk.publisher._committers.large, "submit_nowait", submit)
    answer, outcome = await submitted(desk, house.principal, room, a_message())
    assert answer is not None
    assert outcome is None
    assert groups == [4]


async def test_costly_checks_are_made_once_from_the_second_publish_on(
    desk: Desk, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = a_room(house, "PUSH")
    await send(desk, house, room, a_message())
    prepared = 0

    def costly(*_: Any, **__: Any) -> None:
        nonlocal prepared
        prepared += 1
        raise ChecksPendingError(DeferredChecks())

    monkeypatch.setattr(desk.publisher._preparation, "at_once", costly)
    for _ in range(3):
        assert await submitted(desk, house.principal, room, a_message()) == (None, None)
    assert prepared == 1


async def test_a_batch_of_few_large_messages_is_submitted_with_large_ones(
    database: str, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = a_room(house, "PUSH")
    async with open_desk(database, ROOMS_MAX_PAYLOAD_BYTES="300000") as desk:
        groups: list[tuple[int, int]] = []

        async def submit(rows: InsertRows) -> CommitOutcome:
            groups.append((len(rows.messages), rows.row_count))
            return None

        monkeypatch.setattr(desk.publisher._committers.large, "submit", submit)
        body = a_batch(*[{"payload": "x" * 250 * 1024}] * 64)
        await desk.publisher.publish_batch(house.principal, room, body, None)
    assert groups == [(64, 128)]


async def test_a_publish_is_refused_while_too_much_of_its_organisation_waits(
    desk: Desk, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another organisation are accepted meanwhile."""
    room, other = a_room(house, "PUSH"), House(house.url)
    others_room = a_room(other, "PUSH")
    await send(desk, house, room, a_message())
    await send(desk, other, others_room, a_message())
    committer = desk.publisher._committers.plain
    write, begun, go_on = committer._write, asyncio.Event(), asyncio.Event()

    async def write_later(group: Sequence[InsertRows]) -> InsertConflict:
        begun.set()
        await go_on.wait()
        return await write(group)

    monkeypatch.setattr(committer, "_write", write_later)
    held = asyncio.create_task(submitted(desk, house.principal, room, a_message()))
    await begun.wait()
    waiting = []
    for _ in range(3):
        waiting.append(asyncio.create_task(submitted(desk, house.principal, room, a_message())))
        await asyncio.sleep(0)
    monkeypatch.setattr(
        "rooms.publishing.pending_requests.MAX_WAITING_BYTES", committer._waiting_bytes
    )
    with pytest.raises(StorageRefusedError):
        await submitted(desk, house.principal, room, a_message())
    others = asyncio.create_task(submitted(desk, other.principal, others_room, a_message()))
    await asyncio.sleep(0)
    go_on.set()
    for outcome in await asyncio.gather(held, *waiting, others):
        assert outcome[1] is None
    assert house.count("messages") == 4 + len(waiting)


# Refusals


async def test_refused_publishes_leave_connections_and_load_no_routes(database: str) -> None:
    """A refusal looks if the room has changed, by its version only, and a few rooms at a time."""
    house = House(database)
    rooms = [a_room(house) for _ in range(20)]
    async with open_desk(database) as desk:
        for room in rooms:
            await send(desk, house, room, a_message())
        loads = 0
        read = desk.planner._load

        async def count_loads(room: RoomId) -> RoutingRecord | None:
            nonlocal loads
            loads += 1
            return await read(room)

        desk.planner._load = count_loads
        used = most = 0

        def count_checkout(*_: Any) -> None:
            nonlocal used, most
            used += 1
            most = max(most, used)

        def count_checkin(*_: Any) -> None:
            nonlocal used
            used -= 1

        event.listen(desk.engine.sync_engine, "checkout", count_checkout)
        event.listen(desk.engine.sync_engine, "checkin", count_checkin)
        outcomes = await asyncio.gather(
            *[
                send(desk, house, room, a_message(event_type="order.unknown"))
                for room in rooms
                for _ in range(5)
            ],
            return_exceptions=True,
        )
    assert all(isinstance(outcome, InvalidError) for outcome in outcomes)
    assert loads == 0
    assert most <= MAX_LOADS + MAX_VERSION_READS


async def test_a_retry_by_its_id_is_answered_by_the_room_as_it_is_now(
    desk: Desk, house: House
) -> None:
    """The cached table refuses it, and so does the room, which has changed once more meanwhile."""
    room = house.room()
    house.event_type(room)
    first = await send(desk, house, room, a_message(id="order-1"))
    house.change(room, 'UPDATE event_type_versions SET schema = \'{"type": "string"}\'')
    with pytest.raises(InvalidError):
        await send(desk, house, room, a_message(id="order-2"))
    house.run(house.bump(room))
    again = await desk.publisher.publish(house.principal, room, a_message(id="order-1"), None)
    assert again.replayed
    assert json.loads(again.body) == first
    house.run(house.bump(room))
    with pytest.raises(InvalidError):
        await send(desk, house, room, a_message(id="order-2"))
    assert house.count("messages") == 1


@pytest.mark.parametrize("again", [False, True])
async def test_a_batch_with_chosen_destinations_lets_other_requests_go_on_while_it_is_routed(
    database: str, house: House, *, again: bool
) -> None:
    """Also where it is prepared again, as costly checks were made in the sandbox."""
    room = a_room(house, *["PULL"] * 100)
    async with open_desk(database, ROOMS_MAX_BATCH="200") as desk:
        everything = (await send(desk, house, room, a_message()))["destinations"]
        messages = decode_batch(
            a_batch(
                *[{"destinations": everything[:50] + everything[50 + n // 4 :]} for n in range(200)]
            ),
            200,
        )
        table = desk.planner.cached(room)
        assert table is not None
        preparation = desk.publisher._preparation
        request = table, house.principal, None, messages
        rows, turns = await _count_turns_during(
            preparation.after_refusal(
                ChecksPendingError(DeferredChecks()), *request, refused={}, batch=True, answered={}
            )
            if again
            else preparation.in_slices(*request, refused={}, answered={})
        )
    named = sum(len(message.destinations or ()) for message in messages)
    assert rows.row_count == 200 + named
    # Those to route them, at about 250 destinations a turn, come before those for the rows.
    assert turns >= named // 300 + rows.row_count // (SLICE_ROWS + 150)
