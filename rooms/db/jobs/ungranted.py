"""Cancel unfinished deliveries of event types that a subscription's grants no longer cover."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Collection
from typing import Final

from rooms.db.jobs.delete import BATCH, OF_SUBSCRIPTION, PAGE_OF_DELIVERIES, CancelPage
from rooms.db.operational.messages import IS_OPERATIONAL
from rooms.db.pg_arrays import text_array
from rooms.db.queue.expire import termination_statement
from rooms.db.statement_parts import has_live_grant, matches_patterns
from rooms.db.writer import LogWriter
from rooms.domain.ids import JobId, RoomId, SubscriptionId
from rooms.domain.state_machine import UNFINISHED, Reason, State

_OPEN: Final = ", ".join(f"'{state}'" for state in sorted(UNFINISHED))
# A walk takes long, and its process may be frozen for longer: what the subscription takes by then,
# it holds.
_CURRENT: Final = """
current AS MATERIALIZED (
    SELECT 1 AS one FROM subscriptions s, jobs j WHERE s.room_id = %(room)s::int4 AND s.id = %(subscription)s::uuid
        AND s.version - s.lane_changes = %(version)s::int4 AND j.id = %(job)s::uuid AND j.state IN ('queued', 'running')
),"""
_PAGE: Final = PAGE_OF_DELIVERIES.format(of=f"{OF_SUBSCRIPTION} AND EXISTS (SELECT FROM current)")
# A subscription for operational events takes no grant for them. `kept` is as old as the walk, and
# grants may have come since: a snapshot that has what was routed by one also has that
# grant, which may have begun after the statement: hence the clock.
_OUTSIDE: Final = f"""
outside AS MATERIALIZED (
    SELECT p.*, EXISTS (
        SELECT FROM subscriptions s WHERE s.room_id = p.room_id AND s.id = %(subscription)s::uuid
            AND {has_live_grant("s", "m.event_type", at="clock_timestamp()")}
    ) AS is_granted
    FROM page p CROSS JOIN LATERAL (
        SELECT m.event_type FROM messages m WHERE m.room_id = p.room_id AND m.id = p.message_id AND NOT ({IS_OPERATIONAL}) LIMIT 1
    ) m WHERE p.state IN ({_OPEN}) AND NOT {matches_patterns("m.event_type", "%(kept)s::text[]")}
),"""  # noqa: S608 - constants of this package
_CANCEL: Final = termination_statement(
    leading_ctes=_CURRENT + _PAGE + _OUTSIDE,
    candidates="SELECT room_id, id, generation, attempt, state, expires_at FROM outside WHERE NOT is_granted",
    state=State.CANCELLED,
    reason=Reason.NOT_GRANTED,
    lease_condition="true",
    result_columns="""(SELECT count(*) FROM spared) + (SELECT count(*) FROM outside WHERE is_granted),
    (SELECT count(*) FROM page), (SELECT id::text FROM page ORDER BY id DESC LIMIT 1), EXISTS (SELECT FROM current)""",
)


class UngrantedQueries:
    """Cancel through one writer.

    StorageUnavailableError: in doubt; StorageRefusedError: nothing happened.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def cancel(
        self,
        room: RoomId,
        subscription: SubscriptionId,
        after: str,
        *,
        job: JobId,
        version: int,
        kept: Collection[str],
        limit: int = BATCH,
    ) -> CancelPage | None:
        """Cancel those among the next deliveries whose event types match none of `kept`.

        What a valid grant covers, though `kept` does not, is skipped. None: the job has ended, or
        the subscription has another `version`; nothing is cancelled then.
        """
        rows = await self._writer.run(
            _CANCEL,
            {
                "room": room,
                "subscription": subscription,
                "after": after,
                "job": job,
                "version": version,
                "kept": text_array(sorted(kept)),
                "limit": limit,
                "host": self._writer.host,
            },
        )
        cancelled, spared, seen, last, is_current = rows[0]
        if not is_current:
            return None
        return CancelPage(cancelled=cancelled, skipped=spared, scanned=seen, last=last)
