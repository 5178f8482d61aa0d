"""`/v1/jobs`: what goes on after a 202."""

from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, get, post
from litestar.params import QueryParameter
from msgspec import Struct

from rooms.domain.ids import MAX_ROOM, JobId, RoomId
from rooms.domain.job import JobKind, JobState
from rooms.domain.states import Scope
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.paths import IdPath, parse_id
from rooms.rest.problems import documented
from rooms.storage import jobs as records
from rooms.storage.transactions import transaction

_LIST: Final = "jobs"
_TAGS: Final = ["jobs"]
_READ: Final = needs(Scope.OPERATE, Scope.MANAGE)

WithKind = Annotated[JobKind | None, QueryParameter(description="Only jobs of this kind.")]
# `state` itself is a name that Litestar keeps for its own.
WithState = Annotated[JobState | None, QueryParameter(name="state", description="Only jobs in this state.")]
OfRoom = Annotated[int | None, QueryParameter(ge=1, le=MAX_ROOM, description="Only jobs on this room.")]


class JobAccepted(Struct, kw_only=True):
    """A job that was just asked for."""

    job_id: str
    kind: str
    state: str
    created_at: datetime


class JobOut(Struct, kw_only=True):
    """A job: `state` is queued, running, done, failed or cancelled; `done` of `total` rows (null: not counted); `result`: counts by
    what became of them, where there is more to tell.
    """

    id: str
    room_id: int | None
    kind: str
    arguments: dict[str, Any]
    state: str
    done: int
    total: int | None
    error: str | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    result: dict[str, Any] | None


class JobPage(Struct, kw_only=True):
    """Jobs, newest first."""

    items: list[JobOut]
    next_cursor: str | None


def accepted(job: records.Job) -> Response[JobAccepted]:
    """The 202 that names a job."""
    body = JobAccepted(job_id=job.id, kind=job.kind, state=job.state, created_at=job.created_at)
    return Response(body, status_code=202, headers={"Location": f"/v1/jobs/{job.id}"})


@get("/jobs", opt=_READ, responses=documented(), tags=_TAGS, summary="List jobs")
async def list_jobs(
    *,
    services: Given,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    kind: WithKind = None,
    in_state: WithState = None,
    room_id: OfRoom = None,
) -> JobPage:
    """The organisation's jobs, newest first."""
    before = open_cursor(services.seal, _LIST, cursor)
    async with transaction(services.engine) as connection:
        found = await records.list_jobs(
            connection,
            principal.organisation_id,
            kind=kind,
            state=in_state,
            room=None if room_id is None else RoomId(room_id),
            platform=principal.may(Scope.PLATFORM),
            before=before,
            limit=limit + 1,
        )
    page, last = cut(found, limit, lambda job: job.id)
    return JobPage(
        items=[_out(job) for job in page],
        next_cursor=seal_cursor(services.seal, _LIST, last),
    )


@get("/jobs/{job_id:str}", opt=_READ, responses=documented(), tags=_TAGS, summary="Read a job")
async def read_job(services: Given, principal: Caller, job_id: IdPath) -> JobOut:
    """How far a job is."""
    identity = JobId(parse_id(job_id, "job"))
    platform = principal.may(Scope.PLATFORM)
    async with transaction(services.engine) as connection:
        return _out(await records.find_job(connection, principal.organisation_id, identity, platform=platform))


@post(
    "/jobs/{job_id:str}/cancel",
    status_code=200,
    opt=needs(Scope.OPERATE),
    responses=documented(409),
    tags=_TAGS,
    summary="Cancel a job",
)
async def cancel_job(services: Given, principal: Caller, job_id: IdPath) -> JobOut:
    """The job, `cancelled`: it stops before its next step, and what it has done stays done; `done` and `result` tell how much.

    A step that is just under way may still end. 409: it is over, or it is a deletion or a sweep, which are done to their end.
    """
    identity = JobId(parse_id(job_id, "job"))
    platform = principal.may(Scope.PLATFORM)
    async with transaction(services.engine) as connection:
        return _out(await records.cancel_job(connection, principal.organisation_id, identity, platform=platform))


def _out(job: records.Job) -> JobOut:
    return JobOut(**{name: getattr(job, name) for name in JobOut.__struct_fields__})


ROUTES: Final = [list_jobs, read_job, cancel_job]
