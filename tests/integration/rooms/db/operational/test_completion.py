"""Test that a look at awaited messages is bounded, and that organisations take turns in it."""

import uuid
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from rooms.db.operational import completion
from rooms.db.operational.completion import MAX_DELIVERIES, CompletionQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import MessageId, OrganisationId, RoomId
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.state_machine import State
from tests.support.installation import Installation, now_ms

DELIVERIES = """
INSERT INTO deliveries (room_id, id, message_id, subscription_id, state)
SELECT %s, id, %s, gen_random_uuid(), %s FROM unnest(%s::uuid[]) id
"""
AWAITED = """
INSERT INTO operational_messages (room_id, id, enqueued, check_at)
VALUES (%s, %s, %s, now() - %s * interval '1 s')
"""
MESSAGE = """
INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, correlation_id, payload)
VALUES (%s, %s, 'made', 1, 4, 1, 'c', '')
"""


@pytest.fixture
async def queries(database: str) -> AsyncIterator[CompletionQueries]:
    async with LogWriter(database, kind="events") as writer:
        yield CompletionQueries(writer)


async def room_of_another(installation: Installation, room: int) -> RoomId:
    """Make an organisation with a room that reports completed messages to it."""
    owner = OrganisationId(installation.ids.generate_global(now_ms()))
    await installation.rows(
        "INSERT INTO organisations (id, name) VALUES (%s, %s)", owner, f"of room {room}"
    )
    made = await installation.make_room(
        RoomId(room),
        organisation_id=owner,
        operational_events=[OperationalEvent.MESSAGE_COMPLETED],
    )
    await installation.rows(
        "INSERT INTO subscriptions (room_id, id, organisation_id, name, type, event_types, operational)"
        " VALUES (%s, %s, %s, '~operational', 'PULL', '[]', true)",
        made, installation.ids.generate(made, now_ms()), owner,
    )  # fmt: skip
    return made


async def await_message(
    installation: Installation,
    room: RoomId,
    states: dict[State, int],
    *,
    due_s: float = 1,
    stored: bool = True,
) -> MessageId:
    """Write a message with so many deliveries in these states, in this order.

    `due_s`: the seconds since it is due; `stored`: write its deliveries, too.
    """
    at_ms = now_ms()
    message = MessageId(installation.ids.generate(room, at_ms))
    await installation.rows(MESSAGE, room, message)
    enqueued = []
    for state, count in states.items():
        ids = [installation.ids.generate(room, at_ms) for _ in range(count)]
        if stored:
            await installation.rows(DELIVERIES, room, message, state.value, ids)
        enqueued += [bytes(16) + uuid.UUID(one).bytes + bytes(4) for one in ids]
    await installation.rows(AWAITED, room, message, b"".join(enqueued), due_s)
    return message


async def completed(installation: Installation) -> set[str]:
    """Return the messages whose events wait."""
    rows = await installation.rows("SELECT data ->> 'message_id' AS id FROM operational_outbox")
    return {row["id"] for row in rows}


def blocks_of(node: dict[str, Any]) -> int:
    """Return the blocks that the most expensive part of a plan has read."""
    own = int(node["Shared Hit Blocks"] + node["Shared Read Blocks"])
    return max([own, *(blocks_of(part) for part in node.get("Plans", ()))])


async def blocks_of_look(installation: Installation) -> int:
    """Return the blocks that a look at what is awaited reads; it changes nothing."""
    statement = completion._COMPLETE % {"writer": "1"}
    async with await psycopg.AsyncConnection.connect(installation.url) as connection:
        await connection.execute(
            "SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off;"
            " SET LOCAL enable_mergejoin = off; SET LOCAL enable_bitmapscan = off; SET LOCAL jit = off"
        )
        cursor = await connection.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {statement}".encode()
        )
        ((found,),) = await cursor.fetchall()
        await connection.rollback()
    return blocks_of(found[0]["Plan"])


async def test_ids_of_awaited_deliveries_are_stored_plainly(installation: Installation) -> None:
    storage = await installation.value(
        "SELECT attstorage::text FROM pg_attribute"
        " WHERE attrelid = 'operational_messages'::regclass AND attname = 'enqueued'"
    )
    assert storage == "e"


async def test_a_look_ends_at_the_first_open_delivery(installation: Installation) -> None:
    await await_message(installation, installation.room, {State.QUEUED: 20_000})
    assert await blocks_of_look(installation) < 500


@pytest.mark.parametrize("last", [State.QUEUED, State.DELIVERED])
async def test_a_look_costs_no_more_for_each_delivery_of_a_larger_message(
    installation: Installation, last: State
) -> None:
    """At worst every delivery is read: the only open one is the last, or there is none."""
    costs = []
    for size in (1_000, 10_000):
        await installation.rows("TRUNCATE operational_messages")
        await await_message(installation, installation.room, {State.SIDELINED: size, last: 1})
        costs.append(await blocks_of_look(installation) / size)
    small, large = costs
    assert large < 1.3 * small


async def test_a_batch_has_a_bounded_number_of_deliveries(
    installation: Installation, queries: CompletionQueries
) -> None:
    room, half = installation.room, MAX_DELIVERIES // 2
    for due_s, size in ((3, half + 1), (2, half), (1, MAX_DELIVERIES + 1)):
        await await_message(installation, room, {State.QUEUED: size}, due_s=due_s, stored=False)
    assert [await queries.find() for _ in range(4)] == [1, 1, 1, 0]


async def test_large_messages_of_an_organisation_delay_no_message_of_another(
    installation: Installation, queries: CompletionQueries
) -> None:
    loud = await room_of_another(installation, 100)
    quiet = await room_of_another(installation, 101)
    for due_s in range(10, 20):
        await await_message(installation, loud, {State.QUEUED: MAX_DELIVERIES}, due_s=due_s)
    own = {await await_message(installation, quiet, {State.DELIVERED: 2}) for _ in range(30)}
    for _ in range(2):
        await queries.find()
    assert await completed(installation) == own


async def test_large_messages_take_turns_with_large_ones_of_another(
    installation: Installation, queries: CompletionQueries
) -> None:
    rooms = [await room_of_another(installation, room) for room in (100, 101, 102)]
    for room in (rooms[0], rooms[1]):
        for due_s in range(10, 14):
            await await_message(
                installation, room, {State.QUEUED: MAX_DELIVERIES}, due_s=due_s, stored=False
            )
    own = await await_message(installation, rooms[2], {State.DELIVERED: MAX_DELIVERIES})
    for _ in range(3):
        assert await queries.find() == 1
    assert own in await completed(installation)
    assert len(await completed(installation)) == 3


async def test_many_rooms_of_an_organisation_have_the_turns_of_one(
    installation: Installation, queries: CompletionQueries
) -> None:
    quiet = await room_of_another(installation, 100)
    own = await await_message(installation, quiet, {State.DELIVERED: 1})
    for number in range(200, 220):
        room = await installation.make_room(RoomId(number))
        for _ in range(completion.MAX_MESSAGES // 10):
            await await_message(installation, room, {State.QUEUED: 1}, due_s=60, stored=False)
    assert await queries.find() <= completion.MAX_MESSAGES
    await queries.find()
    assert own in await completed(installation)


async def test_messages_of_a_room_that_is_gone_are_deleted(
    installation: Installation, queries: CompletionQueries
) -> None:
    for _ in range(2):
        await await_message(installation, RoomId(999), {State.QUEUED: MAX_DELIVERIES}, stored=False)
    while await queries.find():
        pass
    assert await installation.value("SELECT count(*) FROM operational_messages") == 0
