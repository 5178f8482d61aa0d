"""Sending again what a broker has lost: rows that were sent are to be sent once more, under a new generation.

The old copies, where some are left after all, are stale from then on and settled without an attempt.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, cast

from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId
from rooms.domain.place import SENT, TO_SEND, Place
from rooms.domain.states import LogKind, State
from rooms.storage.literals import numbers, plain
from rooms.storage.writer import LIFE_LOCK, Writer

BATCH: Final = 1000
START: Final = (RoomId(-(1 << 31)), "00000000-0000-0000-0000-000000000000")
"""Before every row."""

_ROWS: Final = "SELECT o.room_id, o.id, o.subscription_id, o.kind, o.generation, o.attempt, o.claimed_until, o.worker"
# A page is so many rows of the key, whatever their place, so that no statement walks over a million others.
_PAGE: Final = f"""
    {_ROWS} FROM outbox o WHERE (o.room_id, o.id) > (%(room)s::int4, %(id)s::uuid)
    ORDER BY o.room_id, o.id LIMIT %(limit)s::int4
"""
_NAMED: Final = f"""
    {_ROWS} FROM unnest(%(rooms)s::int4[], %(ids)s::uuid[], %(generations)s::int4[], %(attempts)s::int4[])
        AS v (room_id, id, generation, attempt) CROSS JOIN LATERAL (
            SELECT * FROM outbox o WHERE o.room_id = v.room_id AND o.id = v.id AND o.generation = v.generation
                AND o.attempt = v.attempt LIMIT 1
        ) o
"""  # noqa: S608 - text of our own

# `c` are the rows it is about. Whoever holds one now (an attempt under way, a relay that has its receipt and not yet
# marked it, somebody's lock) is left alone, and the row looked at again. Nobody is waited for.
_RESTORE: Final = """
WITH page AS MATERIALIZED ({rows}), c AS MATERIALIZED (
    SELECT p.*, p.kind IN ({sent}) AS sent, p.claimed_until > now() AND NOT p.worker = ANY (%(dead)s::int4[]) AS claimed
    FROM page p WHERE p.kind = ANY (%(kinds)s::int2[])
        AND (%(subscription)s::uuid IS NULL OR p.subscription_id = %(subscription)s::uuid)
), free AS MATERIALIZED (
    SELECT c.room_id, c.id, c.generation, c.attempt FROM c CROSS JOIN LATERAL (
        SELECT FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id AND o.generation = c.generation
            AND o.attempt = c.attempt AND o.kind = c.kind AND o.claimed_until = c.claimed_until
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) o WHERE c.sent AND c.claimed IS NOT TRUE
), d AS (
    UPDATE deliveries t SET generation = t.generation + 1, updated_at = now()
    FROM free f WHERE t.room_id = f.room_id AND t.id = f.id AND t.generation = f.generation AND t.attempt = f.attempt
        AND t.state = '{queued}' AND (%(before)s::timestamptz IS NULL OR t.updated_at < %(before)s::timestamptz)
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), o AS (
    UPDATE outbox o SET kind = o.kind - {back}, generation = d.generation, claimed_until = '-infinity', worker = NULL
    FROM d WHERE o.room_id = ANY (ARRAY[d.room_id]) AND o.id = d.id
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, worker_host, correlation_id, event_type, event_version, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{restored}', d.subscription_id, d.id,
        d.generation, d.attempt, %(host)s::text, m.correlation_id, m.event_type, m.event_version, 'lost_by_broker'
    FROM d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true RETURNING 1
), spared AS MATERIALIZED (
    SELECT c.* FROM c WHERE c.claimed OR c.sent AND NOT EXISTS (
        SELECT FROM free f WHERE f.room_id = c.room_id AND f.id = c.id OFFSET 0)
)
SELECT (SELECT count(*) FROM l), 0, (SELECT count(*) FROM d), (SELECT count(*) FROM page), NULL, NULL::int4
UNION ALL SELECT 0, 1, NULL, room_id, id::text, NULL
    FROM (SELECT room_id, id FROM page ORDER BY room_id DESC, id DESC LIMIT 1) last
UNION ALL SELECT 0, 2, generation, room_id, id::text, attempt FROM spared
"""


def _restore(rows: str) -> str:
    return _RESTORE.format(
        rows=rows,
        sent=", ".join(f"{place:d}" for place in SENT),
        queued=State.QUEUED,
        restored=LogKind.RESTORED,
        back=SENT[0] - TO_SEND[0],
    )


_RESTORE_PAGE: Final = _restore(_PAGE)
_RESTORE_NAMED: Final = _restore(_NAMED)

_SENT_COUNTS: Final = f"""
SELECT 0, CASE WHEN kind = {Place.PULL_SENT:d} THEN subscription_id END::text, count(*) FROM outbox
WHERE kind IN ({SENT[0]:d}, {SENT[1]:d}) GROUP BY 2 UNION ALL SELECT 0, NULL, NULL
"""  # noqa: S608 - numbers of our own

_NOW: Final = "SELECT 0, now()"

_DEAD: Final = """
SELECT 0, w.id FROM writers w WHERE NOT EXISTS (
    SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.classid = %(life)s AND l.objid::int8 = w.id
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
UNION ALL SELECT 0, NULL ORDER BY 2 DESC NULLS LAST LIMIT 1000
"""

Row = tuple[RoomId, DeliveryId, int, int]
"""(room, delivery, generation, attempt)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One step of a walk: how many rows are to be sent again, which ones somebody holds, how many rows there were up to
    `last` (None: there were none after the one given).
    """

    restored: int
    spared: Sequence[Row]
    seen: int
    last: tuple[RoomId, str] | None


class Recovery:
    """Through one writer. StorageUnavailableError: in doubt, the same again is harmless; StorageRefusedError: not done."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def restore(
        self,
        after: tuple[RoomId, str],
        *,
        places: Collection[Place],
        subscription: SubscriptionId | None,
        dead: Collection[int],
        before: datetime | None = None,
        limit: int = BATCH,
    ) -> Look:
        """Have the rows after one sent again that stand in one of `places`, of one subscription or (None) of all; with
        `before` only deliveries that nothing has changed since.

        Rows that are claimed are spared, unless by one of the `dead`: to send ones too, which may have been sent.
        """
        room, identity = after
        asked = {**self._asked(places, subscription, dead, before), "room": room, "id": identity, "limit": limit}
        return _look(await self._writer.run(_RESTORE_PAGE, asked))

    async def restore_again(
        self, rows: Sequence[Row], *, places: Collection[Place], dead: Collection[int], before: datetime | None = None
    ) -> Look:
        """The same for rows that an earlier look spared, as far as they stand at their step still."""
        asked = {
            **self._asked(places, None, dead, before),
            "rooms": numbers(row[0] for row in rows),
            "ids": plain(row[1] for row in rows),
            "generations": numbers(row[2] for row in rows),
            "attempts": numbers(row[3] for row in rows),
        }
        return _look(await self._writer.run(_RESTORE_NAMED, asked))

    async def sent(self) -> Mapping[SubscriptionId | None, int]:
        """How many rows say that the broker has a copy: by PULL subscription, and (None) of PUSH."""
        return {
            None if name is None else SubscriptionId(name): count
            for name, count in await self._writer.run(_SENT_COUNTS, {})
        }

    async def now(self) -> datetime:
        """PostgreSQL's time."""
        ((at,),) = await self._writer.run(_NOW, {})
        return cast("datetime", at)

    async def dead(self) -> list[int]:
        """Writers whose session is gone: their claims are free."""
        return [row[0] for row in await self._writer.run(_DEAD, {"life": LIFE_LOCK})]

    def _asked(
        self,
        places: Collection[Place],
        subscription: SubscriptionId | None,
        dead: Collection[int],
        before: datetime | None,
    ) -> dict[str, object]:
        return {
            "kinds": numbers(int(place) for place in places),
            "subscription": subscription,
            "dead": numbers(dead),
            "before": before,
            "host": self._writer.host,
        }


def _look(rows: Sequence[tuple[object, ...]]) -> Look:
    restored, seen, last = 0, 0, None
    spared: list[Row] = []
    for what, number, room, identity, attempt in rows:
        if what == 0:
            restored, seen = int(str(number)), int(str(room))
        elif what == 1:
            last = (RoomId(int(str(room))), str(identity))
        else:
            spared.append((RoomId(int(str(room))), DeliveryId(str(identity)), int(str(number)), int(str(attempt))))
    return Look(restored=restored, spared=spared, seen=seen, last=last)
