"""The doctor: one examination of an installation, straight on its stores."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final

from delivery.doctor.broker import PATIENCE_S, BrokerExamination
from delivery.doctor.claims import ClaimExamination
from delivery.doctor.deliveries import DeliveryExamination
from delivery.doctor.findings import Finding
from delivery.doctor.sidelines import SidelineExamination
from delivery.magazines import open_magazines
from delivery.sideline.audit import Audit
from delivery.sideline.loader import Loader
from delivery.sideline.shelves import Shelves
from rooms.brokers import open_broker
from rooms.clock import SystemClock
from rooms.errors import BrokerUnavailableError, MagazineUnavailableError
from rooms.settings import Settings
from rooms.storage.abandoned import Abandoned
from rooms.storage.sidelines import Sidelines
from rooms.storage.signals import Signals
from rooms.storage.standing import Standing
from rooms.storage.writer import Writer

KIND: Final = "doctor"


def examine(
    settings: Settings, database_url: str, *, repair: bool, patience_s: float = PATIENCE_S
) -> Sequence[Finding]:
    """What differs, and with `repair` was put right. StorageUnavailableError, where PostgreSQL is away."""
    return asyncio.run(_examine(settings, database_url, repair=repair, patience_s=patience_s))


async def _examine(settings: Settings, url: str, *, repair: bool, patience_s: float) -> list[Finding]:
    clock = SystemClock()
    shape = settings.shape
    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(Writer(url, kind=KIND, shape=shape))
        signals = await stack.enter_async_context(Signals(url, shape=shape))
        found = await DeliveryExamination(Standing(writer), signals.ring_queued).run(mend=repair)
        found += await ClaimExamination(Abandoned(writer)).run(mend=repair)

        async def broker() -> list[Finding]:
            if not settings.relayed or settings.broker_url is None:
                return []
            async with open_broker(
                settings.broker_url, claim_s=settings.claim_s, farm=settings.farm, client=settings.client
            ) as opened:
                return await BrokerExamination(writer, opened, clock, signals.ring_queued, patience_s=patience_s).run(
                    mend=repair
                )

        async def sidelines() -> list[Finding]:
            async with open_magazines(
                settings.magazine_url or url, farm=settings.farm, client=settings.client
            ) as magazines:
                rows = Sidelines(writer)
                shelves = Shelves(magazines, rows)

                def audit() -> Audit:
                    return Audit(rows, shelves, clock, lost=_told_by_the_report)

                return await SidelineExamination(audit, Loader(rows, shelves)).run(mend=repair)

        return [*found, *await _answered("broker", broker), *await _answered("sidelines", sidelines)]


async def _answered(part: str, examination: Callable[[], Awaitable[list[Finding]]]) -> list[Finding]:
    try:
        return await examination()
    except (BrokerUnavailableError, MagazineUnavailableError) as exc:
        return [Finding(part=part, what=f"its store does not answer: {exc}", count=1)]


def _told_by_the_report(_: int) -> None:
    return
