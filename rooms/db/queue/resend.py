"""Send again what a broker has lost: under a new generation.

If some old copies are left after all, they are stale from then on and settled without an attempt.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, cast

from rooms.db.bounded_counts import count_bounded
from rooms.db.job_progress import IS_OPEN, OPEN_JOB, JobRun, progress_cte, run_parameters
from rooms.db.pg_arrays import number_array, word_array
from rooms.db.statement_parts import JOIN_MESSAGE
from rooms.db.writer import LogWriter, dead_writers
from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId
from rooms.domain.state_machine import LogKind, State
from rooms.domain.work_location import AT_BROKER, TO_RELAY, WorkLocation

BATCH: Final = 1000
_MAX_DEAD_WRITERS: Final = 1000
SENT_AGAIN: Final = "sent_again"
"""The name of the count in a job's result."""
START: Final = (RoomId(-(1 << 31)), "00000000-0000-0000-0000-000000000000")
"""A position before every row."""

_SELECT_ROWS: Final = """SELECT o.room_id, o.id, o.subscription_id, o.kind, o.generation, o.attempt,
    o.claimed_until, o.worker"""
# A page is a number of rows of the key, whatever their location, so that no statement reads a
# million others.
_PAGE: Final = f"""
    {_SELECT_ROWS} FROM outbox o WHERE (o.room_id, o.id) > (%(room)s::int4, %(id)s::uuid)
    ORDER BY o.room_id, o.id LIMIT %(limit)s::int4
"""
_BY_VERSION: Final = f"""
    {_SELECT_ROWS} FROM unnest(%(rooms)s::int4[], %(ids)s::uuid[], %(generations)s::int4[], %(attempts)s::int4[])
        AS v (room_id, id, generation, attempt) CROSS JOIN LATERAL (
            SELECT * FROM outbox o WHERE o.room_id = v.room_id AND o.id = v.id AND o.generation = v.generation
                AND o.attempt = v.attempt LIMIT 1
        ) o
"""  # noqa: S608 - constants of this package

# `c` are the rows to resend. A row is left, and tried again later, while it is in use: by an
# attempt, by a relay that has its receipt and has not marked it yet, or by a lock. No lock is
# waited for.
_RESEND_TEMPLATE: Final = """
WITH {open_job}, page AS MATERIALIZED ({rows}), c AS MATERIALIZED (
    SELECT p.*, p.kind IN ({sent}) AS sent, p.claimed_until > now() AND NOT p.worker = ANY (%(dead)s::int4[]) AS claimed
    FROM page p WHERE {is_open} AND p.kind = ANY (%(kinds)s::int2[])
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
    FROM d {join_message} RETURNING 1
), spared AS MATERIALIZED (
    SELECT c.* FROM c WHERE c.claimed OR c.sent AND NOT EXISTS (
        SELECT FROM free f WHERE f.room_id = c.room_id AND f.id = c.id OFFSET 0)
), {progress}
SELECT (SELECT count(*) FROM l), 0, (SELECT count(*) FROM d), (SELECT count(*) FROM page), NULL, ({is_open})::int4
UNION ALL SELECT 0, 1, NULL, room_id, id::text, NULL
    FROM (SELECT room_id, id FROM page ORDER BY room_id DESC, id DESC LIMIT 1) last
UNION ALL SELECT 0, 2, generation, room_id, id::text, attempt FROM spared
"""


def _resend_statement(rows: str) -> str:
    return _RESEND_TEMPLATE.format(
        open_job=OPEN_JOB,
        is_open=IS_OPEN,
        progress=progress_cte(
            position="j.position",
            done="(SELECT count(*) FROM d)",
            counts=f"SELECT '{SENT_AGAIN}' AS what, count(*) AS n FROM d",  # noqa: S608 - a constant
        ),
        rows=rows,
        join_message=JOIN_MESSAGE,
        sent=", ".join(f"{place:d}" for place in AT_BROKER),
        queued=State.QUEUED,
        restored=LogKind.RESTORED,
        back=AT_BROKER[0] - TO_RELAY[0],
    )


_RESEND_PAGE: Final = _resend_statement(_PAGE)
_RESEND_BY_VERSION: Final = _resend_statement(_BY_VERSION)

# The broker drops what has expired, maybe before its row is gone.
_SENT_COUNTS: Final = f"""
SELECT 0, CASE WHEN kind = {WorkLocation.PULL_AT_BROKER:d} THEN subscription_id END::text, count(*) FROM outbox
WHERE kind IN ({AT_BROKER[0]:d}, {AT_BROKER[1]:d}) AND (expires_at IS NULL OR expires_at > now()) GROUP BY 2 UNION ALL SELECT 0, NULL, NULL
"""  # noqa: S608 - constants of this package

# The bound is of the rows that are read: no index finds those in the broker.
_COUNT_SENT: Final = f"""
SELECT 0, CASE WHEN count(*) < %(most)s::int4 THEN count(*) FILTER (WHERE kind IN ({AT_BROKER[0]:d}, {AT_BROKER[1]:d}))
    ELSE %(most)s::int4 END
FROM (SELECT kind FROM outbox ORDER BY room_id, id LIMIT %(most)s::int4) o
"""  # noqa: S608 - constants of this package

_DATABASE_TIME: Final = "SELECT 0, now()"


ResendRow = tuple[RoomId, DeliveryId, int, int]
"""(room, delivery, generation, attempt)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResendPage:
    """Hold one step of a walk: `resent` rows are sent again, `skipped` are in use.

    `scanned` rows were read up to `last` (None: there were no more). `is_over`: the job's run is
    over, and nothing was done.
    """

    resent: int
    skipped: Sequence[ResendRow]
    scanned: int
    last: tuple[RoomId, str] | None
    is_over: bool = False


class ResendQueries:
    """Resend through one writer.

    StorageUnavailableError: in doubt, repeat the call; StorageRefusedError: not done.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def resend(
        self,
        after: tuple[RoomId, str],
        *,
        locations: Collection[WorkLocation],
        subscription: SubscriptionId | None,
        dead_writers: Collection[int],
        before: datetime | None = None,
        run: JobRun | None = None,
        limit: int = BATCH,
    ) -> ResendPage:
        """Have the next rows sent again that are in one of `locations`.

        They are those of one subscription or (None) of all. `before`: only deliveries that have not
        changed since. Claimed rows are skipped, unless one of `dead_writers` claimed them. That
        includes rows to send: they may have been sent. The job of `run` counts what is sent again.
        """
        room, identity = after
        parameters = {
            **self._parameters(locations, subscription, dead_writers, before, run),
            "room": room,
            "id": identity,
            "limit": limit,
        }
        return _page(await self._writer.run(_RESEND_PAGE, parameters))

    async def resend_skipped(
        self,
        rows: Sequence[ResendRow],
        *,
        locations: Collection[WorkLocation],
        dead_writers: Collection[int],
        before: datetime | None = None,
        run: JobRun | None = None,
    ) -> ResendPage:
        """Try rows again that an earlier call skipped, if they are still at their version."""
        parameters = {
            **self._parameters(locations, None, dead_writers, before, run),
            "rooms": number_array(row[0] for row in rows),
            "ids": word_array(row[1] for row in rows),
            "generations": number_array(row[2] for row in rows),
            "attempts": number_array(row[3] for row in rows),
        }
        return _page(await self._writer.run(_RESEND_BY_VERSION, parameters))

    async def count_sent(self) -> Mapping[SubscriptionId | None, int]:
        """Count the rows whose copy is in the broker: by PULL subscription, and (None) of PUSH."""
        return {
            None if name is None else SubscriptionId(name): count
            for name, count in await self._writer.run(_SENT_COUNTS, {})
        }

    async def count_sent_bounded(self) -> int | None:
        """Count all rows whose copy is in the broker; None: the outbox has too many rows."""
        return await count_bounded(self._writer, _COUNT_SENT, {})

    async def database_time(self) -> datetime:
        """Return PostgreSQL's time."""
        ((at,),) = await self._writer.run(_DATABASE_TIME, {})
        return cast("datetime", at)

    async def dead_writers(self) -> list[int]:
        """Return the writers whose session is gone: their claims do not count."""
        return await dead_writers(self._writer, limit=_MAX_DEAD_WRITERS)

    def _parameters(
        self,
        locations: Collection[WorkLocation],
        subscription: SubscriptionId | None,
        dead_writers: Collection[int],
        before: datetime | None,
        run: JobRun | None,
    ) -> dict[str, object]:
        return run_parameters(run) | {
            "kinds": number_array(int(place) for place in locations),
            "subscription": subscription,
            "dead": number_array(dead_writers),
            "before": before,
            "host": self._writer.host,
        }


def _page(rows: Sequence[tuple[object, ...]]) -> ResendPage:
    restored, seen, last, is_over = 0, 0, None, False
    spared: list[ResendRow] = []
    for what, number, room, identity, attempt in rows:
        if what == 0:
            restored, seen, is_over = int(str(number)), int(str(room)), attempt == 0
        elif what == 1:
            last = (RoomId(int(str(room))), str(identity))
        else:
            spared.append(
                (
                    RoomId(int(str(room))),
                    DeliveryId(str(identity)),
                    int(str(number)),
                    int(str(attempt)),
                )
            )
    return ResendPage(resent=restored, skipped=spared, scanned=seen, last=last, is_over=is_over)
