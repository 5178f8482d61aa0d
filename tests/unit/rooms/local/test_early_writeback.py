"""Test which files are written early, and when."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from rooms.local import Supervisor
from rooms.local import early_writeback as module
from rooms.local import supervisor as supervisor_module
from rooms.local.early_writeback import (
    MAX_COLLECTED_BYTES,
    EarlyWriteback,
    linux_start_write,
    writing_early,
)
from tests.support.polling import until

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="Linux collects pages like this")


class Written:
    """Record the files whose writes are started."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.failing: set[str] = set()

    def start(self, file: int) -> None:
        name = Path(f"/proc/self/fd/{file}").readlink().name
        if name in self.failing:
            raise OSError(22, "Invalid argument")
        self.names.append(name)

    def take(self) -> list[str]:
        taken, self.names = self.names, []
        return sorted(taken)


@pytest.fixture
def written() -> Written:
    return Written()


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    tables = tmp_path / "base" / "5"
    tables.mkdir(parents=True)
    return tables


@pytest.fixture(autouse=True)
def scans_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SCAN_EVERY_S", 0.0)


def writeback(
    folder: Path, written: Written, *, collected: int = MAX_COLLECTED_BYTES
) -> EarlyWriteback:
    return EarlyWriteback(folder, written.start, collected_bytes=lambda: collected)


@LINUX_ONLY
def test_files_that_changed_since_the_last_pass_are_written(
    tmp_path: Path, tables: Path, written: Written
) -> None:
    old = tables / "16384"
    old.write_bytes(b"0")
    os.utime(old, (1, 1))
    early = writeback(tmp_path, written)
    for name in ("16385", "16385_fsm", "16386.1"):
        (tables / name).write_bytes(b"0")
    time.sleep(0.2)
    assert early.run_once() == 3
    assert written.take() == ["16385", "16385_fsm", "16386.1"]
    time.sleep(0.2)
    assert early.run_once() == 0
    old.write_bytes(b"1")
    assert early.run_once() == 1
    assert written.take() == ["16384"]


@LINUX_ONLY
def test_between_two_scans_only_files_that_were_changing_are_read(
    tmp_path: Path, tables: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SCAN_EVERY_S", 3_600.0)
    early = writeback(tmp_path, written)
    for name in ("16384", "16385"):
        (tables / name).write_bytes(b"0")
    time.sleep(0.2)
    assert early.run_once() == 2
    assert written.take() == ["16384", "16385"]
    time.sleep(0.2)
    for name in ("16384", "16386"):
        (tables / name).write_bytes(b"1")
    time.sleep(0.2)
    assert early.run_once() == 1
    assert written.take() == ["16384"]
    early._next_scan_s = 0.0
    assert early.run_once() == 2, "all that changed since the last scan, not since the last pass"
    assert written.take() == ["16384", "16386"]


@LINUX_ONLY
def test_nothing_is_done_while_linux_has_collected_little(
    tmp_path: Path, tables: Path, written: Written
) -> None:
    collected = MAX_COLLECTED_BYTES - 1
    early = EarlyWriteback(tmp_path, written.start, collected_bytes=lambda: collected)
    (tables / "16384").write_bytes(b"0")
    assert early.run_once() == 0
    time.sleep(0.2)
    collected += 1
    assert early.run_once() == 1, "it changed since the last pass that wrote"


@LINUX_ONLY
def test_what_is_no_table_or_fails_hinders_no_other(
    tmp_path: Path, tables: Path, written: Written
) -> None:
    early = writeback(tmp_path, written)
    (tmp_path / "elsewhere").write_bytes(b"0")
    (tables / "link").symlink_to(tmp_path / "elsewhere")
    (tables / "folder").mkdir()
    (tables.parent / "file").write_bytes(b"0")
    os.mkfifo(tables / "fifo")
    (tables / "16384").write_bytes(b"0")
    (tables / "16385").write_bytes(b"0")
    written.failing.add("16384")
    assert early.run_once() == 1
    assert written.take() == ["16385"]


def test_a_folder_that_is_not_there_yet_has_nothing_to_write(
    tmp_path: Path, written: Written
) -> None:
    assert writeback(tmp_path / "later", written).run_once() == 0


@LINUX_ONLY
def test_linux_starts_the_write_of_a_file(tmp_path: Path) -> None:
    start = linux_start_write()
    assert start is not None
    with (tmp_path / "table").open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        start(file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        start(1_000_000)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    passes: list[int] = []

    def run_once(_self: EarlyWriteback) -> int:
        passes.append(threading.get_ident())
        if len(passes) == 1:
            raise PermissionError("the folder is another user's")
        return 0

    monkeypatch.setattr(module, "_EVERY_S", 0.01)
    monkeypatch.setattr(EarlyWriteback, "run_once", run_once)
    return passes


@LINUX_ONLY
def test_passes_follow_one_another_in_one_thread_until_the_end(
    tmp_path: Path, quick: list[int]
) -> None:
    """Also after one that failed."""
    with writing_early(tmp_path):
        until(lambda: len(quick) >= 3, "three passes")
    count = len(quick)
    assert len(set(quick)) == 1
    assert quick[0] != threading.get_ident()
    assert not [thread for thread in threading.enumerate() if "writeback" in thread.name]
    time.sleep(0.05)
    assert len(quick) == count


def test_systems_other_than_linux_do_nothing(
    tmp_path: Path, quick: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "linux_start_write", lambda: None)
    with writing_early(tmp_path):
        time.sleep(0.05)
    assert quick == []


async def test_the_supervisor_writes_the_tables_of_the_server_that_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SeenError(Exception):
        pass

    def seen(folder: Path) -> None:
        assert folder == tmp_path / "postgres"
        raise SeenError

    monkeypatch.setattr(supervisor_module, "writing_early", seen)
    with pytest.raises(SeenError):
        await Supervisor(data=tmp_path, children=[], environment={}).run()
