"""`/v1/subscriptions/{id}/sideline`: looking through what could not be delivered, bringing it back, ending it."""

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody, QueryParameter
from msgspec import Meta, Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from delivery.sideline.order import MAX_CONCURRENCY, MAX_RATE_PER_S, MAX_SHOVELS, Order
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.states import Reason, Scope
from rooms.errors import FieldProblem, InvalidError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.filters import Correlation, EventType
from rooms.rest.jobs import JobAccepted, accepted
from rooms.rest.pages import Cursor, Limit, Since, Until, cut, open_cursor, parse_time, seal_cursor
from rooms.rest.paths import IdPath, parse_id
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.rest.subscriptions import parse_subscription
from rooms.storage import jobs as job_records
from rooms.storage import sideline_pages as records
from rooms.storage.subscriptions import find_subscription
from rooms.storage.transactions import transaction

_LIST: Final = "sideline"
_TAGS: Final = ["sideline"]
_READ: Final = needs(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE)
_WRITE: Final = needs(Scope.OPERATE)
_MAX_NAMED: Final = 1000
_MOST_SHOVELS: Final = 10_000

WithReason = Annotated[Reason | None, QueryParameter(description="Only what was sidelined for this reason.")]
WithError = Annotated[str | None, QueryParameter(description="Only where the last error contains this text.")]
Text = Annotated[str, Meta(min_length=1, max_length=256)]
Id = Annotated[str, Meta(pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]


class SidelinedOut(Struct, kw_only=True):
    """A delivery at rest, and why; what its message would tell is null where the message is gone (`orphan`)."""

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


class SidelinePage(Struct, kw_only=True):
    """What rests, in the order in which it was sidelined."""

    items: list[SidelinedOut]
    next_cursor: str | None


class Choice(Struct, forbid_unknown_fields=True, kw_only=True):
    """Which deliveries of the sideline are meant; without a filter, all of them."""

    since: Annotated[datetime, Meta(tz=True, description="Sidelined at this time or later.")] | None = None
    until: Annotated[datetime, Meta(tz=True, description="Sidelined before this time.")] | None = None
    reason: Reason | None = None
    event_type: Text | None = None
    error: Annotated[Text, Meta(description="Part of the last error.")] | None = None
    correlation_ids: Annotated[list[Text], Meta(max_length=_MAX_NAMED)] | None = None
    delivery_ids: Annotated[list[Id], Meta(max_length=_MAX_NAMED)] | None = None
    dry_run: Annotated[bool, Meta(description="Only say what would be moved.")] = False


class ShovelNew(Choice, forbid_unknown_fields=True, kw_only=True):
    """What to bring back, and how fast."""

    rate_per_s: (
        Annotated[float, Meta(gt=0, le=MAX_RATE_PER_S, description="Deliveries a second; null: as fast as it goes.")]
        | None
    ) = None
    concurrency: Annotated[int, Meta(ge=1, le=MAX_CONCURRENCY, description="Batches under way at a time.")] = 4
    max_shovels: Annotated[
        int,
        Meta(ge=1, le=_MOST_SHOVELS, description="What came back so often already stays: poison must not circle."),
    ] = MAX_SHOVELS


class PurgeNew(Choice, forbid_unknown_fields=True, kw_only=True):
    """What to end."""


class DryRunOut(Struct, kw_only=True):
    """What would be moved: how many, by reason, and the first of them. A shovel leaves what came back too often (`too_often`)
    and ends what `expired`; a purge ends all of it.
    """

    would_move: int
    by_reason: dict[str, int]
    sample: list[SidelinedOut]
    too_often: int
    expired: int


_JOB_OR_DRY_RUN: Final = {
    **documented(),
    200: ResponseSpec(DryRunOut, generate_examples=False, description="What a dry run found; nothing was moved."),
    202: ResponseSpec(JobAccepted, generate_examples=False, description="The job that does it."),
}


@get(
    "/subscriptions/{subscription_id:str}/sideline",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="Look through a sideline",
)
async def read_sideline(
    *,
    services: Given,
    principal: Caller,
    subscription_id: IdPath,
    limit: Limit = 50,
    cursor: Cursor = None,
    since: Since = None,
    until: Until = None,
    reason: WithReason = None,
    event_type: EventType = None,
    error: WithError = None,
    correlation_id: Correlation = None,
) -> SidelinePage:
    """What could not be delivered, in the order in which it was sidelined; `since` and `until` mean that time."""
    identity = parse_subscription(subscription_id)
    position = open_cursor(services.seal, _LIST, cursor)
    wanted = records.SidelineFilter(
        since=parse_time("since", since),
        until=parse_time("until", until),
        reason=reason,
        event_type=event_type,
        error=error or None,
        correlation_ids=() if correlation_id is None else (correlation_id,),
    )
    async with transaction(services.engine) as connection:
        found = await find_subscription(connection, principal.organisation_id, identity)
        items = await records.sideline_page(
            connection, found.room_id, identity, wanted, after=_position(position), limit=limit + 1
        )
    page, last = cut(items, limit, _text)
    return SidelinePage(
        items=[_out(one) for one in page],
        next_cursor=seal_cursor(services.seal, _LIST, last),
    )


@post(
    "/subscriptions/{subscription_id:str}/sideline/shovel",
    status_code=202,
    dto=Body[ShovelNew | None],
    return_dto=None,
    opt=_WRITE,
    responses=_JOB_OR_DRY_RUN,
    tags=_TAGS,
    summary="Bring deliveries back from a sideline",
)
async def shovel(
    services: Given, principal: Caller, subscription_id: IdPath, data: JSONBody[ShovelNew | None] = None
) -> Response[Any]:
    """202 with the job that queues them again, their attempts counted anew; 200 with what would move for a dry run.

    A lifetime is not renewed: what expired meanwhile ends. What is sidelined while the job runs is not meant by it.
    """
    asked = data or ShovelNew()
    identity = parse_subscription(subscription_id)
    order = Order(
        subscription=identity,
        wanted=_filter(asked),
        rate_per_s=asked.rate_per_s,
        concurrency=asked.concurrency,
        max_shovels=asked.max_shovels,
    )
    return await _ask(services, principal, identity, order, JobKind.SHOVEL_SIDELINE, dry_run=asked.dry_run)


@post(
    "/subscriptions/{subscription_id:str}/sideline/purge",
    status_code=202,
    dto=Body[PurgeNew | None],
    return_dto=None,
    opt=_WRITE,
    responses=_JOB_OR_DRY_RUN,
    tags=_TAGS,
    summary="End deliveries of a sideline",
)
async def purge(
    *,
    services: Given,
    principal: Caller,
    subscription_id: IdPath,
    confirm: Annotated[
        str | None, QueryParameter(description="The subscription's name, so that nobody purges by mistake.")
    ] = None,
    data: JSONBody[PurgeNew | None] = None,
) -> Response[Any]:
    """202 with the job that ends them as `purged`: nobody gets them any more; 200 with what would end for a dry run."""
    asked = data or PurgeNew()
    identity = parse_subscription(subscription_id)
    order = Order(subscription=identity, wanted=_filter(asked))
    return await _ask(
        services,
        principal,
        identity,
        order,
        JobKind.PURGE_SIDELINE,
        dry_run=asked.dry_run,
        confirm=confirm or "",
    )


async def _ask(
    services: Services,
    principal: Principal,
    identity: SubscriptionId,
    order: Order,
    kind: JobKind,
    *,
    dry_run: bool,
    confirm: str | None = None,
) -> Response[Any]:
    async with transaction(services.engine) as connection:
        found = await find_subscription(connection, principal.organisation_id, identity)
        if dry_run:
            return Response(await _would(connection, found, order, kind), status_code=200)
        if confirm is not None and confirm != found.name:
            raise InvalidError(FieldProblem("confirm", "repeat the subscription's name here: what is purged is gone"))
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            kind,
            new_id=services.ids.global_id(services.clock.now_ms()),
            room=found.room_id,
            arguments=order.arguments(),
        )
    return accepted(job)


async def _would(connection: AsyncConnection, found: Subscription, order: Order, kind: JobKind) -> DryRunOut:
    if kind is JobKind.SHOVEL_SIDELINE:
        most, wanted = order.max_shovels, replace(order.wanted, fit_below=order.max_shovels)
        would = await records.sideline_prospect(connection, found.room_id, found.id, order.wanted, most=most)
    else:
        wanted = order.wanted
        summary = await records.sideline_summary(connection, found.room_id, found.id, wanted)
        would = records.Prospect(queued=summary, too_often=0, expired=0)
    sample = await records.sideline_page(connection, found.room_id, found.id, wanted, after=None, limit=10)
    return DryRunOut(
        would_move=sum(would.queued.values()),
        by_reason=dict(would.queued),
        sample=[_out(one) for one in sample],
        too_often=would.too_often,
        expired=would.expired,
    )


def _filter(asked: Choice) -> records.SidelineFilter:
    return records.SidelineFilter(
        since=asked.since,
        until=asked.until,
        reason=asked.reason,
        event_type=asked.event_type,
        error=asked.error,
        correlation_ids=tuple(asked.correlation_ids or ()),
        deliveries=tuple(DeliveryId(parse_id(one, "delivery")) for one in asked.delivery_ids or ()),
    )


def _out(one: records.Sidelined) -> SidelinedOut:
    step = one.step
    same = ("last_status", "last_error", "attempts", "shovel_count", "sidelined_at", "published_at", "expires_at")
    told = ("correlation_id", "event_type", "event_version")
    return SidelinedOut(
        delivery_id=step.delivery_id,
        message_id=one.message_id,
        subscription_id=step.subscription_id,
        reason=Reason(one.reason),
        **{name: getattr(one, name) for name in (*same, *told)},
    )


def _text(one: records.Sidelined) -> str:
    at, identity = one.position
    return f"{at.isoformat()} {identity}"


def _position(text: str | None) -> records.Position | None:
    if text is None:
        return None
    at, _, identity = text.partition(" ")
    return datetime.fromisoformat(at), DeliveryId(identity)


ROUTES: Final = [read_sideline, shovel, purge]
