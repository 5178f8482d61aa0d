"""Test the parts of the supervisor: log files, process ids, locks, readiness, settings."""

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooms.local import (
    Child,
    DataInUseError,
    embedded_url,
    http_ready,
    postgres,
    process_table,
)
from rooms.local.child_process import ensure_can_listen
from rooms.local.errors import StartError
from rooms.local.log_file import RotatingLog
from rooms.local.pidfile import MARKER_VARIABLE, child_marker, kill_leftovers, lock_data_dir
from rooms.local.postgres import find_binaries

WAITING = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that waits for the end of its input."""
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE) as process:
        yield process


@pytest.fixture
def echoed() -> list[str]:
    return []


@pytest.fixture
def book(tmp_path: Path, echoed: list[str]) -> Iterator[RotatingLog]:
    book = RotatingLog(tmp_path / "api.log", echo=echoed.append, limit_bytes=100)
    yield book
    book.close()


def test_log_keeps_every_line_and_echoes_warnings(book: RotatingLog, echoed: list[str]) -> None:
    lines = [
        "GET / 200",
        "2026-01-01 WARNING disk is slow",
        '{"level": "error", "event": "x"}',
        "an error of spelling",
    ]
    for line in lines:
        book.write(line)
    assert book.path.read_text().splitlines() == lines
    assert echoed == lines[1:3]
    assert book.tail().splitlines() == lines


def test_full_log_is_rotated(book: RotatingLog) -> None:
    for number in range(30):
        book.write(f"line {number:05}")
    older = book.path.with_name("api.log.1")
    assert book.path.stat().st_size <= 120
    assert older.stat().st_size <= 120
    assert book.path.read_text().endswith("line 00029\n")
    assert len(book.tail().splitlines()) == 20


def test_a_log_goes_on_when_its_rotation_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No inode is left, or no space: the child's output must be read all the same."""
    path = tmp_path / "child.log"
    book = RotatingLog(path, echo=lambda _: None, limit_bytes=10)

    def full(self: Path, *given: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    book.write("more than ten bytes")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        for number in range(3):
            book.write(f"line {number}")
    book.write("after it")
    book.write("and on")
    book.close()
    old = path.with_name("child.log.1").read_text().splitlines()
    assert old == ["more than ten bytes", "line 0", "line 1", "line 2"]
    assert path.read_text().splitlines() == ["after it", "and on"]


async def test_log_reads_a_pipe_to_its_end(book: RotatingLog) -> None:
    reading, writing = os.pipe()
    async with book.copy_output(os.fdopen(reading, "rb", buffering=0), drain_s=10):
        os.write(writing, b"first\nsec")
        os.write(writing, b"ond\nno end of line")
        os.close(writing)
    assert book.path.read_text() == "first\nsecond\nno end of line\n"


def test_process_is_identified_by_id_start_and_command(
    waiting: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process_table.write_pid_file(tmp_path / "x.pid", waiting.pid, WAITING)
    seen = process_table.read_pid_file(tmp_path / "x.pid")
    assert seen is not None
    assert seen.is_running()
    assert not replace(seen, started="at another time").is_running()
    assert not replace(seen, argv=("python", "-c", "pass")).is_running()
    waiting.kill()
    waiting.wait()
    assert not seen.is_running()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "started": "", "argv": []}']
)
def test_unreadable_pid_file_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.pid").write_text(text)
    assert process_table.read_pid_file(tmp_path / "x.pid") is None


def test_children_of_an_earlier_supervisor_are_killed(
    waiting: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    process_table.write_pid_file(tmp_path / "worker.pid", waiting.pid, WAITING)
    kill_leftovers(tmp_path, child_marker(tmp_path))
    assert waiting.wait(60) == -9
    assert list(tmp_path.iterdir()) == []


def test_reused_process_id_is_not_killed(waiting: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The record is of an earlier start: the process with this id is another."""
    process_table.write_pid_file(tmp_path / "worker.pid", waiting.pid, WAITING)
    path = tmp_path / "worker.pid"
    path.write_text(path.read_text().replace('"started": "', '"started": "x'))
    kill_leftovers(tmp_path, child_marker(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert waiting.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="environments of others are read from /proc")
def test_grandchildren_are_found_by_their_environment(tmp_path: Path) -> None:
    marked = {**os.environ, MARKER_VARIABLE: child_marker(tmp_path)}
    with (
        subprocess.Popen(WAITING, stdin=subprocess.PIPE, env=marked) as left,
        subprocess.Popen(
            WAITING, stdin=subprocess.PIPE, env={**marked, MARKER_VARIABLE: "/elsewhere"}
        ) as other,
    ):
        kill_leftovers(tmp_path, child_marker(tmp_path))
        assert left.wait(60) == -9
        assert other.poll() is None


def test_data_folder_is_locked_once_and_released(tmp_path: Path) -> None:
    with (
        lock_data_dir(tmp_path),
        pytest.raises(DataInUseError, match=f"process {os.getpid()}"),
        lock_data_dir(tmp_path),
    ):
        pass
    with lock_data_dir(tmp_path) as run:
        assert run == tmp_path / "run"


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"", False),
        (b"nonsense", False),
    ],
)
async def test_only_200_is_ready(answer: bytes, *, ready: bool) -> None:
    async with answering(answer) as port:
        assert await http_ready(f"http://127.0.0.1:{port}/health/ready")() is ready


async def test_address_in_use_is_named(unused_tcp_port: int) -> None:
    async with answering(b"") as port:
        child = Child(name="serve", argv=[], listens_on=("127.0.0.1", port))
        with pytest.raises(StartError, match=f"127.0.0.1:{port} is in use by another process"):
            await ensure_can_listen(child)
    await ensure_can_listen(Child(name="serve", argv=[], listens_on=("127.0.0.1", unused_tcp_port)))
    await ensure_can_listen(Child(name="worker", argv=[]))


async def test_address_of_another_machine_is_refused() -> None:
    child = Child(name="serve", argv=[], listens_on=("192.0.2.1", 8080))
    with pytest.raises(StartError, match=r"cannot listen on 192\.0\.2\.1:8080: .*ROOMS_LISTEN"):
        await ensure_can_listen(child)


async def test_closed_port_is_not_ready(unused_tcp_port: int) -> None:
    assert await http_ready(f"http://127.0.0.1:{unused_tcp_port}/health/ready")() is False


@pytest.mark.parametrize(
    ("memory_mib", "shared"), [(100, "32MB"), (1024, "128MB"), (2048, "256MB"), (65536, "256MB")]
)
def test_small_machines_get_small_buffers(memory_mib: int, shared: str) -> None:
    chosen = postgres.postgres_settings(find_binaries(), memory_mib * 1024 * 1024)
    assert chosen["shared_buffers"] == shared
    assert chosen["fsync"] == chosen["synchronous_commit"] == chosen["full_page_writes"] == "on"
    assert chosen["wal_init_zero"] == "off"
    assert chosen["backend_flush_after"] == "512kB"
    assert chosen["bgwriter_lru_maxpages"] == "1000"
    assert f"shared_buffers = '{shared}'\n" in postgres.render_settings(chosen)


def test_address_depends_only_on_the_folder(tmp_path: Path) -> None:
    data = tmp_path / "a b"
    assert embedded_url(data) == f"postgresql://rooms@/rooms?host={tmp_path}/a%20b/socket&port=5432"
    deep = tmp_path / ("x" * 100)
    assert postgres.socket_dir(deep) == postgres.socket_dir(deep)
    assert postgres.socket_dir(deep) != postgres.socket_dir(deep / "y")
    assert len(os.fsencode(postgres.socket_dir(deep))) <= 88
