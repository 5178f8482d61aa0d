"""Take deliveries out of a sideline: a shovel queues them again, a purge ends them."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from rooms.db.job_progress import IS_OPEN, OPEN_JOB, JobRun, progress_cte, run_parameters
from rooms.db.queue.ordering import RELEASED_COUNT, advance_ordering
from rooms.db.sideline.entries import JOIN_DELIVERY, EntryRef, entry_arrays
from rooms.db.statement_parts import JOIN_MESSAGE
from rooms.db.writer import LogWriter
from rooms.domain.magazine import Slot
from rooms.domain.state_machine import LogKind, Reason, State


class ShovelOutcome(StrEnum):
    """Say what became of a delivery that should be shoveled or purged."""

    QUEUED = "queued"
    EXPIRED = "expired"
    PURGED = "purged"
    TOO_OFTEN = "too_often"
    STALE = "stale"
    """It is no longer sidelined at this generation, or its message or subscription is gone."""
    BUSY = "busy"
    """It stays in the sideline: another process has its row locked."""


class MoveResult(NamedTuple):
    """Hold what became of a delivery.

    Of one that has left the sideline, `slot` is that of its entry. The loader may have recorded it
    after the caller read the row. `subscription_type`: if a shovel found the subscription.
    """

    outcome: ShovelOutcome
    subscription_type: str | None = None
    slot: Slot | None = None


_OVER: Final = "over"
"""In the place of an outcome: the job's run is over, and nothing was done."""
_ADVANCE_EXPIRED: Final = advance_ordering(
    f"SELECT room_id, id FROM u WHERE next = '{State.EXPIRED}'"  # noqa: S608 - constants of this package
)
_INPUT_ROWS: Final = f"""
WITH {OPEN_JOB}, v AS MATERIALIZED (
    SELECT * FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[]) WITH ORDINALITY AS v (room_id, id, generation, n)
    WHERE {IS_OPEN}
), s AS MATERIALIZED (
    SELECT v.n, s.* FROM v CROSS JOIN LATERAL (
        SELECT * FROM sidelined s WHERE s.room_id = v.room_id AND s.id = v.id AND s.generation = v.generation
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) s
), locked AS MATERIALIZED (
    SELECT v.n FROM (SELECT * FROM v WHERE n NOT IN (SELECT n FROM s)) v CROSS JOIN LATERAL (
        SELECT * FROM sidelined s WHERE s.room_id = v.room_id AND s.id = v.id AND s.generation = v.generation LIMIT 1
    ) s {JOIN_DELIVERY}
)"""  # noqa: S608 - constants of this package
# Rows that the caller will try again are not counted: if it dies before, its successor finds them.
_DONE: Final = """((SELECT count(*) FROM v)
    - CASE WHEN %(pass_locked)s::bool THEN 0 ELSE (SELECT count(*) FROM locked) END)"""
_BUSY_COUNT: Final = f"""
    SELECT '{ShovelOutcome.BUSY}' AS what, count(*) AS n FROM locked WHERE %(pass_locked)s::bool HAVING count(*) > 0
"""  # noqa: S608 - constants of this package
_SHOVEL_PROGRESS: Final = progress_cte(
    position="j.position",
    done=_DONE,
    counts=f"""
        SELECT next::text AS what, count(*) AS n FROM u GROUP BY next
        UNION ALL SELECT '{ShovelOutcome.TOO_OFTEN}', count(*) FROM t WHERE next IS NULL HAVING count(*) > 0
        UNION ALL SELECT '{ShovelOutcome.STALE}', n FROM (
            SELECT (SELECT count(*) FROM v) - (SELECT count(*) FROM locked)
                - (SELECT count(*) FROM t WHERE next IS NULL) - (SELECT count(*) FROM u) AS n
        ) x WHERE n > 0
        UNION ALL {_BUSY_COUNT}
    """,  # noqa: S608 - constants of this package
)
_PURGE_PROGRESS: Final = progress_cte(
    position="j.position",
    done=_DONE,
    counts=f"""
        SELECT '{State.PURGED}' AS what, count(*) AS n FROM u
        UNION ALL SELECT '{ShovelOutcome.STALE}', (SELECT count(*) FROM v) - (SELECT count(*) FROM locked) - (SELECT count(*) FROM u)
        UNION ALL {_BUSY_COUNT}
    """,  # noqa: S608 - constants of this package
)
_RECORD_SKIPPED: Final = f"""
WITH {OPEN_JOB}, {progress_cte(position="j.position", done="%(skipped)s::int8", counts=f"SELECT '{ShovelOutcome.TOO_OFTEN}' AS what, %(skipped)s::int8 AS n")}
SELECT 0, count(*) FROM progress
"""  # noqa: S608 - constants of this package

# A shovel does not renew the lifetime: what expired meanwhile ends here. What was shoveled too
# often stays.
_SHOVEL: Final = f"""{_INPUT_ROWS}, t AS MATERIALIZED (
    SELECT s.n, s.shard, s.pointer, d.room_id, d.id, d.message_id, d.subscription_id, d.generation, d.expires_at,
        u.type, u.version - u.lane_changes AS policy, m.priority, m.event_type, m.event_version, m.correlation_id,
        CASE WHEN d.expires_at <= now() THEN '{State.EXPIRED}' WHEN d.shovels >= %(most)s::int4 THEN NULL
            ELSE '{State.QUEUED}' END::delivery_state AS next
    FROM s {JOIN_DELIVERY} CROSS JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m CROSS JOIN LATERAL (
        SELECT * FROM subscriptions u WHERE u.room_id = d.room_id AND u.id = d.subscription_id LIMIT 1
    ) u WHERE u.status NOT IN ('deleted', 'rejected', 'terminated')
), u AS (
    UPDATE deliveries d SET state = t.next, updated_at = now(),
        generation = d.generation + (t.next = '{State.QUEUED}')::int4,
        attempt = CASE WHEN t.next = '{State.QUEUED}' THEN 0 ELSE d.attempt END,
        shovels = d.shovels + (t.next = '{State.QUEUED}')::int4,
        due_at = CASE WHEN t.next = '{State.QUEUED}' THEN now() END,
        reason = CASE WHEN t.next = '{State.EXPIRED}' THEN '{Reason.TOO_LATE}' END
    FROM t WHERE t.next IS NOT NULL AND d.room_id = t.room_id AND d.id = t.id AND d.generation = t.generation
        AND d.state = '{State.SIDELINED}'
    RETURNING t.*, d.generation AS new_generation, d.attempt
), gone AS (
    DELETE FROM sidelined s USING u WHERE s.room_id = ANY (ARRAY[u.room_id]) AND s.id = u.id
), o AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id,
        CASE type WHEN 'PULL' THEN %(pull)s::int2 ELSE %(push)s::int2 END, priority, new_generation, 0, now(), expires_at
    FROM u WHERE next = '{State.QUEUED}'
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, delay_ms, worker_host)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id,
        CASE next WHEN '{State.QUEUED}' THEN '{LogKind.SHOVELED}' ELSE '{LogKind.EXPIRED}' END, subscription_id, id,
        new_generation, attempt, event_type, event_version, correlation_id, policy, 0, %(host)s::text FROM u
    RETURNING 1
){_ADVANCE_EXPIRED}, {_SHOVEL_PROGRESS}
SELECT (SELECT count(*) FROM l) + {RELEASED_COUNT}, t.n,
    CASE WHEN t.next IS NULL THEN '{ShovelOutcome.TOO_OFTEN}' WHEN u.n IS NULL THEN '{ShovelOutcome.STALE}' ELSE u.next::text END, t.type,
    t.shard, t.pointer
FROM t LEFT JOIN u ON u.n = t.n
UNION ALL SELECT (SELECT count(*) FROM l) + {RELEASED_COUNT}, n, '{ShovelOutcome.BUSY}', NULL, NULL, NULL FROM locked
UNION ALL SELECT (SELECT count(*) FROM l) + {RELEASED_COUNT}, NULL, CASE WHEN NOT {IS_OPEN} THEN '{_OVER}' END, NULL, NULL, NULL
"""  # noqa: S608 - constants of this package

_PURGE: Final = f"""{_INPUT_ROWS}, u AS (
    UPDATE deliveries d SET state = '{State.PURGED}', updated_at = now()
    FROM s WHERE d.room_id = s.room_id AND d.id = s.id AND d.generation = s.generation AND d.state = '{State.SIDELINED}'
    RETURNING s.n, s.shard, s.pointer, d.room_id, d.id, d.message_id, d.subscription_id, d.generation, d.attempt
), gone AS (
    DELETE FROM sidelined s USING u WHERE s.room_id = ANY (ARRAY[u.room_id]) AND s.id = u.id
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.PURGED}', d.subscription_id,
        d.id, d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(host)s::text
    FROM u d {JOIN_MESSAGE}
    RETURNING 1
){advance_ordering("SELECT room_id, id FROM u")}, {_PURGE_PROGRESS}
SELECT (SELECT count(*) FROM l) + {RELEASED_COUNT}, n, '{ShovelOutcome.PURGED}', NULL, shard, pointer FROM u
UNION ALL SELECT (SELECT count(*) FROM l) + {RELEASED_COUNT}, n, '{ShovelOutcome.BUSY}', NULL, NULL, NULL FROM locked
UNION ALL SELECT (SELECT count(*) FROM l) + {RELEASED_COUNT}, NULL, CASE WHEN NOT {IS_OPEN} THEN '{_OVER}' END, NULL, NULL, NULL
"""  # noqa: S608 - constants of this package


class ShovelQueries:
    """Shovel and purge through one writer.

    StorageUnavailableError: in doubt; StorageRefusedError: not done.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def shovel(
        self,
        entries: Sequence[EntryRef],
        *,
        max_shovels: int,
        pass_locked: bool = True,
        run: JobRun | None = None,
    ) -> list[MoveResult] | None:
        """Queue deliveries again, unless they were shoveled `max_shovels` times.

        Their attempts count anew. Return what became of each. The caller must delete the entries of
        those that left the sideline. The job of `run` counts what became of them; without
        `pass_locked` it does not count those that are locked, as the caller tries them again. None:
        the run is over, and nothing was done.
        """
        parameters = {"most": max_shovels, "pass_locked": pass_locked}
        return await self._move(_SHOVEL, entries, parameters, run)

    async def purge(
        self,
        entries: Sequence[EntryRef],
        *,
        pass_locked: bool = True,
        run: JobRun | None = None,
    ) -> list[MoveResult] | None:
        """End deliveries as `purged`; otherwise as `shovel`."""
        return await self._move(_PURGE, entries, {"pass_locked": pass_locked}, run)

    async def _move(
        self,
        statement: str,
        entries: Sequence[EntryRef],
        parameters: Mapping[str, object],
        run: JobRun | None,
    ) -> list[MoveResult] | None:
        rows = await self._writer.run(
            statement,
            {
                **entry_arrays(entries),
                **run_parameters(run),
                **parameters,
                "host": self._writer.host,
            },
        )
        results = [MoveResult(ShovelOutcome.STALE)] * len(entries)
        for n, outcome, kind, shard, pointer in rows:
            if outcome == _OVER:
                return None
            slot = None if shard is None else Slot(shard, pointer)
            results[n - 1] = MoveResult(ShovelOutcome(outcome), kind, slot)
        return results

    async def record_skipped(self, run: JobRun, count: int) -> bool:
        """Count deliveries that were shoveled too often; return False if the run is over."""
        parameters = run_parameters(run) | {"skipped": count}
        return bool((await self._writer.run(_RECORD_SKIPPED, parameters))[0][0])
