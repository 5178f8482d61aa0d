"""The embedded PostgreSQL as one program to be kept alive: how it is prepared, started, asked and stopped."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import psycopg
from psycopg import sql

from rooms.embedded import cluster, identity
from rooms.embedded.binaries import Binaries, locate
from rooms.embedded.identity import Identity, launched

DATABASE = "rooms"
_CONNECT_TIMEOUT_S = 2


def embedded_url(data: Path, database: str = DATABASE) -> str:
    """The address of the server that works on this data folder, whether or not it is running."""
    host = quote(str(cluster.socket_folder(data)), safe="/")
    return f"postgresql://{cluster.SUPERUSER}@/{database}?host={host}&port={cluster.PORT}"


@dataclass(slots=True)
class EmbeddedPostgres:
    """PostgreSQL 18 from the wheel, its records in `<data>/postgres`, reached by a unix socket alone.

    Every call blocks. `prepare` comes before each start, also after a crash, and is the only one that changes
    anything on disk. Whoever starts `command` keeps it alive: stop it by SIGINT (fast shutdown), and by SIGQUIT where that takes
    too long (it then recovers at the next start).
    """

    data: Path
    worn: Identity | None = None
    _binaries: Binaries = field(default_factory=locate)

    stop_signal: ClassVar[signal.Signals] = signal.SIGINT
    impatient_signals: ClassVar[tuple[signal.Signals, ...]] = (signal.SIGQUIT, signal.SIGKILL)

    @property
    def url(self) -> str:
        """`postgresql://…` of the database `rooms`, with the socket's folder as host."""
        return embedded_url(self.data)

    @property
    def folder(self) -> Path:
        return self.data.absolute() / "postgres"

    @property
    def program(self) -> Path:
        """The binary itself."""
        return self._binaries.postgres

    @property
    def environment(self) -> Mapping[str, str]:
        return cluster.ENVIRONMENT

    def prepare(self) -> None:
        """Make the data folder when it is new, end what a crash left, and write the settings.

        Raises IdentityError or InitialisationError, each with what to do about it.
        """
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.worn is None:
            self.worn = identity.choose(self.data.absolute(), self._binaries.postgres)
        sockets = cluster.socket_folder(self.data)
        cluster.make_socket_folder(sockets, self.worn)
        cluster.clear(self.folder, sockets)
        cluster.make(self.folder, self._binaries, self.worn)

    def argv(self) -> list[str]:
        """PostgreSQL's own command line."""
        sockets = str(cluster.socket_folder(self.data))
        port = str(cluster.PORT)
        return [
            str(self._binaries.postgres),
            "-D",
            str(self.folder),
            "-k",
            sockets,
            "-p",
            port,
            "-c",
            "listen_addresses=",
        ]

    def command(self) -> list[str]:
        """What to start: it becomes PostgreSQL under its identity, and stops fast when the calling process dies."""
        return launched(self.argv(), identity=self.worn, death=self.stop_signal)

    def answers(self) -> bool:
        """Whether it takes connections; makes the database when it is missing. False while it starts or recovers."""
        address = embedded_url(self.data, "postgres")
        try:
            with psycopg.connect(address, autocommit=True, connect_timeout=_CONNECT_TIMEOUT_S) as connection:
                known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone()
                if known is None:
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
        except psycopg.OperationalError:
            return False
        except (psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
            # Another process asked at the same moment, and made it.
            return True
        return True
