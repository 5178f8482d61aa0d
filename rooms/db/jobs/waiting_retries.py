"""Make the waiting retries of one subscription due now, one page of a job in one statement.

A retry is a delivery that was attempted before and is due later. It moves on by one generation, so
that a copy of it at a broker is stale. Its attempt, its expiry and its place in the order of its
key stay. A delivery waits on if its message is due later, if it is in flight, or if it is held.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.db.bounded_counts import count_bounded
from rooms.db.job_progress import OPEN_JOB, position_json, progress_cte
from rooms.db.queue.withdraw import IN_FLIGHT
from rooms.db.statement_parts import JOIN_MESSAGE
from rooms.db.writer import LIVENESS_LOCK, LogWriter
from rooms.domain.ids import JobId, SubscriptionId, room_of
from rooms.domain.state_machine import LogKind, State, SubscriptionStatus, SubscriptionType

BATCH: Final = 200
"""The most retries of a page."""
MAX_READ: Final = 2000
"""The most rows of the room's outbox that a page reads: no index finds those of a subscription."""
RETRIED: Final = "retried"
"""The name of the count in a job's result."""

_LAST_ID: Final = "ffffffff-ffff-ffff-ffff-ffffffffffff"
_IS_RETRY: Final = (
    "o.subscription_id = %(subscription)s::uuid AND o.attempt > 0 AND o.due_at > now()"
)
# `delay_ms` says when a retry began to wait, except where a restore made the work row again. Those
# that began after the request keep their backoff, so that repeated requests spend no attempts.
_WAITED_BY_THEN: Final = """least(o.due_at - o.delay_ms * interval '1 ms', d.updated_at)
        <= %(asked_at)s::timestamptz"""
# Rows are locked as by a restore (`rooms.db.jobs.restore`): no lock is waited for, and the page
# ends before the first row that is locked. With `%(on)s` such a row is passed over.
_RETRY: Final = f"""
WITH {OPEN_JOB}, page AS MATERIALIZED (
    SELECT o.* FROM outbox o
    WHERE o.room_id = %(room)s::int4 AND o.id > %(after)s::uuid AND o.id < %(until)s::uuid AND (SELECT one FROM open_job) = 1
    ORDER BY o.id LIMIT %(read)s::int4
), s AS MATERIALIZED (
    SELECT u.type, u.version - u.lane_changes AS policy FROM subscriptions u CROSS JOIN rooms r
    WHERE u.room_id = %(room)s::int4 AND u.id = %(subscription)s::uuid AND u.status || '' = '{
    SubscriptionStatus.ACTIVE
}'
        AND r.id = %(room)s::int4 AND NOT r.deleting
), seen AS MATERIALIZED (
    SELECT o.* FROM page o WHERE {_IS_RETRY} ORDER BY o.id LIMIT %(limit)s::int4
), ahead AS MATERIALIZED (
    SELECT CASE WHEN count(*) < %(limit)s::int4 THEN '{
    _LAST_ID
}'::uuid ELSE max(id::text)::uuid END AS last FROM seen
), c AS MATERIALIZED (
    SELECT o.*, d.state, m.event_type, m.event_version, m.correlation_id
    FROM seen o CROSS JOIN LATERAL (
        SELECT * FROM deliveries d WHERE d.room_id = o.room_id AND d.id = o.id LIMIT 1
    ) d {JOIN_MESSAGE}
    WHERE EXISTS (SELECT FROM s) AND d.generation = o.generation AND d.attempt = o.attempt
        AND d.state IN ('{State.QUEUED}', '{
    State.SCHEDULED
}') AND (m.due_at > now()) IS NOT TRUE AND {_WAITED_BY_THEN}
        AND NOT {IN_FLIGHT}
), w AS MATERIALIZED (
    SELECT c.id FROM c CROSS JOIN LATERAL (
        SELECT FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id AND o.generation = c.generation AND o.attempt = c.attempt
            AND o.kind + 0 = c.kind AND o.claimed_until = c.claimed_until
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) o
), free AS MATERIALIZED (
    SELECT c.* FROM c CROSS JOIN LATERAL (
        SELECT FROM deliveries t WHERE t.room_id = c.room_id AND t.id = c.id AND t.generation = c.generation
            AND t.attempt = c.attempt AND t.state = c.state
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) t WHERE c.id IN (SELECT id FROM w)
), stop AS MATERIALIZED (
    SELECT coalesce((
        SELECT id FROM c WHERE NOT %(on)s::bool AND id NOT IN (SELECT id FROM free) ORDER BY id LIMIT 1
    ), '{_LAST_ID}'::uuid) AS id
), x AS MATERIALIZED (
    SELECT f.* FROM free f WHERE f.id < (SELECT id FROM stop)
), d AS (
    UPDATE deliveries t SET state = '{
    State.QUEUED
}', generation = x.generation + 1, due_at = now(), updated_at = now()
    FROM x WHERE t.room_id = x.room_id AND t.id = x.id
), o AS (
    UPDATE outbox o SET generation = x.generation + 1, due_at = now(), kind = (x.kind & 1) + %(push)s::int2,
        delay_ms = greatest(0, x.delay_ms - ceil(extract(epoch FROM x.due_at - now()) * 1000)::int8),
        claimed_until = '-infinity', worker = NULL
    FROM x WHERE o.room_id = ANY (ARRAY[x.room_id]) AND o.id = x.id
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, worker_host, delay_ms, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id, '{
    LogKind.RESTORED
}', subscription_id, id,
        generation + 1, attempt, event_type, event_version, correlation_id, (SELECT policy FROM s), %(host)s::text, 0, '{
    RETRIED
}'
    FROM x RETURNING 1
), passed AS MATERIALIZED (
    SELECT max(id::text)::uuid AS last FROM page WHERE id < (SELECT id FROM stop) AND id <= (SELECT last FROM ahead)
), busy AS MATERIALIZED (
    SELECT count(*) AS n FROM c WHERE id < (SELECT id FROM stop) AND id NOT IN (SELECT id FROM x)
), {
    progress_cte(
        position="coalesce((SELECT jsonb_build_object('after', last::text) FROM passed WHERE last IS NOT NULL), j.position)",
        done="((SELECT count(*) FROM x) + (SELECT n FROM busy))",
        counts=f"SELECT '{RETRIED}' AS what, count(*) AS n FROM x UNION ALL SELECT 'busy', n FROM busy WHERE n > 0",
    )
}
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM progress), (SELECT count(*) FROM x), (SELECT last::text FROM passed),
    NOT EXISTS (SELECT FROM s) OR (SELECT count(*) FROM page) < %(read)s::int4
        AND (SELECT last FROM ahead) = '{_LAST_ID}'::uuid AND (SELECT id FROM stop) = '{
    _LAST_ID
}'::uuid,
    (SELECT type = '{SubscriptionType.PULL}' FROM s)
"""  # noqa: S608 - constants of this package

# The bound is of the rows that are read: no index finds those of a subscription.
_COUNT: Final = f"""
SELECT 0, CASE WHEN count(*) < %(most)s::int4 THEN count(*) FILTER (WHERE {_IS_RETRY}) ELSE %(most)s::int4 END
FROM (
    SELECT * FROM outbox o WHERE o.room_id = %(room)s::int4 AND o.id > %(after)s::uuid AND o.id < %(until)s::uuid
    ORDER BY o.id LIMIT %(most)s::int4
) o
"""  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPage:
    """Describe a step: how many retries it made due, and the last id that it passed (None: none).

    `end`: there are no more, or the subscription is not active. `is_pull`: its type.
    """

    retried: int
    last: str | None
    end: bool
    is_pull: bool


class WaitingRetryQueries:
    """Make retries due through one writer.

    StorageUnavailableError: in doubt, read the job's position; StorageRefusedError: not done.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def count(self, subscription: SubscriptionId, after: str, until: str) -> int | None:
        """Count the retries between two ids; None: too many rows of the room had to be read."""
        parameters = {
            "room": room_of(subscription),
            "subscription": subscription,
            "after": after,
            "until": until,
        }
        return await count_bounded(self._writer, _COUNT, parameters)

    async def retry_page(
        self,
        job: JobId,
        position: Mapping[str, Any] | None,
        subscription: SubscriptionId,
        *,
        after: str,
        until: str,
        requested_at: datetime,
        skip_locked: bool = False,
        limit: int = BATCH,
        max_read: int = MAX_READ,
    ) -> RetryPage | None:
        """Make the next retries due that are between two ids and waited at `requested_at`.

        None: the job has ended, or is at another position. `skip_locked`: pass over locked rows.
        """
        parameters = {
            "job": job,
            "position": position_json(position),
            "room": room_of(subscription),
            "subscription": subscription,
            "after": after,
            "until": until,
            "asked_at": requested_at,
            "on": skip_locked,
            "limit": limit,
            "read": max_read,
            "life": LIVENESS_LOCK,
            "host": self._writer.host,
        }
        ((is_current, retried, last, end, is_pull),) = await self._writer.run(_RETRY, parameters)
        if not is_current:
            return None
        return RetryPage(retried=retried, last=last, end=end, is_pull=bool(is_pull))
