"""Check at the start of a standby that it could take over, and its keys again while it runs.

What it needs is otherwise first used when the active process has died.
"""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import psycopg

from rooms.api.server.tls_files import TlsFileError, TlsFiles, load_tls
from rooms.backends import running_processes
from rooms.db.connection import CONNECTION_LOST, Connection, open_connection
from rooms.db.processes import read_processes
from rooms.db.schema import describe_missing
from rooms.db.secret_rotation import find_unknown_keys
from rooms.db.secrets import Cipher, open_cipher
from rooms.errors import SettingsError
from rooms.settings import Settings

_log = logging.getLogger(__name__)

KEY_CHECK_S: Final = 300.0
"""Seconds between two checks of the keys: each counts all sealed values."""
_RETRY_S: Final = 5.0
_RECORD_WAIT_S: Final = 10.0
"""Longer than the pause of a process between two tries to record itself."""
_RECORD_POLL_S: Final = 0.5
_API: Final = "serve"
"""The kind of the processes that have an API."""


@asynccontextmanager
async def checked_standby(settings: Settings, database_url: str) -> AsyncIterator[None]:
    """Check what taking over needs, and the keys again and again within the block.

    SettingsError: taking over would fail. While PostgreSQL is away, only the rest is checked.
    """
    cipher = open_cipher(settings.secret_key, settings.data)
    _check_tls(settings)
    occupied = _check_addresses(settings)
    is_checked = await _check_database(settings, database_url, cipher, occupied)
    checking = asyncio.create_task(
        _check_keys(database_url, cipher, KEY_CHECK_S if is_checked else _RETRY_S)
    )
    try:
        yield
    finally:
        checking.cancel()
        with suppress(asyncio.CancelledError):
            await checking


def _check_tls(settings: Settings) -> None:
    files = TlsFiles.of(settings)
    if files is not None:
        try:
            load_tls(files)
        except TlsFileError as exc:
            raise SettingsError([str(exc)]) from exc


def _check_addresses(settings: Settings) -> list[str]:
    """Return problems of addresses that are in use. SettingsError: one may never be used here.

    An address that this machine does not have is only logged: it may be one that a tool gives to
    the active machine. So is a name that cannot be resolved, as while the machine boots.
    """
    occupied = []
    for problem, error in _refused_addresses(settings):
        if error.errno == errno.EADDRINUSE:
            occupied.append(problem)
        elif error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            _log.warning("%s; this machine must have it when it takes over", problem)
        else:
            raise SettingsError([problem]) from error
    return occupied


def _refused_addresses(settings: Settings) -> Iterator[tuple[str, OSError]]:
    """Yield the problem and error of each address on which this process cannot listen now."""
    wanted = [("ROOMS_TLS_LISTEN", settings.tls_listen)]
    if settings.plain_port == "open":
        wanted.append(("ROOMS_LISTEN", (settings.listen_host, settings.listen_port)))
    for variable, address in wanted:
        if address is None:
            continue
        host, port = address
        try:
            _bind(host, port)
        except OSError as exc:
            yield f"{variable}: cannot listen on {host}:{port}: {exc.strerror or exc}", exc


def _bind(host: str, port: int) -> None:
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)


async def _check_database(
    settings: Settings, database_url: str, cipher: Cipher, occupied: list[str]
) -> bool:
    """Return whether the database could be asked. SettingsError."""
    try:
        async with open_connection(database_url, name="rooms standby checks") as connection:
            if (missing := await describe_missing(connection)) is not None:
                raise SettingsError([missing])
            await _check_occupied(settings, connection, occupied)
            await _report_unknown_keys(settings, connection, cipher)
    except CONNECTION_LOST as exc:
        # The outage itself is logged by those who wait for its end.
        _log.info("the keys of this standby are checked later: %s", exc)
        return False
    return True


async def _check_occupied(settings: Settings, connection: Connection, occupied: list[str]) -> None:
    """Raise SettingsError for addresses that another program than the active process has.

    After PostgreSQL was away, the active process is on record again at its next heartbeat.
    """
    deadline = time.monotonic() + _RECORD_WAIT_S
    while occupied and not await _is_served_here(connection):
        if time.monotonic() >= deadline:
            raise SettingsError(occupied)
        await asyncio.sleep(_RECORD_POLL_S)
        occupied = [
            problem
            for problem, error in _refused_addresses(settings)
            if error.errno == errno.EADDRINUSE
        ]


async def _is_served_here(connection: Connection) -> bool:
    """Return whether the active process may be the one that has the address."""
    here = socket.gethostname()
    running = running_processes(await read_processes(connection))
    return any(one.kind == _API and one.host == here for one in running)


async def _report_unknown_keys(settings: Settings, connection: Connection, cipher: Cipher) -> None:
    problem = await find_unknown_keys(connection, cipher)
    if problem is None:
        return
    if settings.unknown_secret_keys == "refuse":  # noqa: S105 - no password
        raise SettingsError([problem])
    _log.error("%s", problem)


async def _check_keys(database_url: str, cipher: Cipher, first_s: float) -> None:
    """Log where the keys of the installation were replaced, and not those of this process."""
    pause_s, logged = first_s, ""
    while True:
        await asyncio.sleep(pause_s)
        pause_s = KEY_CHECK_S
        try:
            async with open_connection(database_url, name="rooms standby checks") as connection:
                problem = await find_unknown_keys(connection, cipher) or ""
        except psycopg.Error as exc:
            _log.debug("the keys could not be checked: %s", exc)
            pause_s = _RETRY_S
            continue
        if problem and problem != logged:
            _log.error("this process could not take over: %s", problem)
        logged = problem
