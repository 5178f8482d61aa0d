"""Restoring deliveries, a page of a job's walk in one statement: what is unfinished anew, and what ended if asked for.

What is unfinished keeps its state, attempt and due time and moves on by one generation; what is missing of its work row
is made again. What ended is queued, its attempts counted anew, with a fresh lifetime. What a living process has claimed
is on its way already and stays as it is, as does what is under a lease.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.domain.ids import JobId, MessageId, RoomId, SubscriptionId
from rooms.domain.place import LATER, TO_SEND
from rooms.domain.states import LogKind, Reason, State
from rooms.storage.job_steps import MINE, told
from rooms.storage.literals import plain
from rooms.storage.writer import Writer

BATCH: Final = 200

_LAST_ID: Final = "ffffffff-ffff-ffff-ffff-ffffffffffff"
_AGAIN: Final = "'restored', 'renewed'"
_ENDED: Final = ", ".join(f"'{state}'" for state in (State.EXPIRED, State.CANCELLED, State.DROPPED))

# Rows are locked work row first, by SKIP LOCKED, and only as they were seen, so that nobody is waited for. The page ends
# before the first row that somebody else has locked or just moved: the next look judges it anew. With `%(on)s`, after
# many looks, it is passed over.
_RESTORE: Final = """
WITH {mine}, page AS MATERIALIZED (
    SELECT d.room_id, d.id, d.message_id, d.subscription_id, d.state, d.generation, d.attempt, d.due_at, d.expires_at, d.reason
    FROM deliveries d WHERE d.room_id = %(room)s::int4 AND d.id > %(after)s::uuid AND d.id < %(until)s::uuid {of}
        AND (SELECT one FROM open_job) = 1
    ORDER BY d.id LIMIT %(limit)s::int4
), r AS MATERIALIZED (
    SELECT message_expiration_ms FROM rooms WHERE id = %(room)s::int4 AND NOT deleting
), seen AS MATERIALIZED (
    SELECT p.*, u.type, u.version AS policy, m.priority, m.event_type, m.event_version, m.correlation_id, m.published_at,
        greatest(m.due_at, now()) AS first_due, o.id IS NOT NULL AS in_outbox, o.kind, o.claimed_until,
        o.claimed_until > now() AS claimed, coalesce(o.delay_ms, h.delay_ms, 0) AS delay_ms, h.id IS NOT NULL AS in_held,
        coalesce(o.due_at, p.due_at, now()) AS due
    FROM page p LEFT JOIN LATERAL (
        SELECT * FROM subscriptions u WHERE u.room_id = p.room_id AND u.id = p.subscription_id AND u.status <> 'deleted' LIMIT 1
    ) u ON true LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = p.room_id AND m.id = p.message_id LIMIT 1
    ) m ON true LEFT JOIN LATERAL (
        SELECT * FROM outbox o WHERE o.room_id = p.room_id AND o.id = p.id LIMIT 1
    ) o ON true LEFT JOIN LATERAL (SELECT * FROM held h WHERE h.room_id = p.room_id AND h.id = p.id LIMIT 1) h ON true
    WHERE p.state = ANY (%(states)s::delivery_state[]) AND EXISTS (SELECT FROM r)
), c AS MATERIALIZED (
    SELECT s.*, CASE WHEN s.type IS NULL THEN 'subscription_gone' WHEN s.priority IS NULL THEN 'message_gone'
        WHEN s.published_at > %(asked_at)s::timestamptz THEN 'newer'
        WHEN s.state = '{leased}' THEN 'leased' WHEN s.claimed THEN 'in_flight' WHEN s.state IN ({ended}) THEN 'renewed'
        WHEN s.expires_at <= now() THEN CASE WHEN '{expired}' = ANY (%(states)s::delivery_state[]) THEN 'renewed' ELSE 'expiring' END
        ELSE 'restored' END AS what
    FROM seen s
), w AS MATERIALIZED (
    SELECT c.id FROM c CROSS JOIN LATERAL (
        SELECT FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id AND o.kind + 0 = c.kind AND o.claimed_until = c.claimed_until
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) o WHERE c.what IN ({again}) AND c.in_outbox
    UNION ALL SELECT c.id FROM c CROSS JOIN LATERAL (
        SELECT FROM held h WHERE h.room_id = c.room_id AND h.id = c.id LIMIT 1 FOR UPDATE SKIP LOCKED
    ) h WHERE c.what IN ({again}) AND c.in_held AND NOT c.in_outbox
), free AS MATERIALIZED (
    SELECT c.* FROM c CROSS JOIN LATERAL (
        SELECT FROM deliveries t WHERE t.room_id = c.room_id AND t.id = c.id AND t.generation = c.generation
            AND t.attempt = c.attempt AND t.state = c.state
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) t WHERE c.what IN ({again}) AND (NOT c.in_outbox AND NOT c.in_held OR c.id IN (SELECT id FROM w))
), stop AS MATERIALIZED (
    SELECT coalesce((
        SELECT id FROM c WHERE NOT %(on)s::bool AND what IN ({again}) AND id NOT IN (SELECT id FROM free) ORDER BY id LIMIT 1
    ), '{last}'::uuid) AS id
), x AS MATERIALIZED (
    SELECT f.*, f.generation + 1 AS next_generation, CASE f.what WHEN 'renewed' THEN 0 ELSE f.attempt END AS next_attempt,
        CASE WHEN f.what = 'restored' AND f.state = '{held}' THEN '{held}'
            WHEN extract(epoch FROM f.next_due - now()) * 1000 > %(horizon)s::int8 THEN '{scheduled}' ELSE '{queued}'
            END::delivery_state AS next,
        CASE f.what WHEN 'renewed' THEN f.first_due + nullif((SELECT message_expiration_ms FROM r), 0) * interval '1 ms'
            ELSE f.expires_at END AS next_expiry
    FROM (SELECT *, CASE what WHEN 'renewed' THEN first_due ELSE due END AS next_due FROM free) f
    WHERE f.id < (SELECT id FROM stop)
), d AS (
    UPDATE deliveries t SET state = x.next, generation = x.next_generation, attempt = x.next_attempt, updated_at = now(),
        due_at = CASE x.next WHEN '{held}' THEN t.due_at ELSE x.next_due END, expires_at = x.next_expiry,
        reason = CASE x.next WHEN '{held}' THEN t.reason END
    FROM x WHERE t.room_id = x.room_id AND t.id = x.id
), o AS (
    INSERT INTO outbox AS o (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, delay_ms, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id, CASE type WHEN 'PULL' THEN %(pull)s::int2 ELSE %(push)s::int2 END
        + CASE next WHEN '{scheduled}' THEN {later:d} ELSE 0 END, priority, next_generation, next_attempt,
        CASE what WHEN 'renewed' THEN 0 ELSE delay_ms END, next_due, next_expiry
    FROM x WHERE next <> '{held}'
    ON CONFLICT (room_id, id) DO UPDATE SET kind = excluded.kind, generation = excluded.generation, attempt = excluded.attempt,
        delay_ms = excluded.delay_ms, due_at = excluded.due_at, expires_at = excluded.expires_at, claimed_until = '-infinity',
        worker = NULL
), hold AS (
    INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)
    SELECT room_id, id, subscription_id, priority, 0, coalesce(reason, '{saturated}') FROM x WHERE next = '{held}'
    ON CONFLICT (room_id, id) DO NOTHING
), unheld AS (
    DELETE FROM held h USING x WHERE x.next <> '{held}' AND h.room_id = ANY (ARRAY[x.room_id]) AND h.id = x.id
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id, '{restored}', subscription_id, id,
        next_generation, next_attempt, event_type, event_version, correlation_id, policy, %(host)s::text,
        CASE next WHEN '{queued}' THEN NULL ELSE next::text END FROM x
    RETURNING 1
), passed AS MATERIALIZED (
    SELECT count(*) AS n, max(id::text)::uuid AS last FROM page WHERE id < (SELECT id FROM stop)
), {told}
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM told), (SELECT n FROM passed), (SELECT last::text FROM passed),
    (SELECT count(*) FROM page) < %(limit)s::int4 AND (SELECT id FROM stop) = '{last}'::uuid,
    EXISTS (SELECT FROM x WHERE next = '{queued}' AND type = 'PUSH'),
    (SELECT string_agg(DISTINCT subscription_id::text, ',') FROM x WHERE next = '{queued}' AND type = 'PULL')
"""


def _restore(of: str = "") -> str:
    return _RESTORE.format(
        mine=MINE,
        of=of,
        again=_AGAIN,
        ended=_ENDED,
        leased=State.LEASED,
        expired=State.EXPIRED,
        queued=State.QUEUED,
        scheduled=State.SCHEDULED,
        held=State.HELD,
        saturated=Reason.SATURATED,
        restored=LogKind.RESTORED,
        later=LATER[0] - TO_SEND[0],
        last=_LAST_ID,
        told=told(
            position="coalesce((SELECT jsonb_build_object('after', last::text) FROM passed WHERE last IS NOT NULL), j.position)",
            done="(SELECT n FROM passed)",
            counts="""
                SELECT what, count(*) AS n FROM (
                    SELECT what FROM x UNION ALL SELECT CASE WHEN what IN ('restored', 'renewed') THEN 'busy' ELSE what END
                    FROM c WHERE id < (SELECT id FROM stop) AND id NOT IN (SELECT id FROM x)
                ) y GROUP BY what
            """,
        ),
    )


_OF_ROOM: Final = _restore()
_OF_MESSAGE: Final = _restore("AND d.message_id = %(message)s::uuid")

_COUNT: Final = """
SELECT 0, count(*) FROM deliveries d WHERE d.room_id = %(room)s::int4 AND d.id > %(after)s::uuid AND d.id < %(until)s::uuid
    AND (%(message)s::uuid IS NULL OR d.message_id = %(message)s::uuid)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Deliveries of a room with ids between two, exclusively; of one message or (None) of all."""

    room: RoomId
    after: str
    until: str
    message: MessageId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a step came to: `seen` rows up to the id `last` (None: none); `end`: there are no more. Who has something to
    take up now: workers (`push`), and pollers of these queues.
    """

    seen: int
    last: str | None
    end: bool
    push: bool
    pulls: Collection[SubscriptionId]


class Restores:
    """Restores through one writer. StorageUnavailableError: in doubt, the job's position tells; StorageRefusedError: not done."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def count(self, span: Span) -> int:
        """How many deliveries there are to look at."""
        asked = {"room": span.room, "after": span.after, "until": span.until, "message": span.message}
        return int((await self._writer.run(_COUNT, asked))[0][0])

    async def step(
        self,
        job: JobId,
        position: Mapping[str, Any] | None,
        span: Span,
        states: Collection[State],
        *,
        asked_at: datetime,
        on: bool = False,
        limit: int = BATCH,
    ) -> Page | None:
        """Restore what is in one of `states` among the next deliveries, but nothing published after `asked_at`. None: the
        job is over, or stands elsewhere. `on`: pass over what somebody has locked.
        """
        asked = {
            "job": job,
            "position": None if position is None else json.dumps(dict(position)),
            "room": span.room,
            "after": span.after,
            "until": span.until,
            "message": span.message,
            "states": plain(sorted(states)),
            "asked_at": asked_at,
            "on": on,
            "limit": limit,
            "host": self._writer.host,
        }
        statement = _OF_ROOM if span.message is None else _OF_MESSAGE
        ((mine, seen, last, end, push, pulls),) = await self._writer.run(statement, asked)
        if not mine:
            return None
        names = [SubscriptionId(name) for name in (pulls or "").split(",") if name]
        return Page(seen=seen, last=last, end=end, push=push, pulls=names)
