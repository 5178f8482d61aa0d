"""Open the stores of a process, and record in the database which ones it uses.

The settings name them. A process that uses other stores than the rest is warned about and not
refused. An installation changes its broker while it runs, one process at a time, and a maintenance
task moves the messages of the former one.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Final

import psycopg

from delivery.brokers import open_broker
from delivery.magazines import open_magazines
from delivery.maintenance.task import wait_first
from rooms.app.process import member_name
from rooms.backends import (
    ProcessRecord,
    backends_of,
    differences,
    format_differences,
    running_processes,
)
from rooms.db.connection import open_connection
from rooms.db.processes import SCHEMA_MISSING, heartbeat, mark_stopped, read_processes
from rooms.db.secret_rotation import prepare_secrets
from rooms.db.secrets import Cipher, open_cipher
from rooms.errors import StorageUnavailableError
from rooms.ports import Broker, Magazines
from rooms.settings import Settings

_log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 15.0
"""Seconds between two confirmations: a third of the time after which a process counts as dead."""
_KEYS_POLL_S: Final = 1.0
_RETRY_S: Final = 2.0
_REMOVE_TIMEOUT_S: Final = 2.0
_MAX_LABELS: Final = 3


def open_own_broker(
    settings: Settings, url: str, *, on_rest: Callable[[float], object] | None = None
) -> AbstractAsyncContextManager[Broker]:
    """Open the broker at an address, with the names and the claims of these settings.

    `on_rest` gets rests of its bulk claims, in seconds.
    """
    return open_broker(
        url,
        claim_s=settings.claim_ttl_s,
        farm=settings.farm,
        client=settings.client,
        on_rest=on_rest,
    )


def open_own_magazines(
    settings: Settings, database_url: str
) -> AbstractAsyncContextManager[Magazines]:
    """Open the magazines: those in the database, unless the settings name another store."""
    return open_magazines(
        settings.magazine_url or database_url, farm=settings.farm, client=settings.client
    )


async def open_checked_cipher(settings: Settings, database_url: str) -> Cipher:
    """Return the cipher, with nothing in the database left that should be sealed and is not.

    SettingsError: something was sealed with another key. StorageUnavailableError.
    """
    cipher = open_cipher(settings.secret_key, settings.data)
    try:
        async with open_connection(database_url, name="rooms sealing") as connection:
            refuse = settings.unknown_secret_keys == "refuse"  # noqa: S105 - no password
            await prepare_secrets(connection, cipher, refuse_unknown=refuse)
    except SCHEMA_MISSING:
        _log.warning("the database has an older schema: run `rooms migrate`, and restart this")
    except psycopg.Error as exc:
        raise StorageUnavailableError(str(exc)) from exc
    return cipher


@asynccontextmanager
async def process_registration(
    settings: Settings,
    database_url: str,
    kind: str,
    *,
    cipher: Cipher | None = None,
    interval_s: float = HEARTBEAT_S,
) -> AsyncIterator[None]:
    """Keep this process on record within the block, also while PostgreSQL comes and goes.

    `cipher`: the one with which it seals. A change of its keys is recorded within seconds.
    """
    registration = _RegistrationTask(settings, database_url, kind, cipher)
    stop = asyncio.Event()
    task = asyncio.create_task(registration.run(interval_s, stop))
    try:
        yield
    finally:
        stop.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await registration.remove()


class _RegistrationTask:
    def __init__(
        self, settings: Settings, database_url: str, kind: str, cipher: Cipher | None
    ) -> None:
        self._database_url = database_url
        self._cipher = cipher
        self._registered = False
        self._reported: frozenset[str] = frozenset()
        self._process = ProcessRecord(
            name=member_name(),
            kind=kind,
            host=socket.gethostname(),
            pid=os.getpid(),
            running=True,
            backends=backends_of(settings),
        )

    async def run(self, interval_s: float, stop: asyncio.Event) -> None:
        while not stop.is_set():
            pause_s = interval_s if await self._record_heartbeat() else min(_RETRY_S, interval_s)
            while pause_s > 0 and not stop.is_set() and not self._keys_changed():
                await wait_first(stop.wait(), timeout_s=min(pause_s, _KEYS_POLL_S))
                pause_s -= _KEYS_POLL_S

    def _keys_changed(self) -> bool:
        """Return whether the keys are others than the record says."""
        return self._present_keys() != self._process.secret_keys

    def _present_keys(self) -> tuple[str, ...] | None:
        if self._cipher is None:
            return None
        self._cipher.reload()
        return self._cipher.key_ids

    async def _record_heartbeat(self) -> bool:
        # A record that could not be written is repeated after a pause, whatever it says.
        self._process = replace(self._process, secret_keys=self._present_keys())
        try:
            async with open_connection(self._database_url, name="rooms registration") as connection:
                await heartbeat(connection, self._process)
                self._registered = True
                self._warn_of_differences(running_processes(await read_processes(connection)))
        except SCHEMA_MISSING:
            return True  # a later migration creates the table; nothing depends on it soon
        except psycopg.Error as exc:
            _log.debug("this process could not be registered: %s", exc)
            return False
        return True

    def _warn_of_differences(self, others: Sequence[ProcessRecord]) -> None:
        other = [one for one in others if differences(self._process.backends, one.backends)]
        found = frozenset(
            format_differences(differences(self._process.backends, one.backends)) for one in other
        )
        if found and found != self._reported:
            labels = ", ".join(one.label for one in other[:_MAX_LABELS])
            _log.warning(
                "this process (%s) and %d others (%s) use different stores: %s. "
                "Restart those with the former settings",
                self._process.kind,
                len(other),
                labels,
                " | ".join(sorted(found)),
            )
        self._reported = found

    async def remove(self) -> None:
        if not self._registered:
            return
        # The row expires by itself if the process cannot delete it.
        with contextlib.suppress(psycopg.Error, TimeoutError):
            async with (
                asyncio.timeout(_REMOVE_TIMEOUT_S),
                open_connection(self._database_url, name="rooms registration") as connection,
            ):
                await mark_stopped(connection, self._process.name)
