"""The outbox as the relay sees it: what is to be sent to another broker, and what has been.

A claim writes `claimed_until` and `worker` alone, which no index knows; the mark that a copy was sent moves its row out
of the index that the relay reads. Rows are locked in the order of their ids, so that whoever leases from the same queue
and this wait for each other in no circle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from rooms.domain.copy import PRIORITIES, Copy
from rooms.domain.ids import DeliveryId, MessageId, RoomId, SubscriptionId, room_of
from rooms.domain.place import SENT, TO_SEND, Place
from rooms.domain.states import Reason, State, SubscriptionType
from rooms.storage.literals import array, numbers, plain, text_array
from rooms.storage.order import TURNS, pass_on
from rooms.storage.writer import LIFE_LOCK, Writer

KIND: Final = "relay"
"""The kind of writer whose claims on rows that are to be sent count."""
MOST_BYTES: Final = 16 * 1024 * 1024
"""No more payload than this is claimed by a statement, one message apart."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_FREE: Final = f"""kind IN ({TO_SEND[0]:d}, {TO_SEND[1]:d})
            AND (claimed_until < now() OR worker = ANY (%(dead)s::int4[]))"""
_ITS_PLACE: Final = f"o.kind + 0 BETWEEN {min(TO_SEND):d} AND {max(TO_SEND):d}"
"""To be sent; an expression that no index matches, so that rows are found by their key."""

# Spans rooms: the relay sends for all of them. What is due comes first, by priority, one index probe for each, then what
# the broker is to time, by due time. From low-water marks on, so that a claim does not walk over the rows that were sent
# and that an old snapshot keeps in the index.
_CLAIM: Final = f"""
WITH due AS MATERIALIZED (
    SELECT o.* FROM unnest(%(low)s::int8[]) WITH ORDINALITY AS p (low, n), LATERAL (
        SELECT ctid AS at, room_id, message_id, due_at FROM outbox
        WHERE {_FREE} AND priority = {PRIORITIES} - p.n AND due_at <= now()
            AND due_at >= timestamptz 'epoch' + p.low * interval '1 microsecond'
        ORDER BY due_at LIMIT %(limit)s::int4 FOR UPDATE SKIP LOCKED
    ) o LIMIT %(limit)s::int4
), later AS MATERIALIZED (
    SELECT o.at FROM generate_series(0, {PRIORITIES - 1}) AS p (priority), LATERAL (
        SELECT ctid AS at, due_at FROM outbox WHERE {_FREE} AND priority = p.priority AND due_at > now()
        ORDER BY due_at LIMIT %(limit)s::int4
    ) o WHERE (SELECT count(*) FROM due) < %(limit)s::int4
    ORDER BY o.due_at LIMIT %(limit)s::int4 - (SELECT count(*) FROM due)
), soon AS MATERIALIZED (
    SELECT o.* FROM later l CROSS JOIN LATERAL (
        SELECT ctid AS at, room_id, message_id, due_at FROM outbox WHERE ctid = l.at FOR UPDATE SKIP LOCKED
    ) o
), picked AS MATERIALIZED (
    SELECT o.*, row_number() OVER () AS n FROM (SELECT * FROM due UNION ALL SELECT * FROM soon) o
), read AS MATERIALIZED (
    SELECT p.at, m.id AS message, m.event_type, m.event_version, m.correlation_id, m.published_at, m.headers, m.payload,
        coalesce(sum(octet_length(m.payload)) OVER (
            ORDER BY p.n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) < %(bytes)s::int8 AS fits
    FROM picked p LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = p.room_id AND m.id = p.message_id LIMIT 1
    ) m ON true
), claimed AS (
    UPDATE outbox o SET claimed_until = now() + %(claim_s)s::float8 * interval '1 s', worker = %(writer)s
    FROM read r WHERE o.ctid = r.at AND r.fits
    RETURNING o.*, r.message, r.event_type, r.event_version, r.correlation_id, r.published_at, r.headers, r.payload
)
SELECT 0, c.room_id, c.id::text, c.message_id::text, c.subscription_id::text, c.kind, c.generation, c.attempt, c.delay_ms,
    c.priority, (extract(epoch FROM c.due_at) * 1000000)::int8, (extract(epoch FROM c.expires_at - now()) * 1000)::int8,
    CASE WHEN s.status <> 'deleted' THEN s.version END, c.event_type, c.event_version, c.correlation_id,
    (extract(epoch FROM c.published_at) * 1000)::int8, c.headers, c.payload, s.native_password IS NOT NULL
FROM claimed c LEFT JOIN LATERAL (
    SELECT * FROM subscriptions s WHERE s.room_id = c.room_id AND s.id = c.subscription_id LIMIT 1
) s ON true
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, (SELECT count(*) FROM picked), NULL,
    (extract(epoch FROM now()) * 1000000)::int8, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
"""  # noqa: S608 - numbers of our own

# A claim that has run out says nothing any more: what it sent is claimed, and sent, by somebody else. Without this a
# relay that stood still could mark as sent what a broker has lost since.
_MINE: Final = f"""
    o.room_id = ANY (ARRAY[v.room_id]) AND o.id = v.id AND o.generation = v.generation AND o.attempt = v.attempt
        AND {_ITS_PLACE} AND o.worker = %(writer)s AND o.claimed_until > now()
"""
_V: Final = "unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[])"
_MARK: Final = f"""
WITH sent AS (
    UPDATE outbox o SET kind = o.kind + {SENT[0] - TO_SEND[0]:d}, claimed_until = '-infinity', worker = NULL
    FROM {_V} AS v (room_id, id, generation, attempt) WHERE {_MINE}
    RETURNING o.kind, o.subscription_id
) SELECT 0, count(*), string_agg(DISTINCT subscription_id::text, ',') FILTER (WHERE kind = {Place.PULL_SENT:d}) FROM sent
"""  # noqa: S608 - text of our own

_RELEASE: Final = f"""
WITH freed AS (
    UPDATE outbox o SET claimed_until = '-infinity', worker = NULL
    FROM {_V} AS v (room_id, id, generation, attempt) WHERE {_MINE}
    RETURNING 1
) SELECT 0, count(*) FROM freed
"""  # noqa: S608 - text of our own

_END: Final = f"""
WITH v AS MATERIALIZED (
    SELECT * FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[],
        %(state)s::delivery_state[], %(reason)s::text[], %(error)s::text[])
        AS v (room_id, id, generation, attempt, state, reason, error)
), gone AS (
    DELETE FROM outbox o USING v WHERE {_MINE} RETURNING v.*
), d AS (
    UPDATE deliveries t SET state = v.state, reason = v.reason, last_error = coalesce(v.error, t.last_error), due_at = NULL,
        updated_at = now()
    FROM gone v WHERE t.room_id = v.room_id AND t.id = v.id AND t.generation = v.generation AND t.attempt = v.attempt
        AND t.state = 'queued'
    RETURNING v.*, t.message_id, t.subscription_id
), side AS (
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, generation, reason FROM d WHERE state = 'sidelined'
    ON CONFLICT (room_id, id) DO UPDATE SET generation = excluded.generation, since = excluded.since,
        reason = excluded.reason, shard = NULL, pointer = NULL
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, d.state::text, d.subscription_id, d.id,
        d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(writer)s, %(host)s::text,
        nullif(concat_ws(': ', d.reason, d.error), '')
    FROM d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true RETURNING 1
){pass_on("SELECT room_id, id FROM d WHERE state <> 'sidelined'")}
SELECT (SELECT count(*) FROM l) + {TURNS}, (SELECT count(*) FROM d)
"""  # noqa: S608 - text of our own

_LIVING: Final = """
SELECT 0, s.id::text FROM unnest(%(room)s::int4[], %(subscription)s::uuid[]) AS v (room_id, subscription_id), LATERAL (
    SELECT * FROM subscriptions s WHERE s.room_id = v.room_id AND s.id = v.subscription_id LIMIT 1
) s WHERE s.status <> 'deleted' UNION ALL SELECT 0, NULL
"""

_NOTHING_SENT: Final = f"""
SELECT 0, NOT EXISTS (SELECT FROM outbox o WHERE o.kind IN ({SENT[0]:d}, {SENT[1]:d})
    OR {_ITS_PLACE} AND o.claimed_until > now() AND o.worker <> %(writer)s)
"""  # noqa: S608 - numbers of our own

_DEAD: Final = """
SELECT 0, w.id FROM writers w WHERE w.kind = %(kind)s::text AND NOT EXISTS (
    SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.classid = %(life)s AND l.objid::int8 = w.id
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
UNION ALL SELECT 0, NULL ORDER BY 2 DESC NULLS LAST LIMIT 500
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one claim took: copies with the times they are due, not longer ours than until `deadline` (monotonic seconds).

    `found`: rows that were there to claim, more than were taken where their payloads would be too much. `at_us`:
    PostgreSQL's time. `unreadable`: those whose message is not there. `native`: subscriptions whose queue is read at the
    broker itself. `highest_due_us`: by priority, the latest due time of those that are due; `beyond`: some are not yet.
    """

    copies: Sequence[Copy]
    not_before: Sequence[datetime]
    unreadable: Sequence[DeliveryId]
    native: frozenset[SubscriptionId] = frozenset()
    found: int
    at_us: int
    highest_due_us: Mapping[int, int]
    beyond: bool
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A copy that no row need wait for any more, the state its delivery ends in, and why: `error` in the broker's words."""

    copy: Copy
    to: State
    reason: Reason | None = None
    error: str | None = None


def _steps(copies: Sequence[Copy]) -> dict[str, str]:
    return {
        "room": numbers(copy.room_id for copy in copies),
        "id": plain(copy.delivery_id for copy in copies),
        "generation": numbers(copy.generation for copy in copies),
        "attempt": numbers(copy.attempt for copy in copies),
    }


def _in_order(copies: Sequence[Copy]) -> list[Copy]:
    return sorted(copies, key=lambda copy: (copy.room_id, copy.delivery_id))


async def living(writer: Writer, subscriptions: Sequence[SubscriptionId]) -> frozenset[SubscriptionId]:
    """Those of the subscriptions that are there and that nobody has deleted. Errors are `Writer.run`'s."""
    asked = {"room": numbers(map(room_of, subscriptions)), "subscription": plain(subscriptions)}
    return frozenset(SubscriptionId(row[0]) for row in await writer.run(_LIVING, asked))


class Outgoing:
    """What is to be sent, through one writer of `KIND`, whose id marks the claims and whose session proves that they live.

    StorageUnavailableError: in doubt, and the claims are lost. StorageRefusedError: nothing was done.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @property
    def writer(self) -> Writer:
        """The writer behind it; its id changes when its claims were lost."""
        return self._writer

    async def claim(
        self, *, limit: int, claim_s: float, deadline: float, now_ms: int, low_us: Sequence[int], dead: Sequence[int]
    ) -> Batch:
        """Claim up to `limit` rows for `claim_s` seconds: what is due, by priority and due time, then what is due later.

        `low_us`: for priorities from 9 down to 0, due times (epoch microseconds) below which it need not look; `dead`: relays
        whose claims do not count; `now_ms`: this process's clock, on which expiry is told.
        """
        rows = await self._writer.run(
            _CLAIM,
            {
                "low": array(low_us),
                "dead": array(dead),
                "limit": limit,
                "bytes": MOST_BYTES,
                "claim_s": claim_s,
            },
        )
        last = rows.pop()
        at_us = last[9]
        rows.sort(key=lambda row: (row[9] > at_us, 0 if row[9] > at_us else -row[8], row[9]))
        copies, due, unreadable = [], [], []
        highest: dict[int, int] = {}
        for row in rows:
            if row[9] <= at_us:
                highest[row[8]] = row[9]
            if row[17] is None:
                unreadable.append(DeliveryId(row[1]))
                continue
            due.append(_EPOCH + timedelta(microseconds=row[9]))
            copies.append(
                Copy(
                    room_id=RoomId(row[0]),
                    delivery_id=DeliveryId(row[1]),
                    message_id=MessageId(row[2]),
                    subscription_id=SubscriptionId(row[3]),
                    kind=SubscriptionType.PULL if row[4] & 1 else SubscriptionType.PUSH,
                    generation=row[5],
                    attempt=row[6],
                    delay_ms=row[7],
                    priority=row[8],
                    expires_ms=None if row[10] is None else now_ms + row[10],
                    subscription_version=row[11],
                    event_type=row[12],
                    event_version=row[13],
                    correlation_id=row[14],
                    published_ms=row[15],
                    headers=row[16],
                    payload=row[17],
                    native=row[18],
                    deadline=deadline,
                )
            )
        return Batch(
            copies=copies,
            not_before=due,
            unreadable=unreadable,
            native=frozenset(SubscriptionId(row[3]) for row in rows if row[18]),
            found=last[7],
            at_us=at_us,
            highest_due_us=highest,
            beyond=bool(rows) and rows[-1][9] > at_us,
            deadline=deadline,
        )

    async def mark(self, copies: Sequence[Copy]) -> tuple[int, list[SubscriptionId]]:
        """These were sent: how many rows were still to be, and the PULL subscriptions among them.

        A row whose copy was taken already, or that moved on, stays as it is.
        """
        ((count, pulls),) = await self._writer.run(_MARK, _steps(_in_order(copies)))
        return count, [SubscriptionId(identity) for identity in (pulls or "").split(",") if identity]

    async def release(self, copies: Sequence[Copy]) -> None:
        """Give claimed rows back untouched."""
        await self._writer.run(_RELEASE, _steps(_in_order(copies)))

    async def end(self, endings: Sequence[Ending]) -> int:
        """End the deliveries of claimed rows: those that cannot be sent, and those that are handed over. How many did."""
        endings = sorted(endings, key=lambda ending: (ending.copy.room_id, ending.copy.delivery_id))
        rows = await self._writer.run(
            _END,
            {
                **_steps([ending.copy for ending in endings]),
                "state": plain(ending.to for ending in endings),
                "reason": text_array(ending.reason for ending in endings),
                "error": text_array(ending.error for ending in endings),
                "host": self._writer.host,
            },
        )
        return int(rows[0][0])

    async def living(self, subscriptions: Sequence[SubscriptionId]) -> frozenset[SubscriptionId]:
        """Those that nobody has deleted."""
        return await living(self._writer, subscriptions)

    async def nothing_sent(self) -> bool:
        """Whether no row says that the broker has a copy, and no other relay may just be sending one."""
        return bool((await self._writer.run(_NOTHING_SENT, {}))[0][0])

    async def dead_relays(self) -> list[int]:
        """Relays whose session is gone: their claims are free."""
        return [row[0] for row in await self._writer.run(_DEAD, {"life": LIFE_LOCK, "kind": KIND})]
