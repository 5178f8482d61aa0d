"""Run API, push worker, maintenance and relay in one process.

A standby waits until no other process is active, serves until it loses that, and waits again.
"""

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace

from delivery.maintenance.task import wait_first
from rooms.app.api import file_need, queue_file_need, serve_api
from rooms.app.file_limit import allot_connections
from rooms.app.maintenance import serve_maintenance
from rooms.app.process import ShutdownGroup, first_transient, run, stop_on_signals
from rooms.app.relay import serve_relay
from rooms.app.standby_checks import checked_standby
from rooms.app.worker import FILE_NEED, serve_worker
from rooms.backend_urls import with_standby_session
from rooms.db.active_lock import ActiveLock
from rooms.errors import TransientError
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.settings import Settings

_log = logging.getLogger(__name__)

_RETRY_S = 0.5
_STANDBY_FAILED = "standby attempts failed"


def run_standalone(settings: Settings, database_url: str, *, standby: bool) -> None:
    """Run everything until SIGTERM or SIGINT; as a `standby` only while no other process does."""
    # A standby waits for PostgreSQL without limit, at its start and later.
    run(
        "standalone",
        lambda metrics: _run(settings, database_url, metrics, standby=standby),
        settings,
        None if standby else database_url,
    )


async def _run(settings: Settings, database_url: str, metrics: Metrics, *, standby: bool) -> None:
    shutdown = ShutdownGroup()
    with stop_on_signals(shutdown.stop):
        if standby:
            if settings.election_url is not None:
                settings = replace(
                    settings, election_url=with_standby_session(settings.election_url)
                )
            async with checked_standby(settings, database_url):
                await _run_standby(settings, database_url, metrics, shutdown)
        else:
            await _run_all(settings, database_url, metrics, shutdown)


async def _run_all(
    settings: Settings, database_url: str, metrics: Metrics, shutdown: ShutdownGroup
) -> None:
    clients, queues, webhooks = allot_connections(
        file_need(settings), queue_file_need(settings), FILE_NEED
    )
    parts = [
        serve_api(
            settings,
            database_url,
            stop_hook=shutdown.register,
            metrics=metrics,
            max_connections=clients,
            max_open_queues=queues,
        ),
        serve_worker(
            settings,
            database_url,
            stop_hook=shutdown.register,
            metrics=metrics,
            connections=webhooks,
        ),
        serve_maintenance(settings, database_url, stop_hook=shutdown.register, metrics=metrics),
    ]
    if settings.uses_relay:
        parts.append(
            serve_relay(settings, database_url, stop_hook=shutdown.register, metrics=metrics)
        )
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(_run_part(part, shutdown))


async def _run_part(part: Awaitable[None], shutdown: ShutdownGroup) -> None:
    try:
        await part
    finally:
        shutdown.stop()  # one that ends, ends all


async def _run_standby(
    settings: Settings, database_url: str, metrics: Metrics, shutdown: ShutdownGroup
) -> None:
    stopped = asyncio.Event()
    with shutdown.register(stopped.set):
        while not stopped.is_set():
            try:
                async with ActiveLock(database_url) as active_lock:
                    OUTAGES.record_success(_STANDBY_FAILED)
                    _log.info("standing by")
                    await wait_first(active_lock.acquire(), stopped.wait())
                    if not stopped.is_set():
                        await _run_active(settings, database_url, metrics, active_lock, shutdown)
            except TransientError as exc:
                await _wait_to_retry(exc, stopped)
            except BaseExceptionGroup as group:
                # PostgreSQL failed again while the parts started.
                if (error := first_transient(group)) is None:
                    raise
                await _wait_to_retry(error, stopped)


async def _wait_to_retry(error: TransientError, stopped: asyncio.Event) -> None:
    OUTAGES.record_failure(error, _STANDBY_FAILED)
    await wait_first(stopped.wait(), timeout_s=_RETRY_S)


async def _run_active(
    settings: Settings,
    database_url: str,
    metrics: Metrics,
    active_lock: ActiveLock,
    shutdown: ShutdownGroup,
) -> None:
    _log.warning("active now")
    part_shutdown = ShutdownGroup()
    lost = asyncio.create_task(active_lock.wait_lost())
    lost.add_done_callback(lambda _: part_shutdown.stop())
    try:
        with shutdown.register(part_shutdown.stop):
            await _run_all(settings, database_url, metrics, part_shutdown)
    finally:
        lost.cancel()
        with suppress(asyncio.CancelledError):
            await lost
    _log.warning("standby again")
