"""What workers are told of a subscription's policy: its own overrides, each by itself, and the room's rest."""

import itertools
import random

import pytest

from rooms.domain.ids import IdMaker, RoomId, SubscriptionId
from rooms.storage.endpoints import load_endpoints
from rooms.storage.engine import connection_for

ROOM = RoomId(7)
OF_ROOM = (1_000, 2.0, 5)
OWN = (250, 1.5, 0)
COLUMNS = ("delivery_delay_ms", "delivery_delay_multiplier", "delivery_attempts")


@pytest.mark.row("A3")
async def test_each_override_stands_on_its_own(database: str) -> None:
    ids = IdMaker(random.Random(1).getrandbits)
    organisation = ids.global_id(1)
    async with connection_for(database, name="test") as connection:
        await connection.execute("INSERT INTO organisations (id, name) VALUES (%s, 'o')", (organisation,))
        await connection.execute(
            "INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms, delivery_delay_multiplier, delivery_attempts,"
            " delivery_max_delay_ms, delivery_jitter) VALUES (%s, %s, 'r', %s, %s, %s, 9000, 0.25)",
            (ROOM, organisation, *OF_ROOM),
        )
        expected = {}
        for overridden in itertools.product([False, True], repeat=3):
            identity = SubscriptionId(ids.make(ROOM, 1))
            given = [own if override else None for own, override in zip(OWN, overridden, strict=True)]
            await connection.execute(
                f"INSERT INTO subscriptions (room_id, id, name, type, push_url, timeout_ms, {', '.join(COLUMNS)})"  # type: ignore[arg-type, unused-ignore]
                " VALUES (%s, %s, %s, 'PUSH', 'http://a.test/', 1000, %s, %s, %s)",
                (ROOM, identity, identity, *given),
            )
            expected[identity] = tuple(
                room if value is None else value for value, room in zip(given, OF_ROOM, strict=True)
            )
        found = await load_endpoints(connection, [(ROOM, identity) for identity in expected])
    assert {record.organisation_id for record in found.values()} == {organisation}
    policies = {identity: record.policy for identity, record in found.items()}
    assert {
        identity: (policy.delay_ms, policy.multiplier, policy.attempts) for identity, policy in policies.items()
    } == expected
    assert {(policy.max_delay_ms, policy.jitter) for policy in policies.values()} == {(9_000, 0.25)}
