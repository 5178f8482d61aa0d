"""Jobs as the one who does them sees them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rooms.domain.ids import JobId
from rooms.storage.jobs import JobState
from rooms.storage.writer import Writer

MAX_ERROR: Final = 1000

_OPEN: Final = """
SELECT 0, j.* FROM (SELECT 0) one LEFT JOIN (
    SELECT id::text, kind, arguments, done, total, extract(epoch FROM now() - created_at)::float8 AS age_s
    FROM jobs WHERE state IN ('queued', 'running') ORDER BY jobs.id
) j ON true
"""
_TELL: Final = """
WITH j AS (
    UPDATE jobs SET state = %(state)s::text, done = coalesce(%(done)s::int8, done),
        total = coalesce(%(total)s::int8, total), error = %(error)s::text, updated_at = now(),
        finished_at = CASE WHEN %(state)s::text IN ('done', 'failed') THEN now() END
    WHERE id = %(id)s::uuid AND state IN ('queued', 'running') RETURNING 1
)
SELECT 0, count(*) FROM j
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job that is not done. `age_s`: since it was asked for, when this was read."""

    id: JobId
    kind: str
    arguments: Mapping[str, Any]
    done: int
    total: int | None
    age_s: float


class Worklist:
    """Reads and tells jobs through one writer. Errors are `Writer.run`'s."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def open(self) -> list[Task]:
        """Every job that is queued or was begun, the oldest first."""
        return [
            Task(id=JobId(identity), kind=kind, arguments=arguments, done=done, total=total, age_s=age_s)
            for identity, kind, arguments, done, total, age_s in await self._writer.run(_OPEN, {})
        ]

    async def progress(self, task: Task, *, done: int | None = None, total: int | None = None) -> None:
        """The job is running and has come so far (None: as before)."""
        await self._tell(task, JobState.RUNNING, done=done, total=total)

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
    ) -> None:
        await self._writer.run(
            _TELL, {"id": task.id, "state": state.value, "done": done, "total": total, "error": error}
        )
