"""Retention of batches in the default partitions: how much is read while others wait."""

from datetime import UTC, datetime

from rooms.db.connection import open_connection
from rooms.db.retention.bounded_locks import prepare_session
from rooms.db.retention.cleanup import clean_default_partitions
from rooms.domain.ids import DeliveryId
from tests.support.installation import Installation

_BORN = datetime(2019, 1, 5, tzinfo=UTC)
_BEFORE = datetime(2020, 1, 5, tzinfo=UTC)
_MESSAGES = 400
_FANOUT = 10


async def make_batch(installation: Installation, kept: int) -> list[str]:
    """Make messages of one millisecond; of the last `kept` a delivery is sidelined."""
    subscription = await installation.subscribe()
    at_ms = int(_BORN.timestamp() * 1000)
    messages = sorted(installation.ids.generate(installation.room, at_ms) for _ in range(_MESSAGES))
    deliveries = [
        (message, DeliveryId(installation.ids.generate(installation.room, at_ms)))
        for message in messages
        for _ in range(_FANOUT)
    ]
    await installation.rows(
        "INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, correlation_id, payload)"
        " SELECT %s, id, 'order.created', 1, 4, %s, '', '' FROM unnest(%s::uuid[]) id",
        installation.room, _FANOUT, messages,
    )  # fmt: skip
    await installation.rows(
        "INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, updated_at)"
        " SELECT %s, id, message, %s, CASE WHEN message = ANY (%s::uuid[]) THEN 'sidelined' ELSE 'delivered' END::delivery_state, %s"
        " FROM unnest(%s::uuid[], %s::uuid[]) v (message, id)",
        installation.room, subscription, messages[_MESSAGES - kept :], _BORN,
        [message for message, _ in deliveries], [identity for _, identity in deliveries],
    )  # fmt: skip
    return messages


async def test_the_messages_of_a_batch_share_a_look_at_its_deliveries(
    installation: Installation,
) -> None:
    """Each would otherwise read those of the whole batch, while no delivery can be made."""
    messages = await make_batch(installation, kept=3)
    async with open_connection(installation.url, name="rooms retention") as connection:
        assert await prepare_session(connection)
        gone = await clean_default_partitions(connection, _BEFORE, None, lambda: True)
        await connection.execute("SELECT pg_stat_force_next_flush()")
    assert gone == _MESSAGES - 3
    left = await installation.rows("SELECT id::text FROM messages_rest ORDER BY id")
    assert [row["id"] for row in left] == messages[-3:]
    assert await installation.value("SELECT count(*) FROM deliveries_rest") == 3 * _FANOUT
    read = await installation.value(
        "SELECT (seq_tup_read + idx_tup_fetch)::int8 FROM pg_stat_user_tables WHERE relname = 'deliveries_rest'"
    )
    assert read < 20 * _MESSAGES * _FANOUT
