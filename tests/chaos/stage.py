"""Start the targets of chaos: servers of this run, proxies before them, and a service that connects only to proxies."""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from rooms.local import EmbeddedPostgres
from rooms.local.postgres import DATABASE_NAME, POSTGRES_PORT, SUPERUSER, socket_dir
from tests.chaos import preloads
from tests.support import service as services
from tests.support.local_servers import make_artemis, make_zookeeper, run_server
from tests.support.polling import until
from tests.support.service import PROCESSES, Service
from tests.support.small_disk import CannotMountError, mounted
from tests.support.tcp_proxy import Proxy, Target

EMBEDDED: Final = "embedded"
FULL: Final = "full"
SHAPES: Final = (EMBEDDED, FULL)
SERVER_START_S: Final = 120.0
_DISK_MIB: Final = 4096


class Server(Protocol):
    """A server that may be killed and frozen. Every call blocks."""

    def kill(self) -> None: ...
    def start(self) -> None: ...
    def suspend(self) -> None: ...
    def resume(self) -> None: ...


class Postgres:
    """PostgreSQL as a child of this process."""

    def __init__(self, data: Path, environment: Mapping[str, str]) -> None:
        self._server = EmbeddedPostgres(data)
        self._log = data.parent / "postgres.log"
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def socket(self) -> Path:
        return socket_dir(self._server.data) / f".s.PGSQL.{POSTGRES_PORT}"

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._server.prepare()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._server.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={**self._server.environment, **self._environment},
                start_new_session=True,
            )
        until(
            self._server.is_ready, f"PostgreSQL to answer; see {self._log}", within_s=SERVER_START_S
        )

    def kill(self) -> None:
        """SIGKILL the postmaster; its backends find out and end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Shut down fast."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(SERVER_START_S)
            self._process = None

    def suspend(self) -> None:
        """SIGSTOP the postmaster and every backend: connections stay open, and no statement ends."""
        for pid in self._family():
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        for pid in self._family():
            os.kill(pid, signal.SIGCONT)

    def _family(self) -> Sequence[int]:
        return [] if self._process is None else list(services.descendants(self._process.pid))


class Link:
    """The way from the service to one server, through a proxy on a loop of its own."""

    def __init__(self, name: str, target: Target, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self._proxy = Proxy(*target) if isinstance(target, tuple) else Proxy(path=target)
        self._loop = loop
        self._call(self._proxy.__aenter__())
        self.port = self._proxy.port

    def close(self) -> None:
        """End it."""
        self._call(self._proxy.__aexit__(None, None, None))

    def cut(self) -> None:
        """Break every connection; new ones are taken."""
        self._loop.call_soon_threadsafe(self._proxy.cut)

    def hold(self) -> None:
        """Answers do not arrive from now on."""
        self._loop.call_soon_threadsafe(self._proxy.hold_answers)

    def release(self) -> None:
        """Answers arrive again."""
        self._loop.call_soon_threadsafe(self._proxy.let_answers_go)

    def _call(self, what: "asyncio.Future[object] | object") -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(SERVER_START_S)  # type: ignore[arg-type]


@dataclass(slots=True, kw_only=True)
class Stage:
    """Everything that runs."""

    service: Service
    processes: tuple[str, ...]
    servers: dict[str, Server]
    links: dict[str, Link]
    slow_sync: preloads.SlowSync | str
    clocks: dict[str, preloads.SteppedClock | str]
    disk: Path | str
    """The mount point of PostgreSQL's disk; why there is none of its own."""
    database_url: str
    """The database without a proxy before it, for the accounting."""
    unavailable: list[str] = field(default_factory=list)


@contextmanager
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxies", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def staged(folder: Path, shape: str) -> Iterator[Stage]:
    """Start everything of a shape; end it afterwards."""
    with ExitStack() as stack:
        slow = preloads.slow_sync(folder)
        clocks = {name: preloads.stepped_clock(folder, name) for name in ("postgres", "service")}
        disk: Path | str
        try:
            disk = stack.enter_context(mounted(folder / "disk", mib=_DISK_MIB, mode="0755"))
        except CannotMountError as why:
            disk = f"a full disk takes a file system of its own: {why}"
        postgres = Postgres(
            folder / "disk" / "data", preloads.environment_of(slow, clocks["postgres"])
        )
        stack.callback(postgres.stop)
        postgres.start()
        loop = stack.enter_context(_loop())
        servers: dict[str, Server] = {"postgres": postgres}
        links = {"postgres": Link("postgres", postgres.socket, loop)}
        proxied = f"postgresql://{SUPERUSER}@127.0.0.1:{links['postgres'].port}/{DATABASE_NAME}"
        settings = {
            "DATABASE_URL": proxied,
            "ROOMS_CLAIM_TTL_S": "35",
            **preloads.environment_of(clocks["service"]),
        }
        processes = tuple(name for name in PROCESSES if name != "postgres")
        if shape == FULL:
            artemis = stack.enter_context(run_server(make_artemis(folder / "artemis")))
            zookeeper = stack.enter_context(run_server(make_zookeeper(folder / "zookeeper")))
            servers |= {"artemis": artemis, "zookeeper": zookeeper}
            for name, url in (("artemis", artemis.url), ("zookeeper", zookeeper.url)):
                at = urlsplit(url)
                assert at.hostname is not None
                assert at.port is not None
                links[name] = Link(name, (at.hostname, at.port), loop)
            settings["BROKER_URL"] = _through(artemis.url, links["artemis"])
            settings["ELECTION_URL"] = _through(zookeeper.url, links["zookeeper"])
            processes = (*processes, "relay")
        for link in links.values():
            stack.callback(link.close)
        service = stack.enter_context(services.running(folder, settings=settings, may_stall=True))
        missing = [what for what in (slow, *clocks.values(), disk) if isinstance(what, str)]
        yield Stage(
            service=service,
            processes=processes,
            servers=servers,
            links=links,
            slow_sync=slow,
            clocks=clocks,
            disk=disk,
            database_url=postgres.url,
            unavailable=list(dict.fromkeys(missing)),
        )


def _through(url: str, link: Link) -> str:
    at = urlsplit(url)
    login = at.netloc.rpartition("@")[0]
    return at._replace(
        netloc=f"{login}@127.0.0.1:{link.port}" if login else f"127.0.0.1:{link.port}"
    ).geturl()
