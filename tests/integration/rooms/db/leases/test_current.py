"""Test what is found of leases without ack ids, and that it is found by index among many."""

import json
from typing import Any, Final

import pytest

from rooms.db.connection import open_engine, transaction
from rooms.db.leases import current
from rooms.domain.ids import RoomId, SubscriptionId
from tests.support.installation import ROOM, Installation

MANY: Final = 20_000
LEASE: Final = current.LeaseId("ffffffff-0000-7000-8000-000000000001", 3)
SUBSCRIPTION: Final = SubscriptionId("00000000-0000-7000-8000-000000000001")
FILL: Final = """
INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at)
SELECT %s, lpad(to_hex(n), 32, '0')::uuid, lpad(to_hex(n), 32, '0')::uuid, lpad(to_hex(n %% 100 + 7), 32, '0')::uuid,
    CASE n %% 3 WHEN 0 THEN 0 WHEN 1 THEN 1 ELSE 3 END, n %% 10, 0, 0, now() - interval '1 s'
FROM generate_series(1, %s::int8) AS n
"""
FILL_LEASES: Final = """
INSERT INTO leases (room_id, id, subscription_id, generation, until)
SELECT n, lpad(to_hex(n), 32, '0')::uuid, lpad(to_hex(n), 32, '0')::uuid, 0, now() + interval '1 h'
FROM generate_series(10, %s::int8) AS n
"""
FILL_ORDERED: Final = """
WITH keys AS (
    INSERT INTO ordered_keys (room_id, subscription_id, key, tail, head, head_id, since)
    SELECT {room}, lpad(to_hex(n), 32, '0')::uuid, 'key', 3, 1, lpad(to_hex(n), 32, '0')::uuid, now()
    FROM generate_series(1, {many}::int8) AS n
) INSERT INTO ordered_waiting (room_id, subscription_id, key, position, id)
SELECT {room}, lpad(to_hex(n), 32, '0')::uuid, 'key', p, gen_random_uuid()
FROM generate_series(1, {many}::int8) AS n, generate_series(2, 3) AS p
"""
OUTBOX: Final = """
INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
VALUES (%s, gen_random_uuid(), gen_random_uuid(), %s, %s, 4, 0, 0, now() + %s * interval '1 s', now() + %s * interval '1 s')
"""


@pytest.mark.parametrize("kind", [1, 3, 5])
async def test_what_is_due_is_seen_with_every_broker(installation: Installation, kind: int) -> None:
    async def has_due() -> bool:
        engine = open_engine(installation.url, size=1)
        try:
            async with transaction(engine) as connection:
                return await current.has_due(connection, RoomId(ROOM), SUBSCRIPTION, LEASE)
        finally:
            await engine.dispose()

    assert not await has_due()
    await installation.rows(OUTBOX, ROOM, SUBSCRIPTION, kind, 60, 120)
    assert not await has_due(), "it is due later"
    await installation.rows(OUTBOX, ROOM, SUBSCRIPTION, kind, -60, -1)
    assert not await has_due(), "it has expired"
    await installation.rows(OUTBOX, ROOM, SUBSCRIPTION, kind, -60, 60)
    assert await has_due()


async def test_a_long_queue_is_not_read(installation: Installation) -> None:
    await installation.rows(FILL, ROOM, MANY)
    await installation.rows(FILL_LEASES, MANY)
    await installation.rows(FILL_ORDERED.format(room=ROOM, many=MANY))
    await installation.rows("VACUUM ANALYZE outbox")
    await installation.rows("VACUUM ANALYZE leases")
    await installation.rows("VACUUM ANALYZE ordered_keys")
    await installation.rows("VACUUM ANALYZE ordered_waiting")
    values = {"room": ROOM, "subscription": SUBSCRIPTION, "most": current.MAX_LEASES_READ}
    values |= {"holder": "key app", "delivery": SUBSCRIPTION, "generation": 0}
    values |= {"leased": f"{MANY // 2:032x}", "order": "order"}
    engine = open_engine(installation.url, size=1)
    try:
        for statement in (current._DUE, current._LEASED, current._TAKE_HELD, current._HOLD):
            async with transaction(engine) as connection:
                explain: Any = type(statement)(
                    f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
                )
                plan = (await connection.execute(explain, values)).scalar_one()
            found = plan if isinstance(plan, list) else json.loads(plan)
            top = found[0]["Plan"]
            assert top["Shared Hit Blocks"] + top["Shared Read Blocks"] < 100, top
    finally:
        await engine.dispose()


async def test_leases_of_others_do_not_hide_what_a_holder_has(installation: Installation) -> None:
    """In a shared room another organisation may have any number of leases."""
    await installation.rows(
        FILL_LEASES.replace("SELECT n,", f"SELECT {ROOM},"), current.MAX_LEASES_READ + 100
    )
    lease = LEASE
    await installation.rows(
        "INSERT INTO leases (room_id, id, subscription_id, generation, until)"
        " VALUES (%s, %s, %s, %s, now() + interval '1 h')",
        ROOM, lease.delivery, SUBSCRIPTION, lease.generation,
    )  # fmt: skip
    room, engine = RoomId(ROOM), open_engine(installation.url, size=1)
    try:
        async with transaction(engine) as connection:
            await current.hold(connection, room, lease, "key app")
            assert await current.take_held(connection, room, SUBSCRIPTION, "other app") is None
            assert await current.take_held(connection, room, SUBSCRIPTION, "key app") == lease
            assert await current.take_held(connection, room, SUBSCRIPTION, "key app") is None
    finally:
        await engine.dispose()
