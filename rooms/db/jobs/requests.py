"""Create jobs for organisations, each of which may have a limited number that is not done."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import Text, Uuid, cast, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.jobs.jobs import JobRecord, create_job
from rooms.db.tables.organisations import jobs
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.job import REPEATABLE, JobKind, JobState
from rooms.errors import QuotaExceededError

MAX_OPEN_JOBS: Final = 1000
"""The most jobs of an organisation that are not done, of kinds which it can request repeatedly."""
MAX_OPEN_BYTES: Final = 4 * 1024 * 1024
"""The most bytes of the arguments of these jobs: the process that runs them reads all of them."""
_RETRY_S: Final = 5
_REPEATABLE: Final = ", ".join(f"'{kind}'" for kind in sorted(REPEATABLE))
_COUNT_OPEN: Final = text(f"""
SELECT o.id, (SELECT count(*) FROM (
    SELECT FROM jobs j WHERE j.organisation_id = o.id AND j.state IN ('queued', 'running') AND j.kind IN ({_REPEATABLE}) LIMIT :most
) j)
FROM unnest(CAST(:organisations AS uuid[])) AS o (id)
""").columns(id=Uuid(as_uuid=False))  # noqa: S608 - constants of this package


async def request_job(
    connection: AsyncConnection,
    organisation: OrganisationId,
    kind: JobKind,
    *,
    new_id: str,
    room: RoomId | None,
    arguments: Mapping[str, Any],
) -> JobRecord:
    """Add a job of a repeatable kind, if the organisation has not too many. QuotaExceededError.

    Requests at the same time may each find one place left.
    """
    is_open = (
        select(func.octet_length(cast(jobs.c.arguments, Text)).label("size"))
        .where(
            jobs.c.organisation_id == organisation,
            jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING)),
            jobs.c.kind.in_(sorted(REPEATABLE)),
        )
        .limit(MAX_OPEN_JOBS)
        .subquery()
    )
    count, size = (
        await connection.execute(
            select(func.count(), func.coalesce(func.sum(is_open.c.size), 0)).select_from(is_open)
        )
    ).one()
    check_open_jobs(count)
    if size + len(msgspec.json.encode(arguments)) > MAX_OPEN_BYTES:
        raise QuotaExceededError(
            f"the jobs of your organisation that are not done have {size} bytes of keys and ids, "
            f"and the limit is {MAX_OPEN_BYTES}: wait for some, cancel them, or name fewer",
            limit="open_jobs",
            retry_after_s=_RETRY_S,
        )
    return await create_job(
        connection, organisation, kind, new_id=new_id, room=room, arguments=arguments
    )


def check_open_jobs(count: int) -> None:
    """Raise QuotaExceededError where so many open jobs of repeatable kinds allow no further one."""
    if count >= MAX_OPEN_JOBS:
        raise QuotaExceededError(
            f"your organisation has {MAX_OPEN_JOBS} jobs that are not done: wait for some, or "
            "cancel them",
            limit="open_jobs",
            retry_after_s=_RETRY_S,
        )


async def count_open_jobs(
    connection: AsyncConnection, organisations: Collection[OrganisationId]
) -> Mapping[OrganisationId, int]:
    """Count the open jobs of repeatable kinds of these organisations, up to `MAX_OPEN_JOBS`."""
    rows = await connection.execute(
        _COUNT_OPEN, {"organisations": list(organisations), "most": MAX_OPEN_JOBS}
    )
    return {OrganisationId(identity): count for identity, count in rows}
