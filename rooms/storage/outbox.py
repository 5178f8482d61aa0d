"""The outbox with PostgreSQL as broker: the PUSH queue itself. With another broker its rows stand in other places.

A claim writes `claimed_until`, `worker` and `abandoned` alone, none of which an index knows, so every claim is a HOT update.
`abandoned` counts the claims running that nobody gave back: whoever had them died, or froze until they ran out. It outlasts
a hold, and ends with the next outcome of an attempt.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.domain.copy import Copy
from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId, first_id, room_of
from rooms.domain.place import Place
from rooms.domain.states import SubscriptionType
from rooms.errors import StorageRefusedError
from rooms.storage.literals import array
from rooms.storage.orphans import sideline
from rooms.storage.writer import LIFE_LOCK, Writer

_log = logging.getLogger(__name__)

KINDS: Final = {SubscriptionType.PUSH: int(Place.PUSH_HERE), SubscriptionType.PULL: int(Place.PULL_HERE)}
_RECENT_MS: Final = 86_400_000
"""Messages not further from now are found by the claim itself."""

# One index probe a priority, highest first, each from its low-water mark: what lies below was seen and taken, so
# the scan does not walk over dead rows that an old snapshot keeps alive. This is the one hot statement that spans
# rooms: a worker serves all of them. Five kinds of rows come back, in this order: the copies, each of their priorities once
# with the highest due time, each of their subscriptions that is not deleted once, each of their messages once, and what the
# statement saw of the time. Messages are looked for in the days between `first` and `last` alone: the tables and indexes of
# all others are not even opened. What is older is looked up by a statement of its own. ("<= ANY", as `outcomes` says.)
_CLAIM: Final = """
WITH picked AS MATERIALIZED (
    SELECT o.at FROM unnest(%(low)s::int8[]) WITH ORDINALITY AS p (low, n), LATERAL (
        SELECT ctid AS at FROM outbox
        WHERE kind = 0 AND priority = 10 - p.n AND due_at <= now()
            AND due_at >= timestamptz 'epoch' + p.low * interval '1 microsecond'
            AND (claimed_until < now() OR worker = ANY (%(dead)s::int4[]))
            AND subscription_id <> ALL (%(excluded)s::uuid[])
        ORDER BY due_at LIMIT %(limit)s::int4 FOR UPDATE SKIP LOCKED
    ) o LIMIT %(limit)s::int4
), claimed AS (
    UPDATE outbox o SET claimed_until = now() + %(claim_s)s::float8 * interval '1 s', worker = %(writer)s,
        abandoned = CASE WHEN o.worker IS NULL THEN o.abandoned ELSE least(coalesce(o.abandoned, 0) + 1, 32767) END
    FROM picked WHERE o.ctid = picked.at
    RETURNING o.room_id, o.id, o.message_id, o.subscription_id, o.generation, o.attempt, o.delay_ms, o.priority,
        o.due_at, o.expires_at, o.abandoned
)
SELECT 0, c.room_id, c.id::text, c.message_id::text, c.subscription_id::text, c.generation, c.attempt, c.delay_ms,
    c.priority, NULL::int8, (extract(epoch FROM c.expires_at - now()) * 1000)::int8,
    c.abandoned::int4, NULL::text, NULL::int4, NULL::text, NULL::int8, NULL::bytea, NULL::bytea
FROM claimed c
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, c.priority, (extract(epoch FROM max(c.due_at)) * 1000000)::int8,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM claimed c GROUP BY c.priority
UNION ALL SELECT 0, NULL, NULL, NULL, s.id::text, NULL, NULL, NULL, NULL, NULL, NULL, s.version, NULL, NULL, NULL, NULL, NULL, NULL
FROM (SELECT DISTINCT room_id, subscription_id FROM claimed) c CROSS JOIN LATERAL (
    SELECT s.id, s.version, s.status FROM subscriptions s WHERE s.room_id = c.room_id AND s.id = c.subscription_id LIMIT 1
) s WHERE s.status <> 'deleted'
UNION ALL SELECT 0, NULL, NULL, m.id::text, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, m.event_type, m.event_version,
    m.correlation_id, (extract(epoch FROM m.published_at) * 1000)::int8, m.headers, m.payload
FROM (SELECT DISTINCT room_id, message_id FROM claimed) c CROSS JOIN LATERAL (
    SELECT m.id, m.event_type, m.event_version, m.correlation_id, m.published_at, m.headers, m.payload FROM messages m
    WHERE m.room_id = c.room_id AND m.id = c.message_id AND m.id >= %(first)s::uuid AND m.id <= ANY (ARRAY[%(last)s::uuid])
    LIMIT 1
) m
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, (extract(epoch FROM now()) * 1000000)::int8,
    pg_snapshot_xmin(pg_current_snapshot())::text::int8, NULL, NULL, NULL, NULL,
    pg_snapshot_xmax(pg_current_snapshot())::text::int8, NULL, NULL
"""

_MESSAGES: Final = """
SELECT 0, m.id::text, m.event_type, m.event_version, m.correlation_id, (extract(epoch FROM m.published_at) * 1000)::int8,
    m.headers, m.payload
FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id) CROSS JOIN LATERAL (
    SELECT * FROM messages m WHERE m.room_id = v.room_id AND m.id = v.id LIMIT 1
) m
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL
"""

_RELEASE: Final = """
WITH freed AS (
    UPDATE outbox o SET claimed_until = '-infinity', worker = NULL
    FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id)
    WHERE o.room_id = ANY (ARRAY[v.room_id]) AND o.id = v.id AND o.worker = %(writer)s
    RETURNING 1
) SELECT 0, count(*) FROM freed
"""

_SEND: Final = """
WITH o AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, delay_ms, due_at, expires_at)
    SELECT d.room_id, d.id, d.message_id, d.subscription_id, v.kind, v.priority, v.generation, v.attempt, v.delay_ms, v.due_at,
        d.expires_at
    FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[], %(kind)s::int2[],
            %(priority)s::int2[], %(delay)s::int8[], %(due)s::timestamptz[])
            AS v (room_id, id, generation, attempt, kind, priority, delay_ms, due_at)
        JOIN deliveries d ON d.room_id = v.room_id AND d.id = v.id AND d.generation = v.generation AND d.attempt = v.attempt
    WHERE d.state = 'queued'
    ON CONFLICT (room_id, id) DO NOTHING RETURNING 1
) SELECT 0, count(*) FROM o
"""

_DEPTH: Final = """
SELECT 0, CASE WHEN %(subscription)s::uuid IS NULL THEN (SELECT count(*) FROM outbox WHERE kind = 0)
    ELSE (SELECT count(*) FROM outbox WHERE kind = 1 AND room_id = %(room)s AND subscription_id = %(subscription)s::uuid) END
"""

_PURGE: Final = """
WITH gone AS (
    DELETE FROM outbox WHERE room_id = %(room)s AND subscription_id = %(subscription)s::uuid AND claimed_until < now() RETURNING 1
) SELECT 0, count(*) FROM gone
"""

_NEXT_DUE: Final = """
SELECT 0, min(wait) FROM generate_series(0, 9) AS p (n), LATERAL (
    SELECT extract(epoch FROM due_at - now())::float8 AS wait FROM outbox
    WHERE kind = 0 AND priority = p.n AND due_at > timestamptz 'epoch' + %(after)s::int8 * interval '1 microsecond'
    ORDER BY due_at LIMIT 1
) o
"""

_DEAD: Final = """
SELECT 0, w.id FROM writers w WHERE w.kind = 'worker' AND NOT EXISTS (
    SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.classid = %(life)s AND l.objid::int8 = w.id
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
UNION ALL SELECT 0, NULL ORDER BY 2 DESC NULLS LAST LIMIT 500
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one claim took, and what it could see: its time in epoch microseconds, the oldest transaction that was under
    way and the first that had not begun, and of each priority the highest due time taken. `found`: how many rows that were,
    with those whose messages are gone.
    """

    at_us: int
    oldest: int
    newest: int
    highest_due_us: Mapping[int, int]
    found: int
    copies: Sequence[Copy]


class Outbox:
    """The outbox through one writer, whose id marks the claims and whose session proves that they live."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def claim(
        self,
        *,
        limit: int,
        claim_s: float,
        deadline: float,
        now_ms: int,
        low: Sequence[int],
        dead: Sequence[int],
        excluded: frozenset[SubscriptionId],
    ) -> Claim:
        """Take up to `limit` due PUSH copies for `claim_s` seconds.

        `low`: for each priority from 9 down to 0 the due time (epoch microseconds) below which not to look; `dead`:
        workers whose claims do not count; `excluded`: subscriptions to pass over; `deadline`: what the copies carry;
        `now_ms`: this process's clock, on which their expiry is told.
        """
        rows = await self._writer.run(
            _CLAIM,
            {
                "low": array(low),
                "dead": array(dead),
                "excluded": array(excluded),
                "limit": limit,
                "claim_s": claim_s,
                "first": first_id(max(0, now_ms - _RECENT_MS)),
                "last": first_id(now_ms + _RECENT_MS),
            },
        )
        last = rows.pop()
        count = next((at for at, row in enumerate(rows) if row[0] is None), len(rows))
        highest = {row[7]: row[8] for row in rows[count:] if row[7] is not None}
        versions = {row[3]: row[10] for row in rows[count:] if row[3] is not None}
        messages = {row[2]: row[11:] for row in rows[count + len(highest) + len(versions) :]}
        if missing := {row[2]: row[0] for row in rows[:count] if row[2] not in messages}:
            messages |= await self._older(missing, rows[:count])
        copies: list[Copy] = []
        orphans: list[tuple[RoomId, DeliveryId]] = []
        kind = SubscriptionType.PUSH
        for row in rows[:count]:
            (room_id, delivery_id, message_id, subscription_id, generation, attempt, delay_ms, priority, _, life_ms,
                abandoned) = row[:11]  # fmt: skip
            message = messages.get(message_id)
            if message is None:
                orphans.append((room_id, delivery_id))
                continue
            event_type, event_version, correlation_id, published_ms, headers, payload = message
            copies.append(
                # By position, as `Copy` says.
                Copy(
                    room_id,
                    delivery_id,
                    message_id,
                    subscription_id,
                    kind,
                    generation,
                    attempt,
                    delay_ms,
                    priority,
                    event_type,
                    event_version,
                    correlation_id,
                    published_ms,
                    None if life_ms is None else now_ms + life_ms,
                    versions.get(subscription_id),
                    deadline,
                    headers,
                    payload,
                    abandoned or 0,
                )
            )
        if orphans:
            _log.error(
                "%d deliveries are sidelined, their messages are not there; the first is %s",
                len(orphans),
                orphans[0][1],
            )
            await sideline(self._writer, orphans)
        return Claim(at_us=last[8], oldest=last[9], newest=last[14], highest_due_us=highest, found=count, copies=copies)

    async def _older(
        self, missing: Mapping[str, RoomId], claimed: Sequence[tuple[Any, ...]]
    ) -> dict[str, tuple[Any, ...]]:
        """What the claim tells of a message, for those that it did not look for; of whatever day they are."""
        try:
            rows = await self._writer.run(_MESSAGES, {"room": array(missing.values()), "id": array(missing)})
        except StorageRefusedError:
            await self._free([row[0] for row in claimed], [row[1] for row in claimed])
            raise
        return {row[0]: row[1:] for row in rows}

    async def release(self, copies: Sequence[Copy]) -> None:
        """Give claimed copies back untouched."""
        await self._free([copy.room_id for copy in copies], [copy.delivery_id for copy in copies])

    async def _free(self, rooms: Sequence[RoomId], deliveries: Sequence[DeliveryId]) -> None:
        await self._writer.run(_RELEASE, {"room": array(rooms), "id": array(deliveries)})

    async def send(self, copies: Sequence[Copy], *, not_before: Sequence[datetime]) -> None:
        """Queue copies of deliveries whose rows stand at their step; one that is queued already stays as it is."""
        await self._writer.run(
            _SEND,
            {
                "room": array(copy.room_id for copy in copies),
                "id": array(copy.delivery_id for copy in copies),
                "generation": array(copy.generation for copy in copies),
                "attempt": array(copy.attempt for copy in copies),
                "kind": array(KINDS[copy.kind] for copy in copies),
                "priority": array(copy.priority for copy in copies),
                "delay": array(copy.delay_ms for copy in copies),
                "due": array(at.isoformat() for at in not_before),
            },
        )

    async def depth(self, subscription: SubscriptionId | None) -> int:
        """Rows that wait: of a PULL subscription, or (None) all of PUSH."""
        room = None if subscription is None else room_of(subscription)
        rows = await self._writer.run(_DEPTH, {"room": room, "subscription": subscription})
        return int(rows[0][0])

    async def purge(self, room: RoomId, subscription: SubscriptionId) -> int:
        """Forget the rows of a subscription that nobody has claimed; returns how many. The delivery rows stay."""
        rows = await self._writer.run(_PURGE, {"room": room, "subscription": subscription})
        return int(rows[0][0])

    async def next_due_s(self, after_us: int) -> float | None:
        """Seconds until the next PUSH copy comes due that was not due at `after_us` (epoch microseconds); None where
        there is none, less than 0 where it came due since.
        """
        rows = await self._writer.run(_NEXT_DUE, {"after": after_us})
        return float(rows[0][0]) if rows else None

    async def dead_workers(self) -> list[int]:
        """Workers whose session is gone: their claims are free."""
        return [row[0] for row in await self._writer.run(_DEAD, {"life": LIFE_LOCK})]
