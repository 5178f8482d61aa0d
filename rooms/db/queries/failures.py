"""List the failing subscriptions of an organisation, since when they fail and why.

The statement reads what waits and is sidelined now.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import RowMapping, TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.queries.hidden_deliveries import IS_ALL_HIDDEN
from rooms.db.queries.subscription_counts import (
    IS_OWN,
    MAX_ROWS_READ,
    OWN_SUBSCRIPTIONS,
    own_parameters,
)
from rooms.domain.delivery_task import PRIORITIES
from rooms.domain.ids import RoomId, SubscriptionId, created_ms
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Reason, SubscriptionStatus
from rooms.domain.subscription_health import (
    LAGGING_AFTER,
    HealthInput,
    SubscriptionHealth,
    classify,
)

MAX_COUNTED: Final = 100_000
"""So many rows of a sideline, of held deliveries, and of a room's outbox that are the
organisation's, are counted; a larger number counts as this.
"""
MAX_DELIVERIES_SCANNED: Final = 1000
"""The last success of a subscription is searched among so many of its newest deliveries.

While a backlog of more is delivered, all of these wait. Then the last minute counts in which
something was delivered, by its begin.
"""

# Each subscription costs a look into the indexes of `sidelined` and `held` (where there are many,
# only each with a symptom: `_SYMPTOMS`), and each room a scan of its part of the outbox. Each
# listed subscription costs a read of its newest deliveries. `w`: what is due or retried; ids give
# the time of the publish. `k`: deliveries that a slow endpoint's lane had no room for are held,
# released and held again, so the time of their publish says how long they wait. The index of `held`
# is by priority, so the oldest is among the oldest of each. `shown`: only the newest deliveries say
# whether a sideline is of the past, so the newest sidelines come first.
_STATEMENT: Final = f"""
WITH RECURSIVE {{symptoms}}u AS MATERIALIZED (
    SELECT s.room_id, r.name AS room, s.id, s.name, s.type, s.push_url, s.status, s.status_since, s.status_reason,
        CASE WHEN l.circuit_open AND coalesce(s.circuit_failures, r.circuit_failures) > 0 THEN l.circuit_since END AS open_since,
        l.failing_since AS only_failures_since, l.probe, {IS_ALL_HIDDEN} AS all_hidden
    FROM rooms r JOIN subscriptions s ON s.room_id = r.id LEFT JOIN lanes l ON l.room_id = s.room_id AND l.id = s.id
    WHERE {IS_OWN}{{only}} AND NOT r.deleting AND s.status NOT IN ('pending', 'deleted', 'rejected', 'terminated')
), w AS MATERIALIZED (
    SELECT o.subscription_id, count(*) FILTER (WHERE o.attempt > 0) AS retrying, min(o.due_at) AS due_since,
        min(o.id::text) FILTER (WHERE o.attempt > 0) AS oldest, max(o.id::text) FILTER (WHERE o.attempt > 0) AS newest,
        count(*) FILTER (WHERE o.due_at <= now()) AS due, count(*) AS waiting
    FROM (SELECT DISTINCT room_id FROM u) r CROSS JOIN LATERAL (
        SELECT o.* FROM (SELECT o.subscription_id, o.id, o.attempt, o.due_at FROM outbox o WHERE o.room_id = r.room_id LIMIT {MAX_ROWS_READ}) o
        WHERE o.subscription_id IN (SELECT id FROM u WHERE NOT all_hidden) LIMIT {MAX_COUNTED}
    ) o WHERE o.attempt > 0 OR o.due_at <= now() GROUP BY o.subscription_id
), f AS MATERIALIZED (
    SELECT u.*, s.since, s.newest AS newest_sidelined, coalesce(w.retrying, 0) AS retrying, w.oldest, w.newest, coalesce(w.due, 0) AS due, coalesce(w.waiting, 0) AS waiting,
        least(CASE WHEN w.due_since <= now() THEN w.due_since END, k.since) AS waits_from,
        u.status = '{SubscriptionStatus.DISABLED}' OR u.open_since IS NOT NULL OR u.only_failures_since IS NOT NULL
            OR coalesce(w.retrying, 0) > 0 OR (u.status = '{SubscriptionStatus.ACTIVE}' AND u.status_reason IS NOT NULL) AS fails
    FROM u LEFT JOIN LATERAL (
        SELECT s.since, (SELECT n.since FROM sidelined n WHERE n.room_id = u.room_id AND n.subscription_id = u.id ORDER BY n.since DESC, n.id DESC LIMIT 1) AS newest
        FROM sidelined s WHERE s.room_id = u.room_id AND s.subscription_id = u.id ORDER BY s.since, s.id LIMIT 1
    ) s ON true LEFT JOIN LATERAL (
        SELECT CASE WHEN h.reason = '{Reason.SATURATED}' AND h.delay_ms = 0 THEN coalesce((
            SELECT greatest(m.published_at, m.due_at) FROM deliveries d JOIN messages m ON m.room_id = d.room_id AND m.id = d.message_id
            WHERE d.room_id = h.room_id AND d.id = h.id LIMIT 1
        ), h.since) ELSE h.since END AS since
        FROM generate_series(0, {PRIORITIES - 1}) AS p (n), LATERAL (
            SELECT h.* FROM held h WHERE -h.room_id = -u.room_id AND h.subscription_id = u.id AND NOT u.all_hidden AND h.priority = p.n
                AND h.reason = CASE WHEN u.status = '{SubscriptionStatus.PAUSED}' THEN '{Reason.PAUSED}' WHEN u.status = '{SubscriptionStatus.SUSPENDED}' THEN '{Reason.SUSPENDED}'
                    WHEN u.status_reason IS NULL THEN '{Reason.SATURATED}' ELSE '{Reason.DISABLED}' END
            ORDER BY h.id LIMIT 1
        ) h ORDER BY h.id LIMIT 1
    ) k ON true LEFT JOIN w ON w.subscription_id = u.id
), shown AS MATERIALIZED (
    SELECT f.*, count(*) OVER () AS total FROM f
    WHERE f.fails OR f.since IS NOT NULL OR f.waits_from < now() - CAST(:late AS interval)
        OR (f.status IN ('{SubscriptionStatus.PAUSED}', '{SubscriptionStatus.SUSPENDED}') AND f.waits_from IS NOT NULL)
    ORDER BY f.fails DESC, CASE WHEN f.fails THEN NULL WHEN f.waits_from < now() - CAST(:late AS interval) THEN now() ELSE f.newest_sidelined END DESC NULLS LAST,
        coalesce(f.only_failures_since, f.open_since, f.since, f.status_since), f.oldest, f.id
    LIMIT :limit
)
SELECT f.*, now() AS at, n.sidelined, h.held, d.delivered_at, e.last_error, e.last_status, m.due_at,
    (SELECT s.since FROM sidelined s WHERE s.room_id = f.room_id AND s.subscription_id = f.id
        AND s.since > coalesce(d.delivered_at, '-infinity') ORDER BY s.since, s.id LIMIT 1) AS sidelined_again
FROM shown f LEFT JOIN LATERAL (
    SELECT count(*) AS sidelined FROM (
        SELECT FROM sidelined s WHERE s.room_id = f.room_id AND s.subscription_id = f.id LIMIT {MAX_COUNTED}
    ) s
) n ON true LEFT JOIN LATERAL (
    SELECT coalesce(jsonb_object_agg(h.reason, h.n), '{{{{}}}}') AS held FROM (
        SELECT h.reason, count(*) AS n FROM (
            SELECT h.reason FROM held h WHERE -h.room_id = -f.room_id AND h.subscription_id = f.id AND NOT f.all_hidden LIMIT {MAX_COUNTED}
        ) h GROUP BY h.reason
    ) h
) h ON true LEFT JOIN LATERAL (
    SELECT greatest((
        SELECT max(d.updated_at) FROM (
            SELECT d.state, d.updated_at FROM deliveries d WHERE -d.room_id = -f.room_id AND d.subscription_id = f.id
            ORDER BY d.id DESC LIMIT {MAX_DELIVERIES_SCANNED}
        ) d WHERE d.state IN ('delivered', 'handed_over')
    ), (
        SELECT a.minute FROM activity_minutes a WHERE a.subject = f.id AND a.delivered > 0 ORDER BY a.minute DESC LIMIT 1
    )) AS delivered_at
) d ON true LEFT JOIN LATERAL (
    SELECT d.last_error, d.last_status FROM (VALUES
        (f.newest::uuid), (f.probe),
        ((SELECT s.id FROM sidelined s WHERE s.room_id = f.room_id AND s.subscription_id = f.id ORDER BY s.since DESC, s.id DESC LIMIT 1)),
        ((SELECT h.id FROM generate_series(0, {PRIORITIES - 1}) AS p (n), LATERAL (
            SELECT h.id FROM held h WHERE -h.room_id = -f.room_id AND h.subscription_id = f.id AND h.priority = p.n
                AND h.reason = '{Reason.CIRCUIT_OPEN}' ORDER BY h.id LIMIT 1
        ) h ORDER BY h.id LIMIT 1))
    ) AS c (id) CROSS JOIN LATERAL (
        SELECT d.last_error, d.last_status, d.updated_at FROM deliveries d WHERE d.room_id = f.room_id AND d.id = c.id LIMIT 1
    ) d WHERE d.last_error IS NOT NULL ORDER BY d.updated_at DESC LIMIT 1
) e ON true LEFT JOIN LATERAL (
    SELECT m.due_at FROM outbox o JOIN messages m ON m.room_id = o.room_id AND m.id = o.message_id
    WHERE o.room_id = f.room_id AND o.id = f.oldest::uuid LIMIT 1
) m ON true
"""  # noqa: S608 - constants of this package
MANY_SUBSCRIPTIONS: Final = 2000
"""Of an organisation with more, only subscriptions with a symptom are looked through."""
MANY_SYMPTOMS: Final = 10_000
"""If more subscriptions have one, the organisation's own are asked for theirs.

So its status does not take the longer, the more fails in other organisations.
"""
MAX_EXAMINED: Final = 10_000
"""Of an organisation with many subscriptions, so many with a symptom are looked through."""
# From index entry to index entry of another subscription, so the cost is that of the subscriptions
# with a symptom, of all organisations.
_DISTINCT: Final = """{name}(id, n) AS (
    (SELECT t.subscription_id, 1 FROM {table} t ORDER BY t.subscription_id LIMIT 1)
    UNION ALL
    SELECT (SELECT t.subscription_id FROM {table} t WHERE t.subscription_id > p.id ORDER BY t.subscription_id LIMIT 1), p.n + 1
    FROM {name} p WHERE p.id IS NOT NULL AND p.n < {most}
)"""


def _of_all(most: str) -> str:
    return ",".join(
        _DISTINCT.format(name=f"with_{table}", table=table, most=most)
        for table in ("sidelined", "held")
    )


_FAILING_LANES: Final = "SELECT id FROM lanes WHERE circuit_open OR failing_since IS NOT NULL"
_HAVE_MANY: Final = text(f"""
WITH RECURSIVE {_of_all(":most + 1")}
SELECT (SELECT count(*) FROM ({_FAILING_LANES} LIMIT :most + 1) l) > :most
    OR (SELECT count(id) FROM with_sidelined) > :most OR (SELECT count(id) FROM with_held) > :most
""")  # noqa: S608 - constants of this package
_WAITING: Final = f"""
waiting AS MATERIALIZED (
    SELECT o.subscription_id AS id, max(o.attempt) > 0 AS retried FROM (
        SELECT o.subscription_id, o.attempt, o.due_at FROM outbox o LIMIT {MAX_ROWS_READ}
    ) o WHERE o.attempt > 0 OR o.due_at <= now() GROUP BY 1
), """  # noqa: S608 - constants of this package
_SYMPTOMS: Final = f"""
{_of_all(str(MAX_COUNTED))},
symptom AS MATERIALIZED (
    SELECT id FROM with_sidelined UNION SELECT id FROM with_held
    UNION {_FAILING_LANES}
    UNION SELECT id FROM waiting
    UNION SELECT s.id FROM subscriptions s
        WHERE s.organisation_id = :organisation AND (s.status = '{SubscriptionStatus.DISABLED}' OR s.status_reason IS NOT NULL)
), """  # noqa: S608 - constants of this package
# Those that fail come first, and those that only have something to do last: a publish to many
# subscriptions hides none that fails. Each costs a look into three indexes at most.
_EXAMINED: Final = f"""
examined AS MATERIALIZED (
    SELECT s.id FROM subscriptions s CROSS JOIN LATERAL (
        SELECT CASE
            WHEN s.status = '{SubscriptionStatus.DISABLED}' OR s.status_reason IS NOT NULL OR s.id IN (SELECT id FROM waiting WHERE retried)
                OR EXISTS (SELECT FROM lanes l WHERE l.room_id = s.room_id AND l.id = s.id AND (l.circuit_open OR l.failing_since IS NOT NULL) OFFSET 0)
                THEN 0
            WHEN EXISTS (SELECT FROM sidelined d WHERE d.room_id = s.room_id AND d.subscription_id = s.id OFFSET 0) THEN 1
            WHEN s.id IN (SELECT id FROM waiting)
                OR EXISTS (SELECT FROM held h WHERE -h.room_id = -s.room_id AND h.subscription_id = s.id OFFSET 0) THEN 2
        END AS place OFFSET 0
    ) p WHERE {IS_OWN}{{only}} AND s.status NOT IN ('pending', 'deleted', 'rejected', 'terminated') AND p.place IS NOT NULL
    ORDER BY p.place, s.id LIMIT :examined
), """  # noqa: S608 - constants of this package
_WITH_SYMPTOM: Final = " AND s.id IN (SELECT id FROM symptom)"
_IS_EXAMINED: Final = " AND s.id IN (SELECT id FROM examined)"
_NARROWED: Final[Mapping[str, str]] = {
    "": "",
    "room": " AND s.room_id = :room",
    "chosen": " AND s.id = ANY (CAST(:chosen AS uuid[]))",
}
"""Conditions on the subscriptions that are looked at, by what narrows them."""
_COUNT: Final = {
    name: text(
        f"SELECT count(*) FROM ({OWN_SUBSCRIPTIONS}{only} LIMIT {MANY_SUBSCRIPTIONS + 1}) s"  # noqa: S608
    )
    for name, only in _NARROWED.items()
    if name != "chosen"
}
STATEMENTS: Final[Mapping[str, str]] = {
    name: _STATEMENT.format(symptoms="", only=only) for name, only in _NARROWED.items()
}
"""Those of few subscriptions, by what narrows them."""
_LIST: Final = {
    name: text(statement).bindparams(late=LAGGING_AFTER) for name, statement in STATEMENTS.items()
}


def _list_of_many(only: str, symptoms: str, with_symptom: str) -> TextClause:
    examined = _EXAMINED.format(only=only + with_symptom)
    return text(
        _STATEMENT.format(symptoms=_WAITING + symptoms + examined, only=_IS_EXAMINED)
    ).bindparams(late=LAGGING_AFTER)


_LIST_OF_MANY: Final = {
    name: _list_of_many(only, _SYMPTOMS, _WITH_SYMPTOM) for name, only in _NARROWED.items()
}
_LIST_OF_MANY_AMONG_MANY: Final = {
    name: _list_of_many(only, "", "") for name, only in _NARROWED.items()
}
"""The same, where many subscriptions of the installation have a symptom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingSubscription:
    """Describe a failing subscription.

    It counts deliveries that are sidelined, retried, due and held (by reason). `since`: the start
    of its health state; `last_delivered_at`: its last success among the newest
    `MAX_DELIVERIES_SCANNED` deliveries; `last_error` and `last_status` are those of the newest
    failure.
    """

    room_id: RoomId
    room: str
    subscription_id: SubscriptionId
    name: str
    type: str
    status: str
    push_url: str | None
    health: SubscriptionHealth
    since: datetime
    last_delivered_at: datetime | None
    sidelined: int
    oldest_sidelined_at: datetime | None
    retrying: int
    due: int
    waiting: int
    held: Mapping[str, int]
    last_status: int | None
    last_error: str | None


async def list_failing(
    connection: AsyncConnection,
    principal: Principal,
    *,
    limit: int,
    room: RoomId | None = None,
    chosen: Collection[SubscriptionId] | None = None,
) -> tuple[Sequence[FailingSubscription], int]:
    """Return failing subscriptions of a principal, the worst and of these the longest first.

    And how many there are in all: of the chosen ones, or of a room, where one is given. Of an
    organisation with many subscriptions, both are of `MAX_EXAMINED` with a symptom.
    """
    whose = own_parameters(principal)
    narrowed = ""
    if chosen is not None:
        narrowed, whose["chosen"] = "chosen", sorted(chosen)
        many = len(chosen) > MANY_SUBSCRIPTIONS
    else:
        if room is not None:
            narrowed, whose["room"] = "room", room
        many = await connection.scalar(_COUNT[narrowed], whose) > MANY_SUBSCRIPTIONS
    statements, parameters = _LIST, whose | {"limit": limit}
    if many:
        among_many = await connection.scalar(_HAVE_MANY, {"most": MANY_SYMPTOMS})
        statements = _LIST_OF_MANY_AMONG_MANY if among_many else _LIST_OF_MANY
        parameters["examined"] = MAX_EXAMINED
    rows = (await connection.execute(statements[narrowed], parameters)).mappings().all()
    found = [_failing(row) for row in rows]
    order = list(SubscriptionHealth)
    return (
        sorted(found, key=lambda one: (order.index(one.health), one.since)),
        rows[0]["total"] if rows else 0,
    )


def _failing(row: RowMapping) -> FailingSubscription:
    unserved = row["status"] == SubscriptionStatus.ACTIVE and row["status_reason"] is not None
    symptoms = HealthInput(
        status=SubscriptionStatus(row["status"]),
        status_since=row["status_since"],
        held_for_reason=unserved,
        circuit_open_since=row["open_since"],
        only_failures_since=row["only_failures_since"],
        oldest_retry_at=_later_of(_created_at(row["oldest"]), row["due_at"]),
        newest_retry_at=_created_at(row["newest"]),
        oldest_sidelined_at=row["since"],
        residelined_at=row["sidelined_again"],
        delivered_at=row["delivered_at"],
        waiting_since=row["waits_from"],
    )
    condition, since = classify(symptoms, row["at"])
    same: dict[str, Any] = {
        name: row[name]
        for name in (
            "room",
            "name",
            "type",
            "status",
            "push_url",
            "sidelined",
            "retrying",
            "due",
            "waiting",
            "held",
        )
    }
    return FailingSubscription(
        **same,
        room_id=RoomId(row["room_id"]),
        subscription_id=SubscriptionId(str(row["id"])),
        health=condition,
        since=since,
        last_delivered_at=row["delivered_at"],
        oldest_sidelined_at=row["since"],
        last_status=row["last_status"],
        last_error=row["status_reason"] if unserved else row["last_error"] or row["status_reason"],
    )


def _created_at(identity: str | None) -> datetime | None:
    return None if identity is None else datetime.fromtimestamp(created_ms(identity) / 1000, UTC)


def _later_of(published_at: datetime | None, due_at: datetime | None) -> datetime | None:
    return (
        due_at
        if published_at is not None and due_at is not None and due_at > published_at
        else published_at
    )
