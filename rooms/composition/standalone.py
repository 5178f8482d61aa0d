"""Everything in one process: API, push worker, upkeep, and a relay where another broker carries the copies.

As a standby it waits until nobody else is in charge, does everything while it is, and waits again when it is not any more.
"""

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace

from delivery.elections.address import for_standby
from rooms.composition.api import serve
from rooms.composition.process import Stops, only_transient, run, stopped_by_signals
from rooms.composition.relay import relay_copies
from rooms.composition.upkeep import keep_up
from rooms.composition.worker import work
from rooms.errors import TransientError
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.settings import Settings
from rooms.storage.charge import Charge
from rooms.upkeep.turn import first

_log = logging.getLogger(__name__)

_RETRY_S = 0.5
_UNASKED = "tries to stand by failed"


def run_standalone(settings: Settings, database_url: str, *, standby: bool) -> None:
    """Do everything until SIGTERM or SIGINT; as a `standby` whenever nobody else does."""
    # A standby waits for PostgreSQL as long as it takes, at its start and later.
    run(
        "standalone",
        lambda metrics: _run(settings, database_url, metrics, standby=standby),
        settings,
        None if standby else database_url,
    )


async def _run(settings: Settings, database_url: str, metrics: Metrics, *, standby: bool) -> None:
    stops = Stops()
    with stopped_by_signals(stops.stop):
        if standby:
            if settings.election_url is not None:
                settings = replace(settings, election_url=for_standby(settings.election_url))
            await _stand_by(settings, database_url, metrics, stops)
        else:
            await _all(settings, database_url, metrics, stops)


async def _all(settings: Settings, database_url: str, metrics: Metrics, stops: Stops) -> None:
    parts = [
        serve(settings, database_url, told=stops.heard, metrics=metrics),
        work(settings, database_url, told=stops.heard, metrics=metrics),
        keep_up(settings, database_url, told=stops.heard, metrics=metrics),
    ]
    if settings.relayed:
        parts.append(relay_copies(settings, database_url, told=stops.heard, metrics=metrics))
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(_together(part, stops))


async def _together(part: Awaitable[None], stops: Stops) -> None:
    try:
        await part
    finally:
        stops.stop()  # one that ends, ends all


async def _stand_by(settings: Settings, database_url: str, metrics: Metrics, stops: Stops) -> None:
    stopped = asyncio.Event()
    with stops.heard(stopped.set):
        while not stopped.is_set():
            try:
                async with Charge(database_url) as charge:
                    OUTAGES.succeeded(_UNASKED)
                    _log.info("standing by")
                    await first(charge.taken(), stopped.wait())
                    if not stopped.is_set():
                        await _in_charge(settings, database_url, metrics, charge, stops)
            except TransientError as exc:
                await _rest(exc, stopped)
            except BaseExceptionGroup as group:
                # It went away again while the parts started.
                if (error := only_transient(group)) is None:
                    raise
                await _rest(error, stopped)


async def _rest(error: TransientError, stopped: asyncio.Event) -> None:
    OUTAGES.failed(error, _UNASKED)
    await first(stopped.wait(), within_s=_RETRY_S)


async def _in_charge(settings: Settings, database_url: str, metrics: Metrics, charge: Charge, stops: Stops) -> None:
    _log.warning("in charge now")
    ours = Stops()
    lost = asyncio.create_task(charge.lost())
    lost.add_done_callback(lambda _: ours.stop())
    try:
        with stops.heard(ours.stop):
            await _all(settings, database_url, metrics, ours)
    finally:
        lost.cancel()
        with suppress(asyncio.CancelledError):
            await lost
    _log.warning("not in charge any more")
