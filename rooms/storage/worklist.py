"""Jobs as the one who does them sees them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.domain.ids import JobId
from rooms.domain.job import JobKind, JobState
from rooms.storage.literals import plain
from rooms.storage.writer import Writer

MAX_ERROR: Final = 1000

_OPEN: Final = """
SELECT 0, j.* FROM (SELECT 0) one LEFT JOIN (
    SELECT id::text, kind, arguments, done, total, result, position, created_at,
        extract(epoch FROM now() - created_at)::float8 AS age_s
    FROM jobs WHERE state IN ('queued', 'running') AND kind = ANY (%(kinds)s::text[]) ORDER BY jobs.id
) j ON true
"""
_TELL: Final = """
WITH j AS (
    UPDATE jobs SET state = CASE state WHEN 'cancelled' THEN state ELSE %(state)s::text END,
        done = coalesce(%(done)s::int8, done), total = coalesce(%(total)s::int8, total), error = %(error)s::text,
        updated_at = now(), result = coalesce(%(result)s::jsonb, result),
        finished_at = CASE WHEN state = 'cancelled' OR %(state)s::text IN ('done', 'failed') THEN now() END
    WHERE id = %(id)s::uuid AND (state IN ('queued', 'running') OR state = 'cancelled' AND %(state)s::text = 'running')
    RETURNING 1
)
SELECT 0, count(*) FROM j
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job that is not done, asked for at `created_at`, `age_s` before this was read. `result`: counts so far; `position`:
    how far a walk has come, as the statements of its steps write it (None: not begun).
    """

    id: JobId
    kind: str
    arguments: Mapping[str, Any]
    done: int
    total: int | None
    result: Mapping[str, Any]
    position: Mapping[str, Any] | None
    created_at: datetime
    age_s: float


class Worklist:
    """Reads and tells jobs through one writer. Errors are `Writer.run`'s."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def open(self, kinds: Iterable[JobKind]) -> list[Task]:
        """Every job of these kinds that is queued or was begun, the oldest first."""
        return [
            Task(
                id=JobId(identity),
                kind=kind,
                arguments=arguments,
                done=done,
                total=total,
                result=result or {},
                position=position,
                created_at=created_at,
                age_s=age_s,
            )
            for identity, kind, arguments, done, total, result, position, created_at, age_s in await self._writer.run(
                _OPEN, {"kinds": plain(sorted(kinds))}
            )
        ]

    async def progress(
        self,
        task: Task,
        *,
        done: int | None = None,
        total: int | None = None,
        result: Mapping[str, Any] | None = None,
    ) -> None:
        """The job is running and has come so far (None: as before). One that was cancelled meanwhile stays so, and counts
        what its last step did.
        """
        await self._tell(task, JobState.RUNNING, done=done, total=total, result=result)

    async def finish(self, task: Task) -> None:
        """The job is done."""
        await self._tell(task, JobState.DONE)

    async def fail(self, task: Task, error: str) -> None:
        """The job cannot be done, and why."""
        await self._tell(task, JobState.FAILED, error=error.replace("\x00", "\ufffd")[:MAX_ERROR])

    async def _tell(
        self,
        task: Task,
        state: JobState,
        *,
        done: int | None = None,
        total: int | None = None,
        error: str | None = None,
        result: Mapping[str, Any] | None = None,
    ) -> None:
        told = None if result is None else json.dumps(dict(result))
        await self._writer.run(
            _TELL,
            {"id": task.id, "state": state.value, "done": done, "total": total, "error": error, "result": told},
        )
