"""Run the jobs that check the stores and preview retention, in the maintenance process.

Its settings count: it is the process that deletes what is old, and that knows every store.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeVar

from delivery.doctor.checks import DoctorFinding
from delivery.maintenance.jobs import SLEEP_STEP_S, JobRunner
from delivery.maintenance.retention import preview
from delivery.maintenance.service import TaskContext, TaskSpec
from delivery.maintenance.task import ShouldContinue
from rooms.app.doctor import check_stores
from rooms.backends import backends_of, differences, format_differences, running_processes
from rooms.db.connection import open_connection
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.processes import read_processes
from rooms.domain.job import JobKind
from rooms.settings import Settings

PARTITION: Final = "upkeep/checks"
EVERY_S: Final = 1.0
MAX_RANGES: Final = 1000
"""Days that the result of a preview names, the oldest ones."""

T = TypeVar("T")


class CheckJobs:
    """Run checks, and write what they found as the jobs' results."""

    def __init__(
        self, job_queue: JobQueue, settings: Settings, database_url: str, destination: str | None
    ) -> None:
        """Create it; `destination`: of the log's export; None: it is not exported."""
        self._job_queue = job_queue
        self._settings = settings
        self._url = database_url
        self._destination = destination

    async def check(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        """Check every store, and repair where the job says so. Errors are those of the stores."""
        repair = bool(job.arguments.get("repair"))
        await self._job_queue.record_progress(job)
        mixed = await self._mixed()
        if repair and mixed:
            result: dict[str, Any] = {
                "open": len(mixed),
                "refused": True,
                "mixed": mixed,
                "findings": [],
            }
        else:
            report = await _unless_stopped(
                check_stores(self._settings, self._url, repair=repair, logs={}), should_continue
            )
            if report is None:
                return False
            result = {
                "open": sum(one.open_count for one in report.findings) + len(mixed),
                "refused": report.refused,
                "mixed": mixed,
                "findings": [_to_document(one) for one in report.findings],
            }
        await self._job_queue.record_progress(job, result=result)
        return True

    async def preview(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        """Find what retention would delete now. Errors are those of PostgreSQL."""
        given = job.arguments.get("days")
        days = self._settings.retention_days if given is None else int(given)
        await self._job_queue.record_progress(job)
        found = (
            await _unless_stopped(
                preview(self._url, days=days, destination=self._destination), should_continue
            )
            if days
            else ()
        )
        if found is None:
            return False
        ranges = [asdict(one) for one in found[:MAX_RANGES]]
        result = {"days": days, "total": len(found), "ranges": ranges}
        await self._job_queue.record_progress(job, result=result)
        return True

    async def _mixed(self) -> list[str]:
        """Describe the running processes that use other stores than this one."""
        own = backends_of(self._settings)
        async with open_connection(self._url, name="rooms checks") as connection:
            running = running_processes(await read_processes(connection))
        return [
            f"{process.label}: {format_differences(found)}"
            for process in running
            if (found := differences(own, process.backends))
        ]


async def _unless_stopped(work: Awaitable[T], should_continue: ShouldContinue) -> T | None:
    """Return the result of work; None: it was ended, because the job or the process stops."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if not should_continue():
                return None
            await asyncio.wait({task}, timeout=SLEEP_STEP_S)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})


def _to_document(finding: DoctorFinding) -> dict[str, Any]:
    return {
        "part": finding.part,
        "description": finding.description,
        "count": finding.count,
        "repaired": finding.repaired,
        "in_progress": finding.self_healing,
        "unavailable": finding.unavailable,
        "since": None if finding.since is None else finding.since.isoformat(),
        "examples": list(finding.examples),
        "advice": finding.advice or None,
    }


def check_tasks(
    settings: Settings, database_url: str, destination: str | None
) -> Sequence[TaskSpec]:
    """Return the task that runs these jobs. `destination`: as of `CheckJobs`."""

    def create(context: TaskContext) -> JobRunner:
        queue = context.job_queue
        checks = CheckJobs(queue, settings, database_url, destination)
        handlers = {JobKind.CHECK_STORES: checks.check, JobKind.PREVIEW_RETENTION: checks.preview}
        return JobRunner(queue, handlers, name="checks")

    return [TaskSpec(partition=PARTITION, every_s=EVERY_S, create=create)]
