"""Test whose times are read, and for how long a file stays open."""

import sys
import threading
import time
from pathlib import Path

import pytest

from rooms.thread_schedule import ThreadSchedule
from tests.support.polling import until


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has schedstat")
def test_the_times_are_those_of_the_calling_thread() -> None:
    schedule = ThreadSchedule()
    before, _ = schedule.times_s()
    own_s = time.thread_time()
    while time.thread_time() - own_s < 0.2:
        pass
    after, waited_s = schedule.times_s()
    assert after - before == pytest.approx(time.thread_time() - own_s, abs=0.05)
    assert waited_s >= 0
    found: list[float] = []
    other = threading.Thread(target=lambda: found.append(ThreadSchedule().times_s()[0]))
    other.start()
    other.join()
    assert found[0] < after - before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has schedstat")
def test_a_deleted_schedule_keeps_no_file_open() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    schedules = [ThreadSchedule() for _ in range(20)]
    assert open_files() == before + 20
    del schedules
    assert open_files() == before


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has schedstat")
def test_the_times_of_a_thread_that_has_ended_are_unknown() -> None:
    schedules: list[ThreadSchedule] = []
    other = threading.Thread(target=lambda: schedules.append(ThreadSchedule()))
    other.start()
    other.join()
    # A joined thread has ended for Python, but not yet for Linux.
    task = Path(f"/proc/self/task/{other.native_id}")
    until(lambda: not task.exists(), "the thread's end")
    assert schedules[0].times_s() == (0.0, 0.0)


@pytest.mark.parametrize("content", [b"", b"12\n", b"no numbers here\n"])
def test_foreign_content_says_nothing(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulations of Linux differ in it, and publishing must go on."""
    monkeypatch.setattr("rooms.thread_schedule.os.pread", lambda *_: content)
    assert ThreadSchedule().times_s() == (0.0, 0.0)
