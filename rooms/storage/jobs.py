"""Jobs: what takes longer than a request. Upkeep does them, several side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import JobId, OrganisationId, RoomId
from rooms.domain.job import CANCELLABLE, OF_INSTALLATION, JobKind, JobState
from rooms.errors import ConflictError, NotFoundError
from rooms.storage.tables.organisations import jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job; `done` of `total` rows (None: not counted); `result`: counts by outcome, where it has more to tell."""

    id: JobId
    room_id: RoomId | None
    kind: str
    arguments: Mapping[str, Any]
    state: str
    done: int
    total: int | None
    error: str | None
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    result: Mapping[str, Any] | None


async def create_job(
    connection: AsyncConnection,
    organisation: OrganisationId,
    kind: JobKind,
    *,
    new_id: str,
    room: RoomId | None,
    arguments: Mapping[str, Any],
) -> Job:
    """Ask upkeep for a job."""
    statement = (
        insert(jobs)
        .values(id=new_id, organisation_id=organisation, room_id=room, kind=kind.value, arguments=dict(arguments))
        .returning(jobs)
    )
    return _job((await connection.execute(statement)).mappings().one())


async def find_job(
    connection: AsyncConnection, organisation: OrganisationId, identity: JobId, *, platform: bool = True
) -> Job:
    """One job of the organisation; without `platform` none on the whole installation. NotFoundError."""
    statement = select(jobs).where(jobs.c.id == identity, *_readable(organisation, platform=platform))
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no job {identity}")
    return _job(row)


async def cancel_job(
    connection: AsyncConnection, organisation: OrganisationId, identity: JobId, *, platform: bool = True
) -> Job:
    """Let nobody do more of a job; what was done stays. One that is cancelled already is told again.

    NotFoundError; ConflictError: it is over, or of a kind that is done to its end.
    """
    statement = (
        update(jobs)
        .where(
            jobs.c.id == identity,
            *_readable(organisation, platform=platform),
            jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING)),
            jobs.c.kind.in_(CANCELLABLE),
        )
        .values(state=JobState.CANCELLED.value, updated_at=func.now(), finished_at=func.now())
        .returning(jobs)
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is not None:
        return _job(row)
    found = await find_job(connection, organisation, identity, platform=platform)
    if found.state == JobState.CANCELLED:
        return found
    if found.kind not in CANCELLABLE:
        raise ConflictError(f"a job of the kind {found.kind} cannot be cancelled: it is done to its end")
    raise ConflictError(f"the job is over: it is {found.state}")


async def list_jobs(
    connection: AsyncConnection,
    organisation: OrganisationId,
    *,
    kind: JobKind | None = None,
    state: JobState | None = None,
    room: RoomId | None = None,
    platform: bool = True,
    before: str | None,
    limit: int,
) -> Sequence[Job]:
    """The jobs of the organisation, newest first; those of a kind, in a state, of a room."""
    statement = select(jobs).where(*_readable(organisation, platform=platform)).order_by(jobs.c.id.desc()).limit(limit)
    for column, wanted in ((jobs.c.kind, kind), (jobs.c.state, state), (jobs.c.room_id, room)):
        if wanted is not None:
            statement = statement.where(column == wanted)
    if before is not None:
        statement = statement.where(jobs.c.id < before)
    return [_job(row) for row in (await connection.execute(statement)).mappings()]


def _readable(organisation: OrganisationId, *, platform: bool) -> tuple[ColumnElement[bool], ...]:
    own = jobs.c.organisation_id == organisation
    return (own,) if platform else (own, jobs.c.kind.not_in(OF_INSTALLATION))


def _job(row: RowMapping) -> Job:
    return Job(
        id=JobId(row["id"]),
        room_id=row["room_id"],
        kind=row["kind"],
        arguments=row["arguments"],
        state=row["state"],
        done=row["done"],
        total=row["total"],
        error=row["error"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        finished_at=row["finished_at"],
        result=row["result"],
    )
