"""Check deliveries that the broker had and PostgreSQL did not, after it was restored.

`OrphanCheck` reports those that were sidelined as orphans, and how to bring them back.

`SurplusTaskCheck` compares PULL queues with the rows that were sent. Workers read the PUSH queue
all the time. A PULL queue is read only while a poll waits for a due delivery. After PostgreSQL was
restored to an earlier time nothing may be due, so that the queue's messages stay until the next
publish. A repair takes them out at once.
"""

import asyncio
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from delivery.brokers.bounded_reads import read_batches
from delivery.doctor.checks import DoctorFinding
from rooms.db.catalog.native_subscriptions import native_passwords
from rooms.db.leases.acquire_copies import finished_copies
from rooms.db.queue.broker_claims import BrokerClaims, version_of
from rooms.db.queue.orphans import OrphanCount, count_orphans, create_orphan_rows
from rooms.db.queue.relay import existing_subscriptions
from rooms.db.queue.resend import ResendQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import Reason
from rooms.ports import Broker, Clock

ORPHANS: Final = "orphans"
_ORPHAN_EXAMPLES: Final = 5
SURPLUS: Final = "broker"
CREDIT: Final = 1000
"""Messages of a queue taken at a time; more that a poll can lease hide those behind them."""
DRAIN_QUIET_S: Final = 2.0
"""Silence after which a queue counts as read to its end."""
DRAIN_MAX_S: Final = 5.0
"""The longest time for which a repair withholds messages that can be delivered."""
_RECOUNT_EVERY_S: Final = 0.5
_ADVICE_WITHOUT_REPAIR: Final = (
    "the poll after the next message takes them out; `rooms doctor --repair` does it now"
)


class OrphanCheck:
    """Report sidelined orphans, not as faults: the operator decides whether to send them."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def run(self) -> list[DoctorFinding]:
        """Count orphans with and without a message. Errors are `LogWriter.run`'s."""
        found = await count_orphans(self._writer)
        with_message = [one for one in found if one.with_message]
        without_message = [one for one in found if one.count > one.with_message]
        findings = []
        if with_message:
            findings.append(
                _to_finding(
                    "sidelined as orphans: the broker had them and PostgreSQL had no rows"
                    " (was it restored to an earlier time?)",
                    sum(one.with_message for one in with_message),
                    with_message,
                    advice=f"bring them back with {_commands(with_message)}",
                )
            )
        if without_message:
            findings.append(
                _to_finding(
                    "sidelined as orphans whose message does not exist (a detached partition?)",
                    sum(one.count - one.with_message for one in without_message),
                    without_message,
                    advice="attach the partition again, then shovel them;"
                    " or end them with `rooms sideline purge`",
                )
            )
        return findings


def _to_finding(
    description: str, count: int, found: Sequence[OrphanCount], *, advice: str
) -> DoctorFinding:
    return DoctorFinding(
        part=ORPHANS,
        description=description,
        count=count,
        self_healing=True,
        examples=[_reference(one) for one in found[:_ORPHAN_EXAMPLES]],
        since=min(one.since for one in found),
        advice=advice,
    )


def _commands(found: Sequence[OrphanCount]) -> str:
    commands = [
        f"`rooms sideline shovel {shlex.quote(_reference(one))} --reason {Reason.ORPHAN}`"
        for one in found[:_ORPHAN_EXAMPLES]
    ]
    more = len(found) - len(commands)
    return ", ".join(commands) + (f", and likewise for {more} more subscriptions" if more else "")


def _reference(one: OrphanCount) -> str:
    return f"{one.room}/{one.name}"


@dataclass(slots=True)
class _TakenCounts:
    obsolete: int = 0
    orphans: int = 0
    without_subscription: int = 0


class SurplusTaskCheck:
    """Compare depths of PULL queues with sent rows. BrokerUnavailableError."""

    def __init__(
        self,
        writer: LogWriter,
        broker: Broker,
        clock: Clock,
        *,
        settle_s: float,
        drain_quiet_s: float = DRAIN_QUIET_S,
        drain_max_s: float = DRAIN_MAX_S,
    ) -> None:
        """Create it; a queue counts only after `settle_s`, since depths lag behind the rows."""
        self._writer = writer
        self._records = ResendQueries(writer)
        self._broker = broker
        self._clock = clock
        self._settle_s = settle_s
        self._drain_quiet_s = drain_quiet_s
        self._drain_max_s = drain_max_s

    async def run(self, *, repair: bool) -> list[DoctorFinding]:
        """Count surplus messages; a repair removes them, and sidelines those without a delivery."""
        surplus = await self._persistent_surplus()
        if not surplus:
            return []
        taken = _TakenCounts()
        if repair:
            for queue, count in surplus.items():
                await self._drain_queue(queue, count, taken)
        count = sum(surplus.values())
        return [
            DoctorFinding(
                part=SURPLUS,
                description="messages in queues without a waiting delivery:"
                " outdated, or of a time that PostgreSQL lost",
                count=count,
                repaired=min(count, taken.obsolete + taken.orphans + taken.without_subscription),
                self_healing=True,
                examples=list(surplus)[:_ORPHAN_EXAMPLES],
                advice=_advice_text(taken) if repair else _ADVICE_WITHOUT_REPAIR,
            )
        ]

    async def _persistent_surplus(self) -> Mapping[SubscriptionId, int]:
        """Return the queues that hold too much at every count, and the least surplus."""
        until = self._clock.monotonic() + self._settle_s
        surplus = await self._count_surplus()
        while surplus and self._clock.monotonic() < until:
            await asyncio.sleep(_RECOUNT_EVERY_S)
            counted = await self._count_surplus()
            surplus = {
                queue: min(count, counted[queue])
                for queue, count in surplus.items()
                if queue in counted
            }
        return surplus

    async def _count_surplus(self) -> Mapping[SubscriptionId, int]:
        queues = await self._broker.list_queues()
        if not queues:
            return {}
        natives = await native_passwords(self._writer)  # their messages belong to native readers
        known = [
            queue
            for queue in await existing_subscriptions(self._writer, queues)
            if queue not in natives
        ]
        before = await self._records.count_sent()
        depths = {queue: await self._broker.depth(queue) for queue in sorted(known)}
        after = await self._records.count_sent()
        surplus = {
            queue: depth - max(before.get(queue, 0), after.get(queue, 0))
            for queue, depth in depths.items()
            if depth
        }
        return {queue: count for queue, count in surplus.items() if count > 0}

    async def _drain_queue(self, queue: SubscriptionId, surplus: int, counts: _TakenCounts) -> None:
        """Remove the surplus. Between two passes, all else goes back to the queue."""
        while surplus > 0:
            removed = await self._drain_once(queue, counts)
            if not removed:
                return
            surplus -= removed

    async def _drain_once(self, queue: SubscriptionId, counts: _TakenCounts) -> int:
        """Remove surplus messages among those that come next; return how many."""
        claims, removed = BrokerClaims(self._writer), 0
        async with self._broker.consume(credit=CREDIT, subscription=queue) as consumer:
            async for tasks in read_batches(
                consumer, quiet_s=self._drain_quiet_s, within_s=self._drain_max_s
            ):
                found = await claims.inspect(tasks)
                orphans = [task for task in tasks if not found[version_of(task)].exists]
                if orphans:
                    created, homeless = await create_orphan_rows(self._writer, orphans)
                    counts.orphans += created
                    counts.without_subscription += homeless
                done = await finished_copies(self._writer, tasks)
                counts.obsolete += len(done)
                await consumer.settle([*orphans, *done])
                removed += len(orphans) + len(done)
        return removed


def _advice_text(counts: _TakenCounts) -> str:
    return (
        f"{counts.obsolete} were outdated, {counts.orphans} are sidelined as orphans now,"
        f" {counts.without_subscription} were of subscriptions or days that no longer exist"
    )
