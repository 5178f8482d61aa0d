"""Restore the deliveries of a room, or clear it, one page of a job in one statement.

**Restore**: an unfinished delivery keeps its state, attempt and due time and moves on by one
generation. If its work row is missing, it is made again. A delivery that ended is queued if that
was requested: its attempts count anew, with a fresh lifetime. It is not where the subscription is
another organisation's and no grant covers it. A delivery that a living process has claimed or
leased is on its way, and stays as it is.

**Clear**: unfinished deliveries are cancelled, of a room or of one subscription. A skip to now
keeps what is due after it was requested. What a push worker has claimed is left to end, and
locked rows are skipped. Both are between `first` and `final` of the pages that saw them, so that
another round tries them again.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.db.bounded_counts import count_bounded
from rooms.db.job_progress import OPEN_JOB, position_json, progress_cte
from rooms.db.pg_arrays import word_array
from rooms.db.queue.expire import termination_statement
from rooms.db.queue.refusals import is_not_granted
from rooms.db.statement_parts import ROOM_LIFETIME_MS
from rooms.db.writer import LogWriter
from rooms.domain.ids import JobId, MessageId, RoomId, SubscriptionId
from rooms.domain.state_machine import UNFINISHED, LogKind, Reason, State
from rooms.domain.work_location import SCHEDULED, TO_RELAY

BATCH: Final = 200

_LAST_ID: Final = "ffffffff-ffff-ffff-ffff-ffffffffffff"
_REPEATED: Final = "'restored', 'renewed'"
_ENDED: Final = ", ".join(f"'{state}'" for state in (State.EXPIRED, State.CANCELLED, State.DROPPED))

# Work rows are locked first, by SKIP LOCKED, and only if they are as they were read, so no lock is
# waited for. The page ends before the first row that is locked or has just moved: the next step
# reads it again. With `%(on)s`, after many steps, such a row is passed over.
_RESTORE: Final = """
WITH {open_job}, page AS MATERIALIZED (
    SELECT d.room_id, d.id, d.message_id, d.subscription_id, d.state, d.generation, d.attempt, d.due_at, d.expires_at, d.reason, d.attempts
    FROM deliveries d WHERE d.room_id = %(room)s::int4 AND d.id > %(after)s::uuid AND d.id < %(until)s::uuid {of}
        AND (SELECT one FROM open_job) = 1
    ORDER BY d.id LIMIT %(limit)s::int4
), r AS MATERIALIZED (
    SELECT {room_lifetime_ms} AS lifetime_ms, r.organisation_id AS owner FROM rooms r WHERE r.id = %(room)s::int4 AND NOT r.deleting
), seen AS MATERIALIZED (
    SELECT p.*, u.type, u.version - u.lane_changes AS policy, u.message_expiration_ms AS own_life_ms, m.priority, m.event_type, m.event_version, m.correlation_id, m.published_at,
        greatest(m.due_at, now()) AS first_due, o.id IS NOT NULL AS in_outbox, o.kind, o.claimed_until,
        o.claimed_until > now() AS claimed, coalesce(o.delay_ms, h.delay_ms, 0) AS delay_ms, h.id IS NOT NULL AS in_held,
        coalesce(o.due_at, p.due_at, now()) AS due,
        (p.state IN ({ended}) AND u.organisation_id <> (SELECT owner FROM r) AND {not_granted}) IS TRUE AS ungranted
    FROM page p LEFT JOIN LATERAL (
        SELECT * FROM subscriptions u WHERE u.room_id = p.room_id AND u.id = p.subscription_id AND u.status NOT IN ('deleted', 'rejected', 'terminated') LIMIT 1
    ) u ON true LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = p.room_id AND m.id = p.message_id LIMIT 1
    ) m ON true LEFT JOIN LATERAL (
        SELECT * FROM outbox o WHERE o.room_id = p.room_id AND o.id = p.id LIMIT 1
    ) o ON true LEFT JOIN LATERAL (SELECT * FROM held h WHERE h.room_id = p.room_id AND h.id = p.id LIMIT 1) h ON true
    WHERE p.state = ANY (%(states)s::delivery_state[]) AND EXISTS (SELECT FROM r)
), c AS MATERIALIZED (
    SELECT s.*, CASE WHEN s.type IS NULL THEN 'subscription_gone' WHEN s.priority IS NULL THEN 'message_gone'
        WHEN s.published_at > %(asked_at)s::timestamptz THEN 'newer' WHEN s.ungranted THEN 'not_granted'
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
            WHEN extract(epoch FROM f.next_due - now()) * 1000 > %(lookahead)s::int8 THEN '{scheduled}' ELSE '{queued}'
            END::delivery_state AS next,
        CASE f.what WHEN 'renewed' THEN f.first_due
            + least((SELECT lifetime_ms FROM r), f.own_life_ms) * interval '1 ms'
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
), {progress}
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM progress), (SELECT n FROM passed), (SELECT last::text FROM passed),
    (SELECT count(*) FROM page) < %(limit)s::int4 AND (SELECT id FROM stop) = '{last}'::uuid,
    EXISTS (SELECT FROM x WHERE next = '{queued}' AND type = 'PUSH'),
    (SELECT string_agg(DISTINCT subscription_id::text, ',') FROM x WHERE next = '{queued}' AND type = 'PULL')
"""


def _restore_statement(of: str = "") -> str:
    return _RESTORE.format(
        open_job=OPEN_JOB,
        room_lifetime_ms=ROOM_LIFETIME_MS,
        not_granted=is_not_granted("p", "u"),
        of=of,
        again=_REPEATED,
        ended=_ENDED,
        leased=State.LEASED,
        expired=State.EXPIRED,
        queued=State.QUEUED,
        scheduled=State.SCHEDULED,
        held=State.HELD,
        saturated=Reason.SATURATED,
        restored=LogKind.RESTORED,
        later=SCHEDULED[0] - TO_RELAY[0],
        last=_LAST_ID,
        progress=progress_cte(
            position="coalesce((SELECT jsonb_build_object('after', last::text) FROM passed WHERE last IS NOT NULL), j.position)",
            done="(SELECT n FROM passed)",
            # Also a step that restored nothing says so: `done` counts what was examined.
            counts="""
                SELECT what, count(*) FILTER (WHERE NOT none) AS n FROM (
                    SELECT what, false AS none FROM x
                    UNION ALL SELECT CASE WHEN what IN ('restored', 'renewed') THEN 'busy' ELSE what END, false
                    FROM c WHERE id < (SELECT id FROM stop) AND id NOT IN (SELECT id FROM x)
                    UNION ALL SELECT 'restored', true
                ) y GROUP BY what
            """,
        ),
    )


_RESTORE_ROOM: Final = _restore_statement()
_RESTORE_MESSAGE: Final = _restore_statement("AND d.message_id = %(message)s::uuid")

_COUNT: Final = """
SELECT 0, count(*) FROM (
    SELECT FROM deliveries d WHERE d.room_id = %(room)s::int4 AND d.id > %(after)s::uuid AND d.id < %(until)s::uuid
        AND (%(message)s::uuid IS NULL OR d.message_id = %(message)s::uuid) LIMIT %(most)s::int4
) c
"""
_COUNT_SUBSCRIPTION: Final = """
SELECT 0, count(*) FROM (
    SELECT FROM deliveries d WHERE d.subscription_id = %(subscription)s::uuid AND d.room_id = %(room)s::int4
        AND d.id > %(after)s::uuid AND d.id < %(until)s::uuid LIMIT %(most)s::int4
) c
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRange:
    """Name the deliveries of a room with ids between two, exclusively.

    They are those of one message, of one subscription, or (both None) all.
    """

    room: RoomId
    after: str
    until: str
    message: MessageId | None = None
    subscription: SubscriptionId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePage:
    """Describe a step: `scanned` rows up to the id `last` (None: none); `end`: there are no more.

    `push_queued`: workers have something to take up; `pull_queued`: the PULL subscriptions that do.
    """

    scanned: int
    last: str | None
    end: bool
    push_queued: bool
    pull_queued: Collection[SubscriptionId]


class RestoreQueries:
    """Restore through one writer.

    StorageUnavailableError: in doubt, read the job's position; StorageRefusedError: not done.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def count(self, within: DeliveryRange) -> int | None:
        """Count the deliveries to read; None: there are too many."""
        parameters = {
            "room": within.room,
            "after": within.after,
            "until": within.until,
            "message": within.message,
            "subscription": within.subscription,
        }
        statement = _COUNT if within.subscription is None else _COUNT_SUBSCRIPTION
        return await count_bounded(self._writer, statement, parameters)

    async def restore_page(
        self,
        job: JobId,
        position: Mapping[str, Any] | None,
        within: DeliveryRange,
        states: Collection[State],
        *,
        requested_at: datetime,
        skip_locked: bool = False,
        limit: int = BATCH,
    ) -> RestorePage | None:
        """Restore the next deliveries in one of `states`, but none published after `requested_at`.

        None: the job has ended, or is at another position. `skip_locked`: pass over locked rows.
        """
        parameters = {
            "job": job,
            "position": position_json(position),
            "room": within.room,
            "after": within.after,
            "until": within.until,
            "message": within.message,
            "states": word_array(sorted(states)),
            "asked_at": requested_at,
            "on": skip_locked,
            "limit": limit,
            "host": self._writer.host,
        }
        statement = _RESTORE_ROOM if within.message is None else _RESTORE_MESSAGE
        ((is_current, seen, last, end, push, pulls),) = await self._writer.run(
            statement, parameters
        )
        if not is_current:
            return None
        names = [SubscriptionId(name) for name in (pulls or "").split(",") if name]
        return RestorePage(scanned=seen, last=last, end=end, push_queued=push, pull_queued=names)


_UNFINISHED: Final = ", ".join(f"'{state}'" for state in sorted(UNFINISHED))
_PAGE_CTES: Final = f"""{OPEN_JOB}, page AS MATERIALIZED (
    SELECT room_id, id, message_id, generation, attempt, state, expires_at FROM deliveries
    WHERE room_id = %(room)s::int4 AND id > %(after)s::uuid AND id < %(until)s::uuid {{of}} AND (SELECT one FROM open_job) = 1
    ORDER BY id LIMIT %(limit)s::int4
), left_alone AS MATERIALIZED (
    SELECT p.id FROM page p CROSS JOIN LATERAL (
        SELECT m.published_at, m.due_at FROM messages m WHERE m.room_id = p.room_id AND m.id = p.message_id LIMIT 1
    ) m WHERE {{left_alone}}
),"""  # noqa: S608 - constants of this package
_NEWER: Final = "m.published_at > %(asked_at)s::timestamptz"
_CANDIDATES: Final = f"""
    SELECT room_id, id, generation, attempt, state, expires_at FROM page
    WHERE state IN ({_UNFINISHED}) AND id NOT IN (SELECT id FROM left_alone)
"""  # noqa: S608 - constants of this package
_BOUNDS: Final = """bounds AS MATERIALIZED (
    SELECT (SELECT id::text FROM spared ORDER BY id LIMIT 1) AS first,
        (SELECT id::text FROM spared ORDER BY id DESC LIMIT 1) AS final, (SELECT id::text FROM page ORDER BY id DESC LIMIT 1) AS last
)"""
_PROGRESS: Final = progress_cte(
    position="""coalesce((
        SELECT jsonb_strip_nulls(jsonb_build_object('after', b.last, 'until', j.position -> 'until',
            'first', coalesce(j.position ->> 'first', b.first), 'final', coalesce(b.final, j.position ->> 'final')))
        FROM bounds b WHERE b.last IS NOT NULL
    ), j.position)""",
    done="CASE WHEN j.position ? 'until' THEN 0 ELSE (SELECT count(*) FROM page) END",
    counts="SELECT 'cancelled' AS what, count(*) AS n FROM d",
)


def _clear_statement(of: str = "", left_alone: str = _NEWER) -> str:
    return termination_statement(
        leading_ctes=_PAGE_CTES.format(of=of, left_alone=left_alone),
        candidates=_CANDIDATES,
        state=State.CANCELLED,
        reason=Reason.CLEARED,
        lease_condition="true",
        trailing_ctes=f"{_BOUNDS}, {_PROGRESS}",
        result_columns="""(SELECT count(*) FROM progress),
    (SELECT count(*) FROM page) < %(limit)s::int4, (SELECT position::text FROM progress)""",
    )


_OF_SUBSCRIPTION: Final = "AND subscription_id = %(subscription)s::uuid"
_CLEAR_ROOM: Final = _clear_statement()
_CLEAR_SUBSCRIPTION: Final = _clear_statement(_OF_SUBSCRIPTION)
_SKIP_TO_NOW: Final = _clear_statement(
    _OF_SUBSCRIPTION, f"{_NEWER} OR m.due_at > %(asked_at)s::timestamptz"
)

_START_ROUND: Final = """
WITH j AS (
    UPDATE jobs SET position = %(following)s::jsonb, updated_at = now()
    WHERE id = %(job)s::uuid AND state IN ('queued', 'running') AND position IS NOT DISTINCT FROM %(position)s::jsonb
    RETURNING 1
) SELECT 0, count(*) FROM j
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearResult:
    """Hold how many deliveries a step cancelled, the job's position, and the end of its round."""

    cancelled: int
    position: Mapping[str, Any] | None
    end: bool


class ClearQueries:
    """Clear through one writer.

    StorageUnavailableError: in doubt, read the job's position; StorageRefusedError: not done.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def clear_page(
        self,
        job: JobId,
        position: Mapping[str, Any] | None,
        within: DeliveryRange,
        *,
        requested_at: datetime,
        keeps_later: bool = False,
        limit: int = BATCH,
    ) -> ClearResult | None:
        """Cancel the next unfinished deliveries, but none published after `requested_at`.

        `keeps_later`: nor those of a subscription that are due after it. None: the job has ended,
        or is at another position.
        """
        parameters = {
            "job": job,
            "position": position_json(position),
            "room": within.room,
            "after": within.after,
            "until": within.until,
            "asked_at": requested_at,
            "limit": limit,
            "host": self._writer.host,
        }
        statement = _CLEAR_ROOM
        if within.subscription is not None:
            parameters["subscription"] = within.subscription
            statement = _SKIP_TO_NOW if keeps_later else _CLEAR_SUBSCRIPTION
        ((cancelled, is_current, end, new_position),) = await self._writer.run(
            statement, parameters
        )
        if not is_current:
            return None
        return ClearResult(
            cancelled=cancelled,
            position=None if new_position is None else json.loads(new_position),
            end=end,
        )

    async def start_round(
        self, job: JobId, position: Mapping[str, Any], *, after: str, until: str
    ) -> bool:
        """Let the job go once more over the range between two ids.

        Return False if it has ended, or is at another position.
        """
        following = json.dumps({"after": after, "until": until})
        parameters = {"job": job, "position": position_json(position), "following": following}
        return bool((await self._writer.run(_START_ROUND, parameters))[0][0])
