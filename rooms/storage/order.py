"""Order per key: what stands behind waits as `held`/`order` until what stands before it is finished.

Of each (subscription, ordering key) one delivery at most is out: the **head**, named by its row of `ordered_keys`, which a
publish takes (`rooms.storage.publish_statement`) and whoever ends the head passes on, in the same statement. Those behind
stand in `ordered_waiting`, numbered in the order of commits. Both tables are empty where nothing is ordered or under way.

A publish moves a key's row after every other publish of that key, whatever its snapshot; a statement that passes it on
sees one state of the database or starts again (`Writer`, isolated). So whoever ends a head sees everything behind it. Where
a writer is not isolated, a row that was moved meanwhile stays as it is, and upkeep passes the key on.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId, room_of
from rooms.domain.place import LATER, TO_SEND
from rooms.domain.states import LogKind, Reason, State
from rooms.storage.literals import array
from rooms.storage.writer import Writer

OVER: Final = "('delivered', 'handed_over', 'dropped', 'expired', 'cancelled', 'purged')"
"""The states in which a head makes room. A sidelined one does not: its key is parked."""

# `ended` may hold what waited too: it is not called any more. Rows before the one that is called belong to nobody.
# The key's row is found by its head, so that one look into an empty index is all there is where nothing is ordered.
_ONWARD: Final = """, next_up AS MATERIALIZED (
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
# Where a webhook was spared and what it missed is drained at a set rate, what has waited since then for its turn is held
# with the rest, so that the drain lets it go.
_TURN: Final = """, turn_spared AS MATERIALIZED (
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
    SELECT t.*, coalesce(m.priority, 0) AS priority, m.event_type, m.event_version, m.correlation_id, s.type, s.version
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
        generation, attempt, event_type, event_version, correlation_id, version, '{reason}' FROM turn_sent
    RETURNING 1
)"""
_PLACES: Final = ("%(push)s::int2", "%(pull)s::int2", "%(horizon)s::int8")
_WRITER: Final = ("%(writer)s", "%(seq)s")


def _turn(places: tuple[str, str, str], writer: tuple[str, str], logged: str) -> str:
    push, pull, horizon = places
    return _TURN.format(
        reason=Reason.ORDER,
        circuit=Reason.CIRCUIT_OPEN,
        paused=Reason.PAUSED,
        drained="(t.updated_at < o.until AND coalesce(t.due_at, now()) <= now()) IS TRUE",
        late=f"extract(epoch FROM t.due_at - now()) * 1000 > {horizon}",
        push=push,
        pull=pull,
        further=LATER[0] - TO_SEND[0],
        writer=writer[0],
        seq=writer[1],
        logged=logged,
        released=LogKind.RELEASED,
    )


def pass_on(
    ended: str,
    *,
    logged: str = "(SELECT count(*) FROM l)",
    places: tuple[str, str, str] = _PLACES,
    writer: tuple[str, str] = _WRITER,
) -> str:
    """CTEs for a statement that ends deliveries: they queue what is next in the keys whose head ended.

    `ended` selects (room_id, id) of what has just ended, heads or not. `logged` counts the log rows that the statement
    writes besides; those written here are counted by `TURNS`, to be added to the statement's first column. `places` are
    the texts of the parameters push, pull and horizon, `writer` those of the writer's id and next number.
    """
    return _ONWARD.format(ended=ended, reason=Reason.ORDER) + _turn(places, writer, logged)


TURNS: Final = "(SELECT count(*) FROM turns)"
CALLED: Final = "(SELECT string_agg(DISTINCT subscription_id::text, ',') FROM turn_sent)"
"""The subscriptions whose next delivery was queued, as one text; null: none."""

_UNORDERED: Final = """
    SELECT FROM subscriptions s JOIN rooms r ON r.id = s.room_id
    WHERE s.room_id = {} AND s.id = {} AND (s.status <> 'deleted') IS TRUE AND NOT coalesce(s.ordered, r.ordered)"""

# Found without the help of who ended it: a page of keys, by primary key.
_MEND: Final = f"""
WITH page AS MATERIALIZED (
    SELECT room_id, subscription_id, key, head_id FROM ordered_keys
    WHERE (room_id, subscription_id, key) > (%(room)s::int4, %(subscription)s::uuid, %(key)s::bytea)
    ORDER BY room_id, subscription_id, key LIMIT %(limit)s::int4
), gone AS MATERIALIZED (
    SELECT p.room_id, p.head_id AS id FROM page p WHERE NOT EXISTS (
        SELECT FROM deliveries t WHERE t.room_id = p.room_id AND t.id = p.head_id AND t.state NOT IN {OVER} OFFSET 0)
){pass_on("SELECT room_id, id FROM gone", logged="0")}
SELECT {TURNS}, (SELECT count(*) FROM gone), {CALLED}, (
    SELECT string_agg(v.subscription_id::text, ',') FROM (SELECT DISTINCT room_id, subscription_id FROM page) v
    WHERE EXISTS ({_UNORDERED.format("v.room_id", "v.subscription_id")} OFFSET 0)
), p.room_id, p.subscription_id::text, p.key
FROM (SELECT) one LEFT JOIN (
    SELECT * FROM page ORDER BY room_id DESC, subscription_id DESC, key DESC LIMIT 1
) p ON true
"""  # noqa: S608 - text of our own

_ADVANCE: Final = f"""
WITH gone AS MATERIALIZED (
    SELECT v.room_id, v.id FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id) WHERE EXISTS (
        SELECT FROM deliveries t WHERE t.room_id = v.room_id AND t.id = v.id AND t.state IN {OVER} OFFSET 0)
){pass_on("SELECT room_id, id FROM gone", logged="0")}
SELECT {TURNS}, true, {CALLED}
"""  # noqa: S608 - text of our own

_SKIP: Final = f"""
WITH gone AS MATERIALIZED (
    SELECT k.room_id, k.head_id AS id FROM ordered_keys k
    WHERE k.room_id = %(room)s::int4 AND k.subscription_id = %(subscription)s::uuid AND k.key = %(key)s::bytea AND EXISTS (
        SELECT FROM deliveries t WHERE t.room_id = k.room_id AND t.id = k.head_id AND t.state = '{State.SIDELINED}' OFFSET 0)
){pass_on("SELECT room_id, id FROM gone", logged="0")}
SELECT {TURNS}, (SELECT id::text FROM gone), {CALLED}
"""  # noqa: S608 - text of our own

# A page of what waits, and of the keys that nothing waits behind then. A publish that does not know yet moves a key's row,
# and the statement starts again.
_LET_GO: Final = f"""
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
){_turn(_PLACES, _WRITER, "0")}
SELECT {TURNS}, (SELECT count(*) FROM next_up), (SELECT count(*) FROM key_freed), {CALLED}
"""  # noqa: S608 - text of our own

Place = tuple[RoomId, SubscriptionId, bytes]
"""A row of `ordered_keys`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """A page of keys: how many had a head that was gone, whose next deliveries were queued, which subscriptions are not
    ordered any more, and where the next page begins.
    """

    found: int
    called: frozenset[SubscriptionId]
    unordered: frozenset[SubscriptionId]
    last: Place | None


class Order:
    """What is done to keys apart from passing them on. StorageUnavailableError: in doubt; StorageRefusedError: not done."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def mend(self, after: Place | None, *, limit: int) -> Mended:
        """Pass on the keys of a page whose head is over, or is no more. The call again changes nothing."""
        room, subscription, key = after or (0, "00000000-0000-0000-0000-000000000000", b"")
        rows = await self._writer.run(_MEND, {"room": room, "subscription": subscription, "key": key, "limit": limit})
        found, called, unordered, *last = rows[0]
        place = None if last[0] is None else (RoomId(last[0]), SubscriptionId(last[1]), bytes(last[2]))
        return Mended(found=found, called=subscriptions_of(called), unordered=subscriptions_of(unordered), last=place)

    async def let_go(self, subscription: SubscriptionId, *, limit: int) -> tuple[int, bool]:
        """Where the order of a subscription was taken back: so many of those that wait, whatever stands before them. How
        many deliveries and keys that were (0: it is done), and whether something was queued.
        """
        rows = await self._writer.run(
            _LET_GO, {"room": room_of(subscription), "subscription": subscription, "limit": limit}
        )
        waiting, keys, called = rows[0]
        return waiting + keys, called is not None

    async def advance(self, deliveries: Sequence[DeliveryId]) -> frozenset[SubscriptionId]:
        """Pass on the keys whose head these were, where they are over; in which subscriptions something was queued."""
        rooms = array(room_of(identity) for identity in deliveries)
        rows = await self._writer.run(_ADVANCE, {"room": rooms, "id": array(deliveries)})
        return subscriptions_of(rows[0][1])

    async def skip(self, subscription: SubscriptionId, ordering_key: str) -> tuple[DeliveryId | None, bool]:
        """Pass a key on although its head is sidelined; it stays there. The head (None: it is not parked), and whether
        something behind it was queued.
        """
        rows = await self._writer.run(
            _SKIP, {"room": room_of(subscription), "subscription": subscription, "key": digest(ordering_key)}
        )
        if not rows or rows[0][0] is None:
            return None, False
        return DeliveryId(rows[0][0]), rows[0][1] is not None


def digest(ordering_key: str) -> bytes:
    """What stands for an ordering key in the tables: 16 bytes, however long it is."""
    return hashlib.sha256(ordering_key.encode()).digest()[:16]


def subscriptions_of(called: str | bytes | None) -> frozenset[SubscriptionId]:
    """What `CALLED` says."""
    told = called.decode() if isinstance(called, bytes) else called
    return frozenset(SubscriptionId(identity) for identity in told.split(",")) if told else frozenset()
