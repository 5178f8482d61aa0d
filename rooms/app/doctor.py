"""Check an installation for consistency, directly on its stores."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from delivery.doctor.checks import (
    QUEUE_SETTLE_S,
    BrokerQueueCheck,
    ClaimCheck,
    DeliveryCheck,
    DoctorFinding,
    Probe,
    SidelineCheck,
    StoreCheck,
)
from delivery.doctor.orphans import OrphanCheck, SurplusTaskCheck
from delivery.leadership import open_election
from delivery.sideline.audit import SidelineAudit
from delivery.sideline.loader import SidelineLoader
from delivery.sideline.magazines import SidelineMagazineCache
from rooms.api.server.tls_files import TlsFileError, TlsFiles, load_tls
from rooms.app.process import member_name
from rooms.app.stores import open_own_broker, open_own_magazines
from rooms.backends import DATABASE, STORES, backends_of
from rooms.clock import SystemClock
from rooms.db.notify import Notifier
from rooms.db.queue.integrity import IntegrityCheck
from rooms.db.queue.orphans import CrashLoops
from rooms.db.sideline.entries import SidelineEntries
from rooms.db.writer import LogWriter
from rooms.errors import BrokerUnavailableError, MagazineUnavailableError
from rooms.ports import Broker, Magazines
from rooms.settings import Settings

TLS_PART: Final = "tls"
RENEW_WITHIN: Final = timedelta(days=14)
"""A certificate that ends sooner is a finding."""
_RENEW: Final = "replace the file; running processes read it within five seconds"


def check_tls(settings: Settings, now: datetime) -> list[DoctorFinding]:
    """Return what is wrong with the files, or will be soon."""
    files = TlsFiles.of(settings)
    if files is None:
        return []
    try:
        loaded = load_tls(files)
    except TlsFileError as exc:
        return [DoctorFinding(part=TLS_PART, description=str(exc), count=1, advice=_RENEW)]
    found = []
    if loaded.not_after - now < RENEW_WITHIN:
        found.append(_ending("the certificate of the TLS port", loaded.not_after))
    if loaded.lists_end is not None and loaded.lists_end <= now:
        found.append(_ending("a revocation list, whose clients are all refused,", loaded.lists_end))
    return found


def _ending(what: str, end: datetime) -> DoctorFinding:
    return DoctorFinding(
        part=TLS_PART, description=f"{what} ends at {end.isoformat()}", count=1, advice=_RENEW
    )


KIND: Final = "doctor"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """Report differences in `findings`, with what was repaired.

    `refused`: nothing was repaired, because a store did not answer.
    """

    findings: Sequence[DoctorFinding]
    refused: bool = False


def run_checks(
    settings: Settings,
    database_url: str,
    *,
    repair: bool,
    grace_s: float = QUEUE_SETTLE_S,
    logs: Mapping[str, str] | None = None,
) -> DoctorReport:
    """Check every part, and with `repair` repair differences, if every store answers.

    `logs`: log files of stores by part, for advice. StorageUnavailableError: PostgreSQL does not
    answer.
    """
    return asyncio.run(
        check_stores(settings, database_url, repair=repair, grace_s=grace_s, logs=logs or {})
    )


async def check_stores(
    settings: Settings,
    url: str,
    *,
    repair: bool,
    grace_s: float = QUEUE_SETTLE_S,
    logs: Mapping[str, str],
) -> DoctorReport:
    """Do what `run_checks` does, in the running event loop."""
    clock = SystemClock()
    broker_mode = settings.broker_mode
    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(LogWriter(url, kind=KIND, broker_mode=broker_mode))
        notifier = await stack.enter_async_context(Notifier(url, broker_mode=broker_mode))
        magazines = await stack.enter_async_context(open_own_magazines(settings, url))
        external_broker: Broker | None = None
        if settings.uses_relay and settings.broker_url is not None:
            external_broker = await stack.enter_async_context(
                open_own_broker(settings, settings.broker_url)
            )
        probes = await _probes(settings, stack, external_broker, magazines)
        stores = StoreCheck(probes, _addresses(settings), logs)
        unavailable = {finding.part: finding for finding in await stores.run()}
        if repair and unavailable:
            return DoctorReport(findings=list(unavailable.values()), refused=True)

        async def broker() -> list[DoctorFinding]:
            if external_broker is None:
                return []
            examination = BrokerQueueCheck(
                writer, external_broker, clock, notifier.notify_queued, settle_s=grace_s
            )
            surplus_check = SurplusTaskCheck(writer, external_broker, clock, settle_s=grace_s)
            return [*await examination.run(repair=repair), *await surplus_check.run(repair=repair)]

        async def sidelines() -> list[DoctorFinding]:
            rows = SidelineEntries(writer)
            magazine_cache = SidelineMagazineCache(magazines, rows)

            def audit() -> SidelineAudit:
                return SidelineAudit(rows, magazine_cache, clock, on_lost=_ignore_lost)

            return await SidelineCheck(audit, SidelineLoader(rows, magazine_cache)).run(
                repair=repair
            )

        async def check_if_available(
            part: str, examination: Callable[[], Awaitable[list[DoctorFinding]]]
        ) -> list[DoctorFinding]:
            if part in unavailable:
                return []
            try:
                return await examination()
            except (BrokerUnavailableError, MagazineUnavailableError) as exc:
                return [stores.unavailable_finding(part, str(exc))]

        found = await DeliveryCheck(IntegrityCheck(writer), notifier.notify_queued).run(
            repair=repair
        )
        found += await ClaimCheck(CrashLoops(writer)).run(repair=repair)
        found += [*unavailable.values(), *await check_if_available("broker", broker)]
        found += await OrphanCheck(
            writer
        ).run()  # after the broker, whose copies may have become sidelined
        found += await check_if_available("magazines", sidelines)
        found += check_tls(settings, clock.now())
        return DoctorReport(findings=found)


async def _probes(
    settings: Settings, stack: AsyncExitStack, broker: Broker | None, magazines: Magazines
) -> Mapping[str, Probe]:
    """Return how to check each store that is not the database."""
    probes: dict[str, Probe] = {}
    addresses = _addresses(settings)
    if broker is not None:
        probes["broker"] = broker.has_sentinel
    if "election" in addresses and settings.election_url is not None:
        election = await stack.enter_async_context(
            open_election(
                settings.election_url,
                client=settings.client,
                member=member_name(),
                clock=SystemClock(),
            )
        )
        probes["election"] = election.view
    if "magazines" in addresses:
        probes["magazines"] = magazines.check
    return probes


def _addresses(settings: Settings) -> Mapping[str, str]:
    """Return the addresses of the stores that are not the database, by part."""
    backends = backends_of(settings)
    return {part: address for part in STORES if (address := getattr(backends, part)) != DATABASE}


def _ignore_lost(_: int) -> None:
    return
