"""Check the policy that workers load for a subscription: each override of its own, and the room's defaults."""

import itertools
import random

from rooms.db.connection import open_connection
from rooms.db.queue.endpoints import load_endpoints
from rooms.domain.ids import IdGenerator, RoomId, SubscriptionId

ROOM = RoomId(7)
OF_ROOM = (1_000, 2.0, 5, 9_000, 0.25)
OWN = (250, 1.5, 0, 0, 0.0)
COLUMNS = (
    "delivery_delay_ms",
    "delivery_delay_multiplier",
    "delivery_attempts",
    "delivery_max_delay_ms",
    "delivery_jitter",
)


async def test_each_override_works_independently(database: str) -> None:
    ids = IdGenerator(random.Random(1).getrandbits)
    organisation = ids.generate_global(1)
    async with open_connection(database, name="test") as connection:
        await connection.execute(
            "INSERT INTO organisations (id, name) VALUES (%s, 'o')", (organisation,)
        )
        await connection.execute(
            "INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms, delivery_delay_multiplier, delivery_attempts,"
            " delivery_max_delay_ms, delivery_jitter) VALUES (%s, %s, 'r', %s, %s, %s, %s, %s)",
            (ROOM, organisation, *OF_ROOM),
        )
        expected = {}
        for overridden in itertools.product([False, True], repeat=len(OWN)):
            identity = SubscriptionId(ids.generate(ROOM, 1))
            given = [
                own if override else None for own, override in zip(OWN, overridden, strict=True)
            ]
            await connection.execute(
                f"INSERT INTO subscriptions (organisation_id, room_id, id, name, type, push_url, timeout_ms, {', '.join(COLUMNS)})"  # type: ignore[arg-type, unused-ignore]
                " VALUES (%s, %s, %s, %s, 'PUSH', 'http://a.test/', 1000, %s, %s, %s, %s, %s)",
                (organisation, ROOM, identity, identity, *given),
            )
            expected[identity] = tuple(
                room if value is None else value for value, room in zip(given, OF_ROOM, strict=True)
            )
        found = await load_endpoints(connection, [(ROOM, identity) for identity in expected])
    assert {record.organisation_id for record in found.values()} == {organisation}
    policies = {identity: record.policy for identity, record in found.items()}
    assert {
        identity: (
            policy.delay_ms,
            policy.multiplier,
            policy.attempts,
            policy.max_delay_ms,
            policy.jitter,
        )
        for identity, policy in policies.items()
    } == expected
