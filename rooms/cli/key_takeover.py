"""Wait until every process that runs has taken over the secret key of a rotation."""

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final

from rooms.backends import ProcessRecord
from rooms.cli.errors import CliError
from rooms.db.connection import Connection
from rooms.db.processes import RUNNING_S, read_processes

if TYPE_CHECKING:
    from rooms.cli.output import Output

SEALING: Final = frozenset({"serve", "worker"})
"""The kinds of processes that seal and open."""
_WAIT_S: Final = RUNNING_S + 15
"""Longer than a process counts as running that was killed a moment ago."""
_POLL_S: Final = 0.2
_MAX_NAMED: Final = 10


class Use(Enum):
    """Name what a process must be able to do with a key."""

    OPEN = "open with"
    SEAL = "seal with"


async def sealing_processes(connection: Connection) -> Sequence[ProcessRecord]:
    """Return the running processes that seal and open."""
    return [one for one in await read_processes(connection) if one.running and one.kind in SEALING]


async def await_takeover(
    connection: Connection, key: str, use: Use, output: "Output", *, remedy: str
) -> None:
    """Return when every process that runs has recorded that it can use `key` so.

    CliError: some have not for a minute. It names them, and ends with `remedy`.
    """
    reported: list[str] = []
    try:
        async with asyncio.timeout(_WAIT_S):
            while lacking := await _lacking(connection, key, use):
                if lacking != reported:
                    output.note(f"waiting until these {use.value} {key}: {_join(lacking)}")
                    reported = lacking
                await asyncio.sleep(_POLL_S)
    except TimeoutError as exc:
        raise CliError(
            f"these processes do not {use.value} {key}: {_join(reported)}. {remedy}"
        ) from exc


async def _lacking(connection: Connection, key: str, use: Use) -> list[str]:
    return [
        f"{one.label} ({_describe(one.secret_keys)})"
        for one in await sealing_processes(connection)
        if not _can(one.secret_keys, key, use)
    ]


def _can(keys: Sequence[str] | None, key: str, use: Use) -> bool:
    if not keys:
        return False
    return keys[0] == key if use is Use.SEAL else key in keys


def _describe(keys: Sequence[str] | None) -> str:
    return (
        f"has {', '.join(keys)}" if keys else "an earlier version, which does not record its keys"
    )


def _join(lacking: Sequence[str]) -> str:
    more = len(lacking) - _MAX_NAMED
    return ", ".join(lacking[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
