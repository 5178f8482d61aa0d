"""The stores that a command beside a running installation works with: those that the installation runs on.

The environment comes first. What it leaves out is taken from what the running processes have on record, with credentials
from ROOMS_DATA/full.env. A command whose environment contradicts the record is refused: it would read, or write to, other
stores than the service.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from rooms.backends import VARIABLES, ProcessRecord
from rooms.cli.errors import CliError
from rooms.cli.resolution import resolve
from rooms.cli.session import Session

if TYPE_CHECKING:
    from rooms.settings import Settings


class BackendsError(CliError):
    """The environment and the running processes name different stores, or the environment names too few."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("the stores of this environment are not those of the installation")
        self.problems = tuple(problems)

    def describe(self) -> dict[str, Any]:
        return {"title": self.message, "problems": list(self.problems)}

    def lines(self) -> list[str]:
        return [self.message, *self.problems]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The settings that fit the running installation, and its database. `logs`: the log files of stores that `make
    run-full` or `make full-up` keep on this machine, by field of `Backends`.
    """

    settings: "Settings"
    database_url: str
    mixed: Sequence[str] = ()
    notes: Sequence[str] = ()
    logs: Mapping[str, str] = field(default_factory=dict)


def running_installation(session: Session) -> Installation:
    """Return what a command works with. BackendsError where the environment contradicts what runs, or says too little."""
    from rooms.errors import SettingsError
    from rooms.settings import read_settings

    settings, url = session.settings(), session.answering_database_url()
    given = frozenset(name for name in VARIABLES.values() if os.environ.get(name))
    local = _local(settings, url)
    found = resolve(settings, given, _processes(url), local)
    if found.problems:
        raise BackendsError(found.problems)
    try:
        settings = read_settings({**os.environ, **found.overrides})
    except SettingsError as exc:
        raise click.UsageError("\n".join(exc.problems)) from exc
    return Installation(
        settings=settings, database_url=url, mixed=found.mixed, notes=found.notes, logs=_logs(settings, local)
    )


def joined_installation(session: Session) -> Installation:
    """Return what a process works with: with DATABASE_URL set, what the environment says and no more, since a changeover
    begins with a process of another setting. Without it, the process joins what `make run` or `make run-full` started here.
    """
    settings = session.settings()
    if settings.database_url is not None:
        return Installation(settings=settings, database_url=settings.database_url)
    return running_installation(session)


def _local(settings: "Settings", url: str) -> Mapping[str, str]:
    """The addresses of this machine's own servers, where the database is theirs."""
    from rooms.embedded.services import Services

    try:
        found = Services(data=settings.data).addresses()
    except (OSError, ValueError):
        return {}
    return found if found.get("DATABASE_URL") == url else {}


def _logs(settings: "Settings", local: Mapping[str, str]) -> Mapping[str, str]:
    folder = settings.data / "full" / "log"
    own = {"broker": (settings.broker_url, "artemis.log"), "election": (settings.election_url, "zookeeper.log")}
    return {
        name: str(folder / log)
        for name, (url, log) in own.items()
        if url is not None and local.get(VARIABLES[name]) == url
    }


def _processes(url: str) -> Sequence[ProcessRecord]:
    import asyncio

    import psycopg

    from rooms.storage.engine import connection_for
    from rooms.storage.processes import MISSING, read_processes

    async def read() -> Sequence[ProcessRecord]:
        async with connection_for(url, name="rooms command") as connection:
            return await read_processes(connection)

    try:
        return asyncio.run(read())
    except MISSING:
        return ()  # an older schema: processes of then are on no record
    except psycopg.Error as exc:
        raise CliError(
            f"PostgreSQL does not answer: {str(exc).strip()}. Start it (`make run`, `make run-full` or `make full-up` where "
            "it is this machine's), or correct DATABASE_URL"
        ) from exc
