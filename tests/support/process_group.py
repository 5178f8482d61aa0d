"""Start single processes of Rooms on one database, some of which kill themselves."""

import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from rooms.cli.database import create_key
from rooms.domain.state_machine import Scope
from rooms.local.services import free_port
from tests.support import stall_guard
from tests.support.api_client import Client, is_live, plain_client
from tests.support.polling import PATIENCE_S, until
from tests.support.service import ROOT, START_S, environment_of


@dataclass
class Process:
    """Hold one process of the crew; `url` is set for an API."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    def await_death(self) -> None:
        """Wait until the process has killed itself."""
        assert self.process.wait(PATIENCE_S) == -signal.SIGKILL, self.reported()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def reported(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


@dataclass(slots=True, kw_only=True)
class Crew(Client):
    """Hold an API that stays, and the processes that a test starts."""

    url: str
    folder: Path
    _database_url: str
    broker: Mapping[str, str] = field(default_factory=dict)
    """Settings for another broker and other stores."""
    _running: list[Process] = field(default_factory=list)
    _standing: list[Process] = field(default_factory=list)

    @property
    def database_url(self) -> str:
        return self._database_url

    def start(
        self, command: str, point: str | None = None, *, options: Sequence[str] = ()
    ) -> Process:
        """Start one process of this command; with a point, one that kills itself there."""
        port = free_port()
        module = (
            ["rooms", command, *options]
            if point is None
            else ["tests.support.crash_points", command, point]
        )
        log = self.folder / f"{command}-{len(self._running)}.log"
        with log.open("wb") as writing:
            process = subprocess.Popen(
                [sys.executable, "-m", *module],
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                cwd=ROOT,
                env=self._environment(port),
            )
        started = Process(process, log, f"http://127.0.0.1:{port}")
        self._running.append(started)
        if command == "serve":
            self._await_live(started)
        return started

    def end_all_but(self, kept: Process) -> None:
        """Kill the processes that the test has started, except `kept`."""
        for process in [
            one for one in self._running if one is not kept and one not in self._standing
        ]:
            process.kill()
            self._running.remove(process)

    def end(self) -> None:
        """Kill every process."""
        for process in self._running:
            process.kill()
        self.http.close()

    def stand(self, process: Process) -> None:
        """Keep a process from test to test."""
        self._standing.append(process)

    @contextmanager
    def without(self, standing: int = 0) -> Iterator[None]:
        """Suspend one of the kept processes meanwhile."""
        frozen = self._standing[standing].process
        frozen.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            frozen.send_signal(signal.SIGCONT)

    def at(self, process: Process) -> httpx.Client:
        """Return a client of another API than the one that stays."""
        return plain_client(base_url=process.url, headers=dict(self.http.headers), timeout=60)

    def _environment(self, port: int) -> Mapping[str, str]:
        return {
            **environment_of(self.folder, port),
            "DATABASE_URL": self.database_url,
            "ROOMS_ALLOW_TARGETS": "127.0.0.0/8",
            # Longer than any test: a claim passes on because its worker died, not by its expiry.
            "ROOMS_CLAIM_TTL_S": "3600",
            **self.broker,
        }

    def _await_live(self, process: Process) -> None:
        def live() -> bool:
            assert process.process.poll() is None, process.reported()
            return is_live(process.url)

        until(live, "the API", within_s=START_S)


@contextmanager
def assembled(
    folder: Path,
    database_url: str,
    broker_url: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[Crew, Process]]:
    """Start an API and yield its crew, with a relay if there is another broker.

    `environment` holds more settings for all processes.
    """
    _, key = create_key(database_url, "default", "crew", [Scope.ADMIN])
    broker = (
        {}
        if broker_url is None
        else {"BROKER_URL": broker_url, "ROOMS_CLIENT": f"crew-{secrets.token_hex(4)}"}
    )
    crew = Crew(
        url="", folder=folder, _database_url=database_url, broker={**broker, **(environment or {})}
    )
    try:
        if broker:
            crew.stand(crew.start("relay"))
        api = crew.start("serve")
        crew.url = api.url
        crew.http.base_url = api.url
        crew.http.headers["authorization"] = f"Bearer {key}"
        yield crew, api
        crew.end_all_but(api)
        stall_guard.assert_none_logged(*folder.glob("*.log"))
    finally:
        crew.end()
