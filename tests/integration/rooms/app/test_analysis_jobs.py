"""Test the job that runs `rooms analyze` in a process of its own.

Oracle: the job ends as its command does; a job that is cancelled, or takes too long, leaves no
process behind; the real command, started so, publishes its findings.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from delivery.maintenance.service import TaskIntervals
from rooms.app.analysis_jobs import AnalysisJobs, analysis_tasks
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.writer import LogWriter
from rooms.domain.job import JobKind
from tests.integration.delivery.maintenance.test_service import always, ask, job
from tests.support.installation import Installation, until
from tests.support.log_rows import logging


@pytest.fixture
async def queue(database: str) -> AsyncIterator[JobQueue]:
    async with LogWriter(database, kind="upkeep") as writer:
        yield JobQueue(writer)


async def opened(queue: JobQueue) -> OpenJob:
    (found,) = await queue.fetch_open([JobKind.ANALYSE_LOG])
    return found


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
