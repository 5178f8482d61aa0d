"""Serve `/v1/analysis`: what the analysis of the log has found, and its runs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from litestar import Response, get, post
from litestar.params import JSONBody, QueryParameter
from msgspec import Meta, Struct

from rooms.api.analysis_bodies import (
    AgePage,
    AgeResponse,
    CofailurePage,
    CofailureResponse,
    IncidentPage,
    IncidentResponse,
    ReconciliationPage,
    ReconciliationResponse,
    RetryAdvicePage,
    RetryAdviceResponse,
    RollupPage,
    RollupResponse,
    SetAsideResponse,
    SubscriptionRetryAdvice,
)
from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.checks import (
    CheckJobResponse,
    check_fields,
    check_result,
    list_checks_of,
    start_check,
)
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.jobs import JobAccepted
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import IdPath, parse_time
from rooms.api.subscriptions import parse_subscription
from rooms.db.catalog.subscriptions import find_subscription
from rooms.db.connection import transaction
from rooms.db.queries.analytics import AnalysisRun, FindingFilter, findings_page, latest_run
from rooms.domain.ids import RoomId
from rooms.domain.job import JobKind
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, InvalidError, NotFoundError

_TAGS: Final = ["analysis"]
_READ: Final = require_scopes(Scope.OPERATE, Scope.MANAGE, allows=OF_SUBSCRIPTIONS)
_MAX_INT4: Final = 0x7FFF_FFFF

PageT = TypeVar("PageT")
SinceQuery = Annotated[
    str | None,
    QueryParameter(
        description="Still open at this time, RFC 3339.", schema_extra={"format": "date-time"}
    ),
]
UntilQuery = Annotated[
    str | None,
    QueryParameter(
        description="Started before this time, RFC 3339.", schema_extra={"format": "date-time"}
    ),
]
RoomQuery = Annotated[
    int | None, QueryParameter(ge=1, le=_MAX_INT4, description="Only of this room.")
]
SubscriptionQuery = Annotated[str | None, QueryParameter(description="Only of this subscription.")]
_PLATFORM: Final = require_scopes(Scope.PLATFORM)


@dataclass(frozen=True, slots=True)
class _Findings(Generic[PageT]):
    """Name findings of a kind, and the types of their pages and items."""

    kind: str
    page: Callable[..., PageT]
    item: type[Any]


_INCIDENTS: Final = _Findings("incidents", IncidentPage, IncidentResponse)
_RECONCILIATION: Final = _Findings("reconciliation", ReconciliationPage, ReconciliationResponse)
_AGES: Final = _Findings("ages", AgePage, AgeResponse)
_COFAILURES: Final = _Findings("cofailures", CofailurePage, CofailureResponse)
_ADVICE: Final = _Findings("advice", RetryAdvicePage, SubscriptionRetryAdvice)


@get("/analysis/incidents", opt=_READ, tags=_TAGS, summary="List incidents")
async def list_incidents(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    since: SinceQuery = None,
    until: UntilQuery = None,
    room_id: RoomQuery = None,
    subscription_id: SubscriptionQuery = None,
) -> IncidentPage:
    """List incidents: when subscriptions failed together, and what their failures share."""
    wanted = _to_filter(since, until, room_id, subscription_id)
    return await _read_page(services, principal, _INCIDENTS, wanted, limit=limit, cursor=cursor)


@get("/analysis/reconciliation", opt=_READ, tags=_TAGS, summary="List reconciliations")
async def list_reconciliation(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    since: SinceQuery = None,
    until: UntilQuery = None,
    room_id: RoomQuery = None,
) -> ReconciliationPage:
    """List what was published against what became of it, by room and hour.

    Without faults `lost` and `missing` are 0. fanout + unanchored + excess = enqueued -
    enqueued_twice + never_enqueued + missing + unread. enqueued - enqueued_twice + never_enqueued
    is the sum of all outcomes, from delivered to lost. Hours go back two weeks; the command
    `rooms reconcile` counts all.
    """
    wanted = _to_filter(since, until, room_id, None)
    return await _read_page(
        services, principal, _RECONCILIATION, wanted, limit=limit, cursor=cursor
    )


@get("/analysis/ages", opt=_READ, tags=_TAGS, summary="List open deliveries by age")
async def list_ages(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    room_id: RoomQuery = None,
    subscription_id: SubscriptionQuery = None,
) -> AgePage:
    """List the open deliveries of each subscription by outcome, with the oldest of them.

    They are as at the end of the log that was analysed.
    """
    wanted = _to_filter(None, None, room_id, subscription_id)
    return await _read_page(services, principal, _AGES, wanted, limit=limit, cursor=cursor)


@get("/analysis/cofailures", opt=_READ, tags=_TAGS, summary="List what fails together")
async def list_cofailures(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    room_id: RoomQuery = None,
    subscription_id: SubscriptionQuery = None,
) -> CofailurePage:
    """List pairs of subscriptions that fail in the same minutes, over the whole log."""
    wanted = _to_filter(None, None, room_id, subscription_id)
    return await _read_page(services, principal, _COFAILURES, wanted, limit=limit, cursor=cursor)


@get("/analysis/rollups", opt=_READ, tags=_TAGS, summary="List rollups")
async def list_rollups(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    since: SinceQuery = None,
    until: UntilQuery = None,
    room_id: RoomQuery = None,
    subscription_id: SubscriptionQuery = None,
    daily: Annotated[bool, QueryParameter(description="Days instead of hours.")] = False,
) -> RollupPage:
    """List counts and latency percentiles by room, subscription, event type and host.

    Hours go back two weeks, days to the start.
    """
    wanted = _to_filter(since, until, room_id, subscription_id)
    kind = "rollups_daily" if daily else "rollups_hourly"
    found = _Findings(kind, RollupPage, RollupResponse)
    return await _read_page(services, principal, found, wanted, limit=limit, cursor=cursor)


@get("/analysis/advice", opt=_READ, tags=_TAGS, summary="List retry advice")
async def list_advice(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    room_id: RoomQuery = None,
) -> RetryAdvicePage:
    """List advice on the retries of every subscription that has failed often enough."""
    wanted = _to_filter(None, None, room_id, None)
    return await _read_page(services, principal, _ADVICE, wanted, limit=limit, cursor=cursor)


@get("/analysis/advice/{subscription_id:str}", opt=_READ, tags=_TAGS, summary="Read retry advice")
async def read_advice(
    services: ServicesDep, principal: Caller, subscription_id: IdPath
) -> RetryAdviceResponse:
    """Return advice on the retries of a subscription, and the evidence. 404: there is none."""
    identity = parse_subscription(subscription_id)
    async with transaction(services.engine) as connection:
        await find_subscription(connection, principal, identity)
        run = await latest_run(connection)
        found = await findings_page(
            connection,
            principal,
            "advice",
            FindingFilter(subscription=identity),
            after=-1,
            limit=1,
        )
    if run is None or not found:
        raise NotFoundError(
            "there is no advice about this subscription: "
            "it has not failed enough, or has not been analysed"
        )
    of_run = {"analysed_at": run.analysed_at, "incomplete": bool(run.set_aside)}
    return msgspec.convert({**found[0][1], **of_run}, RetryAdviceResponse)


def _to_filter(
    since: str | None, until: str | None, room: int | None, subscription: str | None
) -> FindingFilter:
    return FindingFilter(
        since=parse_time("since", since),
        until=parse_time("until", until),
        room=None if room is None else RoomId(room),
        subscription=None if subscription is None else _parse_subscription_filter(subscription),
    )


def _parse_subscription_filter(text: str) -> Any:
    try:
        return parse_subscription(text)
    except NotFoundError as exc:
        raise InvalidError(FieldProblem("subscription_id", "is not an id")) from exc


async def _read_page(
    services: ApiServices,
    principal: Principal,
    findings: _Findings[PageT],
    wanted: FindingFilter,
    *,
    limit: int,
    cursor: str | None,
) -> PageT:
    request = PageRequest(services.cipher, f"analysis {findings.kind}", limit, cursor)
    async with transaction(services.engine) as connection:
        run = await latest_run(connection)
        after = _resume_after(request.after, None if run is None else run.id)
        found = await findings_page(
            connection,
            principal,
            findings.kind,
            wanted,
            after=after,
            limit=request.fetch_limit,
        )
    return request.respond(
        partial(findings.page, **_run_fields(run)),
        found,
        lambda finding: msgspec.convert(finding[1], findings.item),
        position=lambda finding: f"{run.id if run else 0}:{finding[0]}",
    )


def _run_fields(run: AnalysisRun | None) -> dict[str, Any]:
    """Return the fields of a page that describe the analysis."""
    aside = () if run is None else run.set_aside
    return {
        "analysed_at": None if run is None else run.analysed_at,
        "incomplete": bool(aside),
        "set_aside": msgspec.convert(aside, list[SetAsideResponse]),
    }


def _resume_after(position: str | None, run: int | None) -> int:
    """Return the last finding's number. InvalidError: the cursor is of an earlier analysis."""
    if position is None:
        return -1
    of, _, number = position.partition(":")
    if of != str(run):
        raise InvalidError(
            FieldProblem("cursor", "belongs to an earlier analysis: start again without it")
        )
    return int(number)


class StartAnalysis(Struct, forbid_unknown_fields=True, kw_only=True):
    """Export the log and analyse what is new."""

    full: Annotated[bool, Meta(description="Analyse every partition again.")] = False


class AnalysisRunResult(Struct, kw_only=True):
    """Describe how far a run has come, in the words of `rooms analyze`.

    `status`: what it does now; `lines`: its last notes; `summary`: what it found; `incomplete`: it
    left something out, which the notes say. The findings are in the other lists of the analysis.
    """

    status: str | None
    lines: list[str]
    summary: str | None = None
    incomplete: bool = False


class AnalysisRunResponse(CheckJobResponse, kw_only=True):
    """Describe a run; `result` is null until it has begun."""

    full: bool
    result: AnalysisRunResult | None


class AnalysisRunPage(Struct, kw_only=True):
    """List runs, newest first."""

    items: list[AnalysisRunResponse]
    next_cursor: str | None


@post(
    "/analysis/runs",
    status_code=202,
    dto=Body[StartAnalysis | None],
    return_dto=None,
    opt=_PLATFORM,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Analyse the log",
)
async def start_analysis(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    data: JSONBody[StartAnalysis | None] = None,
) -> Response[JobAccepted]:
    """Start the job that does what `rooms analyze` does, for the whole installation.

    The maintenance process runs it with the lowest priority, for an hour at most. It needs the
    extra `spark`, and Java for a log of a million rows or more, or one that is not on that machine.
    Without them the job fails and says so. 409: another run is under way.
    """
    full = data is not None and data.full
    return await start_check(services, principal, change, JobKind.ANALYSE_LOG, {"full": full})


@get("/analysis/runs", opt=_PLATFORM, tags=_TAGS, summary="List runs of the analysis")
async def list_runs(
    services: ServicesDep, principal: Caller, limit: Limit = 10, cursor: Cursor = None
) -> AnalysisRunPage:
    """List the runs that the organisation started, newest first.

    Those of `rooms analyze` on the command line are not among them.
    """
    page = PageRequest(services.cipher, "analysis-runs", limit, cursor)
    found, further = await list_checks_of(services, principal, JobKind.ANALYSE_LOG, page)
    return page.respond(
        AnalysisRunPage,
        found,
        lambda job: AnalysisRunResponse(
            **check_fields(job),
            full=bool(job.arguments["full"]),
            result=check_result(job, AnalysisRunResult),
        ),
        position=lambda job: job.id,
        further=further,
    )


ROUTES: Final = [
    list_incidents,
    list_reconciliation,
    list_ages,
    list_cofailures,
    list_rollups,
    list_advice,
    read_advice,
    start_analysis,
    list_runs,
]
