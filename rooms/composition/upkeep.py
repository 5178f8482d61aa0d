"""The upkeep process."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack

from delivery.elections import open_election
from delivery.handlers.duties import QueueDuties
from delivery.magazines import open_magazines
from delivery.sideline.duties import SidelineDuties
from delivery.sideline.shelves import magazine_of
from rooms.brokers import open_broker
from rooms.clock import SystemClock, WakefulClock
from rooms.composition.process import Told, member_name, run, stopped_by_signals
from rooms.composition.registration import registered
from rooms.domain.ids import SubscriptionId
from rooms.metrics import Metrics
from rooms.ports import Clock
from rooms.settings import Settings
from rooms.upkeep.retention import Rules, retention_chores
from rooms.upkeep.service import Chore, keep

_log = logging.getLogger(__name__)


def run_upkeep(settings: Settings, database_url: str) -> None:
    """Do this process's share of the upkeep until SIGTERM or SIGINT."""
    run("upkeep", lambda metrics: keep_up(settings, database_url, metrics=metrics), settings, database_url)


async def keep_up(
    settings: Settings, database_url: str, *, told: Told = stopped_by_signals, metrics: Metrics | None = None
) -> None:
    """Do this process's share until `told`; counts go to `metrics`, where several share one process."""
    stop = asyncio.Event()
    clock = SystemClock()
    metrics = metrics or Metrics()
    async with AsyncExitStack() as stack:
        election = await stack.enter_async_context(
            open_election(
                settings.election_url or database_url,
                client=settings.client,
                member=member_name(),
                clock=WakefulClock(),
            )
        )
        broker = None
        if settings.relayed and settings.broker_url is not None:
            broker = await stack.enter_async_context(
                open_broker(settings.broker_url, claim_s=settings.claim_s, farm=settings.farm, client=settings.client)
            )
        magazines = await stack.enter_async_context(
            open_magazines(settings.magazine_url or database_url, farm=settings.farm, client=settings.client)
        )
        await stack.enter_async_context(registered(settings, database_url, "upkeep"))

        async def part(subscription: SubscriptionId) -> bool:
            if broker is not None:
                if broker.gate is not None:
                    await broker.gate.close(subscription)  # or its readers would keep the queue
                if not await broker.delete(subscription):
                    return False
            await magazines.drop(magazine_of(subscription))
            return True

        exporting, destination = exports_of(settings, database_url, metrics)
        with told(stop.set):
            await keep(
                database_url=database_url,
                election=election,
                clock=clock,
                stop=stop,
                broker=broker,
                shape=settings.shape,
                part=part,
                metrics=metrics,
                more=(
                    *SidelineDuties(magazines, metrics).chores(),
                    *QueueDuties(magazines, metrics).chores(),
                    *exporting,
                    *retention_of(settings, database_url, destination, clock, metrics),
                ),
            )


def retention_of(
    settings: Settings, database_url: str, destination: str | None, clock: Clock, metrics: Metrics
) -> Sequence[Chore]:
    """Retention, unless everything is to be kept. `destination`: where the log has to have left for before it goes."""
    if not settings.retention_days:
        return ()
    rules = Rules(days=settings.retention_days, destination=destination)
    return retention_chores(database_url, rules, clock, metrics)


def exports_of(settings: Settings, database_url: str, metrics: Metrics) -> tuple[Sequence[Chore], str | None]:
    """The export of the log, where it is wanted, and the name of its destination; everything else goes on where it cannot
    be done. What has not been exported is kept even so.
    """
    if not settings.export_s:
        return (), None
    url = f"{settings.analysis}/segments"
    try:
        from delivery.export.duty import export_chores
        from delivery.export.errors import ExportError
        from delivery.export.segments import Destination
    except ImportError as exc:
        _log.error("the log is not exported: ROOMS_EXPORT_S needs the extra `spark`, %s", exc)
        return (), url
    try:
        chores = export_chores(database_url, url, every_s=float(settings.export_s), metrics=metrics)
        return chores, Destination(url).name
    except ExportError as exc:
        _log.error("the log is not exported: %s", exc)
        return (), url
