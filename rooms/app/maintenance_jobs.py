"""Run the jobs that check the stores, preview retention and analyse the log, in maintenance.

The settings of the maintenance process count for the checks and the preview: it is the process that
deletes what is old, and that knows every store. The analysis is the command `rooms analyze` in a
process of its own: Spark takes cores and memory for a minute, so it has neither the maintenance
process's event loop nor its priority.

| if this happens | then |
| --- | --- |
| the analysis is cancelled, or the term ends | it and what it started are killed at once |
| the maintenance process dies | the kernel kills the command; the next leader begins anew |
| it takes longer than `MAX_RUN_S` | it is killed, and the job fails |
| Spark or Java is missing | the job fails with the words of the command |

The command itself is repeatable: it exports and analyses what is new.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, TypeVar

from delivery.doctor.checks import DoctorFinding
from delivery.maintenance.jobs import SLEEP_STEP_S, JobRunner
from delivery.maintenance.retention import preview
from delivery.maintenance.service import TaskSpec
from delivery.maintenance.task import ShouldContinue
from delivery.maintenance.task_context import TaskContext
from rooms.app.doctor import check_stores
from rooms.backends import backends_of, differences, format_differences, running_processes
from rooms.db.connection import open_reader
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.processes import read_processes
from rooms.domain.job import JobKind
from rooms.local.run_as import launch_command
from rooms.settings import Settings

_CHECKS_PARTITION: Final = "upkeep/checks"
_ANALYSIS_PARTITION: Final = "upkeep/analysis"
_EVERY_S: Final = 1.0
MAX_RANGES: Final = 1000
"""Days that the result of a preview names, the oldest ones."""

MAX_RUN_S: Final = 3600.0
COMMAND: Final = (sys.executable, "-m", "rooms", "analyze")
EXIT_INCOMPLETE: Final = 3
"""The exit code of a run that left something out."""
_LOWEST_PRIORITY: Final = 19
_HEAP_VARIABLE: Final = "PYSPARK_SUBMIT_ARGS"
_HEAP_ARGUMENTS: Final = "--driver-memory 1g pyspark-shell"
_READ_BYTES: Final = 4096
_MAX_LINE: Final = 500
_MAX_LINES: Final = 20
_PROGRESS_S: Final = 1.0

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
        """Describe the running processes that use other stores than this one.

        StorageUnavailableError.
        """
        own = backends_of(self._settings)
        async with open_reader(self._url, name="rooms checks") as connection:
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

    return [TaskSpec(partition=_CHECKS_PARTITION, every_s=_EVERY_S, create=create)]


class AnalysisJobs:
    """Run the command, and write its last lines as the job's result."""

    def __init__(
        self,
        job_queue: JobQueue,
        environment: Mapping[str, str],
        *,
        command: Sequence[str] = COMMAND,
        max_run_s: float = MAX_RUN_S,
    ) -> None:
        """Run `command` in `environment`; kill it after `max_run_s`."""
        self._job_queue = job_queue
        self._environment = environment
        self._command = command
        self._max_run_s = max_run_s

    async def analyse(self, job: OpenJob, should_continue: ShouldContinue) -> bool:
        """Run the command to its end; if it fails, so does the job. Errors of PostgreSQL."""
        await self._job_queue.record_progress(job)
        options = ("--full",) if job.arguments.get("full") else ()
        process = await asyncio.create_subprocess_exec(
            *launch_command((*self._command, *options), parent_death_signal=signal.SIGKILL),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=self._environment,
            start_new_session=True,
        )
        with suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PGRP, process.pid, _LOWEST_PRIORITY)
        notes, printed = _Lines(), _Lines()
        readers = [
            asyncio.create_task(lines.read(stream))
            for lines, stream in ((notes, process.stderr), (printed, process.stdout))
            if stream is not None
        ]
        try:
            if not await self._watch(job, process, notes, should_continue):
                return False
            too_long = process.returncode is None
            if not too_long:
                await asyncio.wait(readers, timeout=_PROGRESS_S)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)
        if too_long:
            await self._job_queue.fail_job(
                job,
                f"it was killed after {self._max_run_s:.0f} s; run `rooms analyze` on the machine,"
                " which has no limit",
            )
            return True
        code = process.returncode
        if code not in (0, EXIT_INCOMPLETE):
            error = notes.error() or f"rooms analyze ended with the code {code}"
            await self._job_queue.fail_job(job, error)
            return True
        result = {
            "status": None,
            "lines": notes.last,
            "summary": " ".join(printed.last[-1:]) or None,
            "incomplete": code == EXIT_INCOMPLETE,
        }
        await self._job_queue.record_progress(job, result=result)
        return True

    async def _watch(
        self, job: OpenJob, process: Process, notes: "_Lines", should_continue: ShouldContinue
    ) -> bool:
        """Report progress until the command has ended or its time is up; False: the job stops."""
        loop = asyncio.get_running_loop()
        begun = reported_at = loop.time()
        reported = 0
        ending = asyncio.create_task(process.wait())
        try:
            while not ending.done():
                if not should_continue():
                    return False
                if loop.time() - begun > self._max_run_s:
                    return True
                if notes.count > reported and loop.time() - reported_at >= _PROGRESS_S:
                    reported, reported_at = notes.count, loop.time()
                    result = {"status": notes.status, "lines": notes.last}
                    await self._job_queue.record_progress(job, result=result)
                await asyncio.wait({ending}, timeout=SLEEP_STEP_S)
            return True
        finally:
            ending.cancel()


class _Lines:
    """Keep the last lines of an output, however much there is."""

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=_MAX_LINES)
        self.count = 0

    @property
    def last(self) -> list[str]:
        """Return the last lines."""
        return list(self._kept)

    @property
    def status(self) -> str | None:
        """Return the last line of the command itself: those of Java begin with a capital."""
        return next((line for line in reversed(self._kept) if line[0].islower()), None)

    def error(self) -> str:
        """Return the message of the command, or its last lines."""
        for index, line in enumerate(self._kept):
            if line.startswith("Error: "):
                return "\n".join(self.last[index:]).removeprefix("Error: ")
        return "\n".join(self.last[-3:])

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read to the end; long lines are cut."""
        rest = b""
        while chunk := await stream.read(_READ_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                self._keep(line)
            rest = rest[:_READ_BYTES]
        self._keep(rest)

    def _keep(self, line: bytes) -> None:
        text = line.decode(errors="replace").replace("\x00", "\ufffd").strip()[:_MAX_LINE]
        if text:
            self._kept.append(text)
            self.count += 1


def analysis_tasks(environment: Mapping[str, str], database_url: str) -> Sequence[TaskSpec]:
    """Return the task that runs these jobs, one at a time. `environment`: of this process."""
    variables = {
        _HEAP_VARIABLE: _HEAP_ARGUMENTS,
        **environment,
        "DATABASE_URL": database_url,
    }

    def create(context: TaskContext) -> JobRunner:
        queue = context.job_queue
        handlers: dict[JobKind, Any] = {JobKind.ANALYSE_LOG: AnalysisJobs(queue, variables).analyse}
        return JobRunner(queue, handlers, name="analysis", max_concurrent=1)

    return [TaskSpec(partition=_ANALYSIS_PARTITION, every_s=_EVERY_S, create=create)]
