"""What an installation's former shape left: work rows in places where nobody of this shape looks for them.

Where another broker came, rows wait for workers that take copies alone; where it went, for a relay, or for copies that
nobody reads any more. They move to this shape's places under a new generation: a copy that the other broker may have
is stale from then on, should it ever be asked for it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.place import LATER, TO_SEND, Place
from rooms.domain.states import LogKind, State
from rooms.storage.literals import numbers
from rooms.storage.writer import LIFE_LOCK, Writer

START: Final = (RoomId(-(1 << 31)), "00000000-0000-0000-0000-000000000000")
"""Before every row."""
HERE: Final = frozenset({Place.PUSH_HERE, Place.PULL_HERE})

# Spans rooms: a page of the key, whatever stands there, so that no statement walks over a million rows of this shape.
# Whoever has claimed a row and lives is not disturbed; what is due beyond the horizon of this shape waits for it.
_MOVE: Final = f"""
WITH page AS MATERIALIZED (
    SELECT o.room_id, o.id, o.kind FROM outbox o WHERE (o.room_id, o.id) > (%(room)s::int4, %(id)s::uuid)
    ORDER BY o.room_id, o.id LIMIT %(limit)s::int4
), c AS MATERIALIZED (
    SELECT * FROM page WHERE kind = ANY (%(kinds)s::int2[])
), free AS MATERIALIZED (
    SELECT o.*, (CASE o.kind & 1 WHEN 1 THEN %(pull)s::int2 ELSE %(push)s::int2 END) + CASE WHEN o.beyond THEN {LATER[0] - TO_SEND[0]:d}
        ELSE 0 END AS place, CASE WHEN o.beyond THEN '{State.SCHEDULED}' ELSE '{State.QUEUED}' END::delivery_state AS state
    FROM c CROSS JOIN LATERAL (
        SELECT o.room_id, o.id, o.kind, o.generation, o.attempt,
            extract(epoch FROM o.due_at - now()) * 1000 > %(horizon)s::int8 AS beyond
        FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id AND o.kind + 0 = c.kind
            AND (o.claimed_until < now() OR NOT EXISTS (
                SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.classid = %(life)s
                    AND l.objid::int8 = o.worker
                    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            ))
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) o
), d AS (
    UPDATE deliveries t SET state = f.state, generation = t.generation + 1, updated_at = now()
    FROM free f WHERE t.room_id = f.room_id AND t.id = f.id AND t.generation = f.generation AND t.attempt = f.attempt
        AND t.state IN ('{State.QUEUED}', '{State.SCHEDULED}')
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt, f.place
), o AS (
    UPDATE outbox o SET kind = d.place, generation = d.generation, claimed_until = '-infinity', worker = NULL
    FROM d WHERE o.room_id = ANY (ARRAY[d.room_id]) AND o.id = d.id
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, worker_host, correlation_id, event_type, event_version, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.RESTORED}', d.subscription_id,
        d.id, d.generation, d.attempt, %(host)s::text, m.correlation_id, m.event_type, m.event_version, 'another_broker'
    FROM d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM d), (SELECT count(*) FROM c) - (SELECT count(*) FROM d),
    last.room_id, last.id::text, (SELECT count(*) FROM page) < %(limit)s::int4,
    (SELECT string_agg(DISTINCT subscription_id::text, ',') FROM d WHERE place & 1 = 1)
FROM (SELECT 1) one LEFT JOIN (SELECT room_id, id FROM page ORDER BY room_id DESC, id DESC LIMIT 1) last ON true
"""  # noqa: S608 - numbers and words of our own

# A look costs nothing where nothing is: each place has an index of its own, but for what was sent. Where another broker
# is in use, a mark says so; a day after it was last set, nothing of that shape is alive.
_OF_HERE: Final = """
SELECT 0, EXISTS (SELECT FROM outbox WHERE kind = 0) OR EXISTS (SELECT FROM outbox WHERE kind = 1)
"""
_OF_ANOTHER: Final = """
SELECT 0, EXISTS (SELECT FROM outbox WHERE kind IN (2, 3)) OR EXISTS (SELECT FROM outbox WHERE kind IN (3, 5))
    OR EXISTS (SELECT FROM outbox WHERE kind IN (6, 7)) OR EXISTS (SELECT FROM upkeep_marks WHERE name = 'relayed')
"""
_SET_MARK: Final = """
WITH m AS (
    INSERT INTO upkeep_marks AS m (name, at) VALUES ('relayed', now()) ON CONFLICT (name) DO UPDATE SET at = excluded.at
) SELECT 0
"""
_FORGET_MARK: Final = """
WITH m AS (DELETE FROM upkeep_marks WHERE name = 'relayed' AND at < now() - interval '1 day') SELECT 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One page of the outbox: how many rows moved, how many somebody has, the PULL queues that got some, the last row there
    was (None: there was none), and whether there are no more.
    """

    moved: int
    left: int
    pulls: Sequence[SubscriptionId]
    last: tuple[RoomId, str] | None
    end: bool


async def move_over(writer: Writer, after: tuple[RoomId, str], *, limit: int) -> Step:
    """Move what stands in another shape's places than the writer's, of the `limit` rows after one. Errors: `Writer.run`'s."""
    wanted = frozenset(Place) - HERE if writer.shape.relayed else HERE
    asked = {
        "room": after[0],
        "id": after[1],
        "limit": limit,
        "kinds": numbers(sorted(set(Place) - wanted)),
        "life": LIFE_LOCK,
        "host": writer.host,
    }
    ((moved, left, room, identity, end, pulls),) = await writer.run(_MOVE, asked)
    return Step(
        moved=moved,
        left=left,
        pulls=[SubscriptionId(name) for name in (pulls or "").split(",") if name],
        last=None if room is None else (RoomId(room), identity),
        end=end,
    )


async def may_stand_elsewhere(writer: Writer) -> bool:
    """Whether anything may stand in another shape's places than the writer's. Errors: `Writer.run`'s."""
    if writer.shape.relayed:
        await writer.run(_SET_MARK, {})
    return bool((await writer.run(_OF_HERE if writer.shape.relayed else _OF_ANOTHER, {}))[0][0])


async def nothing_stands_elsewhere(writer: Writer) -> None:
    """A whole walk has found nothing. Errors: `Writer.run`'s."""
    await writer.run(_FORGET_MARK, {})
