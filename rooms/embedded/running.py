"""A server as a child of this very process, with everything that may be done to it."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rooms.embedded.artemis import EmbeddedArtemis
from rooms.embedded.errors import StartError
from rooms.embedded.identity import launched
from rooms.embedded.zookeeper import EmbeddedZookeeper

_START_TIMEOUT_S = 90.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.03
# Below what Linux and others take for outgoing connections.
_LOWEST_PORT, _PORTS = 10_240, 20_000
_TRIES = 100


class Server(Protocol):
    """What can be started: a program, the folder of what must outlive it, and how to ask whether it serves."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def folder(self) -> Path: ...
    @property
    def records(self) -> Path: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    @property
    def stop_signal(self) -> signal.Signals: ...
    def prepare(self) -> None: ...
    def argv(self) -> list[str]: ...
    def answers(self) -> bool: ...


class Running:
    """A server for the length of a test, to be started, stopped, killed, frozen and robbed of its records.

    Every call blocks. The server ends with the thread that started it. The port stays the same over every restart.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def log(self) -> Path:
        """What it printed, over all its lives."""
        return self._server.folder / "server.log"

    @property
    def pid(self) -> int:
        """Its number. Raises StartError while it is not running."""
        if self._process is None:
            raise StartError(f"{self._server.name} is not running")
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it serves. Nothing when it runs. Raises StartError with its log when it does not come up."""
        if self._process is not None:
            return
        self._server.prepare()
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                launched(self._server.argv(), death=signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=self._server.folder,
                env=dict(self._server.environment),
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._server.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise StartError(f"{self._server.name} did not start:\n{self.log.read_text(errors='replace')}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Ask it to end, and insist when it does not. Nothing when it is not running."""
        if self._process is None:
            return
        self.thaw()
        self._process.send_signal(self._server.stop_signal)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """SIGKILL. Nothing when it is not running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """SIGKILL and a start on the same records."""
        self.kill()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nobody answers."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """SIGKILL and the loss of every record; `start` begins anew."""
        self.kill()
        shutil.rmtree(self._server.records, ignore_errors=True)


def free_port() -> int:
    """A port of loopback that nobody uses at the moment, nor will as the near end of a connection: it must be there for a restart."""
    for _ in range(_TRIES):
        port = _LOWEST_PORT + secrets.randbelow(_PORTS)
        if is_free(port):
            return port
    raise StartError(f"no port of {_LOWEST_PORT} to {_LOWEST_PORT + _PORTS - 1} is free on loopback")


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def running(server: Server) -> Iterator[Running]:
    """Start the server, and stop it in the end. Its folder stays."""
    handle = Running(server)
    try:
        handle.start()
        yield handle
    finally:
        handle.stop()


def own_artemis(
    data: Path, *, heap_mib: int = 512, quick: bool = True, properties: Mapping[str, str] | None = None
) -> EmbeddedArtemis:
    """A broker on a free port with a new password, not started yet. Raises MissingError without Java 17 or later."""
    return EmbeddedArtemis(
        data=data,
        port=free_port(),
        password=secrets.token_hex(8),
        heap_mib=heap_mib,
        quick=quick,
        properties=properties or {},
    )


def own_zookeeper(data: Path) -> EmbeddedZookeeper:
    """A ZooKeeper on a free port, not started yet. Raises MissingError without Java 17 or later."""
    return EmbeddedZookeeper(data=data, port=free_port())


@contextmanager
def temporary_artemis(data: Path) -> Iterator[str]:
    """Start a broker on the folder, give its address, and stop it in the end. The folder stays.

    Raises MissingError, FetchError or StartError.
    """
    with running(own_artemis(data)) as handle:
        yield handle.url


@contextmanager
def temporary_zookeeper(data: Path) -> Iterator[str]:
    """Start a ZooKeeper on the folder, give its address, and stop it in the end. The folder stays.

    Raises MissingError, FetchError or StartError.
    """
    with running(own_zookeeper(data)) as handle:
        yield handle.url
