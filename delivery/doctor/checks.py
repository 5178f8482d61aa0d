"""Run the checks of `rooms doctor`: stores, broker queues, claims, deliveries, sidelines."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Final

from delivery.maintenance.cleanup import delete_orphan_queues
from delivery.maintenance.resend import LossDetector, Resender, ResendScope, queue_scope
from delivery.sideline.audit import AuditResult, SidelineAudit
from delivery.sideline.loader import SidelineLoader
from rooms.db.catalog.native_subscriptions import native_passwords
from rooms.db.queue.integrity import (
    START,
    WORK_TABLES,
    IntegrityCheck,
    Mismatch,
    MismatchKind,
    RowPosition,
)
from rooms.db.queue.orphans import CrashLoops
from rooms.db.queue.relay import existing_subscriptions
from rooms.db.queue.resend import ResendQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId
from rooms.errors import TransientError
from rooms.ports import Broker, Clock

BROKER: Final = "broker"
CLAIMS: Final = "claims"
DELIVERIES: Final = "deliveries"
SIDELINES: Final = "sidelines"

QUEUE_SETTLE_S: Final = 10.0
"""Time for which a queue must hold too little: its rows and its depth are read a moment apart."""
ANSWER_TIMEOUT_S: Final = 10.0
"""Seconds within which a store must answer the check."""
SUSPECT_CRASHES: Final = 3
REPAIR_CRASHES: Final = 10
"""Workers in a row that died with a delivery claimed, from which a repair sidelines it."""
DELIVERY_EXAMPLES: Final = 5
_CLAIM_EXAMPLES: Final = 5
_NATIVE_EXAMPLES: Final = 5
_RECOUNT_EVERY_S: Final = 0.5
_MISMATCHES: Final = {
    MismatchKind.MISSING: "unfinished or sidelined deliveries without a work row",
    MismatchKind.OTHER_VERSION: "deliveries whose work row has another generation",
    MismatchKind.SURPLUS: "deliveries with a work row that their state does not need",
    MismatchKind.NO_MESSAGE: "waiting deliveries without their message",
}
_WHILE_UNAVAILABLE: Final[Mapping[str, str]] = {
    "broker": "deliveries wait in PostgreSQL until it is back, and none is lost",
    "election": "no maintenance task moves to another process until it is back",
    "magazines": (
        "sidelined deliveries wait in PostgreSQL until it is back; handler queues accept nothing"
    ),
}

Probe = Callable[[], Awaitable[object]]


def _always_continue() -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFinding:
    """Count differences of one kind in a part, and how many of them were repaired.

    `examples`: ids of some; `self_healing`: no fault, since maintenance will repair them;
    `unavailable`: the part does not answer, so that nothing is known and a repair is refused;
    `advice`: for the operator; `since`: the time of the oldest.
    """

    part: str
    description: str
    count: int
    repaired: int = 0
    self_healing: bool = False
    unavailable: bool = False
    examples: Sequence[str] = field(default_factory=tuple)
    advice: str = ""
    since: datetime | None = None

    @property
    def open_count(self) -> int:
        """Return the number of differences that are left."""
        return 0 if self.self_healing else self.count - self.repaired


class BrokerQueueCheck:
    """Compare an external broker's queues with the rows that were sent. BrokerUnavailableError."""

    def __init__(
        self,
        writer: LogWriter,
        broker: Broker,
        clock: Clock,
        notify_relay: Callable[[], None],
        *,
        settle_s: float = QUEUE_SETTLE_S,
    ) -> None:
        """Create it; `notify_relay` wakes the relay."""
        self._writer = writer
        self._records = ResendQueries(writer)
        self._broker = broker
        self._clock = clock
        self._notify_relay = notify_relay
        self._settle_s = settle_s

    async def run(self, *, repair: bool) -> list[DoctorFinding]:
        """Check the sentinel, the depths and the names of queues."""
        found: list[DoctorFinding] = []
        if not await self._broker.has_sentinel():
            count = sum((await self._records.count_sent()).values())
            if count:
                found.append(await self._repair_empty_broker(count, repair=repair))
        else:
            lacking, counted_at = await self._lacking_queues()
            if lacking:
                found.append(await self._repair_lacking(lacking, counted_at, repair=repair))
        found += await self._check_rejections()
        return [*found, *await self._check_orphan_queues(repair=repair)]

    async def _check_rejections(self) -> list[DoctorFinding]:
        users = self._broker.users
        if users is None:
            return []
        natives = await native_passwords(self._writer)
        if not natives or await users.keeps_rejected():
            return []
        return [
            DoctorFinding(
                part=BROKER,
                description="native subscriptions that lose what a STOMP client rejects by NACK",
                count=len(natives),
                examples=[str(subscription) for subscription in islice(natives, _NATIVE_EXAMPLES)],
                advice="give the broker the interceptor rooms/local/NackInterceptor.java",
            )
        ]

    async def _repair_empty_broker(self, count: int, *, repair: bool) -> DoctorFinding:
        repaired = 0
        if repair:
            loss_detector = LossDetector(self._records, self._broker)
            # None: maintenance was first.
            if (since := await loss_detector.lost_since()) is not None:
                resent = await self._resend(ResendScope(before=since))
                if await loss_detector.mark_recovered():
                    repaired = min(count, resent)
        return DoctorFinding(
            part=BROKER,
            description="deliveries sent to a broker that was restarted or emptied, or is new",
            count=count,
            repaired=repaired,
        )

    async def _repair_lacking(
        self,
        lacking: Mapping[SubscriptionId | None, int],
        counted_at: datetime,
        *,
        repair: bool,
    ) -> DoctorFinding:
        repaired = 0
        if repair:
            # A depth does not say which ones are missing, so the whole queue is sent again, but
            # nothing that was sent to it after it was counted.
            for queue, missing in lacking.items():
                resent = await self._resend(queue_scope(queue, before=counted_at))
                repaired += min(missing, resent)
        return DoctorFinding(
            part=BROKER,
            description="deliveries that are missing from their queue",
            count=sum(lacking.values()),
            repaired=repaired,
            examples=["PUSH" if queue is None else queue for queue in lacking],
        )

    async def _resend(self, scope: ResendScope) -> int:
        """Send the rows of a scope again, and return how many were."""
        resent = 0

        async def on_resent(count: int) -> None:
            nonlocal resent
            resent += count

        await Resender(self._records, self._notify_relay).run(scope, _always_continue, on_resent)
        return resent

    async def _lacking_queues(self) -> tuple[Mapping[SubscriptionId | None, int], datetime]:
        """Return the queues that hold too little at every count, and the least number missing.

        And the time of the last count, by PostgreSQL's clock.
        """
        until = self._clock.monotonic() + self._settle_s
        lacking: dict[SubscriptionId | None, int] | None = None
        while True:
            counted_at = await self._records.database_time()
            counted = await self._count_lacking()
            lacking = {
                queue: missing if lacking is None else min(missing, lacking[queue])
                for queue, missing in counted.items()
                if lacking is None or queue in lacking
            }
            if not lacking or self._clock.monotonic() >= until:
                return lacking, counted_at
            await asyncio.sleep(_RECOUNT_EVERY_S)

    async def _count_lacking(self) -> Mapping[SubscriptionId | None, int]:
        before = await self._records.count_sent()
        depths = {queue: await self._broker.depth(queue) for queue in before}
        after = await self._records.count_sent()
        missing = {
            queue: min(before[queue], after.get(queue, 0)) - depth
            for queue, depth in depths.items()
        }
        return {queue: count for queue, count in missing.items() if count > 0}

    async def _check_orphan_queues(self, *, repair: bool) -> list[DoctorFinding]:
        queues = await self._broker.list_queues()
        existing = await existing_subscriptions(self._writer, queues) if queues else frozenset()
        orphans = [queue for queue in queues if queue not in existing]
        if not orphans:
            return []
        repaired = 0
        if repair:
            await delete_orphan_queues(self._writer, self._broker, _always_continue)
            left = set(await self._broker.list_queues())
            repaired = sum(queue not in left for queue in orphans)
        return [
            DoctorFinding(
                part=BROKER,
                description="queues whose subscription does not exist",
                count=len(orphans),
                repaired=repaired,
                examples=orphans[:5],
            )
        ]


class ClaimCheck:
    """Find claimed deliveries whose workers keep dying. Errors are those of `CrashLoops`."""

    def __init__(self, crash_loops: CrashLoops) -> None:
        self._crash_loops = crash_loops

    async def run(self, *, repair: bool) -> list[DoctorFinding]:
        """Report them; a repair sidelines the hopeless ones as `stuck`."""
        found = await self._crash_loops.find(SUSPECT_CRASHES)
        hopeless = [task for task, crashes in found if crashes >= REPAIR_CRASHES]
        suspects = [task for task, crashes in found if crashes < REPAIR_CRASHES]
        findings = []
        if suspects:
            findings.append(
                DoctorFinding(
                    part=CLAIMS,
                    description=f"claimed by {SUSPECT_CRASHES} or more workers in a row that died",
                    count=len(suspects),
                    self_healing=True,
                    examples=[delivery_id for delivery_id, _, _ in suspects[:_CLAIM_EXAMPLES]],
                )
            )
        if hopeless:
            findings.append(
                DoctorFinding(
                    part=CLAIMS,
                    description=f"claimed by {REPAIR_CRASHES} or more workers in a row that died;"
                    " a repair sidelines them",
                    count=len(hopeless),
                    repaired=await self._crash_loops.sideline(hopeless) if repair else 0,
                    examples=[delivery_id for delivery_id, _, _ in hopeless[:_CLAIM_EXAMPLES]],
                )
            )
        return findings


class DeliveryCheck:
    """Check every delivery and its work row. Errors are those of `IntegrityCheck`."""

    def __init__(self, integrity: IntegrityCheck, on_repaired: Callable[[], None]) -> None:
        """Create it; `on_repaired` is called after each batch that may have queued work."""
        self._integrity = integrity
        self._on_repaired = on_repaired

    async def run(self, *, repair: bool) -> list[DoctorFinding]:
        """Check every delivery, then every work row."""
        counts: defaultdict[MismatchKind, int] = defaultdict(int)
        repaired: defaultdict[MismatchKind, int] = defaultdict(int)
        examples: defaultdict[MismatchKind, list[str]] = defaultdict(list)
        after: RowPosition | None = START
        while after is not None:
            found, _, after = await self._integrity.scan(after)
            by_kind: defaultdict[MismatchKind, list[Mismatch]] = defaultdict(list)
            for mismatch in found:
                by_kind[mismatch.kind].append(mismatch)
            for kind, some in by_kind.items():
                counts[kind] += len(some)
                examples[kind] += [
                    mismatch.delivery_id
                    for mismatch in some[: DELIVERY_EXAMPLES - len(examples[kind])]
                ]
                if repair:
                    repaired[kind] += await self._integrity.repair(some)
                    self._on_repaired()
        mismatches = [
            DoctorFinding(
                part=DELIVERIES,
                description=_MISMATCHES[kind],
                count=count,
                repaired=repaired[kind],
                examples=examples[kind],
            )
            for kind, count in counts.items()
        ]
        return [
            *mismatches,
            *[
                finding
                for table in WORK_TABLES
                for finding in await self._check_orphan_rows(table, repair=repair)
            ],
        ]

    async def _check_orphan_rows(self, table: str, *, repair: bool) -> list[DoctorFinding]:
        count = repaired = 0
        examples: list[str] = []
        after: RowPosition | None = START
        while after is not None:
            found, after = await self._integrity.find_orphan_rows(table, after)
            count += len(found)
            examples += [
                delivery_id for _, delivery_id in found[: DELIVERY_EXAMPLES - len(examples)]
            ]
            if repair and found:
                repaired += await self._integrity.delete_orphan_rows(table, found)
        if not count:
            return []
        return [
            DoctorFinding(
                part=DELIVERIES,
                description=f"rows of {table} without a delivery",
                count=count,
                repaired=repaired,
                examples=examples,
            )
        ]


class SidelineCheck:
    """Compare sidelines with their magazines. Errors are those of magazines and PostgreSQL."""

    def __init__(self, make_audit: Callable[[], SidelineAudit], loader: SidelineLoader) -> None:
        """Create it; `make_audit` returns a new audit: a used one skips what it has checked."""
        self._make_audit = make_audit
        self._loader = loader

    async def run(self, *, repair: bool) -> list[DoctorFinding]:
        """Audit, and audit again where something differs: a shovel may have just moved it."""
        found = await self._audit_once()
        if found.differences:
            found = _lower_counts(found, await self._audit_once())
        left = found
        if repair and found.differences:
            await self._make_audit().check(_always_continue, repair=True)
            await self._loader.run(_always_continue)
            left = _lower_counts(found, await self._audit_once())
        kinds = (
            ("entries that their magazine has lost", "lost", False),
            ("entries that no row names", "orphans", False),
            ("rows of deliveries that are no longer sidelined", "stale", True),
        )
        return [
            DoctorFinding(
                part=SIDELINES,
                description=description,
                count=count,
                repaired=count - getattr(left, field),
                self_healing=self_healing,
            )
            for description, field, self_healing in kinds
            if (count := getattr(found, field))
        ]

    async def _audit_once(self) -> AuditResult:
        return await self._make_audit().check(_always_continue, repair=False)


def _lower_counts(one: AuditResult, other: AuditResult) -> AuditResult:
    """Return the differences that both audits found."""
    return AuditResult(
        lost=min(one.lost, other.lost),
        stale=min(one.stale, other.stale),
        orphans=min(one.orphans, other.orphans),
    )


class StoreCheck:
    """Check that each store answers, all at the same time."""

    def __init__(
        self, probes: Mapping[str, Probe], addresses: Mapping[str, str], logs: Mapping[str, str]
    ) -> None:
        """Create it; by part: its probe, its address, and the log file of a local server."""
        self._probes = probes
        self._addresses = addresses
        self._logs = logs

    async def run(self) -> Sequence[DoctorFinding]:
        """Return a finding for each store that does not answer."""
        found = await asyncio.gather(
            *(self._probe(part, probe) for part, probe in self._probes.items())
        )
        return [finding for finding in found if finding is not None]

    async def _probe(self, part: str, probe: Probe) -> DoctorFinding | None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await probe()
        except TimeoutError:
            return self.unavailable_finding(part, f"no answer within {ANSWER_TIMEOUT_S:g} s")
        except TransientError as exc:
            return self.unavailable_finding(part, str(exc))
        return None

    def unavailable_finding(self, part: str, reason: str) -> DoctorFinding:
        """Return the finding for a store that does not answer."""
        address = self._addresses[part]
        return DoctorFinding(
            part=part,
            description=f"{address} does not answer: {reason}",
            count=1,
            unavailable=True,
            advice=f"{_WHILE_UNAVAILABLE[part]}. {self._repair_advice(part, address)}",
        )

    def _repair_advice(self, part: str, address: str) -> str:
        if part in self._logs:
            return (
                f"See {self._logs[part]}. `make run-full` restarts it when its process ends;"
                " otherwise run `make full-up`. End a process that hangs"
            )
        return f"Start the server at {address} and see its log; is the network open from here?"
