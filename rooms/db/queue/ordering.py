"""Deliver in order per key: a delivery waits as `held`/`order` until those before it have ended.

Of each (subscription, ordering key) at most one delivery is released: the **head**, named by the
key's row of `ordered_keys`. A publish inserts that row (`rooms.db.publish.insert`). The statement
that ends the head advances the key to the next delivery. Those behind it are in `ordered_waiting`,
numbered in the order of commits. Both tables are empty where nothing is ordered or in progress.

A publish updates a key's row after every other publish of that key, whatever its snapshot. A
statement that advances a key sees one state of the database or starts again (`LogWriter`,
isolated), so it sees everything behind the head. With a writer that is not isolated, a row that was
changed meanwhile stays as it is, and maintenance advances the key.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rooms.db.pg_arrays import literal_array
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId, room_of
from rooms.domain.state_machine import LogKind, Reason, State
from rooms.domain.work_location import SCHEDULED, TO_RELAY

ENDED_STATES: Final = "('delivered', 'handed_over', 'dropped', 'expired', 'cancelled', 'purged')"
"""The states in which a head makes way for the next. A sidelined head does not: its key is blocked.
"""

# `ended` may contain deliveries that were waiting: they are not released. Waiting rows before the
# released one are obsolete; few are left, as `leave_line` has deleted the others. The key's row is
# found by its head, so one look into an empty index is all it costs without ordering.
_ADVANCE_CTES: Final = """, next_up AS MATERIALIZED (
    SELECT k.room_id, k.subscription_id, k.key, k.head, k.tail, n.position, n.id AS next
    FROM ({ended}) e CROSS JOIN LATERAL (
        SELECT * FROM ordered_keys k WHERE k.head_id = e.id AND k.room_id = e.room_id LIMIT 1
    ) k LEFT JOIN LATERAL (
        SELECT w.position, w.id FROM ordered_waiting w
        WHERE w.room_id = k.room_id AND w.subscription_id = k.subscription_id AND w.key = k.key AND w.position > k.head
            AND w.id NOT IN (SELECT id FROM ({ended}) x) AND EXISTS (
                SELECT FROM deliveries t WHERE t.room_id = w.room_id AND t.id = w.id AND t.state = 'held'
                    AND t.reason = '{reason}' OFFSET 0)
        ORDER BY w.position LIMIT 1
    ) n ON true
    ORDER BY 1, 2, 3
), key_passed AS (
    UPDATE ordered_keys k SET head = o.position, head_id = o.next, since = now() FROM next_up o
    WHERE o.next IS NOT NULL AND k.room_id = ANY (ARRAY[o.room_id]) AND k.subscription_id = o.subscription_id AND k.key = o.key
        AND k.head = o.head
), key_freed AS (
    DELETE FROM ordered_keys k USING next_up o
    WHERE o.next IS NULL AND k.room_id = ANY (ARRAY[o.room_id]) AND k.subscription_id = o.subscription_id AND k.key = o.key
        AND k.head = o.head AND k.tail = o.tail
), key_called AS (
    DELETE FROM ordered_waiting w USING next_up o
    WHERE w.room_id = ANY (ARRAY[o.room_id]) AND w.subscription_id = o.subscription_id AND w.key = o.key
        AND (o.next IS NULL OR w.position <= o.position)
)"""
# If a webhook was spared, its backlog is drained at a set rate. A delivery that has waited for its
# turn since then is held with the backlog, so that the drain releases it.
_RELEASE_NEXT_CTES: Final = """, turn_spared AS MATERIALIZED (
    SELECT s.room_id, s.id,
        CASE WHEN l.circuit_since > s.status_since THEN '{circuit}' ELSE '{paused}' END AS reason,
        greatest(s.status_since, l.circuit_since) AS until
    FROM (SELECT DISTINCT room_id, subscription_id FROM next_up WHERE next IS NOT NULL) o CROSS JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = o.room_id AND s.id = o.subscription_id LIMIT 1
    ) s CROSS JOIN LATERAL (
        SELECT * FROM rooms r WHERE r.id = o.room_id LIMIT 1
    ) r LEFT JOIN LATERAL (
        SELECT * FROM lanes l WHERE l.room_id = o.room_id AND l.id = o.subscription_id LIMIT 1
    ) l ON true
    WHERE s.push_url IS NOT NULL AND s.status = 'active' AND coalesce(s.drain_per_s, r.drain_per_s) > 0
        AND l.circuit_open IS NOT TRUE
), turn_due AS MATERIALIZED (
    SELECT o.room_id, o.next, p.reason, p.until FROM next_up o
        LEFT JOIN turn_spared p ON p.room_id = o.room_id AND p.id = o.subscription_id WHERE o.next IS NOT NULL
), turn AS (
    UPDATE deliveries t SET state = CASE WHEN {drained} THEN 'held' WHEN {late} THEN 'scheduled' ELSE 'queued' END::delivery_state,
        reason = CASE WHEN {drained} THEN o.reason END, generation = t.generation + CASE WHEN {drained} THEN 0 ELSE 1 END,
        due_at = greatest(t.due_at, now()), updated_at = now()
    FROM turn_due o WHERE t.room_id = o.room_id AND t.id = o.next AND t.state = 'held' AND t.reason = '{reason}'
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.state, t.reason, t.generation, t.attempt, t.due_at, t.expires_at
), turn_parked AS (
    DELETE FROM held h USING turn t WHERE h.room_id = ANY (ARRAY[t.room_id]) AND h.id = t.id AND t.state <> 'held'
), turn_drained AS (
    UPDATE held h SET reason = t.reason FROM turn t WHERE h.room_id = ANY (ARRAY[t.room_id]) AND h.id = t.id AND t.state = 'held'
), turn_sent AS (
    SELECT t.*, coalesce(m.priority, 0) AS priority, m.event_type, m.event_version, m.correlation_id, s.type,
        s.version - s.lane_changes AS policy
    FROM turn t LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = t.room_id AND m.id = t.message_id LIMIT 1
    ) m ON true CROSS JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = t.room_id AND s.id = t.subscription_id LIMIT 1
    ) s WHERE t.state <> 'held'
), turn_out AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, CASE type WHEN 'PULL' THEN {pull} ELSE {push} END
        + CASE state WHEN 'scheduled' THEN {further} ELSE 0 END, priority, generation, attempt, due_at, expires_at FROM turn_sent
), turns AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, detail)
    SELECT {writer}, {seq} - 1 + {logged} + row_number() OVER (), room_id, message_id, '{released}', subscription_id, id,
        generation, attempt, event_type, event_version, correlation_id, policy, '{reason}' FROM turn_sent
    RETURNING 1
)"""
_MODE_PARAMETERS: Final = ("%(push)s::int2", "%(pull)s::int2", "%(lookahead)s::int8")
_WRITER_PARAMETERS: Final = ("%(writer)s", "%(seq)s")


def _release_next(
    mode_parameters: tuple[str, str, str], writer: tuple[str, str], logged: str
) -> str:
    push, pull, lookahead = mode_parameters
    return _RELEASE_NEXT_CTES.format(
        reason=Reason.ORDER,
        circuit=Reason.CIRCUIT_OPEN,
        paused=Reason.PAUSED,
        drained="(t.updated_at < o.until AND coalesce(t.due_at, now()) <= now()) IS TRUE",
        late=f"extract(epoch FROM t.due_at - now()) * 1000 > {lookahead}",
        push=push,
        pull=pull,
        further=SCHEDULED[0] - TO_RELAY[0],
        writer=writer[0],
        seq=writer[1],
        logged=logged,
        released=LogKind.RELEASED,
    )


def advance_ordering(
    ended: str,
    *,
    logged: str = "(SELECT count(*) FROM l)",
    mode_parameters: tuple[str, str, str] = _MODE_PARAMETERS,
    writer: tuple[str, str] = _WRITER_PARAMETERS,
) -> str:
    """Return CTEs for a statement that ends deliveries.

    They queue the next delivery in each key whose head ended. `ended` selects (room_id, id) of what
    has just ended, heads or not. `logged` counts the log rows that the statement itself writes.
    Those written here are counted by `RELEASED_COUNT`, which must be added to its first column.
    `mode_parameters` are the texts of the parameters push, pull and lookahead, `writer` those of
    the writer's id and next number.
    """
    return _ADVANCE_CTES.format(ended=ended, reason=Reason.ORDER) + _release_next(
        mode_parameters, writer, logged
    )


# No lock is waited for: a row that another statement has locked stays, and is obsolete then. Its
# index is by id; the sign leaves the primary key out, by which all of the room would be read.
_LEAVE_LINE_CTES: Final = """, line_left AS MATERIALIZED (
    SELECT w.room_id, w.id FROM ({ended}) e CROSS JOIN LATERAL (
        SELECT w.room_id, w.id FROM ordered_waiting w WHERE -w.room_id = -e.room_id AND w.id = e.id
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) w
), line_freed AS (
    DELETE FROM ordered_waiting w USING line_left l WHERE -w.room_id = -l.room_id AND w.id = ANY (ARRAY[l.id])
)"""


def leave_line(ended: str) -> str:
    """Return CTEs for a statement that ends deliveries which may wait for their turn.

    They leave the line, or a key that is blocked for long would gather them without bound, and the
    statement that ends its head would read them all. `ended` selects (room_id, id).
    """
    return _LEAVE_LINE_CTES.format(ended=ended)


RELEASED_COUNT: Final = "(SELECT count(*) FROM turns)"
ADVANCED_SUBSCRIPTIONS: Final = (
    "(SELECT string_agg(DISTINCT subscription_id::text, ',') FROM turn_sent)"
)
"""The subscriptions whose next delivery was queued, as one text; null: none."""

_UNORDERED: Final = """
    SELECT FROM subscriptions s JOIN rooms r ON r.id = s.room_id
    WHERE s.room_id = {} AND s.id = {} AND (s.status NOT IN ('deleted', 'rejected', 'terminated')) IS TRUE AND NOT coalesce(s.ordered, r.ordered)"""

# Repairs without knowing which statement ended a head: a page of keys, by primary key.
_REPAIR: Final = f"""
WITH page AS MATERIALIZED (
    SELECT room_id, subscription_id, key, head_id FROM ordered_keys
    WHERE (room_id, subscription_id, key) > (%(room)s::int4, %(subscription)s::uuid, %(key)s::bytea)
    ORDER BY room_id, subscription_id, key LIMIT %(limit)s::int4
), gone AS MATERIALIZED (
    SELECT p.room_id, p.head_id AS id FROM page p WHERE NOT EXISTS (
        SELECT FROM deliveries t WHERE t.room_id = p.room_id AND t.id = p.head_id AND t.state NOT IN {ENDED_STATES} OFFSET 0)
){advance_ordering("SELECT room_id, id FROM gone", logged="0")}
SELECT {RELEASED_COUNT}, (SELECT count(*) FROM gone), {ADVANCED_SUBSCRIPTIONS}, (
    SELECT string_agg(v.subscription_id::text, ',') FROM (SELECT DISTINCT room_id, subscription_id FROM page) v
    WHERE EXISTS ({_UNORDERED.format("v.room_id", "v.subscription_id")} OFFSET 0)
), p.room_id, p.subscription_id::text, p.key
FROM (SELECT) one LEFT JOIN (
    SELECT * FROM page ORDER BY room_id DESC, subscription_id DESC, key DESC LIMIT 1
) p ON true
"""  # noqa: S608 - constants of this package

# Many installations have none, and the large statement takes longer to find that out.
_ANY_KEY: Final = "SELECT 0, EXISTS (SELECT FROM ordered_keys)"

_ADVANCE: Final = f"""
WITH gone AS MATERIALIZED (
    SELECT v.room_id, v.id FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id) WHERE EXISTS (
        SELECT FROM deliveries t WHERE t.room_id = v.room_id AND t.id = v.id AND t.state IN {ENDED_STATES} OFFSET 0)
){advance_ordering("SELECT room_id, id FROM gone", logged="0")}
SELECT {RELEASED_COUNT}, true, {ADVANCED_SUBSCRIPTIONS}
"""  # noqa: S608 - constants of this package

_SKIP: Final = f"""
WITH gone AS MATERIALIZED (
    SELECT k.room_id, k.head_id AS id FROM ordered_keys k
    WHERE k.room_id = %(room)s::int4 AND k.subscription_id = %(subscription)s::uuid AND k.key = %(key)s::bytea AND EXISTS (
        SELECT FROM deliveries t WHERE t.room_id = k.room_id AND t.id = k.head_id AND t.state = '{State.SIDELINED}' OFFSET 0)
){advance_ordering("SELECT room_id, id FROM gone", logged="0")}
SELECT {RELEASED_COUNT}, (SELECT id::text FROM gone), {ADVANCED_SUBSCRIPTIONS}
"""  # noqa: S608 - constants of this package

# A page of the keys of a subscription, by primary key. A head without its message is old, too.
_SKIP_OLD: Final = f"""
WITH page AS MATERIALIZED (
    SELECT room_id, key, head_id FROM ordered_keys
    WHERE room_id = %(room)s::int4 AND subscription_id = %(subscription)s::uuid AND key > %(key)s::bytea
    ORDER BY key LIMIT %(limit)s::int4
), gone AS MATERIALIZED (
    SELECT p.room_id, p.head_id AS id FROM page p CROSS JOIN LATERAL (
        SELECT t.message_id FROM deliveries t WHERE t.room_id = p.room_id AND t.id = p.head_id AND t.state = '{State.SIDELINED}' LIMIT 1
    ) t WHERE NOT EXISTS (
        SELECT FROM messages m WHERE m.room_id = p.room_id AND m.id = t.message_id AND m.published_at > %(before)s::timestamptz OFFSET 0)
){advance_ordering("SELECT room_id, id FROM gone", logged="0")}
SELECT {RELEASED_COUNT}, (SELECT count(*) FROM gone), {ADVANCED_SUBSCRIPTIONS}, (SELECT key FROM page ORDER BY key DESC LIMIT 1)
"""  # noqa: S608 - constants of this package

# A page of the waiting deliveries, and of the keys behind which nothing waits then. A publish that
# does not know of the change yet updates a key's row, and this statement starts again.
_RELEASE: Final = f"""
WITH off AS MATERIALIZED (
    SELECT v.room_id, v.id FROM (SELECT %(room)s::int4 AS room_id, %(subscription)s::uuid AS id) v
    WHERE EXISTS ({_UNORDERED.format("v.room_id", "v.id")} OFFSET 0)
), next_up AS MATERIALIZED (
    SELECT w.room_id, w.subscription_id, w.key, w.position, w.id AS next FROM off CROSS JOIN LATERAL (
        SELECT * FROM ordered_waiting w WHERE w.room_id = off.room_id AND w.subscription_id = off.id
        ORDER BY w.key, w.position LIMIT %(limit)s::int4
    ) w
), page AS MATERIALIZED (
    SELECT k.room_id, k.subscription_id, k.key FROM off CROSS JOIN LATERAL (
        SELECT * FROM ordered_keys k WHERE k.room_id = off.room_id AND k.subscription_id = off.id
        ORDER BY k.key LIMIT %(limit)s::int4
    ) k WHERE NOT EXISTS (
        SELECT FROM ordered_waiting w WHERE w.room_id = k.room_id AND w.subscription_id = k.subscription_id AND w.key = k.key
            AND w.position > coalesce((SELECT max(o.position) FROM next_up o WHERE o.key = k.key), 0) OFFSET 0)
), key_freed AS (
    DELETE FROM ordered_keys k USING page p
    WHERE k.room_id = ANY (ARRAY[p.room_id]) AND k.subscription_id = p.subscription_id AND k.key = p.key
    RETURNING 1
), key_called AS (
    DELETE FROM ordered_waiting w USING next_up o
    WHERE w.room_id = ANY (ARRAY[o.room_id]) AND w.subscription_id = o.subscription_id AND w.key = o.key
        AND w.position = o.position
){_release_next(_MODE_PARAMETERS, _WRITER_PARAMETERS, "0")}
SELECT {RELEASED_COUNT}, (SELECT count(*) FROM next_up), (SELECT count(*) FROM key_freed), {ADVANCED_SUBSCRIPTIONS}
"""  # noqa: S608 - constants of this package

KeyPosition = tuple[RoomId, SubscriptionId, bytes]
"""The primary key of a row of `ordered_keys`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedPage:
    """Hold a page of keys: how many had a head that was gone, and where the next page begins.

    In the subscriptions of `advanced` a delivery was queued; those of `unordered` are not ordered
    any more.
    """

    repaired: int
    advanced: frozenset[SubscriptionId]
    unordered: frozenset[SubscriptionId]
    last: KeyPosition | None


class OrderingQueries:
    """Repair and skip keys. StorageUnavailableError: in doubt; StorageRefusedError: not done."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def repair(self, after: KeyPosition | None, *, limit: int) -> RepairedPage:
        """Advance the keys of a page whose head has ended or is gone.

        Repeating the call changes nothing.
        """
        if after is None and not (await self._writer.run(_ANY_KEY, {}))[0][0]:
            return RepairedPage(repaired=0, advanced=frozenset(), unordered=frozenset(), last=None)
        room, subscription, key = after or (0, "00000000-0000-0000-0000-000000000000", b"")
        rows = await self._writer.run(
            _REPAIR, {"room": room, "subscription": subscription, "key": key, "limit": limit}
        )
        found, called, unordered, *last = rows[0]
        place = (
            None if last[0] is None else (RoomId(last[0]), SubscriptionId(last[1]), bytes(last[2]))
        )
        return RepairedPage(
            repaired=found,
            advanced=parse_subscriptions(called),
            unordered=parse_subscriptions(unordered),
            last=place,
        )

    async def release(self, subscription: SubscriptionId, *, limit: int) -> tuple[int, bool]:
        """Release up to `limit` waiting deliveries of a subscription that is no longer ordered.

        Those before them do not matter. Return how many deliveries and keys those were (0: it is
        done), and whether a delivery was queued.
        """
        rows = await self._writer.run(
            _RELEASE, {"room": room_of(subscription), "subscription": subscription, "limit": limit}
        )
        waiting, keys, called = rows[0]
        return waiting + keys, called is not None

    async def advance(self, deliveries: Sequence[DeliveryId]) -> frozenset[SubscriptionId]:
        """Advance the keys whose heads these were, if they have ended.

        Return the subscriptions with a queued delivery.
        """
        rooms = literal_array(room_of(identity) for identity in deliveries)
        rows = await self._writer.run(_ADVANCE, {"room": rooms, "id": literal_array(deliveries)})
        return parse_subscriptions(rows[0][1])

    async def skip(
        self, subscription: SubscriptionId, ordering_key: str
    ) -> tuple[DeliveryId | None, bool]:
        """Advance a key although its head is sidelined; the head stays sidelined.

        Return the head (None: the key is not blocked), and whether a delivery behind it was queued.
        """
        rows = await self._writer.run(
            _SKIP,
            {
                "room": room_of(subscription),
                "subscription": subscription,
                "key": key_digest(ordering_key),
            },
        )
        if not rows or rows[0][0] is None:
            return None, False
        return DeliveryId(rows[0][0]), rows[0][1] is not None

    async def skip_old(
        self, subscription: SubscriptionId, after: bytes, *, before: datetime, limit: int
    ) -> tuple[bool, bytes | None]:
        """Advance the keys of a page whose sidelined head was published at or before a time.

        The heads stay sidelined. Return whether a delivery behind one was queued, and the digest
        of the last key (None: there are no more). Repeating the call changes nothing.
        """
        parameters = {
            "room": room_of(subscription),
            "subscription": subscription,
            "key": after,
            "before": before,
            "limit": limit,
        }
        ((_, called, last),) = await self._writer.run(_SKIP_OLD, parameters)
        return called is not None, None if last is None else bytes(last)


def key_digest(ordering_key: str) -> bytes:
    """Return the 16 bytes that represent an ordering key of any length in the tables."""
    return hashlib.sha256(ordering_key.encode()).digest()[:16]


def parse_subscriptions(joined: str | bytes | None) -> frozenset[SubscriptionId]:
    """Return the subscriptions that `ADVANCED_SUBSCRIPTIONS` selects."""
    names = joined.decode() if isinstance(joined, bytes) else joined
    return frozenset(SubscriptionId(name) for name in names.split(",")) if names else frozenset()
