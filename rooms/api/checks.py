"""Serve `/v1/doctor` and `/v1/retention-preview`: checks that the maintenance process makes."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar

import msgspec
from litestar import Response, get, post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.api.auth import Caller, ServicesDep, require_scopes
from rooms.api.changes import Change, ChangeDep
from rooms.api.codec import Body
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.jobs import JobAccepted, accepted_response
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.db.connection import transaction
from rooms.db.jobs import jobs as records
from rooms.domain.job import JobKind, JobState
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import ConflictError

_TAGS: Final = ["cluster"]
_PLATFORM: Final = require_scopes(Scope.PLATFORM)
_MAX_DAYS: Final = 3650

ResultT = TypeVar("ResultT")


class StartDoctor(Struct, forbid_unknown_fields=True, kw_only=True):
    """Check that database, broker and magazines agree."""

    repair: Annotated[
        bool,
        Meta(
            description="Repair differences: the delivery's state in PostgreSQL wins. Refused "
            "while a store does not answer, or processes run on different stores."
        ),
    ] = False


class DoctorFindingResponse(Struct, kw_only=True):
    """Describe the differences of one kind in a part, and how many of them were repaired.

    `in_progress`: no fault, because maintenance repairs them; `unavailable`: the part does not
    answer, so nothing is known; `examples`: ids of some; `since`: the time of the oldest.
    """

    part: str
    description: str
    count: int
    repaired: int
    in_progress: bool
    unavailable: bool
    since: datetime | None
    examples: list[str]
    advice: str | None


class DoctorResult(Struct, kw_only=True):
    """Describe what a check found.

    `open`: differences that are left; `refused`: nothing was repaired; `mixed`: processes that run
    on other stores.
    """

    open: int
    refused: bool
    mixed: list[str]
    findings: list[DoctorFindingResponse]


class CheckJobResponse(Struct, kw_only=True):
    """Describe a check as its job does."""

    job_id: str
    state: JobState
    created_at: datetime
    finished_at: datetime | None
    error: str | None


class DoctorResponse(CheckJobResponse, kw_only=True):
    """Describe a check of the stores; `result` is null until it is complete."""

    repair: bool
    result: DoctorResult | None


class DoctorPage(Struct, kw_only=True):
    """List checks, newest first."""

    items: list[DoctorResponse]
    next_cursor: str | None


class PreviewRetention(Struct, forbid_unknown_fields=True, kw_only=True):
    """Find what retention would delete now."""

    days: (
        Annotated[
            int, Meta(ge=1, le=_MAX_DAYS, description="Days to keep; null: as the settings say.")
        ]
        | None
    ) = None


class RetentionRangeResponse(Struct, kw_only=True):
    """Count the deliveries of a past day, or of the kept rest of several (`kept`).

    `stay`: those that must stay. `fate`: `goes`, all is deleted; `shrinks`, only what must stay is
    kept; `stays`, too little would be deleted; `waits`, its log is not exported yet.
    """

    label: str
    kept: bool
    deliveries: int
    stay: int
    fate: str


class RetentionResult(Struct, kw_only=True):
    """List past days, oldest first: the first 1,000 of `total`. `days` 0: everything is kept."""

    days: int
    total: int
    ranges: list[RetentionRangeResponse]


class RetentionResponse(CheckJobResponse, kw_only=True):
    """Describe a preview; `result` is null until it is complete."""

    days: int | None
    result: RetentionResult | None


class RetentionPage(Struct, kw_only=True):
    """List previews, newest first."""

    items: list[RetentionResponse]
    next_cursor: str | None


@post(
    "/doctor",
    status_code=202,
    dto=Body[StartDoctor | None],
    return_dto=None,
    opt=_PLATFORM,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Check the stores",
)
async def start_doctor(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    data: JSONBody[StartDoctor | None] = None,
) -> Response[JobAccepted]:
    """Start the job that checks, and with `repair` repairs, what `rooms doctor` does.

    409: another check is under way.
    """
    repair = data is not None and data.repair
    return await start_check(services, principal, change, JobKind.CHECK_STORES, {"repair": repair})


@get("/doctor", opt=_PLATFORM, tags=_TAGS, summary="List checks of the stores")
async def list_checks(
    services: ServicesDep, principal: Caller, limit: Limit = 10, cursor: Cursor = None
) -> DoctorPage:
    """List the organisation's checks with what they found, newest first."""
    page = PageRequest(services.cipher, "doctor", limit, cursor)
    found, further = await list_checks_of(services, principal, JobKind.CHECK_STORES, page)
    return page.respond(
        DoctorPage,
        found,
        lambda job: DoctorResponse(
            **check_fields(job),
            repair=bool(job.arguments["repair"]),
            result=check_result(job, DoctorResult),
        ),
        position=lambda job: job.id,
        further=further,
    )


@post(
    "/retention-preview",
    status_code=202,
    dto=Body[PreviewRetention | None],
    return_dto=None,
    opt=_PLATFORM,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Preview retention",
)
async def start_preview(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    data: JSONBody[PreviewRetention | None] = None,
) -> Response[JobAccepted]:
    """Start the job that counts what retention would delete now, as `rooms retention` does.

    It changes nothing. 409: another preview is under way.
    """
    days = None if data is None else data.days
    return await start_check(services, principal, change, JobKind.PREVIEW_RETENTION, {"days": days})


@get("/retention-preview", opt=_PLATFORM, tags=_TAGS, summary="List previews of retention")
async def list_previews(
    services: ServicesDep, principal: Caller, limit: Limit = 10, cursor: Cursor = None
) -> RetentionPage:
    """List the organisation's previews with what they found, newest first."""
    page = PageRequest(services.cipher, "retention-preview", limit, cursor)
    found, further = await list_checks_of(services, principal, JobKind.PREVIEW_RETENTION, page)
    return page.respond(
        RetentionPage,
        found,
        lambda job: RetentionResponse(
            **check_fields(job),
            days=job.arguments["days"],
            result=check_result(job, RetentionResult),
        ),
        position=lambda job: job.id,
        further=further,
    )


async def start_check(
    services: ApiServices,
    principal: Principal,
    change: Change,
    kind: JobKind,
    arguments: Mapping[str, Any],
) -> Response[JobAccepted]:
    """Create a job of a kind of which one may be open. ConflictError: one is."""
    async with change.transaction() as connection:
        if await records.is_kind_open(connection, kind):
            raise ConflictError("one is under way already; wait for its result")
        job = await records.create_job(
            connection,
            principal.organisation_id,
            kind,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            room=None,
            arguments=arguments,
        )
    return accepted_response(job)


async def list_checks_of(
    services: ApiServices, principal: Principal, kind: JobKind, page: PageRequest
) -> tuple[Sequence[records.JobRecord], str | None]:
    """Return the jobs of one kind, newest first, and the position where a page ended early."""
    async with transaction(services.engine) as connection:
        found, is_cut = await records.list_jobs(
            connection, principal, kind=kind, before=page.after, limit=page.fetch_limit
        )
    return found, found[-1].id if is_cut else None


def check_fields(job: records.JobRecord) -> dict[str, Any]:
    """Return the fields of a `CheckJobResponse`."""
    return {
        "job_id": job.id,
        "state": JobState(job.state),
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "error": job.error,
    }


def check_result(job: records.JobRecord, kind: type[ResultT]) -> ResultT | None:
    """Return what a job has found so far; None: nothing yet."""
    return None if job.result is None else msgspec.convert(job.result, kind)


ROUTES: Final = [start_doctor, list_checks, start_preview, list_previews]
