"""Kill children of the supervisor, or the supervisor itself. Needs no database."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rooms.local import process_table
from tests.faults.supervisor_stage import PATIENCE_S, Stage, line_of, staged, until

BROKEN = """
import pathlib, sys, threading
while not pathlib.Path(sys.argv[1]).exists():
    threading.Event().wait(0.02)
raise SystemExit("no such setting: X")
"""
linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="the kernel's death signal is Linux's"
)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with staged(tmp_path / "data") as stage:
        yield stage


def error_text(process: subprocess.Popen[bytes]) -> str:
    _, stderr = process.communicate(timeout=PATIENCE_S)
    return stderr.decode()


def test_killed_child_is_restarted_without_its_siblings(stage: Stage) -> None:
    """Every kill is followed by a new process of the same name, and of no other."""
    stage.supervisor([stage.child("api"), stage.child("worker")])
    first = stage.reports(2)
    last = first["worker"]
    for _ in range(3):
        os.kill(last.pid, signal.SIGKILL)
        assert last.says() == ""
        again = stage.report()
        assert again.name == "worker"
        assert again.pid != last.pid
        last = again
    assert process_table.start_token(first["api"].pid) is not None


def test_death_of_a_child_is_logged(stage: Stage) -> None:
    supervisor = stage.supervisor([stage.child("worker")])
    assert supervisor.stderr is not None
    child = stage.report()
    assert "WARNING worker has started" in line_of(supervisor.stderr)
    os.kill(child.pid, signal.SIGKILL)
    reported = line_of(supervisor.stderr)
    assert "worker was killed by SIGKILL; restarting it" in reported
    assert str(stage.data / "log/worker.log") in reported


@linux_only
def test_a_killed_supervisor_leaves_no_child(stage: Stage) -> None:
    """The kernel ends every child, even one that ignores SIGTERM."""
    supervisor = stage.supervisor([stage.child("api"), stage.child("worker", "ignore")])
    children = stage.reports(2)
    supervisor.kill()
    for child in children.values():
        assert child.says() == ""
        assert process_table.wait_gone(child.pid, PATIENCE_S)


def test_ctrl_c_stops_the_children_in_their_order(stage: Stage) -> None:
    """A child is stopped after the one before it has ended; the supervisor exits with 0."""
    supervisor = stage.supervisor(
        [stage.child("api", "ignore"), stage.child("worker"), stage.child("upkeep")]
    )
    children = stage.reports(3)
    os.killpg(supervisor.pid, signal.SIGINT)
    assert children["api"].says() == "api stopping"
    assert process_table.start_token(children["worker"].pid) is not None
    os.kill(children["api"].pid, signal.SIGKILL)
    assert children["worker"].says() == "worker stopping"
    assert children["upkeep"].says() == "upkeep stopping"
    assert supervisor.wait(PATIENCE_S) == 0
    assert list((stage.data / "run").glob("*.pid")) == []


def test_second_ctrl_c_does_not_wait(stage: Stage) -> None:
    """A child that ignores SIGTERM ends long before the drain time of ten minutes."""
    supervisor = stage.supervisor([stage.child("api", "ignore")], drain_s=600)
    child = stage.report()
    supervisor.send_signal(signal.SIGINT)
    assert child.says() == "api stopping"
    supervisor.send_signal(signal.SIGINT)
    assert child.says() == ""
    assert supervisor.wait(PATIENCE_S) == 0


def test_a_child_that_ignores_the_request_is_killed_when_the_drain_time_is_over(
    stage: Stage,
) -> None:
    # Long enough for a child on a busy machine to say that it was asked.
    supervisor = stage.supervisor(
        [stage.child("api", "ignore"), stage.child("worker")], drain_s=3.0
    )
    children = stage.reports(2)
    supervisor.terminate()
    assert children["api"].says() == "api stopping"
    assert children["api"].says() == ""
    assert supervisor.wait(PATIENCE_S) == 0


def test_two_supervisors_cannot_share_a_folder(stage: Stage) -> None:
    """The second exits with the process id of the first and advice; the first continues."""
    first = stage.supervisor([stage.child("api")])
    child = stage.report()
    second = stage.supervisor([stage.child("api")])
    said = error_text(second)
    assert second.returncode == 1
    assert "DataInUseError" in said
    assert f"process {first.pid}" in said
    assert "ROOMS_DATA" in said
    assert process_table.start_token(child.pid) is not None


def test_a_child_that_cannot_start_ends_the_start_with_the_end_of_its_log(
    stage: Stage, tmp_path: Path
) -> None:
    may_break = tmp_path / "may-break"
    broken = ("broken", [sys.executable, "-c", BROKEN, str(may_break)])
    supervisor = stage.supervisor([stage.child("api"), broken])
    child = stage.report()
    may_break.touch()
    said = error_text(supervisor)
    assert supervisor.returncode == 1
    assert "StartError: broken died 3 times before it was ready" in said
    assert "no such setting: X" in said
    assert process_table.wait_gone(child.pid, PATIENCE_S)


def test_missing_program_is_reported(stage: Stage) -> None:
    supervisor = stage.supervisor([("broken", ["/nowhere/at/all"])])
    assert "/nowhere/at/all: No such file or directory" in error_text(supervisor)


def test_grandchildren_go_with_their_parent(stage: Stage) -> None:
    """A killed child that had a process of its own leaves none behind."""
    name, argv = stage.child("api")
    _, inner = stage.child("grandchild")
    script = f"import subprocess; subprocess.Popen({inner!r}); subprocess.run({argv!r})"
    stage.supervisor([(name, [sys.executable, "-c", script])])
    first = stage.reports(2)
    record = stage.data / "run/api.pid"
    until(lambda: process_table.read_pid_file(record) is not None, "the record of the parent")
    parent = process_table.read_pid_file(record)
    assert parent is not None
    os.kill(parent.pid, signal.SIGKILL)
    assert first["grandchild"].says() == ""
    assert set(stage.reports(2)) == {"api", "grandchild"}
