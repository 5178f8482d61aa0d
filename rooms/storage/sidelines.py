"""Sidelined deliveries and their entries: what is to be loaded into the magazine, and where it stands there.

PostgreSQL wins. A row of `sidelined` whose delivery is not sidelined at its generation any more means nothing and is
cleared away by whoever meets it; a row without a slot is an entry that the magazine does not have yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.domain.ids import DeliveryId, MessageId, RoomId, SubscriptionId, first_id, is_id, room_of
from rooms.domain.magazine import Slot
from rooms.domain.states import State
from rooms.storage.literals import array, numbers, plain
from rooms.storage.writer import Writer

# Whatever reads and writes here finds rows one by one by primary key: `rooms.storage.leases` says why.
DELIVERY: Final = f"""CROSS JOIN LATERAL (
    SELECT * FROM deliveries d WHERE d.room_id = s.room_id AND d.id = s.id AND d.generation = s.generation
        AND d.state = '{State.SIDELINED}' LIMIT 1
) d"""  # noqa: S608 - words of our own
MESSAGE: Final = """LEFT JOIN LATERAL (
    SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
) m ON true"""

# Spans rooms: one member loads for all of them.
_UNLOADED: Final = f"""
WITH s AS MATERIALIZED (
    SELECT * FROM sidelined WHERE shard IS NULL ORDER BY since LIMIT %(limit)s::int4
), found AS MATERIALIZED (
    SELECT s.room_id, s.id, s.subscription_id, s.generation, s.reason, s.since, d.message_id, d.attempts, d.shovels,
        d.last_status, d.last_error, d.expires_at, m.correlation_id, m.event_type, m.event_version, m.published_at
    FROM s {DELIVERY} {MESSAGE}
), stale AS (
    DELETE FROM sidelined t USING (SELECT * FROM s WHERE id NOT IN (SELECT id FROM found)) v
    WHERE t.room_id = ANY (ARRAY[v.room_id]) AND t.id = v.id AND t.generation = v.generation
)
SELECT 0, room_id, id::text, subscription_id::text, generation, reason, since, message_id::text, attempts, shovels,
    last_status, last_error, expires_at, correlation_id, event_type, event_version, published_at, (SELECT count(*) FROM s)
FROM found
UNION ALL
SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, (SELECT count(*) FROM s)
"""  # noqa: S608 - text of our own

# That it has no shard is said so that no index knows it: the one of all that is unloaded would be walked for each row.
_LOADED: Final = """
WITH v AS MATERIALIZED (
    SELECT * FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(shard)s::int2[], %(pointer)s::int8[])
        WITH ORDINALITY AS v (room_id, id, generation, shard, pointer, n)
), u AS (
    UPDATE sidelined t SET shard = v.shard, pointer = v.pointer FROM v
    WHERE t.room_id = ANY (ARRAY[v.room_id]) AND t.id = v.id AND t.generation = v.generation AND coalesce(t.shard, -1) = -1
    RETURNING v.n
)
SELECT 0, n FROM v WHERE n NOT IN (SELECT n FROM u) UNION ALL SELECT 0, NULL
"""

_LOST: Final = """
WITH u AS (
    UPDATE sidelined t SET shard = NULL, pointer = NULL
    FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(shard)s::int2[], %(pointer)s::int8[]) AS v (room_id, id, shard, pointer)
    WHERE t.room_id = ANY (ARRAY[v.room_id]) AND t.id = v.id AND t.shard = v.shard AND t.pointer = v.pointer
    RETURNING 1
)
SELECT 0, count(*) FROM u
"""

# For the audit: spans rooms, by primary key.
_PLACED: Final = f"""
WITH s AS MATERIALIZED (
    SELECT * FROM sidelined WHERE (room_id, id) > (%(room)s::int4, %(after)s::uuid) ORDER BY room_id, id LIMIT %(limit)s::int4
), found AS MATERIALIZED (SELECT s.id FROM s {DELIVERY})
SELECT 0, s.room_id, s.id::text, s.subscription_id::text, s.generation, s.shard, s.pointer, s.id IN (SELECT id FROM found)
FROM s UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL
"""  # noqa: S608 - text of our own

_FORGET: Final = """
WITH gone AS (
    DELETE FROM sidelined t USING unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[]) AS v (room_id, id, generation)
    WHERE t.room_id = ANY (ARRAY[v.room_id]) AND t.id = v.id AND t.generation = v.generation RETURNING 1
) SELECT 0, count(*) FROM gone
"""

_MADE: Final = """
WITH s AS (
    UPDATE subscriptions SET sideline_shards = %(shards)s::int2 WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid
        AND sideline_shards IS DISTINCT FROM %(shards)s::int2 RETURNING 1
) SELECT 0, count(*) FROM s
"""

# Spans rooms: who has a sideline, each page from where the last one ended.
_SUBSCRIPTIONS: Final = """
SELECT 0, id::text FROM (
    SELECT id FROM subscriptions WHERE sideline_shards IS NOT NULL AND id > %(after)s::uuid ORDER BY id LIMIT %(limit)s::int4
) s UNION ALL SELECT 0, NULL
"""

_BEYOND: Final = """
SELECT 0, coalesce(max(pointer) + 1, 0) FROM sidelined
WHERE room_id = %(room)s::int4 AND subscription_id = %(subscription)s::uuid
"""

_SLOTS: Final = """
SELECT 0, s.id::text, s.shard, s.pointer FROM unnest(%(id)s::uuid[]) AS v (id) CROSS JOIN LATERAL (
    SELECT * FROM sidelined s WHERE s.room_id = %(room)s::int4 AND s.id = v.id AND s.shard IS NOT NULL LIMIT 1
) s UNION ALL SELECT 0, NULL, NULL, NULL
"""

_MOVED: Final = """
WITH u AS (
    UPDATE sidelined t SET shard = v.shard, pointer = v.pointer
    FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(from_shard)s::int2[], %(from_pointer)s::int8[],
        %(shard)s::int2[], %(pointer)s::int8[])
        WITH ORDINALITY AS v (room_id, id, generation, from_shard, from_pointer, shard, pointer, n)
    WHERE t.room_id = ANY (ARRAY[v.room_id]) AND t.id = v.id AND t.generation = v.generation
        AND t.shard = v.from_shard AND t.pointer = v.from_pointer
    RETURNING v.n
)
SELECT 0, n FROM u UNION ALL SELECT 0, NULL
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A sidelined delivery at one generation, and where its entry is (None: the magazine does not have it yet)."""

    delivery_id: DeliveryId
    subscription_id: SubscriptionId
    generation: int
    slot: Slot | None

    @property
    def room_id(self) -> RoomId:
        """The room of both."""
        return room_of(self.delivery_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloaded:
    """What an entry is made of."""

    step: Step
    reason: str
    since: datetime
    message_id: MessageId
    attempts: int
    shovels: int
    last_status: int | None
    last_error: str | None
    expires_at: datetime | None
    correlation_id: str | None
    """None, like the next three, where the message is gone (an orphan)."""
    event_type: str | None
    event_version: int | None
    published_at: datetime | None


class Sidelines:
    """Moves sidelined deliveries through one writer. StorageUnavailableError: in doubt; StorageRefusedError: not done."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def unloaded(self, *, limit: int) -> tuple[list[Unloaded], bool]:
        """What the magazines do not have yet, the longest waiting first; and whether there may be more."""
        rows = await self._writer.run(_UNLOADED, {"limit": limit})
        return [_unloaded(row) for row in rows[:-1]], rows[-1][-1] >= limit

    async def loaded(self, steps: Sequence[Step]) -> list[Step]:
        """These are in their slots now. Those among them that have moved on meanwhile: their entries are to be deleted."""
        rows = await self._writer.run(
            _LOADED,
            keys_of(steps)
            | {
                "shard": array(step.slot and step.slot.shard for step in steps),
                "pointer": array(step.slot and step.slot.pointer for step in steps),
            },
        )
        return [steps[n - 1] for (n,) in rows]

    async def lost(self, steps: Sequence[Step]) -> int:
        """The magazine does not have these in their slots: they are to be loaded again. How many were believed there."""
        parameters = keys_of(steps) | {
            "shard": array(step.slot and step.slot.shard for step in steps),
            "pointer": array(step.slot and step.slot.pointer for step in steps),
        }
        del parameters["generation"]
        return int((await self._writer.run(_LOST, parameters))[0][0])

    async def placed(self, after: tuple[RoomId, DeliveryId], *, limit: int) -> list[tuple[Step, bool]]:
        """The next steps in the order of their keys, and whether each is still sidelined; the others are to be forgotten."""
        rows = await self._writer.run(_PLACED, {"room": after[0], "after": after[1], "limit": limit})
        return [
            (
                Step(
                    delivery_id=DeliveryId(identity),
                    subscription_id=SubscriptionId(subscription),
                    generation=generation,
                    slot=None if shard is None else Slot(shard, pointer),
                ),
                sidelined,
            )
            for _, identity, subscription, generation, shard, pointer, sidelined in rows
        ]

    async def slots(self, subscription: SubscriptionId, deliveries: Sequence[DeliveryId]) -> Mapping[DeliveryId, Slot]:
        """Where the rows say that the entries of these deliveries are; those without a row or a slot are left out, and so is
        what can be no delivery's id.
        """
        ours = [delivery for delivery in deliveries if is_id(delivery)]
        parameters = {"room": room_of(subscription), "id": plain(ours)}
        rows = await self._writer.run(_SLOTS, parameters)
        return {DeliveryId(identity): Slot(shard, pointer) for identity, shard, pointer in rows}

    async def moved(self, steps: Sequence[Step], slots: Sequence[Slot]) -> list[bool]:
        """The entries of these steps stand elsewhere now; which rows could be told (the others have moved on)."""
        parameters = keys_of(steps) | {
            "from_shard": array(step.slot and step.slot.shard for step in steps),
            "from_pointer": array(step.slot and step.slot.pointer for step in steps),
            "shard": numbers(slot.shard for slot in slots),
            "pointer": numbers(slot.pointer for slot in slots),
        }
        told = {n - 1 for (n,) in await self._writer.run(_MOVED, parameters)}
        return [n in told for n in range(len(steps))]

    async def forget(self, steps: Sequence[Step]) -> int:
        """Clear rows away that mean nothing any more; their entries are deleted before. How many there were."""
        return int((await self._writer.run(_FORGET, keys_of(steps)))[0][0])

    async def made(self, subscription: SubscriptionId, *, shards: int) -> None:
        """The subscription has a sideline magazine of so many shards."""
        asked = {"room": room_of(subscription), "subscription": subscription, "shards": shards}
        await self._writer.run(_MADE, asked)

    async def subscriptions(self, after: SubscriptionId | None, *, limit: int = 1000) -> list[SubscriptionId]:
        """The next subscriptions that have a sideline magazine, by id; deleted ones too, until their room is gone."""
        rows = await self._writer.run(_SUBSCRIPTIONS, {"after": after or first_id(0), "limit": limit})
        return [SubscriptionId(identity) for (identity,) in rows]

    async def beyond(self, subscription: SubscriptionId) -> int:
        """A pointer beyond every slot that a row of this sideline names."""
        rows = await self._writer.run(_BEYOND, {"room": room_of(subscription), "subscription": subscription})
        return int(rows[0][0])


def keys_of(steps: Sequence[Step]) -> dict[str, str]:
    return {
        "room": numbers(step.room_id for step in steps),
        "id": plain(step.delivery_id for step in steps),
        "generation": numbers(step.generation for step in steps),
    }


def _unloaded(row: tuple[Any, ...]) -> Unloaded:
    _, identity, subscription, generation, reason, since, message, attempts, shovels, status, error, *rest, _ = row
    expires_at, correlation_id, event_type, event_version, published_at = rest
    return Unloaded(
        step=Step(
            delivery_id=DeliveryId(identity),
            subscription_id=SubscriptionId(subscription),
            generation=generation,
            slot=None,
        ),
        reason=reason,
        since=since,
        message_id=MessageId(message),
        attempts=attempts,
        shovels=shovels,
        last_status=status,
        last_error=error,
        expires_at=expires_at,
        correlation_id=correlation_id,
        event_type=event_type,
        event_version=event_version,
        published_at=published_at,
    )
