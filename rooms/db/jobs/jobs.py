"""Store jobs: work that takes longer than a request.

Periodic tasks do it, several jobs in parallel. The API creates, lists and cancels jobs; `JobQueue`
is for the process that runs them.

A job that walks through rows does so in steps. What a step changes, how far it came and what it
counted are written by one statement. So a process that dies does so between two steps, and its
successor continues after the last one. Two processes may run one job at the same time, if a term
was lost unnoticed. Only one of them can make a step: a step begins at the position that it was read
with.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import asyncio
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from sqlalchemy import (
    ColumnElement,
    RowMapping,
    Select,
    and_,
    cast,
    exists,
    false,
    func,
    insert,
    not_,
    select,
    update,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.bounded_lists import read_bounded
from rooms.db.job_progress import RECORD_LEFT, START_RUN, JobRun, position_json, run_parameters
from rooms.db.pg_arrays import word_array
from rooms.db.tables.organisations import jobs
from rooms.db.tables.rooms import IS_SHOWN_IN_PORTALS, rooms, subscriptions
from rooms.db.writer import PUBLISHER, LogWriter, session_name
from rooms.domain.ids import JobId, OrganisationId, RoomId
from rooms.domain.job import CANCELLABLE, ENDS_A_BACKLOG, INSTALLATION_WIDE, JobKind, JobState
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import ConflictError, NotFoundError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """Describe a job.

    `done` of `total` rows (None: not counted); `result`: counts by outcome, if it has any. Of a job
    that ends what waits for a subscription, the subscriber in another organisation's room sees
    none of these: they would count what is hidden from it.
    """

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
    is_done: bool = False,
) -> JobRecord:
    """Add a job to the queue; `is_done`: one without work, for those who wait for it."""
    done = {"state": JobState.DONE.value, "finished_at": func.now()} if is_done else {}
    statement = (
        insert(jobs)
        .values(
            id=new_id,
            organisation_id=organisation,
            room_id=room,
            kind=kind.value,
            arguments=dict(arguments),
            **done,
        )
        .returning(jobs)
    )
    return _job((await connection.execute(statement)).mappings().one())


_IS_OF_OWN_ROOM: Final = exists().where(
    rooms.c.id == jobs.c.room_id, rooms.c.organisation_id == jobs.c.organisation_id
)
_HIDES_COUNTS: Final = and_(jobs.c.kind.in_(sorted(ENDS_A_BACKLOG)), not_(_IS_OF_OWN_ROOM))


def _visible_jobs(principal: Principal) -> Select[Any]:
    """Select the jobs that a principal may read, and whether their counts are hidden from it."""
    hides_counts = false() if principal.has_scope(Scope.PLATFORM) else _HIDES_COUNTS
    return select(jobs, hides_counts.label("hides_counts")).where(*_readable(principal))


async def find_job(
    connection: AsyncConnection,
    principal: Principal,
    identity: JobId,
) -> JobRecord:
    """Return one job that the principal may read. NotFoundError."""
    statement = _visible_jobs(principal).where(jobs.c.id == identity)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no job {identity}")
    return _job(row)


async def is_kind_open(connection: AsyncConnection, kind: JobKind) -> bool:
    """Return whether a job of this kind is queued or running, of whichever organisation.

    Until the commit, other calls for this kind wait: of several at once, one finds none.
    """
    await connection.execute(
        select(func.pg_advisory_xact_lock(func.hashtextextended(f"jobs {kind.value}", 0)))
    )
    statement = select(jobs.c.id).where(
        jobs.c.kind == kind.value, jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING))
    )
    return (await connection.execute(statement.limit(1))).first() is not None


async def cancel_job(
    connection: AsyncConnection,
    principal: Principal,
    identity: JobId,
) -> JobRecord:
    """Cancel the rest of a job, and return it; what was done stays.

    Repeating the call is harmless.

    NotFoundError; ConflictError: it has ended, or its kind cannot be cancelled.
    """
    statement = (
        update(jobs)
        .where(
            jobs.c.id == identity,
            *_readable(principal),
            jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING)),
            jobs.c.kind.in_(CANCELLABLE),
        )
        .values(state=JobState.CANCELLED.value, updated_at=func.now(), finished_at=func.now())
        .returning(jobs.c.id)
    )
    await connection.execute(statement)
    found = await find_job(connection, principal, identity)
    if found.state == JobState.CANCELLED:
        return found
    if found.kind not in CANCELLABLE:
        raise ConflictError(
            f"a job of the kind {found.kind} cannot be cancelled: it is done to its end"
        )
    raise ConflictError(f"the job is over: it is {found.state}")


async def list_jobs(
    connection: AsyncConnection,
    principal: Principal,
    *,
    kind: JobKind | None = None,
    state: JobState | None = None,
    room: RoomId | None = None,
    before: str | None,
    limit: int,
) -> tuple[Sequence[JobRecord], bool]:
    """Return the jobs that the principal may read, newest first.

    And whether the list may go on, because it ended where the jobs have enough bytes. `kind`,
    `state` and `room` narrow the list.
    """
    chosen = _visible_jobs(principal).order_by(jobs.c.id.desc())
    for column, wanted in ((jobs.c.kind, kind), (jobs.c.state, state), (jobs.c.room_id, room)):
        if wanted is not None:
            chosen = chosen.where(column == wanted)

    async def read(last: JobRecord | None, count: int) -> Sequence[JobRecord]:
        statement = chosen.limit(count)
        after = before if last is None else last.id
        if after is not None:
            statement = statement.where(jobs.c.id < after)
        return [_job(row) for row in (await connection.execute(statement)).mappings()]

    return await read_bounded(read, limit, _size_of)


def _readable(principal: Principal) -> list[ColumnElement[bool]]:
    """Select the organisation's jobs: of the key's rooms and subscriptions, if it is restricted.

    Jobs on the whole installation are only for the scope `platform`.
    """
    conditions = [jobs.c.organisation_id == principal.organisation_id]
    if not principal.has_scope(Scope.PLATFORM):
        conditions.append(jobs.c.kind.not_in(INSTALLATION_WIDE))
    if principal.rooms is not None:
        conditions.append(jobs.c.room_id.in_(principal.rooms))
    if principal.subscriptions is not None:
        conditions.append(jobs.c.arguments["subscription_id"].astext.in_(principal.subscriptions))
    elif principal.is_portal:
        subscription = cast(jobs.c.arguments["subscription_id"].astext, subscriptions.c.id.type)
        conditions.append(
            exists().where(
                subscriptions.c.room_id == jobs.c.room_id,
                subscriptions.c.id == subscription,
                subscriptions.c.organisation_id == principal.organisation_id,
                IS_SHOWN_IN_PORTALS,
            )
        )
    return conditions


def _size_of(job: JobRecord) -> int:
    return len(msgspec.json.encode((job.arguments, job.result)))


def _job(row: RowMapping) -> JobRecord:
    hides_counts = row.get("hides_counts", False)
    return JobRecord(
        id=JobId(row["id"]),
        room_id=row["room_id"],
        kind=row["kind"],
        arguments=row["arguments"],
        state=row["state"],
        done=0 if hides_counts else row["done"],
        total=None if hides_counts else row["total"],
        error=row["error"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        finished_at=row["finished_at"],
        result=None if hides_counts else row["result"],
    )


MAX_ERROR_LENGTH: Final = 1000

MAX_FETCHED: Final = 1200
"""The most jobs of a kind and an organisation that are read at a time."""
# The organisations with open jobs of a kind are looked up one by one, each by its first entry of
# the index. It has no id, or statements for one job would read all of it.
_ALL_KINDS: Final = word_array(sorted(JobKind))
_FETCH_OPEN: Final = """
WITH RECURSIVE o (kind, id) AS (
    SELECT k.kind, (SELECT j.organisation_id FROM jobs j WHERE j.kind = k.kind AND j.state IN ('queued', 'running')
        ORDER BY j.organisation_id LIMIT 1)
    FROM unnest(%(kinds)s::text[]) AS k (kind)
    UNION ALL
    SELECT o.kind, (SELECT j.organisation_id FROM jobs j WHERE j.kind = o.kind AND j.state IN ('queued', 'running')
        AND j.organisation_id > o.id ORDER BY j.organisation_id LIMIT 1)
    FROM o WHERE o.id IS NOT NULL
)
SELECT 0, j.* FROM (SELECT 0) one LEFT JOIN (
    SELECT f.* FROM o CROSS JOIN LATERAL (
        SELECT id::text, organisation_id::text, kind, arguments, done, total, result, position, created_at,
            extract(epoch FROM now() - created_at)::float8 AS age_s
        FROM jobs WHERE kind = o.kind AND organisation_id = o.id AND state IN ('queued', 'running')
            AND (snoozed_until IS NULL OR snoozed_until <= now()) ORDER BY jobs.created_at LIMIT %(per_organisation)s
    ) f ORDER BY 1
) j ON true
"""
_OPEN_KINDS: Final = """
SELECT 0, j.kind FROM (SELECT 0) one LEFT JOIN (
    SELECT k.kind FROM unnest(%(kinds)s::text[]) AS k (kind) WHERE EXISTS (
        SELECT FROM jobs WHERE kind = k.kind AND state IN ('queued', 'running') AND (snoozed_until IS NULL OR snoozed_until <= now()))
) j ON true
"""
_UPDATE: Final = """
WITH j AS (
    UPDATE jobs SET state = CASE state WHEN 'cancelled' THEN state ELSE %(state)s::text END,
        done = greatest(done, %(done)s::int8), total = coalesce(%(total)s::int8, total, CASE WHEN %(state)s::text = 'done' THEN nullif(done, 0) END), error = %(error)s::text,
        updated_at = now(), result = coalesce(%(result)s::jsonb, result),
        finished_at = CASE WHEN state = 'cancelled' OR %(state)s::text IN ('done', 'failed') THEN now() END
    WHERE id = %(id)s::uuid AND (state IN ('queued', 'running') OR state = 'cancelled' AND %(state)s::text = 'running')
        AND (%(position)s::jsonb IS NULL OR position IS NOT DISTINCT FROM %(position)s::jsonb)
    RETURNING 1
)
SELECT 0, count(*) FROM j
"""
_SNOOZE: Final = """
WITH j AS (
    UPDATE jobs SET snoozed_until = greatest(snoozed_until, now() + %(seconds)s::float8 * interval '1 s'), error = coalesce(%(error)s::text, error)
    WHERE id = %(id)s::uuid AND state IN ('queued', 'running') RETURNING 1
)
SELECT 0, count(*) FROM j
"""

# Its statements begin with a look at the version of their rooms, and may wait for locks afterwards.
_HAS_OLDER_PUBLISH: Final = f"""
SELECT 0, EXISTS (
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = '{session_name(PUBLISHER)}'
        AND xact_start <= %(at)s::timestamptz
)
"""  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJob:
    """Describe a job that is not done.

    `age_s`: its age when this was read; `result`: counts so far; `position`: how far a walk has
    come, as its steps write it (None: not begun).
    """

    id: JobId
    organisation: OrganisationId
    kind: str
    arguments: Mapping[str, Any]
    done: int
    total: int | None
    result: Mapping[str, Any]
    position: Mapping[str, Any] | None
    created_at: datetime
    """The begin of the transaction that created it, which may be long before its end."""
    age_s: float
    runs: list[JobRun] = field(default_factory=list, compare=False)
    """The run that was begun for this reading of the job, if one was: see `JobQueue.start_run`."""

    @property
    def seen_at(self) -> datetime:
        """Return when this was read, by PostgreSQL's clock."""
        return self.created_at + timedelta(seconds=self.age_s)


class JobQueue:
    """Fetch jobs and record their progress through one writer. Errors: those of `LogWriter.run`."""

    def __init__(
        self, writer: LogWriter, *, memory_s: float = 0, max_fetched: int = MAX_FETCHED
    ) -> None:
        """`max_fetched`: the most jobs of a kind and an organisation that are read at a time."""
        self._writer = writer
        self.max_fetched = max_fetched
        self._memory_s = memory_s
        self._open_kinds: frozenset[str] = frozenset()
        self._open_kinds_until = -math.inf

    async def fetch_open(self, kinds: Iterable[JobKind]) -> list[OpenJob]:
        """Return the jobs of these kinds that are queued or running, the oldest first.

        Those that are snoozed are left out, and of a kind and an organisation those after
        `max_fetched`. Many tasks ask often, mostly for nothing. So one statement answers all that
        find no job within `memory_s`.
        """
        if self._memory_s:
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._open_kinds_until:
                # Others that ask meanwhile take the earlier answer.
                self._open_kinds_until = now_s + self._memory_s
                try:
                    found = await self._writer.run(_OPEN_KINDS, {"kinds": _ALL_KINDS})
                except BaseException:
                    self._open_kinds_until = -math.inf
                    raise
                self._open_kinds = frozenset(kind for (kind,) in found)
            kinds = [kind for kind in kinds if kind in self._open_kinds]
            if not kinds:
                return []
        parameters = {"kinds": word_array(sorted(kinds)), "per_organisation": self.max_fetched}
        rows = await self._writer.run(_FETCH_OPEN, parameters)
        return [
            OpenJob(
                id=JobId(identity),
                organisation=OrganisationId(organisation),
                kind=kind,
                arguments=arguments,
                done=done,
                total=total,
                result=result or {},
                position=position,
                created_at=created_at,
                age_s=age_s,
            )
            for (
                identity,
                organisation,
                kind,
                arguments,
                done,
                total,
                result,
                position,
                created_at,
                age_s,
            ) in rows
        ]

    async def has_older_publish(self, at: datetime) -> bool:
        """Return whether a publish is under way that began before that time.

        It may not know what was committed by then.
        """
        return bool((await self._writer.run(_HAS_OLDER_PUBLISH, {"at": at}))[0][0])

    async def start_run(self, job: OpenJob, *, recounted: Sequence[str] = ()) -> JobRun | None:
        """Begin a run of a job that has no other position, after which earlier ones do nothing.

        `recounted`: counts that each run makes anew. None: the job has ended.

        What is recorded for this `job` later is of this run: it changes nothing after another has
        begun.
        """
        parameters = {"job": job.id, "recounted": word_array(recounted)}
        rows = await self._writer.run(START_RUN, parameters)
        if not rows:
            return None
        run = JobRun(job.id, json.loads(rows[0][0]))
        job.runs[:] = [run]
        return run

    async def record_left(self, run: JobRun, left: int) -> None:
        """Set the job's total by the rows that it has still to do, before the run's first step.

        Count them after `start_run`: until then an earlier run may move some of them.
        """
        await self._writer.run(RECORD_LEFT, run_parameters(run) | {"left": left})

    async def record_progress(
        self,
        job: OpenJob,
        *,
        done: int | None = None,
        total: int | None = None,
        result: Mapping[str, Any] | None = None,
    ) -> None:
        """Record that the job is running and has come so far (None: as before).

        `done` does not go back: a process that was frozen may write it after its successor.
        A job that was cancelled meanwhile stays cancelled, and counts what its last step did.
        """
        await self._update(job, JobState.RUNNING, done=done, total=total, result=result)

    async def finish_job(self, job: OpenJob) -> None:
        """Record that the job is done; a total that was not counted is what it did."""
        await self._update(job, JobState.DONE)

    async def snooze_job(self, job: OpenJob, seconds: float, *, error: str | None = None) -> None:
        """Keep the job open, but unfetched for so long. `error`: why its last step failed."""
        error = None if error is None else _storable(error)
        await self._writer.run(_SNOOZE, {"id": job.id, "seconds": seconds, "error": error})

    async def fail_job(self, job: OpenJob, error: str) -> None:
        """Record that the job cannot be done, and why."""
        await self._update(job, JobState.FAILED, error=_storable(error))

    async def _update(
        self,
        job: OpenJob,
        state: JobState,
        *,
        done: int | None = None,
        total: int | None = None,
        error: str | None = None,
        result: Mapping[str, Any] | None = None,
    ) -> None:
        counts = None if result is None else json.dumps(dict(result))
        await self._writer.run(
            _UPDATE,
            {
                "id": job.id,
                "state": state.value,
                "done": done,
                "total": total,
                "error": error,
                "result": counts,
                "position": position_json(job.runs[0].position) if job.runs else None,
            },
        )


def _storable(error: str) -> str:
    return error.replace("\x00", "\ufffd")[:MAX_ERROR_LENGTH]
