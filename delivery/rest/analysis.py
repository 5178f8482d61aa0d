"""`/v1/analysis`: what the analysis of the log has found, each organisation's own part of it."""

from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

import msgspec
from litestar import get
from litestar.params import QueryParameter

from delivery.rest.analysis_fields import (
    AdviceOut,
    BooksOut,
    CofailureOut,
    CofailurePage,
    IncidentOut,
    IncidentPage,
    ReconciliationPage,
    RollupOut,
    RollupPage,
)
from rooms.domain.ids import RoomId
from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.errors import FieldProblem, InvalidError, NotFoundError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, parse_time, seal_cursor
from rooms.rest.paths import IdPath
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.rest.subscriptions import parse_subscription
from rooms.storage.analysis import FindingFilter, findings_page, latest_run
from rooms.storage.subscriptions import find_subscription
from rooms.storage.transactions import transaction

_TAGS: Final = ["analysis"]
_READ: Final = needs(Scope.OPERATE, Scope.MANAGE)
_MAX_INT4: Final = 0x7FFF_FFFF

Out = TypeVar("Out")
From = Annotated[
    str | None, QueryParameter(description="Not over at this time, RFC 3339.", schema_extra={"format": "date-time"})
]
To = Annotated[
    str | None, QueryParameter(description="Begun before this time, RFC 3339.", schema_extra={"format": "date-time"})
]
OfRoom = Annotated[int | None, QueryParameter(ge=1, le=_MAX_INT4, description="Only of this room.")]
OfSubscription = Annotated[str | None, QueryParameter(description="Only of this subscription.")]


@get("/analysis/incidents", opt=_READ, responses=documented(), tags=_TAGS, summary="List incidents")
async def list_incidents(
    *,
    services: Given,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    since: From = None,
    until: To = None,
    room_id: OfRoom = None,
    subscription_id: OfSubscription = None,
) -> IncidentPage:
    """When subscriptions failed together, and what their failures have in common."""
    wanted = _filter(since, until, room_id, subscription_id)
    return await _page(
        services, principal, "incidents", wanted, IncidentPage, of=IncidentOut, limit=limit, cursor=cursor
    )


@get("/analysis/reconciliation", opt=_READ, responses=documented(), tags=_TAGS, summary="Read the books")
async def list_reconciliation(
    *,
    services: Given,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    since: From = None,
    until: To = None,
    room_id: OfRoom = None,
) -> ReconciliationPage:
    """What was published against what became of it, a room and an hour. `lost` and `missing` are 0 where all is well."""
    wanted = _filter(since, until, room_id, None)
    return await _page(
        services, principal, "reconciliation", wanted, ReconciliationPage, of=BooksOut, limit=limit, cursor=cursor
    )


@get("/analysis/cofailures", opt=_READ, responses=documented(), tags=_TAGS, summary="List what fails together")
async def list_cofailures(
    *,
    services: Given,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    room_id: OfRoom = None,
    subscription_id: OfSubscription = None,
) -> CofailurePage:
    """Pairs of subscriptions that share bad minutes, over the whole log."""
    wanted = _filter(None, None, room_id, subscription_id)
    return await _page(
        services, principal, "cofailures", wanted, CofailurePage, of=CofailureOut, limit=limit, cursor=cursor
    )


@get("/analysis/rollups", opt=_READ, responses=documented(), tags=_TAGS, summary="List rollups")
async def list_rollups(
    *,
    services: Given,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    since: From = None,
    until: To = None,
    room_id: OfRoom = None,
    subscription_id: OfSubscription = None,
    daily: Annotated[bool, QueryParameter(description="Days instead of hours.")] = False,
) -> RollupPage:
    """Counts and latency percentiles by room, subscription, event type and host. Hours go back two weeks, days to the start."""
    wanted = _filter(since, until, room_id, subscription_id)
    kind = "rollups_daily" if daily else "rollups_hourly"
    return await _page(services, principal, kind, wanted, RollupPage, of=RollupOut, limit=limit, cursor=cursor)


@get(
    "/analysis/advice/{subscription_id:str}",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="Read the advice on retries",
)
async def read_advice(services: Given, principal: Caller, subscription_id: IdPath) -> AdviceOut:
    """How the retries of a subscription should be set, with what that rests on. 404 where there is no advice."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        await find_subscription(connection, principal.organisation_id, identity)
        run = await latest_run(connection)
        found = await findings_page(
            connection, principal.organisation_id, "advice", FindingFilter(subscription=identity), after=-1, limit=1
        )
    if run is None or not found:
        raise NotFoundError(
            "there is no advice about this subscription: it has not failed enough, or not been analysed"
        )
    return msgspec.convert({**found[0][1], "analysed_at": run.analysed_at}, AdviceOut)


def _filter(since: str | None, until: str | None, room: int | None, subscription: str | None) -> FindingFilter:
    return FindingFilter(
        since=parse_time("since", since),
        until=parse_time("until", until),
        room=None if room is None else RoomId(room),
        subscription=None if subscription is None else _subscription(subscription),
    )


def _subscription(text: str) -> Any:
    try:
        return parse_subscription(text)
    except NotFoundError as exc:
        raise InvalidError(FieldProblem("subscription_id", "is not an id")) from exc


async def _page(
    services: Services,
    principal: Principal,
    kind: str,
    wanted: FindingFilter,
    page: Callable[..., Out],
    *,
    of: type[Any],
    limit: int,
    cursor: str | None,
) -> Out:
    listed = f"analysis {kind}"
    position = open_cursor(services.seal, listed, cursor)
    async with transaction(services.engine) as connection:
        run = await latest_run(connection)
        after = _after(position, None if run is None else run.id)
        found = await findings_page(connection, principal.organisation_id, kind, wanted, after=after, limit=limit + 1)
    items, last = cut(found, limit, lambda one: f"{run.id if run else 0}:{one[0]}")
    return page(
        items=[msgspec.convert(body, of) for _, body in items],
        next_cursor=seal_cursor(services.seal, listed, last),
        analysed_at=None if run is None else run.analysed_at,
    )


def _after(position: str | None, run: int | None) -> int:
    """The number to go on behind. InvalidError where the page before was of an earlier analysis."""
    if position is None:
        return -1
    of, _, number = position.partition(":")
    if of != str(run):
        raise InvalidError(FieldProblem("cursor", "belongs to an earlier analysis: begin again without it"))
    return int(number)


ROUTES: Final = [list_incidents, list_reconciliation, list_cofailures, list_rollups, read_advice]
