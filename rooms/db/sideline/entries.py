"""Track sidelined deliveries: which must be loaded into a magazine, and where the others are.

PostgreSQL decides. A row of `sidelined` means nothing once its delivery is no longer sidelined at
its generation; the next process that meets it deletes it. A row without a slot is an entry that the
magazine does not have yet.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.db.pg_arrays import literal_array, number_array, word_array
from rooms.db.statement_parts import JOIN_MESSAGE
from rooms.db.writer import LogWriter
from rooms.domain.ids import (
    DeliveryId,
    MessageId,
    OrganisationId,
    RoomId,
    SubscriptionId,
    first_id,
    is_id,
    room_of,
)
from rooms.domain.magazine import Slot
from rooms.domain.state_machine import ENDED_STATUSES, State

# All statements here find rows one by one by primary key; `rooms.db.leases.acquire` explains why.
JOIN_DELIVERY: Final = f"""CROSS JOIN LATERAL (
    SELECT * FROM deliveries d WHERE d.room_id = s.room_id AND d.id = s.id AND d.generation = s.generation
        AND d.state = '{State.SIDELINED}' LIMIT 1
) d"""  # noqa: S608 - constants of this package


# Spans rooms: each subscription costs one look into the index, however many rows it has.
_LIST_UNLOADED_SIDELINES: Final = """
WITH RECURSIVE w AS (
    (SELECT s.subscription_id AS id, s.room_id, 1 AS n FROM sidelined s
        WHERE s.shard IS NULL AND s.subscription_id > %(after)s::uuid ORDER BY s.subscription_id LIMIT 1)
    UNION ALL
    SELECT x.* FROM w CROSS JOIN LATERAL (
        SELECT s.subscription_id, s.room_id, w.n + 1 FROM sidelined s
        WHERE s.shard IS NULL AND s.subscription_id > w.id ORDER BY s.subscription_id LIMIT 1
    ) x WHERE w.n < %(limit)s::int4
)
SELECT 0, w.id::text, (SELECT u.organisation_id::text FROM subscriptions u WHERE u.room_id = w.room_id AND u.id = w.id)
FROM w UNION ALL SELECT 0, NULL, NULL
"""

# In the order of the given subscriptions, without a sort: only the rows that are returned are read.
_LIST_UNLOADED: Final = f"""
WITH s AS MATERIALIZED (
    SELECT s.*, v.n FROM unnest(%(subscription)s::uuid[]) WITH ORDINALITY AS v (id, n) CROSS JOIN LATERAL (
        SELECT * FROM sidelined s WHERE s.shard IS NULL AND s.subscription_id = v.id ORDER BY s.since LIMIT %(limit)s::int4
    ) s ORDER BY v.n LIMIT %(limit)s::int4
), found AS MATERIALIZED (
    SELECT s.room_id, s.id, s.subscription_id, s.generation, s.reason, s.since, d.message_id, d.attempts, d.shovels,
        d.last_status, d.last_error, d.expires_at, m.correlation_id, m.event_type, m.event_version, m.published_at
    FROM s {JOIN_DELIVERY} {JOIN_MESSAGE}
), stale AS (
    DELETE FROM sidelined t USING (SELECT * FROM s WHERE id NOT IN (SELECT id FROM found)) v
    WHERE t.room_id = ANY (ARRAY[v.room_id]) AND t.id = v.id AND t.generation = v.generation
)
SELECT 0, room_id, id::text, subscription_id::text, generation, reason, since, message_id::text, attempts, shovels,
    last_status, last_error, expires_at, correlation_id, event_type, event_version, published_at, NULL, NULL
FROM found
UNION ALL
SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, (SELECT count(*) FROM s), (SELECT max(n) FROM s)
"""  # noqa: S608 - constants of this package

# The missing shard is tested by an expression that no index matches: the index of all unloaded rows
# would be scanned for each row.
_RECORD_LOADED: Final = """
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

_RECORD_LOST: Final = """
WITH u AS (
    UPDATE sidelined t SET shard = NULL, pointer = NULL
    FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(shard)s::int2[], %(pointer)s::int8[]) AS v (room_id, id, shard, pointer)
    WHERE t.room_id = ANY (ARRAY[v.room_id]) AND t.id = v.id AND t.shard = v.shard AND t.pointer = v.pointer
    RETURNING 1
)
SELECT 0, count(*) FROM u
"""

# For the audit: spans rooms, by primary key.
_LIST_PLACED: Final = f"""
WITH s AS MATERIALIZED (
    SELECT * FROM sidelined WHERE (room_id, id) > (%(room)s::int4, %(after)s::uuid) ORDER BY room_id, id LIMIT %(limit)s::int4
), found AS MATERIALIZED (SELECT s.id FROM s {JOIN_DELIVERY})
SELECT 0, s.room_id, s.id::text, s.subscription_id::text, s.generation, s.shard, s.pointer, s.id IN (SELECT id FROM found)
FROM s UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL
"""  # noqa: S608 - constants of this package

# In the order of the given subscriptions, without a sort, each on from a position.
_LIST_PLACED_OF: Final = f"""
WITH s AS MATERIALIZED (
    SELECT s.*, v.n FROM unnest(%(subscription)s::uuid[], %(since)s::timestamptz[], %(after)s::uuid[])
        WITH ORDINALITY AS v (subscription_id, since, id, n) CROSS JOIN LATERAL (
            SELECT * FROM sidelined s WHERE s.subscription_id = v.subscription_id AND (s.since, s.id) > (v.since, v.id)
            ORDER BY s.since, s.id LIMIT %(limit)s::int4
        ) s ORDER BY v.n LIMIT %(limit)s::int4
), found AS MATERIALIZED (SELECT s.id FROM s {JOIN_DELIVERY})
SELECT 0, s.id::text, s.subscription_id::text, s.generation, s.shard, s.pointer, s.since, s.id IN (SELECT id FROM found)
FROM s UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL
"""  # noqa: S608 - constants of this package

_DELETE_STALE: Final = """
WITH gone AS (
    DELETE FROM sidelined t USING unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[]) AS v (room_id, id, generation)
    WHERE t.room_id = ANY (ARRAY[v.room_id]) AND t.id = v.id AND t.generation = v.generation RETURNING 1
) SELECT 0, count(*) FROM gone
"""

_RECORD_MAGAZINE: Final = """
WITH s AS (
    UPDATE subscriptions SET sideline_shards = %(shards)s::int2 WHERE room_id = %(room)s::int4 AND id = %(subscription)s::uuid
        AND sideline_shards IS DISTINCT FROM %(shards)s::int2 RETURNING 1
) SELECT 0, count(*) FROM s
"""

_FORGET_ENDED: Final = f"""
WITH gone AS (
    UPDATE subscriptions u SET sideline_shards = NULL
    FROM unnest(%(room)s::int4[], %(subscription)s::uuid[]) AS v (room_id, id)
    WHERE u.room_id = ANY (ARRAY[v.room_id]) AND u.id = v.id AND u.status IN ({", ".join(f"'{status}'" for status in sorted(ENDED_STATUSES))})
        AND NOT EXISTS (SELECT FROM sidelined s WHERE s.subscription_id = u.id AND -s.room_id = -u.room_id) RETURNING 1
) SELECT 0, count(*) FROM gone
"""  # noqa: S608 - constants of this package

# Spans rooms: the subscriptions that have a sideline, each page from the end of the last one.
_SUBSCRIPTIONS: Final = """
SELECT 0, id::text FROM (
    SELECT id FROM subscriptions WHERE sideline_shards IS NOT NULL AND id > %(after)s::uuid ORDER BY id LIMIT %(limit)s::int4
) s UNION ALL SELECT 0, NULL
"""

_SIDELINES: Final = """
SELECT 0, id::text, organisation_id::text FROM (
    SELECT id, organisation_id FROM subscriptions WHERE sideline_shards IS NOT NULL AND id > %(after)s::uuid
    ORDER BY id LIMIT %(limit)s::int4
) s UNION ALL SELECT 0, NULL, NULL
"""

_NEXT_POINTER: Final = """
SELECT 0, coalesce(max(pointer) + 1, 0) FROM sidelined
WHERE room_id = %(room)s::int4 AND subscription_id = %(subscription)s::uuid
"""

_SLOTS: Final = """
SELECT 0, s.id::text, s.shard, s.pointer FROM unnest(%(id)s::uuid[]) AS v (id) CROSS JOIN LATERAL (
    SELECT * FROM sidelined s WHERE s.room_id = %(room)s::int4 AND s.id = v.id AND s.shard IS NOT NULL LIMIT 1
) s UNION ALL SELECT 0, NULL, NULL, NULL
"""

_RECORD_MOVED: Final = """
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


EntryPosition = tuple[datetime, DeliveryId]
"""The place of a row in its sideline: rows are in the order in which they were sidelined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRef:
    """Name a sidelined delivery at one generation, and its entry's slot (None: not loaded yet)."""

    delivery_id: DeliveryId
    subscription_id: SubscriptionId
    generation: int
    slot: Slot | None

    @property
    def room_id(self) -> RoomId:
        """Return the room of both."""
        return room_of(self.delivery_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadedEntry:
    """Hold what an entry is made of."""

    ref: EntryRef
    reason: str
    since: datetime
    message_id: MessageId
    attempts: int
    shovels: int
    last_status: int | None
    last_error: str | None
    expires_at: datetime | None
    correlation_id: str | None
    """None, like the next three, if the message is gone (an orphan)."""
    event_type: str | None
    event_version: int | None
    published_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SidelineOwner:
    """Name a subscription that has a sideline (organisation None: the subscription is gone)."""

    subscription: SubscriptionId
    organisation: OrganisationId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadedPage:
    """Hold what magazines lack.

    `is_full`: there may be more; `reached`: number of subscriptions up to the last one with a row.
    """

    entries: Sequence[UnloadedEntry]
    is_full: bool
    reached: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEntry:
    """Hold a row of a sideline, and whether its delivery is still sidelined."""

    ref: EntryRef
    since: datetime
    sidelined: bool

    @property
    def position(self) -> EntryPosition:
        """Return the place of the row in the order of its sideline."""
        return self.since, self.ref.delivery_id


class SidelineEntries:
    """Update entries of sidelined deliveries through one writer.

    StorageUnavailableError: in doubt; StorageRefusedError: not done.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def list_unloaded_sidelines(
        self, after: SubscriptionId | None, *, limit: int = 1000
    ) -> list[SidelineOwner]:
        """Return the next subscriptions whose magazine lacks something, by id."""
        rows = await self._writer.run(
            _LIST_UNLOADED_SIDELINES, {"after": after or first_id(0), "limit": limit}
        )
        return [
            SidelineOwner(
                subscription=SubscriptionId(identity),
                organisation=None if organisation is None else OrganisationId(organisation),
            )
            for identity, organisation in rows
        ]

    async def list_unloaded(
        self, subscriptions: Sequence[SubscriptionId], *, limit: int
    ) -> UnloadedPage:
        """Return what the magazines of these lack: one after another, the oldest first."""
        parameters = {"subscription": word_array(subscriptions), "limit": limit}
        *rows, (*_, count, last) = await self._writer.run(_LIST_UNLOADED, parameters)
        is_full = count >= limit
        return UnloadedPage(
            entries=[_unloaded(row) for row in rows],
            is_full=is_full,
            reached=last if is_full else len(subscriptions),
        )

    async def record_loaded(self, refs: Sequence[EntryRef]) -> list[EntryRef]:
        """Record that these are in their slots.

        Return those that have moved on meanwhile: their entries must be deleted.
        """
        rows = await self._writer.run(
            _RECORD_LOADED,
            entry_arrays(refs)
            | {
                "shard": literal_array(step.slot and step.slot.shard for step in refs),
                "pointer": literal_array(step.slot and step.slot.pointer for step in refs),
            },
        )
        return [refs[n - 1] for (n,) in rows]

    async def record_lost(self, refs: Sequence[EntryRef]) -> int:
        """Record that the magazine has lost these, so that they are loaded again.

        Return how many were recorded there.
        """
        parameters = entry_arrays(refs) | {
            "shard": literal_array(step.slot and step.slot.shard for step in refs),
            "pointer": literal_array(step.slot and step.slot.pointer for step in refs),
        }
        del parameters["generation"]
        return int((await self._writer.run(_RECORD_LOST, parameters))[0][0])

    async def list_placed(
        self, after: tuple[RoomId, DeliveryId], *, limit: int
    ) -> list[tuple[EntryRef, bool]]:
        """Return the next references in the order of their keys.

        Each comes with whether it is still sidelined; the others must be deleted.
        """
        rows = await self._writer.run(
            _LIST_PLACED, {"room": after[0], "after": after[1], "limit": limit}
        )
        return [
            (
                EntryRef(
                    delivery_id=DeliveryId(identity),
                    subscription_id=SubscriptionId(subscription),
                    generation=generation,
                    slot=None if shard is None else Slot(shard, pointer),
                ),
                sidelined,
            )
            for _, identity, subscription, generation, shard, pointer, sidelined in rows
        ]

    async def list_placed_of(
        self, positions: Mapping[SubscriptionId, EntryPosition | None], *, limit: int
    ) -> list[PlacedEntry]:
        """Return the next rows of these subscriptions, one after another, each on from a position.

        Those of deliveries that are not sidelined any more must be deleted.
        """
        parameters = {
            "subscription": word_array(positions),
            "since": word_array(
                "-infinity" if at is None else at[0].isoformat() for at in positions.values()
            ),
            "after": word_array(first_id(0) if at is None else at[1] for at in positions.values()),
            "limit": limit,
        }
        return [
            PlacedEntry(
                ref=EntryRef(
                    delivery_id=DeliveryId(identity),
                    subscription_id=SubscriptionId(subscription),
                    generation=generation,
                    slot=None if shard is None else Slot(shard, pointer),
                ),
                since=since,
                sidelined=sidelined,
            )
            for identity, subscription, generation, shard, pointer, since, sidelined in (
                await self._writer.run(_LIST_PLACED_OF, parameters)
            )
        ]

    async def find_slots(
        self, subscription: SubscriptionId, deliveries: Sequence[DeliveryId]
    ) -> Mapping[DeliveryId, Slot]:
        """Return the recorded slots of these deliveries' entries.

        Deliveries without a row or a slot are left out, and so is text that can be no delivery id.
        """
        ids = [delivery for delivery in deliveries if is_id(delivery)]
        parameters = {"room": room_of(subscription), "id": word_array(ids)}
        rows = await self._writer.run(_SLOTS, parameters)
        return {DeliveryId(identity): Slot(shard, pointer) for identity, shard, pointer in rows}

    async def record_moved(self, refs: Sequence[EntryRef], slots: Sequence[Slot]) -> list[bool]:
        """Record that these entries are in other slots now.

        Return for each whether its row was updated (the others have moved on).
        """
        parameters = entry_arrays(refs) | {
            "from_shard": literal_array(step.slot and step.slot.shard for step in refs),
            "from_pointer": literal_array(step.slot and step.slot.pointer for step in refs),
            "shard": number_array(slot.shard for slot in slots),
            "pointer": number_array(slot.pointer for slot in slots),
        }
        updated = {n - 1 for (n,) in await self._writer.run(_RECORD_MOVED, parameters)}
        return [n in updated for n in range(len(refs))]

    async def delete_stale(self, refs: Sequence[EntryRef]) -> int:
        """Delete rows that mean nothing any more; the caller has deleted their entries.

        Return how many there were.
        """
        return int((await self._writer.run(_DELETE_STALE, entry_arrays(refs)))[0][0])

    async def record_magazine(self, subscription: SubscriptionId, *, shards: int) -> None:
        """Record that the subscription has a sideline magazine of so many shards."""
        parameters = {"room": room_of(subscription), "subscription": subscription, "shards": shards}
        await self._writer.run(_RECORD_MAGAZINE, parameters)

    async def forget_ended(self, subscriptions: Sequence[SubscriptionId]) -> int:
        """Record that those of these that have ended and have no row have no magazine any more.

        Return how many. Otherwise each would be looked at for as long as its room exists.
        """
        rooms = number_array(room_of(one) for one in subscriptions)
        parameters = {"room": rooms, "subscription": word_array(subscriptions)}
        return int((await self._writer.run(_FORGET_ENDED, parameters))[0][0])

    async def list_subscriptions(
        self, after: SubscriptionId | None, *, limit: int = 1000
    ) -> list[SubscriptionId]:
        """Return the next subscriptions that have a sideline magazine, by id.

        Deleted ones are included until the audit finds nothing of them.
        """
        rows = await self._writer.run(
            _SUBSCRIPTIONS, {"after": after or first_id(0), "limit": limit}
        )
        return [SubscriptionId(identity) for (identity,) in rows]

    async def list_sidelines(
        self, after: SubscriptionId | None, *, limit: int = 1000
    ) -> list[SidelineOwner]:
        """Return the subscriptions of `list_subscriptions` with their organisations."""
        rows = await self._writer.run(_SIDELINES, {"after": after or first_id(0), "limit": limit})
        return [
            SidelineOwner(
                subscription=SubscriptionId(identity), organisation=OrganisationId(organisation)
            )
            for identity, organisation in rows
        ]

    async def next_pointer(self, subscription: SubscriptionId) -> int:
        """Return a pointer beyond every slot that a row of this sideline names."""
        rows = await self._writer.run(
            _NEXT_POINTER, {"room": room_of(subscription), "subscription": subscription}
        )
        return int(rows[0][0])


def entry_arrays(refs: Sequence[EntryRef]) -> dict[str, str]:
    return {
        "room": number_array(step.room_id for step in refs),
        "id": word_array(step.delivery_id for step in refs),
        "generation": number_array(step.generation for step in refs),
    }


def _unloaded(row: tuple[Any, ...]) -> UnloadedEntry:
    (
        _,
        identity,
        subscription,
        generation,
        reason,
        since,
        message,
        attempts,
        shovels,
        status,
        error,
        *rest,
        _,
        _,
    ) = row
    expires_at, correlation_id, event_type, event_version, published_at = rest
    return UnloadedEntry(
        ref=EntryRef(
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
