"""Test the jobs that the maintenance process runs on request.

Oracle: a check reports what the doctor reports and changes nothing; a repair leaves nothing; a job
that is cancelled ends before its check does. The job that runs `rooms analyze` ends as its command
does; if it is cancelled, or takes too long, it leaves no process behind; the real command, started
so, publishes its findings.
"""

import asyncio
import dataclasses
import os
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest

from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.service import TaskIntervals
from rooms.app import maintenance_jobs
from rooms.app.maintenance_jobs import AnalysisJobs, CheckJobs, analysis_tasks
from rooms.backends import DATABASE, Backends, ProcessRecord
from rooms.db.connection import open_connection
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.processes import heartbeat
from rooms.db.writer import LogWriter
from rooms.domain.ids import JobId
from rooms.domain.job import JobKind
from rooms.domain.state_machine import State
from rooms.settings import Settings, read_settings
from tests.integration.delivery.maintenance.test_service import always, ask, job
from tests.support.installation import Installation, until
from tests.support.log_rows import logging
from tests.support.old_messages import DAY, make_days, write

_UNREACHABLE: Final = "postgresql://rooms@127.0.0.1:1/rooms"


@pytest.fixture
async def queue(database: str) -> AsyncIterator[JobQueue]:
    async with LogWriter(database, kind="upkeep") as writer:
        yield JobQueue(writer)


async def opened(queue: JobQueue) -> OpenJob:
    """Return the only open job."""
    (found,) = await queue.fetch_open(
        [JobKind.CHECK_STORES, JobKind.PREVIEW_RETENTION, JobKind.ANALYSE_LOG]
    )
    return found


def checks(installation: Installation, queue: JobQueue, **settings: str) -> CheckJobs:
    """Return the jobs of a process with these settings."""
    found: Settings = read_settings(settings)
    return CheckJobs(queue, found, installation.url, None)


async def result(installation: Installation, identity: JobId) -> dict[str, Any]:
    found: dict[str, Any] = (await job(installation, identity))["result"]
    return found


async def lost_one(installation: Installation) -> Any:
    """Create a delivery without work, which a repair queues again."""
    (copy,) = await installation.publish(await installation.subscribe())
    await installation.rows("DELETE FROM outbox WHERE id = %s", copy.delivery_id)
    return copy


async def test_a_check_reports_and_changes_nothing_and_a_repair_repairs(
    installation: Installation, queue: JobQueue
) -> None:
    copy = await lost_one(installation)
    identity = await ask(installation, "check_stores", repair=False)
    assert await checks(installation, queue).check(await opened(queue), always)
    found = await result(installation, identity)
    assert (found["open"], found["refused"], found["mixed"]) == (1, False, [])
    (finding,) = found["findings"]
    assert (finding["part"], finding["count"], finding["repaired"]) == ("deliveries", 1, 0)
    assert finding["examples"] == [copy.delivery_id]
    assert await installation.work("outbox", copy) is None
    await queue.finish_job(await opened(queue))

    identity = await ask(installation, "check_stores", repair=True)
    assert await checks(installation, queue).check(await opened(queue), always)
    found = await result(installation, identity)
    assert (found["open"], found["findings"][0]["repaired"]) == (0, 1)
    assert await installation.work("outbox", copy) is not None


async def test_processes_on_other_stores_refuse_a_repair(
    installation: Installation, queue: JobQueue
) -> None:
    copy = await lost_one(installation)
    embedded = Backends(
        broker=DATABASE, election=DATABASE, magazines=DATABASE, farm="rooms", client="default"
    )
    process = ProcessRecord(
        name="other", kind="worker", host="h", pid=7, running=True,
        backends=dataclasses.replace(embedded, broker="stomp://127.0.0.1:1"),
    )  # fmt: skip
    async with open_connection(installation.url, name="test") as connection:
        await heartbeat(connection, process)
    identity = await ask(installation, "check_stores", repair=True)
    assert await checks(installation, queue).check(await opened(queue), always)
    found = await result(installation, identity)
    assert found["refused"]
    assert "worker 7 on h" in found["mixed"][0]
    assert await installation.work("outbox", copy) is None


@pytest.mark.parametrize("kind", [JobKind.CHECK_STORES, JobKind.PREVIEW_RETENTION])
async def test_a_job_waits_while_postgresql_is_away(
    installation: Installation, queue: JobQueue, kind: JobKind
) -> None:
    identity = await ask(installation, kind, repair=False, days=30)
    jobs = CheckJobs(queue, read_settings({}), _UNREACHABLE, None)
    handlers = {JobKind.CHECK_STORES: jobs.check, JobKind.PREVIEW_RETENTION: jobs.preview}
    looks = iter([True] * 3 + [False] * 100)
    await JobRunner(queue, handlers, poll_s=0.01).run(lambda: next(looks))
    found = await job(installation, identity)
    assert (found["state"], found["error"]) == ("running", None)


async def test_a_cancelled_check_ends(
    installation: Installation, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    async def endless(*_: object, **__: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(maintenance_jobs, "check_stores", endless)
    identity = await ask(installation, "check_stores", repair=False)
    looks = iter([True, True, False])
    checked = checks(installation, queue).check(await opened(queue), lambda: next(looks))
    assert not await asyncio.wait_for(checked, 10)
    assert ended.is_set()
    assert (await job(installation, identity))["result"] is None


async def test_a_preview_counts_what_is_old(installation: Installation, queue: JobQueue) -> None:
    make_days(installation.url, DAY, DAY + timedelta(days=1))
    subscription = await installation.subscribe()
    for state in (State.DELIVERED, State.DELIVERED, State.SIDELINED):
        await write(installation, subscription, state, born=DAY)
    identity = await ask(installation, "preview_retention", days=30)
    assert await checks(installation, queue).preview(await opened(queue), always)
    found = await result(installation, identity)
    assert (found["days"], found["total"]) == (30, 2)
    assert found["ranges"][0] == {
        "label": f"{DAY:%Y%m%d}", "kept": False, "deliveries": 3, "stay": 1, "fate": "shrinks"
    }  # fmt: skip
    await queue.finish_job(await opened(queue))

    identity = await ask(installation, "preview_retention", days=None)
    off = checks(installation, queue, ROOMS_RETENTION_DAYS="0")
    assert await off.preview(await opened(queue), always)
    assert await result(installation, identity) == {"days": 0, "total": 0, "ranges": []}


def program(queue: JobQueue, text: str, *, max_run_s: float = 60.0) -> AnalysisJobs:
    """Return jobs whose command is this Python program."""
    command = (sys.executable, "-c", text)
    return AnalysisJobs(queue, os.environ, command=command, max_run_s=max_run_s)


async def run(installation: Installation, queue: JobQueue, text: str, **more: Any) -> Any:
    """Run a program as a job to its end, as the runner does; return the job's row."""
    identity = await ask(installation, "analyze_log", full=bool(more.pop("full", False)))
    one = await opened(queue)
    if await program(queue, text, **more).analyse(one, always):
        await queue.finish_job(one)
    return await job(installation, identity)


async def test_its_notes_and_its_summary_are_the_result(
    installation: Installation, queue: JobQueue
) -> None:
    text = (
        "import os, sys; print('nice', os.getpriority(os.PRIO_PROCESS, 0), sys.argv[1:], file=sys.stderr);"
        "print('x' * 100_000, file=sys.stderr); print('run 7: 3 deliveries')"
    )
    found = await run(installation, queue, text, full=True)
    assert found["state"] == "done"
    result = found["result"]
    assert (result["summary"], result["incomplete"]) == ("run 7: 3 deliveries", False)
    assert "--full" in result["lines"][0]
    assert len(result["lines"][1]) == 500


async def test_it_has_the_lowest_priority(installation: Installation, queue: JobQueue) -> None:
    text = (
        "import os, sys, time\n"
        "while os.getpriority(os.PRIO_PROCESS, 0) < 19: time.sleep(0.01)\n"
        "print('done')"
    )
    assert (await run(installation, queue, text))["result"]["summary"] == "done"


async def test_an_incomplete_run_says_so(installation: Installation, queue: JobQueue) -> None:
    found = await run(installation, queue, "print('run 7'); raise SystemExit(3)")
    assert (found["state"], found["result"]["incomplete"]) == ("done", True)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "raise SystemExit('note\\nError: this needs the extra `spark`\\n  pip')",
            "this needs the",
        ),
        ("raise SystemExit(9)", "ended with the code 9"),
        ("import os; os.kill(os.getpid(), 9)", "ended with the code -9"),
    ],
)
async def test_a_failure_is_the_jobs(
    installation: Installation, queue: JobQueue, text: str, error: str
) -> None:
    found = await run(installation, queue, text)
    assert found["state"] == "failed"
    assert error in found["error"]
    assert "note" not in found["error"]


def endless(pids: Path) -> str:
    """Return a program that starts another one, writes both numbers, and waits."""
    return (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        f"open({str(pids) + '.part'!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids) + '.part'!r}, {str(pids)!r})\n"
        "print('waiting\\nWARNING: of Java', file=sys.stderr, flush=True)\n"
        "child.wait()"
    )


async def all_gone(pids: Path) -> None:
    text = await asyncio.to_thread(pids.read_text)
    numbers = [int(one) for one in text.split()]

    async def gone() -> bool:
        return not any(_runs(number) for number in numbers)

    await until(gone, "the end of the processes")


def _runs(number: int) -> bool:
    try:
        status = Path(f"/proc/{number}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


async def test_a_cancelled_run_leaves_no_process(
    installation: Installation, queue: JobQueue, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    identity = await ask(installation, "analyze_log", full=False)
    jobs = program(queue, endless(pids))
    done = await jobs.analyse(await opened(queue), lambda: not pids.exists())
    assert not done
    await all_gone(pids)
    assert (await job(installation, identity))["state"] == "running"


async def test_a_run_that_takes_too_long_fails(
    installation: Installation, queue: JobQueue, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    found = await run(installation, queue, endless(pids), max_run_s=2.0)
    assert found["state"] == "failed"
    assert "killed after 2 s" in found["error"]
    await all_gone(pids)


async def test_progress_is_shown_while_it_runs(
    installation: Installation, queue: JobQueue, tmp_path: Path
) -> None:
    identity = await ask(installation, "analyze_log", full=False)
    stop = asyncio.Event()
    jobs = program(queue, endless(tmp_path / "pids"))
    running = asyncio.create_task(jobs.analyse(await opened(queue), lambda: not stop.is_set()))

    async def is_shown() -> bool:
        result = (await job(installation, identity))["result"]
        return result is not None and result["status"] == "waiting"

    await until(is_shown, "the status")
    stop.set()
    assert not await running


async def test_the_runner_takes_one_at_a_time() -> None:
    (spec,) = analysis_tasks({}, "postgresql://x")
    assert spec.partition == "upkeep/analysis"
    assert TaskIntervals().jobs_s <= spec.every_s


async def test_the_command_itself_publishes_findings(
    installation: Installation, queue: JobQueue, tmp_path: Path
) -> None:
    """Run the real one over a small log: export, Spark, results in PostgreSQL."""
    pytest.importorskip("pyspark")
    subscription = await installation.subscribe()
    with logging(installation.url, 77) as log:
        log.write(installation.room, "published", enqueued=[subscription])
        log.commit()
    identity = await ask(installation, "analyze_log", full=False)
    environment = {
        **os.environ,
        "ROOMS_DATA": str(tmp_path),
        "DATABASE_URL": installation.url,
    }
    one = await opened(queue)
    assert await AnalysisJobs(queue, environment).analyse(one, always)
    await queue.finish_job(one)
    found = await job(installation, identity)
    assert found["state"] == "done", found["error"]
    assert "deliveries" in found["result"]["summary"]
    assert await installation.value("SELECT count(*) FROM analysis_runs") == 1
