"""Serve `/v1/subscriptions/{id}/sideline`: list, shovel and purge failed deliveries."""

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody, QueryParameter
from msgspec import Meta, Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from delivery.sideline.shovel import MAX_CONCURRENCY, MAX_RATE_PER_S, MAX_SHOVELS, ShovelRequest
from rooms.api.auth import (
    OF_SUBSCRIPTIONS,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.changes import Change, ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.jobs import JobAccepted, accepted_response
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import (
    BusinessKey,
    Correlation,
    EventType,
    IdPath,
    OrderingKey,
    Since,
    Until,
    parse_id,
    parse_time,
)
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog.subscriptions import find_subscription
from rooms.db.connection import transaction
from rooms.db.jobs.requests import request_job
from rooms.db.sideline import queries as records
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.state_machine import Reason, Scope
from rooms.errors import FieldProblem, InvalidError

_LIST: Final = "sideline"
_TAGS: Final = ["sideline"]
_READ: Final = for_portals(
    require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE, allows=OF_SUBSCRIPTIONS)
)
_WRITE: Final = for_portals(require_scopes(Scope.OPERATE, allows=OF_SUBSCRIPTIONS))
_MAX_IDS: Final = 1000
_MAX_SHOVELS: Final = 10_000

ReasonQuery = Annotated[
    Reason | None, QueryParameter(description="Only deliveries sidelined for this reason.")
]
ErrorQuery = Annotated[
    str | None, QueryParameter(description="Only deliveries whose last error contains this text.")
]
FilterText = Annotated[str, Meta(min_length=1, max_length=256)]
DeliveryIdText = Annotated[str, Meta(pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]


class SidelinedDeliveryResponse(Struct, kw_only=True):
    """Describe a sidelined delivery and the reason.

    The fields of its message are null where the message is gone (`orphan`).
    """

    delivery_id: str
    message_id: str
    subscription_id: str
    reason: Reason
    last_status: int | None
    last_error: str | None
    attempts: int
    shovel_count: int
    sidelined_at: datetime
    published_at: datetime | None
    expires_at: datetime | None
    correlation_id: str | None
    event_type: str | None
    event_version: int | None
    ordering_key: str | None
    business_key: str | None


class SidelinePage(Struct, kw_only=True):
    """List sidelined deliveries, oldest first."""

    items: list[SidelinedDeliveryResponse]
    next_cursor: str | None


class SidelineSelection(Struct, forbid_unknown_fields=True, kw_only=True):
    """Select deliveries of the sideline; without a filter, all of them."""

    since: (
        Annotated[datetime, Meta(tz=True, description="Sidelined at this time or later.")] | None
    ) = None
    until: Annotated[datetime, Meta(tz=True, description="Sidelined before this time.")] | None = (
        None
    )
    reason: Reason | None = None
    event_type: FilterText | None = None
    error: Annotated[FilterText, Meta(description="Part of the last error.")] | None = None
    correlation_ids: Annotated[list[FilterText], Meta(max_length=_MAX_IDS)] | None = None
    ordering_keys: (
        Annotated[
            list[FilterText],
            Meta(max_length=_MAX_IDS, description="Only messages with one of these keys."),
        ]
        | None
    ) = None
    business_keys: (
        Annotated[
            list[FilterText],
            Meta(max_length=_MAX_IDS, description="Only messages with one of these keys."),
        ]
        | None
    ) = None
    delivery_ids: Annotated[list[DeliveryIdText], Meta(max_length=_MAX_IDS)] | None = None
    dry_run: Annotated[bool, Meta(description="Only return what would be moved.")] = False


ShovelRate = Annotated[
    float,
    Meta(gt=0, le=MAX_RATE_PER_S, description="Deliveries a second; null: no limit."),
]
ShovelConcurrency = Annotated[int, Meta(ge=1, le=MAX_CONCURRENCY, description="Batches at a time.")]
ShovelLimit = Annotated[
    int,
    Meta(
        ge=1,
        le=_MAX_SHOVELS,
        description="Deliveries that returned so often stay: poison messages must not circle.",
    ),
]


class CreateShovel(SidelineSelection, forbid_unknown_fields=True, kw_only=True):
    """Select what to bring back, and how fast."""

    rate_per_s: ShovelRate | None = None
    concurrency: ShovelConcurrency = 4
    max_shovels: ShovelLimit = MAX_SHOVELS


class CreatePurge(SidelineSelection, forbid_unknown_fields=True, kw_only=True):
    """Select what to purge."""


class DryRunResponse(Struct, kw_only=True):
    """Describe what would be moved: the number, by reason, and the first ones.

    A shovel leaves those that returned too often (`too_often`) and ends those that `expired`; a
    purge ends all. A request with this `until` moves none that was sidelined later.
    """

    would_move: int
    by_reason: dict[str, int]
    sample: list[SidelinedDeliveryResponse]
    too_often: int
    expired: int
    until: datetime


_JOB_OR_DRY_RUN: Final = {
    **documented_responses(),
    200: ResponseSpec(
        DryRunResponse,
        generate_examples=False,
        description="The result of a dry run; nothing was moved.",
    ),
    202: ResponseSpec(JobAccepted, generate_examples=False, description="The job."),
}


@get(
    "/subscriptions/{subscription_id:str}/sideline",
    opt=_READ,
    tags=_TAGS,
    summary="List a sideline",
)
async def read_sideline(
    *,
    services: ServicesDep,
    principal: Caller,
    subscription_id: IdPath,
    limit: Limit = 50,
    cursor: Cursor = None,
    since: Since = None,
    until: Until = None,
    reason: ReasonQuery = None,
    event_type: EventType = None,
    error: ErrorQuery = None,
    correlation_id: Correlation = None,
    ordering_key: OrderingKey = None,
    business_key: BusinessKey = None,
) -> SidelinePage:
    """List deliveries in the order in which they were sidelined.

    `since` and `until` are the time of sidelining. A call looks at 5,000 deliveries at most, so a
    page may have few items or none while `next_cursor` is set: the list goes on there.
    """
    identity = parse_subscription(subscription_id)
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    sideline_filter = records.SidelineFilter(
        since=parse_time("since", since),
        until=parse_time("until", until),
        reason=reason,
        event_type=event_type,
        error=error or None,
        correlation_ids=() if correlation_id is None else (correlation_id,),
        ordering_keys=() if ordering_key is None else (ordering_key,),
        business_keys=() if business_key is None else (business_key,),
    )
    async with transaction(services.engine) as connection:
        found = await find_subscription(connection, principal, identity)
        scan = await records.scan_sideline(
            connection,
            found.room_id,
            identity,
            sideline_filter,
            after=_parse_position(page.after),
            limit=page.fetch_limit,
        )
    return page.respond(
        SidelinePage,
        scan.found,
        _to_sidelined_response,
        position=lambda one: _position_text(one.position),
        further=None if scan.further is None else _position_text(scan.further),
    )


@post(
    "/subscriptions/{subscription_id:str}/sideline/shovel",
    status_code=202,
    dto=Body[CreateShovel | None],
    return_dto=None,
    opt=_WRITE,
    responses=_JOB_OR_DRY_RUN,
    tags=_TAGS,
    summary="Shovel a sideline",
)
async def shovel(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
    data: JSONBody[CreateShovel | None] = None,
) -> Response[Any]:
    """Start the job that queues deliveries again with new attempts; a dry run moves nothing.

    Lifetimes are not renewed: what expired meanwhile ends. Deliveries that are sidelined while the
    job runs are left out.
    """
    selection = data or CreateShovel()
    identity = parse_subscription(subscription_id)
    request = ShovelRequest(
        subscription=identity,
        selection=_to_filter(selection),
        rate_per_s=selection.rate_per_s,
        concurrency=selection.concurrency,
        max_shovels=selection.max_shovels,
    )
    return await _create_job(
        services,
        principal,
        change,
        identity,
        request,
        kind=JobKind.SHOVEL_SIDELINE,
        dry_run=selection.dry_run,
    )


@post(
    "/subscriptions/{subscription_id:str}/sideline/purge",
    status_code=202,
    dto=Body[CreatePurge | None],
    return_dto=None,
    opt=_WRITE,
    responses=_JOB_OR_DRY_RUN,
    tags=_TAGS,
    summary="Purge a sideline",
)
async def purge(
    *,
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    subscription_id: IdPath,
    confirm: Annotated[
        str | None,
        QueryParameter(description="The subscription's name, to prevent purging by mistake."),
    ] = None,
    data: JSONBody[CreatePurge | None] = None,
) -> Response[Any]:
    """Start the job that ends deliveries as `purged`; a dry run moves nothing."""
    selection = data or CreatePurge()
    identity = parse_subscription(subscription_id)
    request = ShovelRequest(subscription=identity, selection=_to_filter(selection))
    return await _create_job(
        services,
        principal,
        change,
        identity,
        request,
        kind=JobKind.PURGE_SIDELINE,
        dry_run=selection.dry_run,
        confirm=confirm or "",
    )


async def _create_job(
    services: ApiServices,
    principal: Principal,
    change: Change,
    identity: SubscriptionId,
    request: ShovelRequest,
    *,
    kind: JobKind,
    dry_run: bool,
    confirm: str | None = None,
) -> Response[Any]:
    change.is_dry_run = dry_run
    async with change.transaction() as connection:
        found = await find_subscription(connection, principal, identity)
        if dry_run:
            return Response(await _dry_run(connection, found, request, kind), status_code=200)
        if confirm is not None and confirm != found.name:
            raise InvalidError(
                FieldProblem(
                    "confirm",
                    "repeat the subscription's name here: purged deliveries cannot be restored",
                )
            )
        job = await request_job(
            connection,
            principal.organisation_id,
            kind,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            room=found.room_id,
            arguments=request.to_arguments(),
        )
    return accepted_response(job)


async def _dry_run(
    connection: AsyncConnection, found: Subscription, request: ShovelRequest, kind: JobKind
) -> DryRunResponse:
    until = await records.end_of_preview(connection, request.selection)
    selection = replace(request.selection, until=until)
    if kind is JobKind.SHOVEL_SIDELINE:
        most, sideline_filter = (
            request.max_shovels,
            replace(selection, shovelable_below=request.max_shovels),
        )
        preview = await records.preview_shovel(
            connection, found.room_id, found.id, selection, max_shovels=most
        )
    else:
        sideline_filter = selection
        summary = await records.sideline_summary(
            connection, found.room_id, found.id, sideline_filter
        )
        preview = records.ShovelPreview(queued=summary, too_often=0, expired=0)
    sample = await records.sideline_page(
        connection, found.room_id, found.id, sideline_filter, after=None, limit=10
    )
    return DryRunResponse(
        would_move=sum(preview.queued.values()),
        by_reason=dict(preview.queued),
        sample=[_to_sidelined_response(one) for one in sample],
        too_often=preview.too_often,
        expired=preview.expired,
        until=until,
    )


def _to_filter(selection: SidelineSelection) -> records.SidelineFilter:
    return records.SidelineFilter(
        since=selection.since,
        until=selection.until,
        reason=selection.reason,
        event_type=selection.event_type,
        error=selection.error,
        correlation_ids=tuple(selection.correlation_ids or ()),
        ordering_keys=tuple(selection.ordering_keys or ()),
        business_keys=tuple(selection.business_keys or ()),
        deliveries=tuple(
            DeliveryId(parse_id(one, "delivery")) for one in selection.delivery_ids or ()
        ),
    )


def _to_sidelined_response(sidelined: records.SidelinedDelivery) -> SidelinedDeliveryResponse:
    step = sidelined.ref
    own_fields = (
        "last_status",
        "last_error",
        "attempts",
        "shovel_count",
        "sidelined_at",
        "published_at",
        "expires_at",
    )
    message_fields = (
        "correlation_id",
        "event_type",
        "event_version",
        "ordering_key",
        "business_key",
    )
    return SidelinedDeliveryResponse(
        delivery_id=step.delivery_id,
        message_id=sidelined.message_id,
        subscription_id=step.subscription_id,
        reason=Reason(sidelined.reason),
        **{name: getattr(sidelined, name) for name in (*own_fields, *message_fields)},
    )


def _position_text(position: records.SidelinePosition) -> str:
    at, identity = position
    return f"{at.isoformat()} {identity}"


def _parse_position(text: str | None) -> records.SidelinePosition | None:
    if text is None:
        return None
    at, _, identity = text.partition(" ")
    return datetime.fromisoformat(at), DeliveryId(identity)


ROUTES: Final = [read_sideline, shovel, purge]
