"""The whole of Rooms as a user starts it, `python -m rooms dev`, and what its processes use."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.bench.processes import Memory, Process, cpu_s, grouped, memory, reset_peaks, under
from tests.support.local_servers import TestServer

ROOT: Final = Path(__file__).parents[2]
PARTS: Final = ("api", "worker", "upkeep", "supervisor", "postgres")
RELAYED: Final = ("relay", "artemis")
"""Parts that are there as well where Artemis is the broker."""
READY_TIMEOUT_S: Final = 120.0
EVENT_TYPE: Final = "order.created"
_COMMANDS = {"serve": "api", "worker": "worker", "upkeep": "upkeep", "relay": "relay"}
# What would make the service another one than `make run` starts.
_FOREIGN = (
    "DATABASE_URL",
    "BROKER_URL",
    "ELECTION_URL",
    "MAGAZINE_URL",
    "ROOMS_LISTEN",
    "ROOMS_DATA",
    "ROOMS_API_KEY",
    "ROOMS_URL",
)


class BenchError(Exception):
    """A figure cannot be had, or would be worth nothing."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """CPU seconds by part, and which process was at work in each: a part that was started anew spoils a figure."""

    at: float
    cpu_s: Mapping[str, float]
    pids: Mapping[str, int]

    def since(self, earlier: "Usage") -> dict[str, float]:
        """CPU seconds by part from then to now. Raises BenchError when a part died in between."""
        died = [part for part in self.cpu_s if self.pids.get(part) != earlier.pids.get(part)]
        if died:
            raise BenchError(
                f"started anew while measuring: {', '.join(died)}; see the service's logs"
            )
        return {part: self.cpu_s[part] - earlier.cpu_s[part] for part in self.cpu_s}


@dataclass(slots=True)
class Service:
    """A running service.

    `api` speaks to it with its admin key, from this process. `artemis`: its broker, if it has one.
    """

    data: Path
    port: int
    process: subprocess.Popen[bytes]
    environment: Mapping[str, str]
    checkout: Path = ROOT
    artemis: TestServer | None = None
    key: str = ""
    api: httpx.Client = field(default_factory=httpx.Client)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def database_url(self) -> str:
        return (self.data / "run" / "database-url").read_text().strip()

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the processes of the service."""
        return PARTS if self.artemis is None else (*PARTS, *RELAYED)

    @property
    def output(self) -> Path:
        return self.data.with_suffix(".output")

    def restart(self) -> None:
        """`kill -9` of everything, Artemis apart, and a start on the same data, until it is ready."""
        found = self.groups()
        self.process.kill()  # first, or it would start the others anew
        for process in [
            process
            for part, processes in found.items()
            if part != "artemis"
            for process in processes
        ]:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = _begun(self.output, self.environment, self.checkout)
        _await_ready(self, self.output)

    def groups(self) -> dict[str, list[Process]]:
        """All processes by part."""
        groups = grouped(self.process.pid, self._part)
        if self.artemis is not None:
            groups["artemis"] = under(self.artemis.pid)
        return groups

    def usage(self) -> Usage:
        """Return the resource use of each part so far."""
        groups = self.groups()
        return Usage(
            at=time.time(),
            cpu_s={
                part: sum(process.cpu_s for process in groups.get(part, ())) for part in self.parts
            },
            pids={
                part: process.pid
                for part, processes in groups.items()
                for process in processes
                if part == "artemis" or self.process.pid in {process.pid, process.parent}
            },
        )

    def memory(self) -> dict[str, Memory]:
        return {part: memory(processes) for part, processes in self.groups().items()}

    def reset_peaks(self) -> None:
        for processes in self.groups().values():
            reset_peaks(processes)

    def cpu_s(self) -> float:
        return sum(
            cpu_s(process.pid) for processes in self.groups().values() for process in processes
        )

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST under /v1; the answer's JSON. Raises BenchError for anything but 2xx."""
        answer = self.api.post(f"/v1{path}", json=body)
        if not answer.is_success:
            raise BenchError(f"POST /v1{path}: {answer.status_code} {answer.text[:400]}")
        found: dict[str, Any] = answer.json()
        return found

    def room(self, name: str, *, event_types: tuple[str, ...] = (EVENT_TYPE,)) -> str:
        """Create a room with event types without schemas; return its id as used in paths."""
        policy = {"delivery_delay_ms": 1000, "delivery_delay_multiplier": 2, "delivery_attempts": 5}
        room = str(self.post("/rooms", {"name": name, **policy})["id"])
        for event_type in event_types:
            self.post(f"/rooms/{room}/event-types", {"name": event_type})
        return room

    def push(self, room: str, name: str, url: str, *, event_type: str = EVENT_TYPE) -> str:
        """A new PUSH subscription; its id."""
        reported = {
            "name": name,
            "type": "PUSH",
            "push_url": url,
            "event_types": [{"name": event_type}],
        }
        return str(self.post(f"/rooms/{room}/subscriptions", reported)["id"])

    def pull(self, room: str, name: str) -> str:
        """A new PULL subscription; its id."""
        return str(self.post(f"/rooms/{room}/subscriptions", {"name": name, "type": "PULL"})["id"])

    def counters(self) -> dict[str, float]:
        """Every sample of GET /metrics by name and labels as they are written there."""
        answer = self.api.get("/metrics")
        answer.raise_for_status()
        samples = (
            line.rpartition(" ") for line in answer.text.splitlines() if line and line[0] != "#"
        )
        return {name: float(value) for name, _, value in samples}

    def count(self, name: str, *labels: str) -> float:
        """The sum of a counter over all label sets that hold each of `labels`, written `name="value"`."""
        return sum(
            value
            for sample, value in self.counters().items()
            if sample.partition("{")[0] == name and all(label in sample for label in labels)
        )

    def _part(self, process: Process) -> str:
        if process.pid == self.process.pid:
            return "supervisor"
        return _COMMANDS.get(process.argv[-1], "postgres")


def _environment(data: Path, port: int, settings: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    return {**kept, "ROOMS_DATA": str(data), "ROOMS_LISTEN": f"127.0.0.1:{port}", **settings}


def _tail(path: Path) -> str:
    return f"{path.name} ends with:\n{path.read_text(errors='replace')[-2000:]}"


def _await_ready(service: Service, output: Path) -> None:
    until = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            if (
                service.api.get("/health/ready").status_code == httpx.codes.OK
                and (service.data / "api-key").exists()
            ):
                return
        except httpx.TransportError:
            pass
        if service.process.poll() is not None or time.monotonic() > until:
            tails = (
                _tail(path) for path in (output, *sorted((service.data / "log").glob("*.log")))
            )
            raise BenchError("\n".join(("the service did not get ready", *tails)))
        time.sleep(0.05)


def _begun(output: Path, environment: Mapping[str, str], checkout: Path) -> subprocess.Popen[bytes]:
    python = sys.executable if checkout == ROOT else str(checkout / ".venv" / "bin" / "python")
    with output.open("ab") as writing:
        return subprocess.Popen(
            [python, "-m", "rooms", "dev"],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            cwd=checkout,
            env=dict(environment),
            start_new_session=True,
        )


@contextmanager
def running(
    folder: Path,
    *,
    artemis: TestServer | None = None,
    settings: Mapping[str, str] | None = None,
    checkout: Path = ROOT,
) -> Iterator[Service]:
    """A service on a new data folder inside `folder`, ready, and down again afterwards; on `artemis`, where that is given.

    `checkout`: of the version to run, with its own .venv; the default is this one.
    """
    data = Path(tempfile.mkdtemp(prefix="rooms-", dir=folder))
    port = free_port()
    broker = {} if artemis is None else {"BROKER_URL": artemis.url}
    environment = _environment(data, port, {**broker, **(settings or {})})
    process = _begun(data.with_suffix(".output"), environment, checkout)
    service = Service(
        data=data,
        port=port,
        process=process,
        environment=environment,
        checkout=checkout,
        artemis=artemis,
    )
    service.api.base_url = service.url
    service.api.timeout = 60
    try:
        _await_ready(service, service.output)
        service.key = (data / "api-key").read_text().strip()
        service.api.headers["authorization"] = f"Bearer {service.key}"
        yield service
    finally:
        service.api.close()
        service.process.send_signal(signal.SIGTERM)
        try:
            service.process.wait(45)
        except subprocess.TimeoutExpired:
            # The second signal is understood as: do not wait any longer.
            service.process.send_signal(signal.SIGTERM)
            service.process.wait(30)
