"""The servers of the full shape on one machine: PostgreSQL, Artemis and ZooKeeper, kept by one process.

Under ROOMS_DATA: `full/` with a folder for each server, its logs and the lock of who keeps them; `full.env` with their addresses.
"""

import asyncio
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rooms.embedded.artemis import EmbeddedArtemis
from rooms.embedded.cache import cache_folder
from rooms.embedded.claim import claimed
from rooms.embedded.files import write_private
from rooms.embedded.keeper import Child
from rooms.embedded.running import Server, free_port, is_free
from rooms.embedded.server import EmbeddedPostgres
from rooms.embedded.tuning import memory_bytes
from rooms.embedded.zookeeper import EmbeddedZookeeper

_STOMP_PORT: Final = 61613
_ZOOKEEPER_PORT: Final = 2181
_MIB: Final = 1024 * 1024
_START_TIMEOUT_S: Final = 300.0
# Clients that come and go are the broker's everyday, not ours to repeat.
_WARNINGS: Final = re.compile(r"^\S+ \S+ (ERROR|FATAL)\b|OutOfMemoryError|[Dd]isk|^Error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Where the servers lie and how they are reached. Every call blocks."""

    data: Path
    cache: Path = field(default_factory=cache_folder)

    @property
    def folder(self) -> Path:
        return self.data.absolute() / "full"

    @property
    def env_file(self) -> Path:
        return self.data.absolute() / "full.env"

    def addresses(self) -> Mapping[str, str]:
        """What `full.env` says: DATABASE_URL, BROKER_URL and ELECTION_URL; empty before the first start."""
        try:
            lines = self.env_file.read_text().splitlines()
        except FileNotFoundError:
            return {}
        words = [word for line in lines if not line.startswith("#") for word in shlex.split(line)]
        return dict(word.split("=", 1) for word in words)

    def lay_out(self) -> None:
        """Choose ports and a password, those of the last time where they can be had, and write `full.env`.

        Ends what an earlier keeper left. Raises DataInUseError while one is at work.
        """
        for folder in (self.data, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with claimed(self.folder):
            known = self.addresses()
            broker, election = (urlsplit(known.get(name, "")) for name in ("BROKER_URL", "ELECTION_URL"))
            artemis = EmbeddedArtemis(
                data=self.folder,
                port=_port(broker.port, _STOMP_PORT),
                password=broker.password or secrets.token_hex(16),
            )
            zookeeper = EmbeddedZookeeper(data=self.folder, port=_port(election.port, _ZOOKEEPER_PORT))
            addresses = {
                "DATABASE_URL": EmbeddedPostgres(self.folder).url,
                "BROKER_URL": artemis.url,
                "ELECTION_URL": zookeeper.url,
            }
            lines = [f"{name}={shlex.quote(value)}\n" for name, value in addresses.items()]
            write_private(self.env_file, "".join(["# Written at every start of the servers.\n", *lines]))

    def fetch(self) -> None:
        """Bring the programs into the cache. Raises MissingError or FetchError, each with what to do about it."""
        for server in (self._artemis(0, ""), self._zookeeper(0)):
            server.fetch()

    def children(self) -> list[Child]:
        """Artemis and ZooKeeper, as `full.env` has them; PostgreSQL is the supervisor's own."""
        return [_child(server) for server in self._servers()]

    def answer(self) -> bool:
        """Whether all three serve."""
        return bool(self.addresses()) and all(
            server.answers() for server in (EmbeddedPostgres(self.folder), *self._servers())
        )

    def _servers(self) -> tuple[EmbeddedArtemis, EmbeddedZookeeper]:
        known = self.addresses()
        broker, election = urlsplit(known["BROKER_URL"]), urlsplit(known["ELECTION_URL"])
        return self._artemis(broker.port or 0, broker.password or ""), self._zookeeper(election.port or 0)

    def _artemis(self, port: int, password: str) -> EmbeddedArtemis:
        heap_mib = max(512, min(2048, memory_bytes() // _MIB // 8))
        return EmbeddedArtemis(data=self.folder, port=port, password=password, cache=self.cache, heap_mib=heap_mib)

    def _zookeeper(self, port: int) -> EmbeddedZookeeper:
        return EmbeddedZookeeper(data=self.folder, port=port, cache=self.cache)


def _child(server: Server) -> Child:
    async def answers() -> bool:
        return await asyncio.to_thread(server.answers)

    return Child(
        name=server.name,
        argv=server.argv(),
        cwd=server.folder,
        stop_signal=server.stop_signal,
        prepare=server.prepare,
        ready=answers,
        ready_timeout_s=_START_TIMEOUT_S,
        warnings=_WARNINGS,
    )


def _port(*wanted: int | None) -> int:
    """The first of the wanted ports that can be had, else another one."""
    return next((port for port in wanted if port and is_free(port)), None) or free_port()
