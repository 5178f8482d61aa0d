"""Store the schedules by which sidelines are shoveled automatically."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import RowMapping, delete, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.db.tables.magazines import shovel_schedules
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of
from rooms.domain.job import JobKind
from rooms.domain.room import Subscription
from rooms.domain.state_machine import ENDED_STATUSES
from rooms.errors import QuotaConflictError

MAX_SCHEDULES: Final = 1000
"""The most schedules of an organisation."""
_MAX_DUE: Final = 200
_MAX_READ: Final = 2000
"""Due schedules among which organisations take turns; the next call looks at further ones."""
_ENDED: Final = ", ".join(f"'{status}'" for status in sorted(ENDED_STATUSES))
_CLAIM_DUE: Final = text(f"""
WITH looked_at AS MATERIALIZED (
    SELECT room_id, subscription_id, next_at FROM shovel_schedules
    WHERE next_at <= now() AND next_at > coalesce(CAST(:after AS timestamptz), '-infinity') ORDER BY next_at LIMIT :read
), ended AS (
    DELETE FROM shovel_schedules s USING looked_at l WHERE s.room_id = l.room_id AND s.subscription_id = l.subscription_id
        AND NOT EXISTS (SELECT FROM subscriptions u WHERE u.room_id = s.room_id AND u.id = s.subscription_id AND u.status NOT IN ({_ENDED}))
), due AS (
    SELECT s.room_id, s.subscription_id, u.organisation_id, s.next_at,
        row_number() OVER (PARTITION BY u.organisation_id ORDER BY s.next_at, s.subscription_id) AS turn
    FROM looked_at s JOIN subscriptions u ON u.room_id = s.room_id AND u.id = s.subscription_id AND u.status NOT IN ({_ENDED})
        JOIN rooms r ON r.id = s.room_id AND NOT r.deleting
), chosen AS (
    SELECT s.room_id, s.subscription_id, d.organisation_id
    FROM shovel_schedules s JOIN (SELECT room_id, subscription_id, organisation_id FROM due ORDER BY turn, next_at LIMIT :most) d USING (room_id, subscription_id)
    WHERE s.next_at <= now()
    FOR UPDATE OF s SKIP LOCKED
), shoveling AS MATERIALIZED (
    SELECT (j.arguments->>'subscription_id')::uuid AS subscription_id FROM jobs j
    WHERE j.organisation_id IN (SELECT organisation_id FROM chosen) AND j.state IN ('queued', 'running') AND j.kind = '{JobKind.SHOVEL_SIDELINE}'
), claimed AS (
    UPDATE shovel_schedules s SET next_at = now() + make_interval(secs => s.interval_s)
    FROM chosen c WHERE s.room_id = c.room_id AND s.subscription_id = c.subscription_id
    RETURNING c.organisation_id, s.room_id, s.subscription_id, s.interval_s, s.rate_per_s, s.concurrency, s.max_shovels, s.next_at
)
SELECT l.read, l.last, c.organisation_id::text AS organisation_id, c.room_id, c.subscription_id::text AS subscription_id, c.interval_s,
    c.rate_per_s, c.concurrency, c.max_shovels, c.next_at
FROM (SELECT count(*) AS read, max(next_at) AS last FROM looked_at) l LEFT JOIN claimed c
    ON EXISTS (SELECT FROM sidelined e WHERE e.room_id = c.room_id AND e.subscription_id = c.subscription_id)
    AND c.subscription_id NOT IN (SELECT subscription_id FROM shoveling WHERE subscription_id IS NOT NULL)
""")  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class SidelineSchedule:
    """Set the interval and the limits of a sideline's shovels. `rate_per_s` None: no limit."""

    interval_s: int
    rate_per_s: float | None
    concurrency: int
    max_shovels: int
    next_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DueSidelineSchedule:
    """Name a schedule that is due, of a sideline that is not empty."""

    organisation: OrganisationId
    room: RoomId
    subscription: SubscriptionId
    schedule: SidelineSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class DuePart:
    """Hold what was claimed of a part of the due schedules.

    `last`: where the next part begins, by time; None: nothing is due behind this one.
    """

    schedules: Sequence[DueSidelineSchedule]
    last: datetime | None


async def set_schedule(
    connection: AsyncConnection,
    subscription: Subscription,
    *,
    interval_s: int,
    rate_per_s: float | None,
    concurrency: int,
    max_shovels: int,
) -> SidelineSchedule:
    """Shovel the sideline from now on, first after one interval. Any older schedule is replaced.

    QuotaConflictError: the organisation has too many. Requests at the same time may each find one
    place left.
    """
    if await find_schedule(connection, subscription.id) is None:
        await _check_number(connection, subscription.organisation_id)
    values = {
        "organisation_id": subscription.organisation_id,
        "interval_s": interval_s,
        "rate_per_s": rate_per_s,
        "concurrency": concurrency,
        "max_shovels": max_shovels,
        "next_at": func.now() + _seconds_interval(interval_s),
    }
    statement = (
        insert(shovel_schedules)
        .values(room_id=subscription.room_id, subscription_id=subscription.id, **values)
        .on_conflict_do_update(index_elements=["room_id", "subscription_id"], set_=values)
        .returning(shovel_schedules)
    )
    return _schedule((await connection.execute(statement)).mappings().one())


async def _check_number(connection: AsyncConnection, organisation: OrganisationId) -> None:
    owned = (
        select(shovel_schedules.c.room_id)
        .where(shovel_schedules.c.organisation_id == organisation)
        .limit(MAX_SCHEDULES)
        .subquery()
    )
    count = await connection.scalar(select(func.count()).select_from(owned))
    if count is not None and count >= MAX_SCHEDULES:
        raise QuotaConflictError(
            f"your organisation has {MAX_SCHEDULES} shovel schedules, and no more are allowed: "
            "delete some, or shovel by request",
            limit="shovel_schedules",
        )


async def find_schedule(
    connection: AsyncConnection, subscription: SubscriptionId
) -> SidelineSchedule | None:
    """Return the schedule of a subscription; None: it is shoveled only by request."""
    statement = select(shovel_schedules).where(*_key_conditions(subscription))
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else _schedule(row)


async def delete_schedule(connection: AsyncConnection, subscription: SubscriptionId) -> bool:
    """Delete the schedule; return False if there was none."""
    statement = delete(shovel_schedules).where(*_key_conditions(subscription))
    return bool((await connection.execute(statement)).rowcount)


async def due_schedules(connection: AsyncConnection, after: datetime | None = None) -> DuePart:
    """Return due schedules, each moved on by its interval; organisations take turns.

    They are of the part behind `after` (None: of the first one). The commit of this transaction
    claims them. Sidelines that are empty or being shoveled are left out. Due schedules of
    subscriptions that have ended are deleted.
    """
    values = {"most": _MAX_DUE, "read": _MAX_READ, "after": after}
    rows = (await connection.execute(_CLAIM_DUE, values)).mappings().all()
    due = [
        DueSidelineSchedule(
            organisation=OrganisationId(row["organisation_id"]),
            room=row["room_id"],
            subscription=SubscriptionId(row["subscription_id"]),
            schedule=_schedule(row),
        )
        for row in rows
        if row["subscription_id"] is not None
    ]
    return DuePart(schedules=due, last=rows[0]["last"] if rows[0]["read"] == _MAX_READ else None)


def _key_conditions(subscription: SubscriptionId) -> tuple[Any, Any]:
    return (
        shovel_schedules.c.room_id == room_of(subscription),
        shovel_schedules.c.subscription_id == subscription,
    )


def _seconds_interval(count: int) -> Any:
    return func.make_interval(0, 0, 0, 0, 0, 0, count)


def _schedule(row: RowMapping) -> SidelineSchedule:
    return SidelineSchedule(
        interval_s=row["interval_s"],
        rate_per_s=row["rate_per_s"],
        concurrency=row["concurrency"],
        max_shovels=row["max_shovels"],
        next_at=row["next_at"],
    )
