"""Jobs: what takes longer than a request. Upkeep does them, one after another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import RowMapping, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import JobId, OrganisationId, RoomId
from rooms.errors import NotFoundError
from rooms.storage.tables import jobs


class JobKind(StrEnum):
    """What a job does, and its arguments: `{"room_id", "name"}`, `{"room_id", "subscription_id", "name"}`; for a shovel,
    purge or sweep `{"room_id", "subscription_id"}` and what of the sideline is meant, and at which pace; of a handler
    queue `{"queue"}`, and `{"magazine"}` which of its two is meant.
    """

    DELETE_ROOM = "delete_room"
    DELETE_SUBSCRIPTION = "delete_subscription"
    SHOVEL_SIDELINE = "shovel_sideline"
    PURGE_SIDELINE = "purge_sideline"
    SWEEP_SIDELINE = "sweep_sideline"
    DELETE_QUEUE = "delete_queue"
    SWEEP_QUEUE = "sweep_queue"


DELETIONS: Final = frozenset({JobKind.DELETE_ROOM, JobKind.DELETE_SUBSCRIPTION})
OF_SIDELINES: Final = frozenset({JobKind.SHOVEL_SIDELINE, JobKind.PURGE_SIDELINE})


class JobState(StrEnum):
    """How far a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


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


async def find_job(connection: AsyncConnection, organisation: OrganisationId, identity: JobId) -> Job:
    """One job of the organisation. NotFoundError."""
    statement = select(jobs).where(jobs.c.id == identity, jobs.c.organisation_id == organisation)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no job {identity}")
    return _job(row)


async def list_jobs(
    connection: AsyncConnection, organisation: OrganisationId, *, before: str | None, limit: int
) -> Sequence[Job]:
    """The jobs of the organisation, newest first."""
    statement = select(jobs).where(jobs.c.organisation_id == organisation).order_by(jobs.c.id.desc()).limit(limit)
    if before is not None:
        statement = statement.where(jobs.c.id < before)
    return [_job(row) for row in (await connection.execute(statement)).mappings()]


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
