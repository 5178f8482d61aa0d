"""Serve `/v1/jobs`: the long-running work behind a 202."""

from datetime import datetime
from typing import Annotated, Final

from litestar import Response, get, post
from litestar.params import QueryParameter
from msgspec import Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import (
    OF_SUBSCRIPTIONS,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.changes import ChangeDep
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import IdPath, parse_id
from rooms.db.catalog import subscriptions as subscription_records
from rooms.db.catalog.shovel_schedules import delete_schedule
from rooms.db.catalog.subscription_requests import mark_ended
from rooms.db.connection import transaction
from rooms.db.jobs import jobs as records
from rooms.domain.ids import MAX_ROOM, JobId, RoomId
from rooms.domain.job import JobKind, JobState
from rooms.domain.principal import Principal
from rooms.domain.room import Subscription
from rooms.domain.state_machine import Scope, SubscriptionStatus

_LIST: Final = "jobs"
_TAGS: Final = ["jobs"]
_READ: Final = for_portals(require_scopes(Scope.OPERATE, Scope.MANAGE, allows=OF_SUBSCRIPTIONS))

JobKindQuery = Annotated[JobKind | None, QueryParameter(description="Only jobs of this kind.")]
# Litestar reserves the name `state`.
JobStateQuery = Annotated[
    JobState | None, QueryParameter(name="state", description="Only jobs in this state.")
]
JobRoomQuery = Annotated[
    int | None, QueryParameter(ge=1, le=MAX_ROOM, description="Only jobs on this room.")
]


class JobAccepted(Struct, kw_only=True):
    """Describe a job that was just created."""

    job_id: str
    kind: str
    state: str
    created_at: datetime


class JobPage(Struct, kw_only=True):
    """List jobs, newest first."""

    items: list[records.JobRecord]
    next_cursor: str | None


def accepted_response(job: records.JobRecord) -> Response[JobAccepted]:
    """Return the 202 answer for a job."""
    body = JobAccepted(job_id=job.id, kind=job.kind, state=job.state, created_at=job.created_at)
    return Response(body, status_code=202, headers={"Location": f"/v1/jobs/{job.id}"})


@get("/jobs", opt=_READ, tags=_TAGS, summary="List jobs")
async def list_jobs(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    kind: JobKindQuery = None,
    in_state: JobStateQuery = None,
    room_id: JobRoomQuery = None,
) -> JobPage:
    """List the organisation's jobs, newest first. A page ends early where they have 1 MiB.

    A job that clears, skips, terminates or deletes a subscription in another organisation's room
    has no counts: `done` is 0, `total` and `result` are null. A backfill there does not count what
    is not due or held by a suspension.
    """
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        found, is_cut = await records.list_jobs(
            connection,
            principal,
            kind=kind,
            state=in_state,
            room=None if room_id is None else RoomId(room_id),
            before=page.after,
            limit=page.fetch_limit,
        )
    return page.respond(
        JobPage,
        found,
        position=lambda job: job.id,
        further=found[-1].id if is_cut else None,
    )


@get("/jobs/{job_id:str}", opt=_READ, tags=_TAGS, summary="Read a job")
async def read_job(services: ServicesDep, principal: Caller, job_id: IdPath) -> records.JobRecord:
    """Return the progress of a job."""
    identity = JobId(parse_id(job_id, "job"))
    async with transaction(services.engine) as connection:
        return await records.find_job(connection, principal, identity)


@post(
    "/jobs/{job_id:str}/cancel",
    status_code=200,
    opt=for_portals(require_scopes(Scope.OPERATE, allows=OF_SUBSCRIPTIONS)),
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Cancel a job",
)
async def cancel_job(principal: Caller, change: ChangeDep, job_id: IdPath) -> records.JobRecord:
    """Cancel the job: it stops before its next step, and completed steps are kept.

    `done` and `result` show how much was completed; a step that is running may still end. 409: the
    job has ended, or it is a deletion or a sweep, which cannot be cancelled.
    """
    identity = JobId(parse_id(job_id, "job"))
    async with change.transaction() as connection:
        return await records.cancel_job(connection, principal, identity)


async def delete_subscription_job(
    connection: AsyncConnection,
    services: ApiServices,
    principal: Principal,
    subscription: Subscription,
) -> records.JobRecord:
    """Create the job that cancels the unfinished deliveries of a deleted subscription.

    The room must have been touched in the same transaction. One that was never approved has no
    deliveries, so its job is done.
    """
    never_approved = await mark_ended(connection, subscription)
    await subscription_records.set_status(
        connection, subscription, SubscriptionStatus.DELETED, None
    )
    await delete_schedule(connection, subscription.id)
    return await records.create_job(
        connection,
        principal.organisation_id,
        JobKind.DELETE_SUBSCRIPTION,
        new_id=services.ids.generate_global(services.clock.now_ms()),
        room=subscription.room_id,
        arguments={
            "room_id": subscription.room_id,
            "subscription_id": subscription.id,
            "name": subscription.name,
        },
        is_done=never_approved,
    )


ROUTES: Final = [list_jobs, read_job, cancel_job]
