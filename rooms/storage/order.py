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
from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

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
), turn AS (
    UPDATE deliveries t SET state = CASE WHEN {late} THEN 'scheduled' ELSE 'queued' END::delivery_state, reason = NULL,
        generation = t.generation + 1, due_at = greatest(t.due_at, now()), updated_at = now()
    FROM next_up o WHERE t.room_id = o.room_id AND t.id = o.next AND t.state = 'held' AND t.reason = '{reason}'
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.state, t.generation, t.attempt, t.due_at, t.expires_at
), turn_parked AS (
    DELETE FROM held h USING turn t WHERE h.room_id = ANY (ARRAY[t.room_id]) AND h.id = t.id
), turn_sent AS (
    SELECT t.*, m.priority, m.event_type, m.event_version, m.correlation_id, s.type, s.version FROM turn t CROSS JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = t.room_id AND m.id = t.message_id LIMIT 1
    ) m CROSS JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = t.room_id AND s.id = t.subscription_id LIMIT 1
    ) s
), turn_out AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, CASE type WHEN 'PULL' THEN {pull} ELSE {push} END
        + CASE state WHEN 'scheduled' THEN {further} ELSE 0 END, priority, generation, attempt, due_at, expires_at FROM turn_sent
), turns AS (
    INSERT INTO delivery_log (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, detail)
    SELECT {writer}, {seq} - 1 + {logged} + row_number() OVER (), room_id, message_id, '{released}', subscription_id, id,
        generation, attempt, event_type, event_version, correlation_id, version, '{reason}' FROM turn_sent
    RETURNING 1
)"""


def pass_on(
    ended: str,
    *,
    logged: str = "(SELECT count(*) FROM l)",
    places: tuple[str, str, str] = ("%(push)s::int2", "%(pull)s::int2", "%(horizon)s::int8"),
    writer: tuple[str, str] = ("%(writer)s", "%(seq)s"),
) -> str:
    """CTEs for a statement that ends deliveries: they queue what is next in the keys whose head ended.

    `ended` selects (room_id, id) of what has just ended, heads or not. `logged` counts the log rows that the statement
    writes besides; those written here are counted by `TURNS`, to be added to the statement's first column. `places` are
    the texts of the parameters push, pull and horizon, `writer` those of the writer's id and next number.
    """
    push, pull, horizon = places
    return _ONWARD.format(
        ended=ended,
        reason=Reason.ORDER,
        late=f"extract(epoch FROM t.due_at - now()) * 1000 > {horizon}",
        push=push,
        pull=pull,
        further=LATER[0] - TO_SEND[0],
        writer=writer[0],
        seq=writer[1],
        logged=logged,
        released=LogKind.RELEASED,
    )


TURNS: Final = "(SELECT count(*) FROM turns)"
CALLED: Final = "(SELECT string_agg(DISTINCT subscription_id::text, ',') FROM turn_sent)"
"""The subscriptions whose next delivery was queued, as one text; null: none."""

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
SELECT {TURNS}, (SELECT count(*) FROM gone), {CALLED}, p.room_id, p.subscription_id::text, p.key
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

_MOST_COUNTED: Final = 10_000
_LIST: Final = text(f"""
    SELECT m.ordering_key, k.head_id::text, t.state::text, k.since, (
        SELECT count(*) FROM (
            SELECT FROM ordered_waiting w WHERE w.room_id = k.room_id AND w.subscription_id = k.subscription_id AND w.key = k.key
            LIMIT {_MOST_COUNTED}) w), k.key
    FROM ordered_keys k JOIN deliveries t ON t.room_id = k.room_id AND t.id = k.head_id
        JOIN messages m ON m.room_id = t.room_id AND m.id = t.message_id
    WHERE k.room_id = :room AND k.subscription_id = :subscription AND k.key > :after
        AND (NOT :parked OR t.state = '{State.SIDELINED}')
    ORDER BY k.key LIMIT :limit
""")  # noqa: S608 - text of our own


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStanding:
    """An ordering key of a subscription: its head since when in what state, and how many wait behind (10,000 at most)."""

    ordering_key: str
    digest: bytes
    head: DeliveryId
    state: State
    since: datetime
    waiting: int


Place = tuple[RoomId, SubscriptionId, bytes]
"""A row of `ordered_keys`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """A page of keys: how many had a head that was gone, whose next deliveries were queued, and where the next page begins."""

    found: int
    called: frozenset[SubscriptionId]
    last: Place | None


class Order:
    """What is done to keys apart from passing them on. StorageUnavailableError: in doubt; StorageRefusedError: not done."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def mend(self, after: Place | None, *, limit: int) -> Mended:
        """Pass on the keys of a page whose head is over, or is no more. The call again changes nothing."""
        room, subscription, key = after or (0, "00000000-0000-0000-0000-000000000000", b"")
        rows = await self._writer.run(_MEND, {"room": room, "subscription": subscription, "key": key, "limit": limit})
        found, called, *last = rows[0]
        place = None if last[0] is None else (RoomId(last[0]), SubscriptionId(last[1]), bytes(last[2]))
        return Mended(found=found, called=subscriptions_of(called), last=place)

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


async def list_keys(
    connection: AsyncConnection, subscription: SubscriptionId, *, parked: bool, after: bytes, limit: int
) -> list[KeyStanding]:
    """The keys of a subscription under which something is under way, by digest; `parked`: whose head is sidelined."""
    found = await connection.execute(
        _LIST,
        {
            "room": room_of(subscription),
            "subscription": subscription,
            "after": after,
            "limit": limit,
            "parked": parked,
        },
    )
    return [
        KeyStanding(
            ordering_key=ordering_key,
            digest=bytes(key),
            head=DeliveryId(head),
            state=State(state),
            since=since,
            waiting=waiting,
        )
        for ordering_key, head, state, since, waiting, key in found
    ]


def digest(ordering_key: str) -> bytes:
    """What stands for an ordering key in the tables: 16 bytes, however long it is."""
    return hashlib.sha256(ordering_key.encode()).digest()[:16]


def subscriptions_of(called: str | bytes | None) -> frozenset[SubscriptionId]:
    """What `CALLED` says."""
    told = called.decode() if isinstance(called, bytes) else called
    return frozenset(SubscriptionId(identity) for identity in told.split(",")) if told else frozenset()
