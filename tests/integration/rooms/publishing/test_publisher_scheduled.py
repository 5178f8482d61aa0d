"""Publishing what is due later, and under an id of the publisher's own: what is written, when it is seen, and who wins."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from delivery.pull.postgres_source import PostgresSource
from delivery.pull.target import PullTarget
from rooms.db.connection import open_connection
from rooms.db.leases.acquire import AcquireRequest, PackedTarget, acquire
from rooms.db.leases.release import LeaseQueries
from rooms.db.queue.claims import Outbox
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.work_location import WorkLocation, relayed_mode
from rooms.errors import ConflictError, InvalidError
from tests.support.fake_broker import MemoryBroker
from tests.support.installation import PATIENCE_S, until
from tests.support.publisher import Desk, House, open_desk
from tests.support.pull_service import open_counter

RELAYED = relayed_mode(lookahead_ms=60_000)
HOUR_MS = 3_600_000
WORK = (
    "SELECT d.state::text, o.kind, o.delay_ms, o.due_at = d.due_at, o.expires_at IS NOT DISTINCT FROM d.expires_at"
    " FROM deliveries d JOIN outbox o USING (room_id, id) ORDER BY o.kind"
)


@pytest.fixture
def house(database: str) -> House:
    return House(database)


@pytest.fixture
async def desk(database: str) -> AsyncIterator[Desk]:
    async with open_desk(database) as desk:
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


def a_room(house: House, *kinds: str, **fields: Any) -> tuple[RoomId, list[SubscriptionId]]:
    room = house.room(**fields)
    house.event_type(room)
    return room, [house.subscription(room, kind) for kind in kinds]


async def send(
    desk: Desk, house: House, room: RoomId, body: bytes, key: str | None = None
) -> dict[str, Any]:
    answer = await desk.publisher.publish(house.principal, room, body, key)
    found: dict[str, Any] = json.loads(answer.body)
    return found


async def send_batch(desk: Desk, house: House, room: RoomId, body: bytes) -> list[dict[str, Any]]:
    answer = await desk.publisher.publish_batch(house.principal, room, body, None)
    found: list[dict[str, Any]] = json.loads(answer.body)["messages"]
    return found


async def test_a_lifetime_begins_when_the_message_is_due(desk: Desk, house: House) -> None:
    room, _ = a_room(house, "PUSH", "PULL", expiration_ms=HOUR_MS)
    await send(
        desk,
        house,
        room,
        a_message(delay_ms=90_000, ttl_ms=5_000, priority=8, business_key="order 7"),
    )
    [(due_in, life, *rest)] = house.run(
        "SELECT due_at - published_at, expires_at - due_at, priority, business_key, caller_id FROM messages"
    )
    assert (due_in, life, *rest) == (
        timedelta(seconds=90),
        timedelta(seconds=5),
        8,
        "order 7",
        None,
    )
    assert house.run(WORK) == [("queued", 0, 0, True, True), ("queued", 1, 0, True, True)]
    log = house.run("SELECT kind, delay_ms, detail FROM delivery_log ORDER BY writer_seq")
    assert log == [
        ("published", 90_000, None),
        ("enqueued", 90_000, None),
        ("enqueued", 90_000, None),
    ]


async def test_a_time_that_is_past_means_at_once(desk: Desk, house: House) -> None:
    room, _ = a_room(house, "PUSH")
    past = (datetime.now(UTC) - timedelta(days=9)).isoformat()
    await send(desk, house, room, a_message(deliver_at=past))
    assert house.run("SELECT due_at, now() - published_at < interval '1 minute' FROM messages") == [
        (None, True)
    ]
    assert house.run("SELECT o.due_at = m.published_at FROM outbox o, messages m") == [(True,)]


async def test_a_time_to_come_is_kept_to_the_microsecond(desk: Desk, house: House) -> None:
    room, _ = a_room(house, "PUSH")
    at = datetime.now(UTC).replace(microsecond=123_457) + timedelta(days=365)
    await send(desk, house, room, a_message(deliver_at=at.isoformat()))
    assert house.run("SELECT m.due_at, o.due_at FROM messages m, outbox o") == [(at, at)]


async def test_what_cannot_be_is_named(desk: Desk, house: House) -> None:
    room, _ = a_room(house, "PUSH")
    wrong: list[tuple[dict[str, Any], list[str]]] = [
        ({"delay_ms": 5, "deliver_at": "2030-01-01T00:00:00Z"}, ["delay_ms", "deliver_at"]),
        ({"delay_ms": -1}, ["delay_ms"]),
        ({"deliver_at": "2030-01-01T00:00:00"}, ["deliver_at"]),
        ({"deliver_at": "9000-01-01T00:00:00Z"}, ["deliver_at"]),
        ({"deliver_at": "soon"}, ["deliver_at"]),
        ({"id": "with space"}, ["id"]),
        ({"id": ""}, ["id"]),
        ({"id": "x" * 129}, ["id"]),
        ({"business_key": "a\x00b"}, ["business_key"]),
    ]
    for fields, names in wrong:
        with pytest.raises(InvalidError) as found:
            await send(desk, house, room, a_message(**fields))
        assert [problem.field for problem in found.value.problems] == names, fields
        with pytest.raises(InvalidError) as found:
            await send_batch(desk, house, room, a_batch({}, fields))
        assert [problem.field for problem in found.value.problems] == [
            f"messages[1].{name}" for name in names
        ]
    with pytest.raises(InvalidError) as found:
        await send_batch(desk, house, room, a_batch({"id": "a"}, {}, {"id": "a"}))
    assert [problem.field for problem in found.value.problems] == ["messages[2].id"]
    assert house.count("messages") == 0


async def test_neither_worker_nor_poll_sees_it_before_it_is_due(
    desk: Desk, house: House, database: str
) -> None:
    """Oracle: one of two messages is due.

    Both claims find only that one, and the other once it is due.
    """
    room, (_, pull) = a_room(house, "PUSH", "PULL")
    now, later = await send_batch(desk, house, room, a_batch({}, {"delay_ms": HOUR_MS}))
    async with LogWriter(database, kind="worker") as writer:
        outbox = Outbox(writer)

        async def seen() -> tuple[list[str], list[str]]:
            claim = await outbox.claim(
                limit=9,
                claim_s=60,
                deadline=0,
                now_ms=0,
                watermarks_us=[0] * 10,
                dead_workers=(),
                excluded=frozenset(),
            )
            (taken,) = await acquire(
                writer,
                [
                    AcquireRequest(
                        PackedTarget.of(room, pull, OrganisationId(house.organisation)), 9, 60_000
                    )
                ],
            )
            return [copy.message_id for copy in claim.tasks], [
                str(row[4], "ascii") for row in taken.rows
            ]

        assert await seen() == ([now["message_id"]], [now["message_id"]])
        assert await seen() == ([], [])
        house.run("UPDATE outbox SET due_at = now() WHERE message_id = %s", later["message_id"])
        assert await seen() == ([later["message_id"]], [later["message_id"]])


async def test_another_broker_is_given_only_what_is_near(house: House, database: str) -> None:
    room, _ = a_room(house, "PUSH", "PULL")
    async with open_desk(database, shape=RELAYED) as desk:
        await send_batch(desk, house, room, a_batch({"delay_ms": 59_000}, {"delay_ms": 61_000}))
    assert [(row[0], WorkLocation(row[1])) for row in house.run(WORK)] == [
        ("queued", WorkLocation.PUSH_TO_RELAY), ("queued", WorkLocation.PULL_TO_RELAY),
        ("scheduled", WorkLocation.PUSH_SCHEDULED), ("scheduled", WorkLocation.PULL_SCHEDULED),
    ]  # fmt: skip
    assert house.run("SELECT DISTINCT delay_ms, detail FROM delivery_log WHERE kind = 'enqueued' ORDER BY 1") == [
        (59_000, None), (61_000, "scheduled"),
    ]  # fmt: skip


async def test_the_same_id_again_gets_the_first_answer(desk: Desk, house: House) -> None:
    room, _ = a_room(house, "PUSH")
    first = await send(desk, house, room, a_message(id="order-1"))
    answer = await desk.publisher.publish(house.principal, room, a_message(id="order-1"), None)
    assert (json.loads(answer.body), answer.replayed) == (first, True)
    for other in ({"payload": 2}, {"priority": 5}, {"delay_ms": 1}):
        with pytest.raises(ConflictError, match="other content"):
            await send(desk, house, room, a_message(id="order-1", **other))
    assert house.run("SELECT id::text, caller_id FROM messages") == [
        (first["message_id"], "order-1")
    ]
    elsewhere, _ = a_room(house, "PUSH")
    assert (await send(desk, house, elsewhere, a_message(id="order-1")))["message_id"] != first[
        "message_id"
    ]


async def test_a_batch_publishes_what_is_new_and_repeats_the_rest(desk: Desk, house: House) -> None:
    room, _ = a_room(house, "PUSH")
    [first] = await send_batch(desk, house, room, a_batch({"id": "a"}))
    again = await send_batch(desk, house, room, a_batch({"id": "b"}, {"id": "a"}, {}))
    assert again[1] == first
    assert len({message["message_id"] for message in again}) == 3
    assert house.run("SELECT caller_id FROM messages ORDER BY id") == [("a",), ("b",), (None,)]
    with pytest.raises(ConflictError, match=r"messages\[1\]"):
        await send_batch(desk, house, room, a_batch({"id": "c"}, {"id": "a", "payload": 2}))
    assert house.count("messages") == 3


async def test_the_first_answer_stays_valid_when_the_room_changes(desk: Desk, house: House) -> None:
    room, _ = a_room(house, "PUSH")
    first = await send(desk, house, room, a_message(id="a"))
    house.change(room, f"DELETE FROM event_type_versions WHERE room_id = {int(room)}")
    assert await send(desk, house, room, a_message(id="a")) == first
    with pytest.raises(InvalidError):
        await send(desk, house, room, a_message(id="b"))


async def test_an_id_and_an_idempotency_key_live_together(desk: Desk, house: House) -> None:
    """Oracle: the key answers as before, even if only the id had kept its first request from publishing."""
    room, _ = a_room(house, "PUSH")
    first = await send(desk, house, room, a_message(id="a"), "k1")
    assert await send(desk, house, room, a_message(id="a"), "k1") == first
    assert await send(desk, house, room, a_message(id="a"), "k2") == first
    for key in ("k1", "k2"):
        with pytest.raises(ConflictError, match="Idempotency-Key"):
            await send(desk, house, room, a_message(), key)
    assert house.count("messages") == 1


async def test_two_api_processes_that_publish_one_id_at_once_publish_it_once(
    house: House, database: str
) -> None:
    room, _ = a_room(house, "PUSH")
    async with open_desk(database) as one, open_desk(database) as other:
        answers = []
        for number in range(20):
            body = a_batch(*[{"id": f"{number}-{place}"} for place in range(5)])
            answers.append(
                await asyncio.gather(
                    *[send_batch(desk, house, room, body) for desk in (one, other)]
                )
            )
    assert all(left == right for left, right in answers)
    assert house.count("messages") == 100


async def test_a_publish_with_an_id_that_is_just_being_taken_waits(
    desk: Desk, house: House, database: str
) -> None:
    """Oracle: it publishes nothing while the other's transaction is open, and finds the id taken when it commits."""
    room, _ = a_room(house, "PUSH")
    async with open_connection(database, name="test") as other, other.transaction():
        await other.execute(
            "INSERT INTO message_ids VALUES (%s, 'a', gen_random_uuid(), 'other', '{}')", (room,)
        )
        task = asyncio.create_task(send(desk, house, room, a_message(id="a")))

        async def waits() -> bool:
            return bool(
                house.run(
                    "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                )
            )

        await until(waits, "a publish that waits for the other's commit")
        assert not task.done()
    with pytest.raises(ConflictError):
        await task
    assert house.count("messages") == 0


@pytest.mark.parametrize("broker", [None, MemoryBroker], ids=["embedded", "relayed"])
async def test_a_poll_that_waits_gets_it_when_it_is_due(
    database: str, broker: type[MemoryBroker] | None
) -> None:
    """Oracle: the lease begins at the due time or later, never before it."""
    async with open_counter(database, broker=None if broker is None else broker()) as counter:
        for delay_ms in (1, 300):
            await counter.publish(delay_ms=delay_ms)
            [message] = await counter.pull(wait_ms=25_000)
            rows = counter.house.run(
                "SELECT l.ts >= m.due_at FROM delivery_log l JOIN messages m ON m.id = l.message_id"
                " WHERE l.kind = 'leased' AND l.message_id = %s", message["message_id"],
            )  # fmt: skip
            assert rows == [(True,)]


async def test_a_scan_notifies_again_for_work_due_soon(
    desk: Desk, house: House, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one scan before the due time is enough, and no other is needed in between."""
    room, (pull,) = a_room(house, "PULL")
    key = PullTarget(room, pull, house.organisation)
    rung: asyncio.Queue[list[SubscriptionId]] = asyncio.Queue()
    async with LogWriter(database, kind="puller") as writer:
        async with PostgresSource(
            [writer], LeaseQueries(writer), lambda names: rung.put_nowait(list(names))
        ) as source:
            await send(desk, house, room, a_message(delay_ms=HOUR_MS))
            assert await source.find_due([key]) == []
            await send(desk, house, room, a_message(delay_ms=60_000))
            monkeypatch.setattr("delivery.pull.postgres_source.LOOKAHEAD_S", 120.0)
            assert await source.find_due([key]) == []
            loop = asyncio.get_running_loop()
            real = loop.time
            with monkeypatch.context() as minute:
                minute.setattr(loop, "time", lambda: real() + 61)  # instead of waiting
                async with asyncio.timeout(PATIENCE_S):
                    assert await rung.get() == [pull]
            house.run(
                "UPDATE outbox SET due_at = now() WHERE due_at < now() + interval '30 minutes'"
            )
            assert list(await source.find_due([key])) == [pull]
        assert rung.empty()
