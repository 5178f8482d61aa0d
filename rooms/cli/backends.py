"""Decide which stores a command uses: the environment, checked against the running processes.

The environment comes first. What it leaves out is taken from the records that running processes
keep in the database, with credentials from ROOMS_DATA/full.env. A command whose environment
contradicts the records is refused, because it would read or write other stores than the service.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import click

from rooms.backends import (
    DATABASE,
    STORES,
    VARIABLES,
    ProcessRecord,
    address_of,
    backends_of,
    is_secret,
    running_processes,
    same_address,
)
from rooms.cli.context import CliSession
from rooms.cli.errors import CliError
from rooms.settings import Settings

_MAX_LABELS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Hold the result of `resolve`.

    `overrides` are variables to add to the environment. `problems` say why the command must not
    run. `mixed` are stores that the running processes disagree about. `notes` are for the operator.
    """

    overrides: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def resolve(
    settings: Settings,
    set_variables: frozenset[str],
    processes: Sequence[ProcessRecord],
    local: Mapping[str, str],
) -> Resolution:
    """Compare `settings` with the processes on record.

    `set_variables` are the variables that the environment sets. `local` are the variables of
    ROOMS_DATA/full.env, if the database is the one that this file names.
    """
    live = running_processes(processes)
    sources = live or processes
    if not sources:
        return Resolution(
            overrides={
                one: local[one]
                for one in VARIABLES.values()
                if one in local and one not in set_variables
            }
        )
    own_backends = backends_of(settings)
    shared = own_backends.uses_other_stores or any(
        one.backends.uses_other_stores for one in sources
    )
    found = Resolution()
    for name, variable in VARIABLES.items():
        if not shared and name not in STORES:
            continue
        recorded = _distinct([getattr(one.backends, name) for one in sources])
        own: str = getattr(own_backends, name)
        if len(recorded) > 1:
            conflict = _format_conflict(sources, name, recorded)
            mixture = f"{variable}: the running processes have {conflict}"
            found.mixed.append(mixture)
            if variable not in set_variables or not any(same_address(own, one) for one in recorded):
                found.problems.append(f"{mixture}. Restart those with the former setting")
        elif same_address(own, recorded[0]):
            continue
        elif variable in set_variables:
            _add_contradiction(
                found, variable, own, recorded[0], live=bool(live), labels=_format_labels(sources)
            )
        elif variable in local and same_address(address_of(local[variable]), recorded[0]):
            found.overrides[variable] = local[variable]
        elif name not in STORES or (live and not is_secret(recorded[0])):
            found.overrides[variable] = recorded[0]
        else:
            found.problems.append(_missing_problem(variable, recorded[0], sources, live=bool(live)))
    return found


def _missing_problem(
    variable: str, recorded: str, sources: Sequence[ProcessRecord], *, live: bool
) -> str:
    users = "the running processes" if live else "nothing runs now; the last process on record"
    verb = "use" if live else "used"
    return (
        f"{variable} is not set, and {users} ({_format_labels(sources)}) {verb} {recorded}: "
        f"set {_advice(variable, recorded)}"
    )


def _add_contradiction(
    found: Resolution, variable: str, own: str, recorded: str, *, live: bool, labels: str
) -> None:
    if live:
        found.problems.append(
            f"{variable} is {own} here, and {recorded} in the running processes ({labels}): "
            f"set {_advice(variable, recorded)}, or restart those with yours"
        )
    else:
        found.notes.append(
            f"nothing runs; the last process ({labels}) had {variable}={recorded}, "
            f"this command has {own}"
        )


def _advice(variable: str, address: str) -> str:
    if address == DATABASE:
        return f"{variable} to nothing"
    login = ", with the user, password or files in place of ***" if is_secret(address) else ""
    return f"{variable}={address}{login}"


def _distinct(addresses: Sequence[str]) -> list[str]:
    found: list[str] = []
    for address in addresses:
        if not any(same_address(address, one) for one in found):
            found.append(address)
    return found


def _format_conflict(
    processes: Sequence[ProcessRecord], name: str, addresses: Sequence[str]
) -> str:
    parts = []
    for address in addresses:
        users = [one for one in processes if same_address(getattr(one.backends, name), address)]
        parts.append(f"{address} ({_format_labels(users)})")
    return " and ".join(parts)


def _format_labels(processes: Sequence[ProcessRecord]) -> str:
    more = len(processes) - _MAX_LABELS
    return ", ".join(one.label for one in processes[:_MAX_LABELS]) + (
        f" and {more} more" if more > 0 else ""
    )


class BackendsError(CliError):
    """Report that the environment names other stores than the running processes, or too few."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("the stores of this environment are not those of the installation")
        self.problems = tuple(problems)

    def describe(self) -> dict[str, Any]:
        return {"title": self.message, "problems": list(self.problems)}

    def lines(self) -> list[str]:
        return [self.message, *self.problems]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Hold the settings that fit the running installation, and the address of its database.

    `logs` are the log files of stores that `make run-full` or `make full-up` keep on this machine,
    by field of `Backends`.
    """

    settings: Settings
    database_url: str
    mixed: Sequence[str] = ()
    notes: Sequence[str] = ()
    logs: Mapping[str, str] = field(default_factory=dict)


def running_installation(session: CliSession) -> Installation:
    """Return the stores of the running installation.

    Raises BackendsError if the environment contradicts the running processes, or names too few
    stores.
    """
    from rooms.errors import SettingsError
    from rooms.settings import read_settings

    settings, url = session.settings(), session.wait_for_database_url()
    given = frozenset(name for name in VARIABLES.values() if os.environ.get(name))
    local = _local_addresses(settings, url)
    found = resolve(settings, given, _read_processes(url), local)
    if found.problems:
        raise BackendsError(found.problems)
    try:
        settings = read_settings({**os.environ, **found.overrides})
    except SettingsError as exc:
        raise click.UsageError("\n".join(exc.problems)) from exc
    return Installation(
        settings=settings,
        database_url=url,
        mixed=found.mixed,
        notes=found.notes,
        logs=_store_logs(settings, local),
    )


def environment_installation(session: CliSession) -> Installation:
    """Return the stores that a new process of the service uses.

    With DATABASE_URL set, only the environment counts, because a change of stores begins with a
    process that has other settings. Without it, the process joins what `make run` or `make
    run-full` started here.
    """
    settings = session.settings()
    session.warn_of_unknown_settings()
    if settings.database_url is not None:
        return Installation(settings=settings, database_url=settings.database_url)
    return running_installation(session)


def _local_addresses(settings: Settings, url: str) -> Mapping[str, str]:
    """Return the addresses of this machine's own servers, if the database is theirs."""
    from rooms.local.services import LocalServices

    try:
        found = LocalServices(data=settings.data).addresses()
    except (OSError, ValueError):
        return {}
    return found if found.get("DATABASE_URL") == url else {}


def _store_logs(settings: Settings, local: Mapping[str, str]) -> Mapping[str, str]:
    folder = settings.data / "full" / "log"
    own = {
        "broker": (settings.broker_url, "artemis.log"),
        "election": (settings.election_url, "zookeeper.log"),
    }
    return {
        name: str(folder / log)
        for name, (url, log) in own.items()
        if url is not None and local.get(VARIABLES[name]) == url
    }


def _read_processes(url: str) -> Sequence[ProcessRecord]:
    import asyncio

    import psycopg

    from rooms.db.connection import open_connection
    from rooms.db.processes import SCHEMA_MISSING, read_processes

    async def read() -> Sequence[ProcessRecord]:
        async with open_connection(url, name="rooms command") as connection:
            return await read_processes(connection)

    try:
        return asyncio.run(read())
    except SCHEMA_MISSING:
        return ()  # an older schema, which has no records of processes
    except psycopg.Error as exc:
        raise CliError(
            f"PostgreSQL does not answer: {str(exc).strip()}. Start it (on this machine: "
            "`make run`, `make run-full` or `make full-up`), or correct DATABASE_URL"
        ) from exc
