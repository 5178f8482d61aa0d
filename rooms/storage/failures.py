"""At a glance: which subscriptions of an organisation do not do well, since when and why, read from what waits and rests
there now.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.condition import BEHIND_AFTER, Condition, Symptoms, judge
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, born_ms
from rooms.domain.states import Reason, SubscriptionStatus

MOST: Final = 100_000
"""So many rows of a sideline, of what is held, and of a room's outbox, are counted; more than these count as these."""
LOOKED_BACK: Final = 1000
"""Among so many of its newest deliveries the last success of a subscription is looked for."""

# Each subscription costs a look into the indexes of `sidelined` and `held`, each room a walk over its part of the outbox,
# and each that is shown a look at its newest deliveries. `w`: what is due or tried again; ids tell the time of the publish.
# `k`: what a slow endpoint's lane could not keep is held, brought back and held again, so its publish tells how long it waits.
_FAILING: Final = text(f"""
WITH u AS MATERIALIZED (
    SELECT u.room_id, r.name AS room, u.id, u.name, u.type, u.push_url, u.status, u.status_since, u.status_reason,
        CASE WHEN l.circuit_open AND coalesce(u.circuit_failures, r.circuit_failures) > 0 THEN l.circuit_since END AS open_since,
        l.failing_since AS only_failures_since, l.probe
    FROM rooms r JOIN subscriptions u ON u.room_id = r.id LEFT JOIN lanes l ON l.room_id = u.room_id AND l.id = u.id
    WHERE r.organisation_id = :organisation AND NOT r.deleting AND u.status <> '{SubscriptionStatus.DELETED}'
), w AS MATERIALIZED (
    SELECT o.subscription_id, count(*) FILTER (WHERE o.attempt > 0) AS retrying, min(o.due_at) AS due_since,
        min(o.id::text) FILTER (WHERE o.attempt > 0) AS oldest, max(o.id::text) FILTER (WHERE o.attempt > 0) AS newest,
        count(*) FILTER (WHERE o.due_at <= now()) AS due
    FROM (SELECT DISTINCT room_id FROM u) r CROSS JOIN LATERAL (
        SELECT o.subscription_id, o.id, o.attempt, o.due_at FROM outbox o WHERE o.room_id = r.room_id LIMIT {MOST}
    ) o WHERE o.attempt > 0 OR o.due_at <= now() GROUP BY o.subscription_id
), f AS MATERIALIZED (
    SELECT u.*, s.since, coalesce(w.retrying, 0) AS retrying, w.oldest, w.newest, coalesce(w.due, 0) AS due,
        least(CASE WHEN w.due_since <= now() THEN w.due_since END, k.since) AS waits_from,
        u.status = '{SubscriptionStatus.DISABLED}' OR u.open_since IS NOT NULL OR u.only_failures_since IS NOT NULL
            OR coalesce(w.retrying, 0) > 0 OR (u.status = '{SubscriptionStatus.ACTIVE}' AND u.status_reason IS NOT NULL) AS fails
    FROM u LEFT JOIN LATERAL (
        SELECT s.since FROM sidelined s WHERE s.room_id = u.room_id AND s.subscription_id = u.id ORDER BY s.since, s.id LIMIT 1
    ) s ON true LEFT JOIN LATERAL (
        SELECT CASE WHEN h.reason = '{Reason.SATURATED}' AND h.delay_ms = 0 THEN coalesce((
            SELECT greatest(m.published_at, m.due_at) FROM deliveries d JOIN messages m ON m.room_id = d.room_id AND m.id = d.message_id
            WHERE d.room_id = h.room_id AND d.id = h.id LIMIT 1
        ), h.since) ELSE h.since END AS since
        FROM held h WHERE -h.room_id = -u.room_id AND h.subscription_id = u.id
            AND h.reason = CASE WHEN u.status = '{SubscriptionStatus.PAUSED}' THEN '{Reason.PAUSED}'
                WHEN u.status_reason IS NULL THEN '{Reason.SATURATED}' ELSE '{Reason.DISABLED}' END
        ORDER BY h.id LIMIT 1
    ) k ON true LEFT JOIN w ON w.subscription_id = u.id
), shown AS MATERIALIZED (
    SELECT f.*, count(*) OVER () AS total FROM f
    WHERE f.fails OR f.since IS NOT NULL OR f.waits_from < now() - CAST(:late AS interval)
        OR (f.status = '{SubscriptionStatus.PAUSED}' AND f.waits_from IS NOT NULL)
    ORDER BY f.fails DESC, coalesce(f.only_failures_since, f.open_since, f.since, f.status_since), f.oldest, f.id
    LIMIT :limit
)
SELECT f.*, now() AS at, n.sidelined, h.held, d.delivered_at, e.last_error, e.last_status, m.due_at,
    (SELECT s.since FROM sidelined s WHERE s.room_id = f.room_id AND s.subscription_id = f.id
        AND s.since > coalesce(d.delivered_at, '-infinity') ORDER BY s.since, s.id LIMIT 1) AS sidelined_again
FROM shown f LEFT JOIN LATERAL (
    SELECT count(*) AS sidelined FROM (
        SELECT FROM sidelined s WHERE s.room_id = f.room_id AND s.subscription_id = f.id LIMIT {MOST}
    ) s
) n ON true LEFT JOIN LATERAL (
    SELECT coalesce(jsonb_object_agg(h.reason, h.n), '{{}}') AS held FROM (
        SELECT h.reason, count(*) AS n FROM (
            SELECT h.reason FROM held h WHERE -h.room_id = -f.room_id AND h.subscription_id = f.id LIMIT {MOST}
        ) h GROUP BY h.reason
    ) h
) h ON true LEFT JOIN LATERAL (
    SELECT max(d.updated_at) AS delivered_at FROM (
        SELECT d.state, d.updated_at FROM deliveries d WHERE -d.room_id = -f.room_id AND d.subscription_id = f.id
        ORDER BY d.id DESC LIMIT {LOOKED_BACK}
    ) d WHERE d.state IN ('delivered', 'handed_over')
) d ON true LEFT JOIN LATERAL (
    SELECT d.last_error, d.last_status FROM (VALUES
        (f.newest::uuid), (f.probe),
        ((SELECT s.id FROM sidelined s WHERE s.room_id = f.room_id AND s.subscription_id = f.id ORDER BY s.since DESC, s.id DESC LIMIT 1)),
        ((SELECT h.id FROM held h WHERE -h.room_id = -f.room_id AND h.subscription_id = f.id
            AND h.reason = '{Reason.CIRCUIT_OPEN}' ORDER BY h.id LIMIT 1))
    ) AS c (id) CROSS JOIN LATERAL (
        SELECT d.last_error, d.last_status, d.updated_at FROM deliveries d WHERE d.room_id = f.room_id AND d.id = c.id LIMIT 1
    ) d WHERE d.last_error IS NOT NULL ORDER BY d.updated_at DESC LIMIT 1
) e ON true LEFT JOIN LATERAL (
    SELECT m.due_at FROM outbox o JOIN messages m ON m.room_id = o.room_id AND m.id = o.message_id
    WHERE o.room_id = f.room_id AND o.id = f.oldest::uuid LIMIT 1
) m ON true
""").bindparams(late=BEHIND_AFTER)  # noqa: S608 - words of our own


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """A subscription that does not do well: `sidelined` rest, `retrying` are tried again, `due` wait, `held` by reason.

    `since`: of its condition; `delivered_at`: its last success among the newest `LOOKED_BACK` deliveries; `last_error` and
    `last_status` are those of the newest failure.
    """

    room_id: RoomId
    room: str
    subscription_id: SubscriptionId
    name: str
    type: str
    status: str
    push_url: str | None
    condition: Condition
    since: datetime
    last_delivered_at: datetime | None
    sidelined: int
    oldest_sidelined_at: datetime | None
    retrying: int
    due: int
    held: Mapping[str, int]
    last_status: int | None
    last_error: str | None


async def failing(
    connection: AsyncConnection, organisation: OrganisationId, *, limit: int
) -> tuple[Sequence[Failing], int]:
    """Those that do not do well, the worst first and of these the longest first; and how many there are in all."""
    rows = (await connection.execute(_FAILING, {"organisation": organisation, "limit": limit})).mappings().all()
    found = [_failing(row) for row in rows]
    order = list(Condition)
    return (
        sorted(found, key=lambda one: (order.index(one.condition), one.since)),
        rows[0]["total"] if rows else 0,
    )


def _failing(row: RowMapping) -> Failing:
    unserved = row["status"] == SubscriptionStatus.ACTIVE and row["status_reason"] is not None
    symptoms = Symptoms(
        status=SubscriptionStatus(row["status"]),
        status_since=row["status_since"],
        unserved=unserved,
        circuit_open_since=row["open_since"],
        only_failures_since=row["only_failures_since"],
        retries_from=_later(_born(row["oldest"]), row["due_at"]),
        retries_to=_born(row["newest"]),
        sidelined_from=row["since"],
        sidelined_again=row["sidelined_again"],
        delivered_at=row["delivered_at"],
        waits_from=row["waits_from"],
    )
    condition, since = judge(symptoms, row["at"])
    same: dict[str, Any] = {
        name: row[name]
        for name in ("room", "name", "type", "status", "push_url", "sidelined", "retrying", "due", "held")
    }
    return Failing(
        **same,
        room_id=RoomId(row["room_id"]),
        subscription_id=SubscriptionId(str(row["id"])),
        condition=condition,
        since=since,
        last_delivered_at=row["delivered_at"],
        oldest_sidelined_at=row["since"],
        last_status=row["last_status"],
        last_error=row["status_reason"] if unserved else row["last_error"] or row["status_reason"],
    )


def _born(identity: str | None) -> datetime | None:
    return None if identity is None else datetime.fromtimestamp(born_ms(identity) / 1000, UTC)


def _later(published_at: datetime | None, due_at: datetime | None) -> datetime | None:
    return due_at if published_at is not None and due_at is not None and due_at > published_at else published_at
