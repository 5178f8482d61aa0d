"""Run PostgreSQL, Artemis and ZooKeeper on one machine, for `rooms full`.

Under ROOMS_DATA, `full/` holds a folder for each server, their logs and the supervisor's lock.
`full.env` holds their addresses.
"""

import asyncio
import re
import secrets
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rooms.local.child_process import Child
from rooms.local.errors import StartError
from rooms.local.java_servers import EmbeddedArtemis, EmbeddedZookeeper, JavaServer
from rooms.local.maven import cache_dir
from rooms.local.pidfile import lock_data_dir, write_private
from rooms.local.postgres import EmbeddedPostgres, memory_bytes

_STOMP_PORT: Final = 61613
_ZOOKEEPER_PORT: Final = 2181
_MIB: Final = 1024 * 1024
# Below the range of Linux and others for outgoing connections.
_FIRST_PORT, _PORT_COUNT = 10_240, 20_000
_TRIES: Final = 100
_START_TIMEOUT_S: Final = 300.0
# Connects and disconnects of clients are not worth repeating.
_WARNINGS: Final = re.compile(r"^\S+ \S+ (ERROR|FATAL)\b|OutOfMemoryError|[Dd]isk|^Error")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServices:
    """Manage the three servers of a data folder. Every call blocks."""

    data: Path
    cache: Path = field(default_factory=cache_dir)

    @property
    def folder(self) -> Path:
        return self.data.absolute() / "full"

    @property
    def env_file(self) -> Path:
        return self.data.absolute() / "full.env"

    def addresses(self) -> Mapping[str, str]:
        """Return the variables in `full.env`, or nothing before the first start."""
        try:
            lines = self.env_file.read_text().splitlines()
        except FileNotFoundError:
            return {}
        words = [word for line in lines if not line.startswith("#") for word in shlex.split(line)]
        return dict(word.split("=", 1) for word in words)

    def write_addresses(self) -> None:
        """Choose ports and a password, the previous ones if possible, and write `full.env`.

        Ends processes that an earlier supervisor left. Raises DataInUseError while one is running.
        """
        for folder in (self.data, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with lock_data_dir(self.folder):
            known = self.addresses()
            broker, election = (
                urlsplit(known.get(name, "")) for name in ("BROKER_URL", "ELECTION_URL")
            )
            artemis = EmbeddedArtemis(
                data=self.folder,
                port=_choose_port(broker.port, _STOMP_PORT),
                password=broker.password or secrets.token_hex(16),
            )
            zookeeper = EmbeddedZookeeper(
                data=self.folder, port=_choose_port(election.port, _ZOOKEEPER_PORT)
            )
            addresses = {
                "DATABASE_URL": EmbeddedPostgres(self.folder).url,
                "BROKER_URL": artemis.url,
                "ELECTION_URL": zookeeper.url,
            }
            lines = [f"{name}={shlex.quote(value)}\n" for name, value in addresses.items()]
            write_private(
                self.env_file, "".join(["# Written at every start of the servers.\n", *lines])
            )

    def fetch(self) -> None:
        """Fetch the programs into the cache. Raise MissingError or FetchError, each with advice."""
        for server in (self._artemis(0, ""), self._zookeeper(0)):
            server.fetch()

    def children(self) -> list[Child]:
        """Return Artemis and ZooKeeper as children. The supervisor adds PostgreSQL itself."""
        return [_server_child(server) for server in self._servers()]

    def is_ready(self) -> bool:
        """Return True if all three servers are ready."""
        return bool(self.addresses()) and all(
            server.is_ready() for server in (EmbeddedPostgres(self.folder), *self._servers())
        )

    def _servers(self) -> tuple[EmbeddedArtemis, EmbeddedZookeeper]:
        known = self.addresses()
        broker, election = urlsplit(known["BROKER_URL"]), urlsplit(known["ELECTION_URL"])
        return self._artemis(broker.port or 0, broker.password or ""), self._zookeeper(
            election.port or 0
        )

    def _artemis(self, port: int, password: str) -> EmbeddedArtemis:
        heap_mib = max(512, min(2048, memory_bytes() // _MIB // 8))
        return EmbeddedArtemis(
            data=self.folder, port=port, password=password, cache=self.cache, heap_mib=heap_mib
        )

    def _zookeeper(self, port: int) -> EmbeddedZookeeper:
        return EmbeddedZookeeper(data=self.folder, port=port, cache=self.cache)


def _server_child(server: JavaServer) -> Child:
    async def is_ready() -> bool:
        return await asyncio.to_thread(server.is_ready)

    return Child(
        name=server.name,
        argv=server.argv(),
        cwd=server.folder,
        stop_signal=server.stop_signal,
        prepare=server.prepare,
        ready=is_ready,
        ready_timeout_s=_START_TIMEOUT_S,
        warning_pattern=_WARNINGS,
    )


def _choose_port(*preferred: int | None) -> int:
    """Return the first of these ports that is free, or any other free port."""
    return next((port for port in preferred if port and is_free(port)), None) or free_port()


def free_port() -> int:
    """Return a free port on loopback, outside the range of outgoing connections.

    It must still be free when the server restarts.
    """
    for _ in range(_TRIES):
        port = _FIRST_PORT + secrets.randbelow(_PORT_COUNT)
        if is_free(port):
            return port
    raise StartError(
        f"no port of {_FIRST_PORT} to {_FIRST_PORT + _PORT_COUNT - 1} is free on loopback"
    )


def is_free(port: int) -> bool:
    """Return True if a server could listen on this port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
