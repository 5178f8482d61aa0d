"""The doctor: one examination of an installation, straight on its stores."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

from delivery.doctor.broker import PATIENCE_S, BrokerExamination
from delivery.doctor.claims import ClaimExamination
from delivery.doctor.deliveries import DeliveryExamination
from delivery.doctor.findings import Finding
from delivery.doctor.orphans import OrphanExamination
from delivery.doctor.sidelines import SidelineExamination
from delivery.doctor.stores import Probe, StoreExamination
from delivery.doctor.surplus import SurplusExamination
from delivery.elections import open_election
from delivery.magazines import open_magazines
from delivery.sideline.audit import Audit
from delivery.sideline.loader import Loader
from delivery.sideline.shelves import Shelves
from rooms.backends import DATABASE, STORES, backends_of
from rooms.brokers import open_broker
from rooms.clock import SystemClock
from rooms.composition.process import member_name
from rooms.errors import BrokerUnavailableError, MagazineUnavailableError
from rooms.magazines import Magazines
from rooms.ports import Broker
from rooms.settings import Settings
from rooms.storage.abandoned import Abandoned
from rooms.storage.sidelines import Sidelines
from rooms.storage.signals import Signals
from rooms.storage.standing import Standing
from rooms.storage.writer import Writer

KIND: Final = "doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """`findings`: what differs, and with a repair what was put right; `refused`: nothing was repaired, because a store did
    not answer.
    """

    findings: Sequence[Finding]
    refused: bool = False


def examine(
    settings: Settings,
    database_url: str,
    *,
    repair: bool,
    patience_s: float = PATIENCE_S,
    logs: Mapping[str, str] | None = None,
) -> Examination:
    """Examine every part, and with `repair` put right what differs, if every store answers. `logs`: log files of stores by
    part, for advice. StorageUnavailableError, where PostgreSQL is away.
    """
    return asyncio.run(_examine(settings, database_url, repair=repair, patience_s=patience_s, logs=logs or {}))


async def _examine(
    settings: Settings, url: str, *, repair: bool, patience_s: float, logs: Mapping[str, str]
) -> Examination:
    clock = SystemClock()
    shape = settings.shape
    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(Writer(url, kind=KIND, shape=shape))
        signals = await stack.enter_async_context(Signals(url, shape=shape))
        magazines = await stack.enter_async_context(
            open_magazines(settings.magazine_url or url, farm=settings.farm, client=settings.client)
        )
        carrier: Broker | None = None
        if settings.relayed and settings.broker_url is not None:
            carrier = await stack.enter_async_context(
                open_broker(settings.broker_url, claim_s=settings.claim_s, farm=settings.farm, client=settings.client)
            )
        probes = await _probes(settings, stack, carrier, magazines)
        stores = StoreExamination(probes, _addresses(settings), logs)
        away = {finding.part: finding for finding in await stores.run()}
        if repair and away:
            return Examination(findings=list(away.values()), refused=True)

        async def broker() -> list[Finding]:
            if carrier is None:
                return []
            examination = BrokerExamination(writer, carrier, clock, signals.ring_queued, patience_s=patience_s)
            surplus = SurplusExamination(writer, carrier, clock, patience_s=patience_s)
            return [*await examination.run(mend=repair), *await surplus.run(mend=repair)]

        async def sidelines() -> list[Finding]:
            rows = Sidelines(writer)
            shelves = Shelves(magazines, rows)

            def audit() -> Audit:
                return Audit(rows, shelves, clock, lost=_told_by_the_report)

            return await SidelineExamination(audit, Loader(rows, shelves)).run(mend=repair)

        async def answered(part: str, examination: Callable[[], Awaitable[list[Finding]]]) -> list[Finding]:
            if part in away:
                return []
            try:
                return await examination()
            except (BrokerUnavailableError, MagazineUnavailableError) as exc:
                return [stores.away(part, str(exc))]

        found = await DeliveryExamination(Standing(writer), signals.ring_queued).run(mend=repair)
        found += await ClaimExamination(Abandoned(writer)).run(mend=repair)
        found += [*away.values(), *await answered("broker", broker)]
        found += await OrphanExamination(writer).run()  # after the broker, whose copies may have become some
        found += await answered("magazines", sidelines)
        return Examination(findings=found)


async def _probes(
    settings: Settings, stack: AsyncExitStack, broker: Broker | None, magazines: Magazines
) -> Mapping[str, Probe]:
    """How to ask each store that is not the database."""
    probes: dict[str, Probe] = {}
    addresses = _addresses(settings)
    if broker is not None:
        probes["broker"] = broker.remembers
    if "election" in addresses and settings.election_url is not None:
        election = await stack.enter_async_context(
            open_election(settings.election_url, client=settings.client, member=member_name(), clock=SystemClock())
        )
        probes["election"] = election.view
    if "magazines" in addresses:
        probes["magazines"] = magazines.check
    return probes


def _addresses(settings: Settings) -> Mapping[str, str]:
    """The addresses of the stores that are not the database, by part."""
    backends = backends_of(settings)
    return {part: address for part in STORES if (address := getattr(backends, part)) != DATABASE}


def _told_by_the_report(_: int) -> None:
    return
