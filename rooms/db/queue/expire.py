"""End deliveries that expired or are cancelled, by one statement for both.

Expired deliveries are found by time and ended a batch in one statement, which serves all rooms at
once.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.db.pg_arrays import literal_array
from rooms.db.queue.claims import LARGEST_ORGANISATION, OF_OTHER_ORGANISATIONS
from rooms.db.queue.ordering import RELEASED_COUNT, advance_ordering, leave_line
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, OrganisationId, room_of
from rooms.domain.state_machine import UNFINISHED, Reason, State

# A push worker has it: its attempt counts.
_CLAIMED: Final = "o.claimed_until > now()"

# Every lock is taken by SKIP LOCKED, so this waits for no lock and cannot deadlock with statements
# that lock in another order. Rows that are locked are left for the next scan. `c` are the
# candidates, `w` the work rows that are deleted; a delivery without any work row (sidelined) ends
# without one.
#
# The plan is made once and kept for days, and perhaps made while a table was empty. So it is left
# no choice: rows are found one by one by primary key (LATERAL … LIMIT, and OFFSET 0, which forbids
# hashing a whole table) or by arrays.
_TERMINATE: Final = """
WITH {given} c AS MATERIALIZED ({candidates}), w AS MATERIALIZED (
    SELECT c.id FROM c, LATERAL (
        SELECT FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id AND NOT ({under_way})
        LIMIT 1 FOR UPDATE SKIP LOCKED) o
    UNION ALL SELECT c.id FROM c, LATERAL (
        SELECT FROM held h WHERE h.room_id = c.room_id AND h.id = c.id LIMIT 1 FOR UPDATE SKIP LOCKED) h
    UNION ALL SELECT c.id FROM c, LATERAL (
        SELECT FROM leases l WHERE l.room_id = c.room_id AND l.id = c.id AND {lease_goes}
        LIMIT 1 FOR UPDATE SKIP LOCKED) l
), mine AS MATERIALIZED (
    SELECT * FROM c WHERE c.id IN (SELECT id FROM w) OR NOT (
        EXISTS (SELECT FROM outbox o WHERE o.room_id = c.room_id AND o.id = c.id OFFSET 0)
        OR EXISTS (SELECT FROM held h WHERE h.room_id = c.room_id AND h.id = c.id OFFSET 0)
        OR EXISTS (SELECT FROM leases l WHERE l.room_id = c.room_id AND l.id = c.id OFFSET 0))
), free AS MATERIALIZED (
    SELECT c.room_id, c.id FROM mine c, LATERAL (
        SELECT FROM deliveries t WHERE t.room_id = c.room_id AND t.id = c.id AND t.generation = c.generation
            AND t.attempt = c.attempt AND t.state = c.state
        LIMIT 1 FOR UPDATE SKIP LOCKED) t
), these AS MATERIALIZED (
    SELECT array_agg(DISTINCT room_id) AS rooms, array_agg(id) AS ids FROM free
), d AS (
    UPDATE deliveries t SET state = '{state}', reason = {reason}, due_at = NULL, updated_at = now()
    WHERE t.room_id = ANY ((SELECT rooms FROM these)::int4[]) AND t.id = ANY ((SELECT ids FROM these)::uuid[])
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), gone_outbox AS (
    DELETE FROM outbox t
    WHERE t.room_id = ANY ((SELECT rooms FROM these)::int4[]) AND t.id = ANY ((SELECT ids FROM these)::uuid[])
), gone_held AS (
    DELETE FROM held t
    WHERE t.room_id = ANY ((SELECT rooms FROM these)::int4[]) AND t.id = ANY ((SELECT ids FROM these)::uuid[])
), gone_leases AS (
    DELETE FROM leases t
    WHERE t.room_id = ANY ((SELECT rooms FROM these)::int4[]) AND t.id = ANY ((SELECT ids FROM these)::uuid[])
), log AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{state}', d.subscription_id, d.id,
        d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(host)s::text, {reason}
    FROM d LEFT JOIN LATERAL (
        SELECT event_type, event_version, correlation_id FROM messages m
        WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1) m ON true
    RETURNING 1
), spared AS MATERIALIZED (
    SELECT id, expires_at FROM c WHERE id NOT IN (SELECT id FROM d)
){onward}{then}
SELECT (SELECT count(*) FROM log) + {turns}, (SELECT count(*) FROM d), {answer}
"""


_ENDED_IN_LINE: Final = f"""
    SELECT room_id, id FROM c WHERE state = '{State.HELD}' AND id IN (SELECT id FROM d)
"""  # noqa: S608 - constants of this package


def termination_statement(
    *,
    candidates: str,
    state: State,
    reason: Reason | None = None,
    lease_condition: str,
    result_columns: str,
    leading_ctes: str = "",
    trailing_ctes: str = "",
) -> str:
    """Return the statement that moves `candidates` to `state`.

    `candidates` selects (room_id, id, generation, attempt, state, expires_at) of deliveries; it may
    use the CTEs of `leading_ctes`. `lease_condition` decides whether a lease `l` may be ended.
    `result_columns` adds columns over `c` and `spared` (candidates left as they were) to the row
    (deliveries ended, …). `trailing_ctes` adds CTEs over all of that. The statement has one
    parameter of its own: `host`.
    """
    reason_sql = "NULL::text" if reason is None else f"'{reason}'::text"
    return _TERMINATE.format(
        given=leading_ctes,
        candidates=candidates,
        state=state,
        reason=reason_sql,
        under_way=_CLAIMED,
        lease_goes=lease_condition,
        answer=result_columns,
        onward=advance_ordering("SELECT room_id, id FROM d", logged="(SELECT count(*) FROM log)")
        + leave_line(_ENDED_IN_LINE),
        turns=RELEASED_COUNT,
        then=f", {trailing_ctes}" if trailing_ctes else "",
    )


_OPEN: Final = "t.state IN ({})".format(", ".join(f"'{state}'" for state in sorted(UNFINISHED)))
_COLUMNS: Final = "t.room_id, t.id, t.generation, t.attempt, t.state, t.expires_at"
# Expiry does not end a live lease. Where the lease ends without an ack, the delivery expires by
# that, so it need not be remembered here.
_NOT_LEASED: Final = f"""(t.state <> '{State.LEASED}' OR NOT EXISTS (
        SELECT FROM leases l WHERE l.room_id = t.room_id AND l.id = t.id AND l.until > now() OFFSET 0))"""
_BY_TIME_TEMPLATE: Final = f"""
    SELECT {_COLUMNS}{{more}} FROM deliveries t
    WHERE t.expires_at >= %(low)s::timestamptz AND t.expires_at <= now() AND {_OPEN} AND {_NOT_LEASED}{{others}}
    ORDER BY t.expires_at LIMIT %(limit)s::int4
"""  # noqa: S608 - constants of this package
_BY_TIME: Final = _BY_TIME_TEMPLATE.format(more="", others="")
_BY_TIME_OF_OTHERS: Final = _BY_TIME_TEMPLATE.format(
    more=", t.subscription_id", others=OF_OTHER_ORGANISATIONS
)
# Nearly always none has expired, and the large statement takes a millisecond to find that out.
_ANY_BY_TIME: Final = f"""
SELECT 0, now(), EXISTS (
    SELECT FROM deliveries t WHERE t.expires_at >= %(low)s::timestamptz AND t.expires_at <= now() AND {_OPEN}
)
"""  # noqa: S608 - constants of this package
_BY_ID: Final = f"""
    SELECT t.* FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id), LATERAL (
        SELECT {_COLUMNS} FROM deliveries t
        WHERE t.room_id = v.room_id AND t.id = v.id AND t.expires_at <= now() AND {_OPEN} AND {_NOT_LEASED} LIMIT 1) t
"""  # noqa: S608 - constants of this package
# What is acknowledged within its lease is delivered, however long ago it expired.
_LEASE_OVER: Final = "l.until <= now()"
_RESULT_COLUMNS: Final = """
    (SELECT count(*) FROM c), (SELECT max(expires_at) FROM c), now(), (SELECT array_agg(id::text) FROM spared),
    (SELECT array_agg(expires_at) FROM spared)
"""
_EXPIRE_BY_TIME: Final = termination_statement(
    candidates=_BY_TIME,
    state=State.EXPIRED,
    lease_condition=_LEASE_OVER,
    result_columns=_RESULT_COLUMNS,
)
_EXPIRE_BY_TIME_OF_OTHERS: Final = termination_statement(
    candidates=_BY_TIME_OF_OTHERS,
    state=State.EXPIRED,
    lease_condition=_LEASE_OVER,
    result_columns=f"{_RESULT_COLUMNS}, {LARGEST_ORGANISATION.format('c')}",
)
_EXPIRE_BY_ID: Final = termination_statement(
    candidates=_BY_ID,
    state=State.EXPIRED,
    lease_condition=_LEASE_OVER,
    result_columns=_RESULT_COLUMNS,
)

_READ_WATERMARK: Final = (
    "SELECT 0, at FROM upkeep_marks WHERE name = 'expiry' UNION ALL SELECT 0, NULL"
)
_SAVE_WATERMARK: Final = """
WITH m AS (
    INSERT INTO upkeep_marks AS m (name, at) VALUES ('expiry', %(at)s::timestamptz)
    ON CONFLICT (name) DO UPDATE SET at = excluded.at
) SELECT 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiryBatch:
    """Hold one batch: `found` candidates, of which `expired` ended.

    `skipped` are left, with their expiry times. `latest_expiry`: the last expiry among the
    candidates (None: there were none). `scanned_at`: PostgreSQL's time. `largest`: the organisation
    with the most candidates, where organisations take turns.
    """

    found: int
    expired: int
    skipped: dict[DeliveryId, datetime]
    latest_expiry: datetime | None
    scanned_at: datetime
    largest: OrganisationId | None = None


class ExpiryQueries:
    """Expire deliveries through one writer.

    StorageUnavailableError: in doubt; StorageRefusedError: nothing written.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def expire(self, low: datetime, *, limit: int) -> ExpiryBatch:
        """Expire unfinished deliveries that expired at `low` or later, the oldest first."""
        ((at, any_expired),) = await self._writer.run(_ANY_BY_TIME, {"low": low})
        if not any_expired:
            return ExpiryBatch(found=0, expired=0, skipped={}, latest_expiry=None, scanned_at=at)
        return await self._run(_EXPIRE_BY_TIME, {"low": low, "limit": limit})

    async def expire_in_turn(
        self, low: datetime, *, limit: int, excluded: Sequence[OrganisationId]
    ) -> ExpiryBatch:
        """Expire deliveries as `expire` does, but for those of some organisations."""
        parameters = {"low": low, "limit": limit, "organisations": literal_array(excluded)}
        return await self._run(_EXPIRE_BY_TIME_OF_OTHERS, parameters)

    async def retry_skipped(self, deliveries: Sequence[DeliveryId]) -> ExpiryBatch:
        """Expire deliveries that an earlier scan skipped.

        Those that ended since are not found any more.
        """
        rooms = literal_array(room_of(identity) for identity in deliveries)
        return await self._run(_EXPIRE_BY_ID, {"room": rooms, "id": literal_array(deliveries)})

    async def read_watermark(self) -> datetime | None:
        """Return the time up to which the last process expired everything; None: there is none."""
        rows = await self._writer.run(_READ_WATERMARK, {})
        return rows[0][0] if rows else None

    async def save_watermark(self, at: datetime) -> None:
        """Record that everything that expired before `at` has ended."""
        await self._writer.run(_SAVE_WATERMARK, {"at": at})

    async def _run(self, statement: str, parameters: dict[str, Any]) -> ExpiryBatch:
        rows = await self._writer.run(statement, {**parameters, "host": self._writer.host})
        expired, found, latest, at, spared, times, *turn = rows[0]
        return ExpiryBatch(
            found=found,
            expired=expired,
            skipped={
                DeliveryId(identity): time
                for identity, time in zip(spared or (), times or (), strict=True)
            },
            latest_expiry=latest,
            scanned_at=at,
            largest=OrganisationId(turn[0]) if turn and turn[0] is not None else None,
        )
