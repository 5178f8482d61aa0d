"""Serve `/v1/analysis/runs`: analyses that the maintenance process runs."""

from typing import Annotated, Final

from litestar import Response, get, post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.api.auth import Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.checks import (
    CheckResponse,
    check_fields,
    check_result,
    list_checks_of,
    start_check,
)
from rooms.api.codec import Body
from rooms.api.errors import documented_responses
from rooms.api.jobs import JobAccepted
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.domain.job import JobKind
from rooms.domain.state_machine import Scope

_TAGS: Final = ["analysis"]
_PLATFORM: Final = require_scopes(Scope.PLATFORM)


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


class AnalysisRunResponse(CheckResponse, kw_only=True):
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
    extra `spark`, and Java; without them the job fails and says so. 409: another run is under way.
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


ROUTES: Final = [start_analysis, list_runs]
