"""Run the embedded servers as children of this process, which stops, kills or erases them."""

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from rooms.local.errors import StartError
from rooms.local.java_servers import EmbeddedArtemis, EmbeddedZookeeper, JavaServer
from rooms.local.postgres import EmbeddedPostgres
from rooms.local.run_as import RunAs, launch_command
from rooms.local.services import free_port

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 20.0
_POSTGRES_START_TIMEOUT_S = 60.0
_POSTGRES_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.03


class TestServer:
    """Run a server for a test that starts, stops, kills, suspends or erases it.

    Every call blocks. The server ends with the thread that started it. Its port stays the same over
    restarts.
    """

    __test__: ClassVar[bool] = False  # pytest would collect it by its name

    def __init__(self, server: JavaServer) -> None:
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def log(self) -> Path:
        """Return the path of its output, over all restarts."""
        return self._server.folder / "server.log"

    @property
    def pid(self) -> int:
        """Return its process id. Raise StartError if it is not running."""
        if self._process is None:
            raise StartError(f"{self._server.name} is not running")
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it is ready. Does nothing if it runs.

        Raises StartError with its log if it does not become ready.
        """
        if self._process is not None:
            return
        self._server.prepare()
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                launch_command(self._server.argv(), parent_death_signal=signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=self._server.folder,
                env=dict(self._server.environment),
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._server.is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise StartError(
                    f"{self._server.name} did not start:\n{self.log.read_text(errors='replace')}"
                )
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Stop the server, or kill it if that takes too long. Does nothing if it does not run."""
        if self._process is None:
            return
        self.resume()
        self._process.send_signal(self._server.stop_signal)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """Send SIGKILL. Does nothing if it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Send SIGKILL, and start again on the same data."""
        self.kill()
        self.start()

    def suspend(self) -> None:
        """Send SIGSTOP: connections stay open, without answers."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def erase(self) -> None:
        """Send SIGKILL and delete the data. The next `start` begins with none."""
        self.kill()
        shutil.rmtree(self._server.data_dir, ignore_errors=True)


@contextmanager
def run_server(server: JavaServer) -> Iterator[TestServer]:
    """Start the server, and stop it at the end. Keeps its folder."""
    handle = TestServer(server)
    try:
        handle.start()
        yield handle
    finally:
        handle.stop()


def make_artemis(
    data: Path,
    *,
    heap_mib: int = 512,
    fast_start: bool = True,
    properties: Mapping[str, str] | None = None,
) -> EmbeddedArtemis:
    """Describe a broker with a free port and a new password. Raise MissingError without Java."""
    return EmbeddedArtemis(
        data=data,
        port=free_port(),
        password=secrets.token_hex(8),
        heap_mib=heap_mib,
        fast_start=fast_start,
        properties=properties or {},
    )


def make_zookeeper(data: Path) -> EmbeddedZookeeper:
    """Describe a ZooKeeper with a free port. Raise MissingError without Java."""
    return EmbeddedZookeeper(data=data, port=free_port())


@contextmanager
def temporary_artemis(data: Path) -> Iterator[str]:
    """Start a broker on the folder, yield its address, and stop it. Keeps the folder.

    Raises MissingError, FetchError or StartError.
    """
    with run_server(make_artemis(data)) as handle:
        yield handle.url


@contextmanager
def temporary_zookeeper(data: Path) -> Iterator[str]:
    """Start a ZooKeeper on the folder, yield its address, and stop it. Keeps the folder.

    Raises MissingError, FetchError or StartError.
    """
    with run_server(make_zookeeper(data)) as handle:
        yield handle.url


@contextmanager
def temporary_postgres(data: Path, *, run_as: RunAs | None = None) -> Iterator[str]:
    """Start PostgreSQL on the folder, yield the address of its database, and stop it.

    Keeps the folder. Call it from the main thread: the server ends with the thread that started it.
    `run_as` is chosen if it is not given. Raises StartError if the server does not answer within a
    minute.
    """
    server = EmbeddedPostgres(data, run_as=run_as)
    server.prepare()
    log = data / "postgres.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            server.command(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd="/",
            env=server.environment,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _POSTGRES_START_TIMEOUT_S
        while not server.is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise StartError(f"PostgreSQL did not start:\n{log.read_text()}")
            time.sleep(_POLL_S)
        yield server.url
    finally:
        process.send_signal(server.stop_signal)
        try:
            process.wait(_POSTGRES_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_POSTGRES_STOP_TIMEOUT_S)
