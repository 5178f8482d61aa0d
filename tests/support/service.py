"""Start the whole service as a user does.

`python -m rooms dev` on a data folder and a port of its own.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from rooms.local import process_table
from rooms.local.services import free_port
from tests.support import stall_guard
from tests.support.api_client import Client
from tests.support.polling import until

ROOT: Final = Path(__file__).parents[2]
# The two shapes of an installation: everything on PostgreSQL, or queues on Artemis and leadership
# on ZooKeeper.
EMBEDDED: Final = "embedded"
FULL: Final = "full"
PROCESSES: Final = ("serve", "worker", "upkeep", "postgres")
START_S: Final = 180.0
TAKEOVER_S: Final = 5.0
"""The documentation promises that a standby takes over within it from a process that hangs."""
STOP_S: Final = 45.0
# What would make it another service than the one that `make run` starts.
_FOREIGN: Final = frozenset({"DATABASE_URL", "BROKER_URL", "ELECTION_URL", "MAGAZINE_URL"})


def descendants(root: int) -> dict[int, str]:
    """Every process under `root`, itself included, with the moment of its start."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: since for pid in found if (since := process_table.start_token(pid)) is not None}


@dataclass(slots=True, kw_only=True)
class Service(Client):
    """A running service. `http` speaks to it with the admin key."""

    data: Path
    port: int
    process: subprocess.Popen[bytes]
    output: Path
    key: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def database_url(self) -> str:
        return (self.data / "run" / "database-url").read_text().strip()

    def logs(self) -> list[Path]:
        """A file for each process."""
        return sorted((self.data / "log").glob("*.log"))

    def pid(self, name: str) -> int | None:
        """The number of one of PROCESSES; None while it is being started again."""
        seen = process_table.read_pid_file(self.data / "run" / f"{name}.pid")
        return (
            seen.pid
            if seen is not None and process_table.start_token(seen.pid) == seen.started
            else None
        )

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """End one of PROCESSES by a signal; the number it had."""
        pid = until(lambda: self.pid(name), f"{name} to run")
        os.kill(pid, number)
        assert process_table.wait_gone(pid, STOP_S)
        return pid

    def await_another(self, name: str, killed: int) -> int:
        """The number of the process that has taken the killed one's place."""

        def another() -> int | None:
            pid = self.pid(name)
            return None if pid == killed else pid

        return until(another, f"{name} to be started again")

    def await_ready(self, *, without: Collection[str] = (), within_s: float = START_S) -> None:
        """Until every part is up, but for those it has to do `without`."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(
                    f"rooms dev ended with code {self.process.returncode}:\n{self.reported()}"
                )
            try:
                answer = self.http.get("/health/ready")
            except httpx.TransportError:
                return False
            return answer.status_code == httpx.codes.OK and set(answer.json()["degraded"]) <= set(
                without
            )

        until(ready, "the service to be ready", within_s=within_s)

    def reported(self) -> str:
        """The end of what `rooms dev` has written."""
        return self.output.read_text(errors="replace")[-6000:]

    def stop(self) -> None:
        """Ctrl-C: everything ends, cleanly, and nothing is left."""
        family = descendants(self.process.pid)
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(STOP_S) == 0, self.reported()
        left = {pid for pid, since in family.items() if process_table.start_token(pid) == since}
        assert not left, f"{left} of {family} outlived rooms dev"


def environment_of(data: Path, port: int) -> dict[str, str]:
    """This process's environment with the service's own place in it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "ROOMS_CACHE" or (name not in _FOREIGN and not name.startswith("ROOMS_"))
    }
    return {
        **kept,
        "ROOMS_DATA": str(data),
        "ROOMS_LISTEN": f"127.0.0.1:{port}",
        "PYTHONPATH": str(ROOT),
    }


def start(
    data: Path,
    *,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
    command: Sequence[str] = ("dev",),
) -> Service:
    """A service that is being started on `data`, by `rooms dev` or another command of its kind."""
    port = port or free_port()
    output = data.with_suffix(".output")
    with output.open("ab") as writing:
        process = subprocess.Popen(
            [sys.executable, "-m", "rooms", *command],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            cwd=data.parent,
            env={**environment_of(data, port), **(settings or {})},
            start_new_session=True,
        )
    service = Service(data=data, port=port, process=process, output=output)
    service.http.base_url = service.url
    return service


@contextmanager
def running(
    folder: Path,
    *,
    settings: Mapping[str, str] | None = None,
    command: Sequence[str] = ("dev",),
    without: Collection[str] = (),
    may_stall: bool = False,
) -> Iterator[Service]:
    """Run a service on a new data folder inside `folder`, all parts up except those in `without`.

    Stop it by Ctrl-C afterwards unless it is down already. Fail where an event loop was blocked, unless that is allowed.
    """
    service = start(folder / "rooms", settings=settings, command=command)
    try:
        try:
            until((service.data / "api-key").exists, "the admin key", within_s=START_S)
            service.key = (service.data / "api-key").read_text().strip()
            service.http.headers["authorization"] = f"Bearer {service.key}"
            service.await_ready(without=without)
            yield service
        finally:
            service.http.close()
        if service.process.poll() is None:
            service.stop()
    finally:
        if service.process.poll() is None:
            service.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                service.process.wait(STOP_S)
        if service.process.poll() is None:
            service.process.kill()
            service.process.wait()
    if not may_stall:
        stall_guard.assert_none_logged(*service.logs())
