"""The small parts under the supervisor: log files, processes by number, claims, readiness, settings."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rooms.embedded import DataInUseError, cluster, embedded_url, http_ready, processes, tuning
from rooms.embedded.binaries import locate
from rooms.embedded.claim import MARK, claimed, clear, mark
from rooms.embedded.logbook import Logbook

WAITING = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for the end of its input."""
    with subprocess.Popen(WAITING, stdin=subprocess.PIPE) as process:
        yield process


@pytest.fixture
def echoed() -> list[str]:
    return []


@pytest.fixture
def book(tmp_path: Path, echoed: list[str]) -> Iterator[Logbook]:
    book = Logbook(tmp_path / "api.log", echo=echoed.append, limit_bytes=100)
    yield book
    book.close()


def test_a_log_keeps_everything_and_repeats_warnings_alone(book: Logbook, echoed: list[str]) -> None:
    lines = ["GET / 200", "2026-01-01 WARNING disk is slow", '{"level": "error", "event": "x"}', "an error of spelling"]
    for line in lines:
        book.write(line)
    assert book.path.read_text().splitlines() == lines
    assert echoed == lines[1:3]
    assert book.tail().splitlines() == lines


def test_a_log_is_turned_over_when_it_is_full(book: Logbook) -> None:
    for number in range(30):
        book.write(f"line {number:05}")
    older = book.path.with_name("api.log.1")
    assert book.path.stat().st_size <= 120
    assert older.stat().st_size <= 120
    assert book.path.read_text().endswith("line 00029\n")
    assert len(book.tail().splitlines()) == 20


async def test_a_log_follows_a_pipe_to_its_last_words(book: Logbook) -> None:
    reading, writing = os.pipe()
    async with book.following(os.fdopen(reading, "rb", buffering=0), patience_s=10):
        os.write(writing, b"first\nsec")
        os.write(writing, b"ond\nno end of line")
        os.close(writing)
    assert book.path.read_text() == "first\nsecond\nno end of line\n"


def test_a_process_is_known_by_number_start_and_command(waiting: subprocess.Popen[bytes], tmp_path: Path) -> None:
    processes.record(tmp_path / "x.pid", waiting.pid, WAITING)
    seen = processes.recorded(tmp_path / "x.pid")
    assert seen is not None
    assert seen.lives()
    assert not replace(seen, started="at another time").lives()
    assert not replace(seen, argv=("python", "-c", "pass")).lives()
    waiting.kill()
    waiting.wait()
    assert not seen.lives()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "started": "", "argv": []}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.pid").write_text(text)
    assert processes.recorded(tmp_path / "x.pid") is None


def test_what_an_earlier_supervisor_left_is_ended(waiting: subprocess.Popen[bytes], tmp_path: Path) -> None:
    processes.record(tmp_path / "worker.pid", waiting.pid, WAITING)
    clear(tmp_path, mark(tmp_path))
    assert waiting.wait(60) == -9
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_was_given_out_again_is_spared(waiting: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The record is of another start: whatever has the number now is not ours."""
    processes.record(tmp_path / "worker.pid", waiting.pid, WAITING)
    path = tmp_path / "worker.pid"
    path.write_text(path.read_text().replace('"started": "', '"started": "x'))
    clear(tmp_path, mark(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert waiting.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="environments of others are read from /proc")
def test_grandchildren_without_a_record_are_found_by_their_mark(tmp_path: Path) -> None:
    marked = {**os.environ, MARK: mark(tmp_path)}
    with (
        subprocess.Popen(WAITING, stdin=subprocess.PIPE, env=marked) as left,
        subprocess.Popen(WAITING, stdin=subprocess.PIPE, env={**marked, MARK: "/elsewhere"}) as other,
    ):
        clear(tmp_path, mark(tmp_path))
        assert left.wait(60) == -9
        assert other.poll() is None


def test_a_folder_is_claimed_once_and_free_again_afterwards(tmp_path: Path) -> None:
    with claimed(tmp_path), pytest.raises(DataInUseError, match=f"process {os.getpid()}"), claimed(tmp_path):
        pass
    with claimed(tmp_path) as run:
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


async def test_nobody_there_is_not_ready(unused_tcp_port: int) -> None:
    assert await http_ready(f"http://127.0.0.1:{unused_tcp_port}/health/ready")() is False


@pytest.mark.parametrize(("memory_mib", "shared"), [(100, "32MB"), (1024, "128MB"), (2048, "256MB"), (65536, "256MB")])
def test_small_machines_get_small_buffers(memory_mib: int, shared: str) -> None:
    chosen = tuning.settings(locate(), memory_mib * 1024 * 1024)
    assert chosen["shared_buffers"] == shared
    assert chosen["fsync"] == chosen["synchronous_commit"] == chosen["full_page_writes"] == "on"
    assert f"shared_buffers = '{shared}'\n" in tuning.rendered(chosen)


def test_the_address_depends_on_the_folder_alone(tmp_path: Path) -> None:
    data = tmp_path / "a b"
    assert embedded_url(data) == f"postgresql://rooms@/rooms?host={tmp_path}/a%20b/socket&port=5432"
    deep = tmp_path / ("x" * 100)
    assert cluster.socket_folder(deep) == cluster.socket_folder(deep)
    assert cluster.socket_folder(deep) != cluster.socket_folder(deep / "y")
    assert len(os.fsencode(cluster.socket_folder(deep))) <= 88
