"""Read usage: sums by hour or day, organisation, room, event type and application.

An organisation sees rows of what it published or received, in rooms of others, too, and every row
of its own rooms. Of what it received in rooms of others it sees no count of what it may not know
of. The platform sees all.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import OrganisationId, RoomId, first_id
from rooms.domain.state_machine import ENDED_STATUSES
from rooms.domain.usage import COUNTERS, HIDDEN_COLUMNS, UsageDimension, UsagePeriod, UsageRow

_ABSENT: Final[Mapping[UsageDimension, str]] = {
    UsageDimension.ORGANISATION: f"'{first_id(0)}'::uuid",
    UsageDimension.ROOM: "0",
    UsageDimension.EVENT_TYPE: "''",
    UsageDimension.APPLICATION: "''",
}
"""Values in place of what rows are not grouped by."""
_COLUMNS: Final[Mapping[UsageDimension, str]] = {
    UsageDimension.ORGANISATION: "organisation_id",
    UsageDimension.ROOM: "room_id",
    UsageDimension.EVENT_TYPE: "event_type",
    UsageDimension.APPLICATION: "application",
}
_WINDOW: Final = timedelta(days=1)
"""The most hours that one statement sums up."""
_STARTS: Final[Mapping[UsagePeriod, str]] = {
    UsagePeriod.HOUR: "hour",
    UsagePeriod.DAY: "date_trunc('day', hour, 'UTC')",
}
_SUMS: Final = ", ".join(f"sum({name})::int8 AS {name}" for name in COUNTERS)
_ALL: Final = ", ".join(COUNTERS)
_KNOWN: Final = ", ".join(
    f"{name} - CASE WHEN owner_id = :whose THEN 0 ELSE {HIDDEN_COLUMNS[name]} END AS {name}"
    if name in HIDDEN_COLUMNS
    else name
    for name in COUNTERS
)
_IS_EMPTY: Final = " + ".join(f"sum({name})" for name in COUNTERS) + " = 0"
_NAMES: Final = ", ".join(f"g.{name}" for name in COUNTERS)
_OWN: Final = " AND (organisation_id = :whose OR owner_id = :whose)"
_OWN_ALONE: Final = " AND organisation_id = :whose"
_OF_APPLICATION: Final = " AND application = :application"
_NEXT_HOUR: Final = """
SELECT min(hour) FROM (
    (SELECT hour FROM usage_hours WHERE organisation_id = :whose AND hour >= :since AND hour < :until{more} ORDER BY hour LIMIT 1)
    UNION ALL
    (SELECT hour FROM usage_hours WHERE owner_id = :whose AND hour >= :since AND hour < :until{more} ORDER BY hour LIMIT 1)
) h
"""
_NEXT_HOUR_OF_ALL: Final = (
    "SELECT min(hour) FROM usage_hours WHERE hour >= :since AND hour < :until{more}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Say which rows are wanted.

    `organisation`: whose; None: all. `viewer`: the organisation that asks, which reads the names of
    the rooms that it may read; None: the platform, which reads all. Hours begin in [since, until).
    `application`: only rows of this one; None: all. `own_alone`: without what other organisations
    do in rooms of `organisation`.
    """

    organisation: OrganisationId | None
    viewer: OrganisationId | None
    by: frozenset[UsageDimension]
    per: UsagePeriod
    since: datetime
    until: datetime
    application: str | None = None
    own_alone: bool = False


_LARGEST: Final = text(f"""
    SELECT g.*, o.name AS organisation_name, r.name AS room_name FROM (
        SELECT organisation_id, room_id, application, {_SUMS} FROM usage_hours WHERE hour >= :since
        GROUP BY 1, 2, 3 ORDER BY sum(messages) + sum(deliveries) DESC, 1, 2, 3 LIMIT :limit
    ) g LEFT JOIN organisations o ON o.id = g.organisation_id LEFT JOIN rooms r ON r.id = g.room_id AND NOT r.deleting
    ORDER BY g.messages + g.deliveries DESC, g.organisation_id, g.room_id, g.application
""")  # noqa: S608 - constants of this package
Position = tuple[datetime, str, int, str, str]
"""Where a row is in the list: its time, organisation, room, event type and application."""


def position_of(row: UsageRow) -> Position:
    """Return the position of a row."""
    organisation = row.organisation_id or first_id(0)
    return row.start, organisation, row.room_id or 0, row.event_type or "", row.application or ""


async def list_usage(
    connection: AsyncConnection, query: UsageQuery, *, after: Position | None, limit: int
) -> list[UsageRow]:
    """Return rows by time, then by group; `after`: the last one of the page before.

    One statement sums up one day at most; days without rows are skipped. As the rooms of an hour
    may be thousands, the first statement sums up one period where rows are grouped by them.
    """
    found: list[UsageRow] = []
    start = query.since if after is None else after[0]
    window = query.per.length if query.by - {UsageDimension.ORGANISATION} else _WINDOW
    while len(found) < limit:
        hour = await _next_hour(connection, query, start)
        if hour is None:
            break
        begin = query.per.floor(hour)
        end = min(begin + window, query.until)
        found += await _sum_window(
            connection, query, (max(begin, query.since), end), after, limit - len(found)
        )
        start, after, window = end, None, min(2 * window, _WINDOW)
    return found


async def largest_usage(
    connection: AsyncConnection, *, since: datetime, limit: int
) -> list[UsageRow]:
    """Return the applications of organisations with the most messages and deliveries in a room.

    Of all, since a time.
    """
    rows = await connection.execute(_LARGEST, {"since": since, "limit": limit})
    return [
        UsageRow(
            start=since,
            organisation_id=OrganisationId(str(row["organisation_id"])),
            organisation_name=row["organisation_name"],
            room_id=RoomId(row["room_id"]),
            room_name=row["room_name"],
            event_type=None,
            application=row["application"] or None,
            counts={name: row[name] for name in COUNTERS},
        )
        for row in rows.mappings()
    ]


async def _next_hour(
    connection: AsyncConnection, query: UsageQuery, start: datetime
) -> datetime | None:
    values: dict[str, Any] = {"since": start, "until": query.until, **_filter_values(query)}
    statement = _NEXT_HOUR_OF_ALL if query.organisation is None else _NEXT_HOUR
    more = "" if query.application is None else _OF_APPLICATION
    hour = await connection.scalar(text(statement.format(more=more)), values)
    return None if hour is None else hour.astimezone(UTC)


async def _sum_window(
    connection: AsyncConnection,
    query: UsageQuery,
    window: tuple[datetime, datetime],
    after: Position | None,
    limit: int,
) -> list[UsageRow]:
    values: dict[str, Any] = {
        "since": window[0],
        "until": window[1],
        "limit": limit,
        "viewer": query.viewer,
        **_filter_values(query),
    }
    if after is not None:
        names = (
            "after_start",
            "after_organisation",
            "after_room",
            "after_type",
            "after_application",
        )
        values |= dict(zip(names, after, strict=True))
    rows = await connection.execute(_sum_statement(query, following=after is not None), values)
    return [_to_row(row, query) for row in rows.mappings()]


def _filter_values(query: UsageQuery) -> dict[str, str]:
    given = {"whose": query.organisation, "application": query.application}
    return {name: value for name, value in given.items() if value is not None}


# As `rooms.db.catalog.access` decides it.
_ENDED: Final = ", ".join(f"'{status}'" for status in sorted(ENDED_STATUSES))
_MAY_READ_ROOM: Final = f"""
    CAST(:viewer AS uuid) IS NULL OR r.organisation_id = CAST(:viewer AS uuid) OR r.visibility = 'listed' OR EXISTS (
        SELECT FROM grants a WHERE a.room_id = r.id AND a.revoked_at IS NULL AND a.starts_at <= now() AND (a.until IS NULL OR a.until > now())
            AND (a.organisation_id = CAST(:viewer AS uuid) OR a.organisation_id IS NULL)
    ) OR EXISTS (
        SELECT FROM subscriptions s WHERE s.room_id = r.id AND s.organisation_id = CAST(:viewer AS uuid) AND s.status NOT IN ({_ENDED})
    )"""  # noqa: S608 - constants of this package


def _sum_statement(query: UsageQuery, *, following: bool) -> Any:
    groups = ", ".join(
        f"{_COLUMNS[one] if one in query.by else _ABSENT[one]} AS {name}"
        for one, name in (
            (UsageDimension.ORGANISATION, "of_organisation"),
            (UsageDimension.ROOM, "of_room"),
            (UsageDimension.EVENT_TYPE, "of_type"),
            (UsageDimension.APPLICATION, "of_application"),
        )
    )
    own = "" if query.organisation is None else _OWN_ALONE if query.own_alone else _OWN
    own += "" if query.application is None else _OF_APPLICATION
    position = (
        " WHERE (start, of_organisation, of_room, of_type, of_application)"
        " > (:after_start, CAST(:after_organisation AS uuid), :after_room, :after_type, :after_application)"
        if following
        else ""
    )
    return text(f"""
        SELECT g.start, g.of_organisation::text AS organisation_id, o.name AS organisation_name, g.of_room AS room_id,
            CASE WHEN {_MAY_READ_ROOM} THEN r.name END AS room_name,
            g.of_type AS event_type, g.of_application AS application, {_NAMES}
        FROM (
            SELECT start, of_organisation, of_room, of_type, of_application, {_SUMS} FROM (
                SELECT {_STARTS[query.per]} AS start, {groups}, {_ALL if query.viewer is None else _KNOWN} FROM usage_hours
                WHERE hour >= :since AND hour < :until{own}
            ) u{position}
            GROUP BY 1, 2, 3, 4, 5 HAVING NOT {_IS_EMPTY} ORDER BY 1, 2, 3, 4, 5 LIMIT :limit
        ) g LEFT JOIN organisations o ON o.id = g.of_organisation LEFT JOIN rooms r ON r.id = g.of_room AND NOT r.deleting
        ORDER BY 1, g.of_organisation, g.of_room, g.of_type, g.of_application
    """)  # noqa: S608 - constants of this package


def _to_row(row: Mapping[Any, Any], query: UsageQuery) -> UsageRow:
    by_organisation = UsageDimension.ORGANISATION in query.by
    known = by_organisation and row["organisation_id"] != first_id(0)
    return UsageRow(
        start=row["start"].astimezone(UTC),
        organisation_id=OrganisationId(row["organisation_id"]) if known else None,
        organisation_name=row["organisation_name"],
        room_id=RoomId(row["room_id"]) if UsageDimension.ROOM in query.by else None,
        room_name=row["room_name"],
        event_type=row["event_type"] or None,
        application=row["application"] or None,
        counts={name: row[name] for name in COUNTERS},
    )
