"""Serve `/v1/usage` and `/v1/activity`: what was published and delivered.

Usage is counted by the hour or day; activity is the last hour, by the minute.
"""

import json
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

from litestar import get
from litestar.params import QueryParameter
from litestar.response import Stream
from msgspec import Meta, Struct
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, for_portals, require_scopes
from rooms.api.deps import ApiServices
from rooms.api.exports import CSV_MEDIA_TYPE, csv_lines, while_key_lasts
from rooms.api.journal import ALL, OrganisationQuery
from rooms.api.openapi import TableOperation
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import IdPath, parse_id, parse_time
from rooms.api.stream_task import in_own_task
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog.subscriptions import find_visible_subscription
from rooms.db.connection import transaction, wait_for_share
from rooms.db.usage.count import complete_until
from rooms.db.usage.minutes import INSTALLATION, read_minutes
from rooms.db.usage.read import Position, UsageQuery, list_usage, position_of
from rooms.domain.ids import OrganisationId
from rooms.domain.principal import Principal
from rooms.domain.sharing import APPLICATION_PATTERN, is_application
from rooms.domain.state_machine import Scope
from rooms.domain.usage import (
    MAX_APPLICATIONS,
    OTHER_APPLICATIONS,
    MinuteCounts,
    UsageDimension,
    UsagePeriod,
    UsageRow,
    add_latencies,
    percentile_ms,
)
from rooms.errors import FieldProblem, ForbiddenError, InvalidError

_LIST: Final = "usage with applications"
"""A cursor of an older version is of another list: its position has no application."""
_TAGS: Final = ["usage"]
_SCOPES: Final = require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.AUDIT, Scope.PLATFORM)
MAX_SPAN: Final = timedelta(days=400)
_DEFAULT_SPAN: Final = {UsagePeriod.HOUR: timedelta(days=1), UsagePeriod.DAY: timedelta(days=30)}
_EXPORT_BATCH: Final = 500

By = Annotated[
    str,
    QueryParameter(
        description="What rows are grouped by, besides time, with commas between them: "
        "`organisation`, `room`, `event_type`, `application`."
    ),
]
ApplicationQuery = Annotated[
    str | None,
    QueryParameter(
        description="Only what this application published, or got by its subscriptions; `*`: the "
        f"applications beyond the first {MAX_APPLICATIONS} of an organisation in an hour.",
        schema_extra={"pattern": rf"^(\*|{APPLICATION_PATTERN.strip('^$')})$"},
    ),
]
OwnQuery = Annotated[
    bool,
    QueryParameter(
        description="Only what the organisation itself published or got, without what others do in "
        "its rooms."
    ),
]
Per = Annotated[UsagePeriod, QueryParameter(description="The length of a row's time, in UTC.")]
UsageSince = Annotated[
    str | None,
    QueryParameter(
        description="Hours or days from the one that this time is in, RFC 3339; by default a day "
        "of hours, or 30 days.",
        schema_extra={"format": "date-time"},
    ),
]
UsageUntil = Annotated[
    str | None,
    QueryParameter(
        description="Hours that begin before this time, RFC 3339; by default now.",
        schema_extra={"format": "date-time"},
    ),
]
Percentile = Annotated[
    float | None,
    Meta(
        description="Of calls of webhooks, estimated: it differs from the exact value by less "
        "than a factor of 1.42. null: there was no call."
    ),
]


class UsageResponse(Struct, kw_only=True):
    """Count what happened in one hour or day, and one group.

    `organisation_id` published (`messages`, `bytes`), or owns the subscriptions that the other
    counts are of. `application` is that of the publishing key, or of the key that made the
    subscription: null without one, and in what versions before this field counted; `*` stands for
    those beyond the first 100 of an organisation in an hour. Fields that rows are not grouped by
    are null, and `room_name` is where the room was deleted, or the caller may not read it any more.
    `closed`: nothing is added any more. `deliveries` were made of messages or replays;
    `delivered` counts webhooks, acknowledged pulls, and hand-overs to native queues;
    `failed_attempts` are part of the `attempts` at webhooks. In rooms of others, `deliveries` leave
    out for good what was made before it was due or during a suspension, `cancelled` what was never
    attempted, and `expired` what was never attempted and ended during a suspension.
    """

    start: datetime
    closed: bool
    organisation_id: str | None
    organisation_name: str | None
    room_id: int | None
    room_name: str | None
    event_type: str | None
    application: str | None
    messages: int
    bytes: int
    deliveries: int
    attempts: int
    failed_attempts: int
    delivered: int
    sidelined: int
    expired: int
    cancelled: int
    dropped: int
    purged: int


class UsagePage(Struct, kw_only=True):
    """List usage by time. `complete_until`: everything before this time is counted."""

    items: list[UsageResponse]
    complete_until: datetime | None
    next_cursor: str | None


@get("/usage", opt=_SCOPES, tags=_TAGS, summary="Read usage")
async def read_usage(
    *,
    services: ServicesDep,
    principal: Caller,
    by: By = "organisation",
    per: Per = UsagePeriod.HOUR,
    since: UsageSince = None,
    until: UsageUntil = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    organisation_id: OrganisationQuery = None,
    application: ApplicationQuery = None,
    own: OwnQuery = False,
) -> UsagePage:
    """Count messages, bytes and deliveries, from the log.

    An organisation sees what it published, what its subscriptions got, and everything in its own
    rooms; the scope `platform` reads that of others. At most 400 days.
    """
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        now = await connection.scalar(select(func.now()))
        assert now is not None
        query = _to_query(
            principal,
            organisation_id,
            by,
            (per, since, until),
            now,
            application=application,
            own=own,
        )
        complete = await complete_until(connection)
        found = await list_usage(
            connection, query, after=_position(page.after), limit=page.fetch_limit
        )
    items, next_cursor = page.split(found, lambda row: _encode(position_of(row)))
    return UsagePage(
        items=[_to_response(row, per, complete) for row in items],
        complete_until=complete,
        next_cursor=next_cursor,
    )


@get(
    "/usage/export",
    opt=_SCOPES,
    tags=_TAGS,
    summary="Export usage",
    operation_class=TableOperation,
    media_type=CSV_MEDIA_TYPE,
)
async def export_usage(
    *,
    services: ServicesDep,
    principal: Caller,
    by: By = "organisation",
    per: Per = UsagePeriod.HOUR,
    since: UsageSince = None,
    until: UsageUntil = None,
    organisation_id: OrganisationQuery = None,
    application: ApplicationQuery = None,
    own: OwnQuery = False,
) -> Stream:
    """Stream usage as CSV, by time. At most 400 days."""
    async with transaction(services.engine) as connection:
        now = await connection.scalar(select(func.now()))
        assert now is not None
        complete = await complete_until(connection)
    query = _to_query(
        principal, organisation_id, by, (per, since, until), now, application=application, own=own
    )
    return Stream(
        in_own_task(while_key_lasts(services, principal, _csv_rows(services, query, complete))),
        headers={
            "Content-Type": CSV_MEDIA_TYPE,
            "Content-Disposition": 'attachment; filename="usage.csv"',
        },
    )


def _to_query(
    principal: Principal,
    organisation_id: str | None,
    by: str,
    span: tuple[UsagePeriod, str | None, str | None],
    now: datetime,
    *,
    application: str | None,
    own: bool,
) -> UsageQuery:
    """Return the query of these parameters. InvalidError, ForbiddenError, NotFoundError."""
    per = span[0]
    since, until = parse_time("since", span[1]), parse_time("until", span[2])
    end = until or now.astimezone(UTC)
    try:
        start = per.floor(since or end - _DEFAULT_SPAN[per])
    except OverflowError as exc:
        raise InvalidError(FieldProblem("until", "is too near to the year 1")) from exc
    if end - start > MAX_SPAN + per.length:
        raise InvalidError(
            FieldProblem("since", f"is more than {MAX_SPAN.days} days before until; ask for less")
        )
    is_platform = principal.has_scope(Scope.PLATFORM)
    whose: OrganisationId | None = principal.organisation_id
    if organisation_id is not None and organisation_id != principal.organisation_id:
        if not is_platform:
            raise ForbiddenError("the usage of another organisation needs the scope platform")
        whose = (
            None
            if organisation_id == ALL
            else OrganisationId(parse_id(organisation_id, "organisation"))
        )
    if own and whose is None:
        raise InvalidError(FieldProblem("own", "needs one organisation, and `*` is all of them"))
    return UsageQuery(
        organisation=whose,
        viewer=None if is_platform else principal.organisation_id,
        by=_dimensions(by),
        per=per,
        since=start,
        until=end,
        application=_check_application(application),
        own_alone=own,
    )


def _check_application(name: str | None) -> str | None:
    """Return the name of a filter. InvalidError: no application has it."""
    if name is None or name == OTHER_APPLICATIONS or is_application(name):
        return name
    raise InvalidError(
        FieldProblem(
            "application",
            "is * for those beyond the bound, or 1 to 64 of a-z, A-Z, 0-9, '_', '.' and '-'",
        )
    )


def _dimensions(text: str) -> frozenset[UsageDimension]:
    """Return the dimensions that a query names. InvalidError."""
    try:
        return frozenset(UsageDimension(name) for name in text.split(",") if name)
    except ValueError as exc:
        known = ", ".join(UsageDimension)
        raise InvalidError(FieldProblem("by", f"takes {known}, with commas between them")) from exc


def _encode(position: Position) -> str:
    return json.dumps([position[0].isoformat(), *position[1:]])


def _position(text: str | None) -> Position | None:
    if text is None:
        return None
    start, organisation, room, event_type, application = json.loads(text)
    return datetime.fromisoformat(start), organisation, room, event_type, application


def _to_response(row: UsageRow, per: UsagePeriod, complete: datetime | None) -> UsageResponse:
    return UsageResponse(
        start=row.start,
        closed=complete is not None and row.start + per.length <= complete,
        organisation_id=row.organisation_id,
        organisation_name=row.organisation_name,
        room_id=row.room_id,
        room_name=row.room_name,
        event_type=row.event_type,
        application=row.application,
        **row.counts,
    )


async def _csv_rows(
    services: ApiServices, query: UsageQuery, complete: datetime | None
) -> AsyncIterator[bytes]:
    columns = UsageResponse.__struct_fields__
    yield csv_lines([columns])
    after: Position | None = None

    async def read() -> Sequence[UsageRow]:
        async with transaction(services.engine) as connection:
            return await list_usage(connection, query, after=after, limit=_EXPORT_BATCH)

    while True:
        found = await wait_for_share(read)
        if found:
            responses = [_to_response(row, query.per, complete) for row in found]
            yield csv_lines([getattr(one, name) for name in columns] for one in responses)
            after = position_of(found[-1])
        if len(found) < _EXPORT_BATCH:
            return


class LatencyResponse(Struct, kw_only=True):
    """Estimate how long calls of webhooks took, in ms."""

    p50_ms: Percentile
    p95_ms: Percentile
    p99_ms: Percentile


class MinuteResponse(LatencyResponse, kw_only=True):
    """Count what happened in the minute that begins at `start`.

    `deliveries` were made; `delivered` counts webhooks, acknowledged pulls, and hand-overs to
    native queues; `failed` counts calls that failed and leases that were returned or ran out. Of
    subscriptions in rooms of others, what usage leaves out is left out here, for both sides.
    """

    start: datetime
    deliveries: int
    delivered: int
    failed: int
    sidelined: int
    expired: int


class ActivityResponse(Struct, kw_only=True):
    """Hold the last 60 minutes, oldest first; the last one is the current minute.

    `complete_until`: everything before this time is counted, which is some seconds ago.
    """

    complete_until: datetime | None
    latency: LatencyResponse
    minutes: list[MinuteResponse]


@get(
    "/activity",
    opt=require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.AUDIT, Scope.PLATFORM),
    tags=["usage"],
    summary="Read the last hour",
)
async def read_activity(
    *, services: ServicesDep, principal: Caller, organisation_id: OrganisationQuery = None
) -> ActivityResponse:
    """Count by the minute what the organisation's subscriptions got in the last hour.

    The scope `platform` reads that of others, and of the whole installation.
    """
    subject = _subject(principal, organisation_id)
    async with transaction(services.engine) as connection:
        return await _describe(connection, subject)


@get(
    "/subscriptions/{subscription_id:str}/activity",
    opt=for_portals(
        require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
    ),
    tags=["subscriptions"],
    summary="Read the last hour of a subscription",
)
async def read_subscription_activity(
    services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> ActivityResponse:
    """Count by the minute what a subscription got in the last hour. For both sides."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        found = await find_visible_subscription(connection, principal, identity)
        return await _describe(connection, found.id)


def _subject(principal: Principal, organisation_id: str | None) -> str:
    if organisation_id is None or organisation_id == principal.organisation_id:
        return principal.organisation_id
    if not principal.has_scope(Scope.PLATFORM):
        raise ForbiddenError("the activity of another organisation needs the scope platform")
    return INSTALLATION if organisation_id == ALL else parse_id(organisation_id, "organisation")


async def _describe(connection: AsyncConnection, subject: str) -> ActivityResponse:
    minutes = await read_minutes(connection, subject)
    return ActivityResponse(
        complete_until=await complete_until(connection),
        latency=_latency(add_latencies([one.latencies for one in minutes])),
        minutes=[_to_minute(one) for one in minutes],
    )


def _latency(calls: Sequence[int]) -> LatencyResponse:
    p50_ms, p95_ms, p99_ms = (percentile_ms(calls, share) for share in (0.5, 0.95, 0.99))
    return LatencyResponse(p50_ms=p50_ms, p95_ms=p95_ms, p99_ms=p99_ms)


def _to_minute(one: MinuteCounts) -> MinuteResponse:
    latency = _latency(one.latencies)
    return MinuteResponse(
        start=one.start,
        **one.counts,
        p50_ms=latency.p50_ms,
        p95_ms=latency.p95_ms,
        p99_ms=latency.p99_ms,
    )


ROUTES: Final = [
    read_usage,
    export_usage,
    read_activity,
    read_subscription_activity,
]
