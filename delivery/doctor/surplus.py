"""Copies in PULL queues of the broker that no row waits for: of steps that are over, or of a time that PostgreSQL lost.

A queue is read while a poll waits for something that is due. After PostgreSQL was restored to an earlier time nothing may
be due there, so that its copies stay until the next message. A repair takes them out at once. Workers read the queue of PUSH
all the time.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from delivery.doctor.findings import Finding
from rooms.domain.ids import SubscriptionId
from rooms.ports import Broker, Clock
from rooms.storage.claims import Claims, step_of
from rooms.storage.copy_leases import over
from rooms.storage.natives import passwords
from rooms.storage.orphans import adopt
from rooms.storage.recovery import Recovery
from rooms.storage.relay import living
from rooms.storage.writer import Writer

PART: Final = "broker"
CREDIT: Final = 1000
"""So many copies of a queue are taken at a time. Behind as many that a poll can still lease, nothing is looked at."""
QUIET_S: Final = 2.0
"""When nothing more came for so long, everything has come."""
_LOOK_S: Final = 0.5
_EXAMPLES: Final = 5
_WAYS: Final = "the poll after the next message takes them out, `rooms doctor --repair` does it now"


@dataclass(slots=True)
class _Taken:
    over: int = 0
    orphans: int = 0
    homeless: int = 0


class SurplusExamination:
    """Compares depths with rows. BrokerUnavailableError; other errors are those of the storage."""

    def __init__(
        self,
        writer: Writer,
        broker: Broker,
        clock: Clock,
        *,
        patience_s: float,
        quiet_s: float = QUIET_S,
    ) -> None:
        """A queue counts when it holds too much for `patience_s`, because copies are counted a moment after they left."""
        self._writer = writer
        self._records = Recovery(writer)
        self._broker = broker
        self._clock = clock
        self._patience_s = patience_s
        self._quiet_s = quiet_s

    async def run(self, *, mend: bool) -> list[Finding]:
        """Count the copies, and with `mend` take them out: what has no delivery rests as an orphan afterwards."""
        surplus = await self._lasting()
        if not surplus:
            return []
        taken = _Taken()
        if mend:
            for queue in surplus:
                await self._take(queue, taken)
        count = sum(surplus.values())
        return [
            Finding(
                part=PART,
                what="copies that no row waits for: of steps that are over, or of a time that PostgreSQL lost",
                count=count,
                mended=min(count, taken.over + taken.orphans + taken.homeless),
                under_way=True,
                examples=list(surplus)[:_EXAMPLES],
                advice=_advice(taken) if mend else _WAYS,
            )
        ]

    async def _lasting(self) -> Mapping[SubscriptionId, int]:
        """The queues that hold too much at every look, and by how much at the least."""
        until = self._clock.monotonic() + self._patience_s
        surplus = await self._look()
        while surplus and self._clock.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
            look = await self._look()
            surplus = {queue: min(count, look[queue]) for queue, count in surplus.items() if queue in look}
        return surplus

    async def _look(self) -> Mapping[SubscriptionId, int]:
        queues = await self._broker.queues()
        if not queues:
            return {}
        natives = await passwords(self._writer)  # what lies in theirs is their readers'
        known = [queue for queue in await living(self._writer, queues) if queue not in natives]
        before = await self._records.sent()
        depths = {queue: await self._broker.depth(queue) for queue in sorted(known)}
        after = await self._records.sent()
        surplus = {
            queue: depth - max(before.get(queue, 0), after.get(queue, 0)) for queue, depth in depths.items() if depth
        }
        return {queue: count for queue, count in surplus.items() if count > 0}

    async def _take(self, queue: SubscriptionId, taken: _Taken) -> None:
        claims = Claims(self._writer)
        async with self._broker.consume(credit=CREDIT, subscription=queue) as consumer:
            batches = consumer.batches()
            with suppress(TimeoutError, StopAsyncIteration):
                while True:
                    async with asyncio.timeout(self._quiet_s):
                        copies = await anext(batches)
                    standings = await claims.look(copies)
                    orphans = [copy for copy in copies if not standings[step_of(copy)].known]
                    if orphans:
                        made, homeless = await adopt(self._writer, orphans)
                        taken.orphans += made
                        taken.homeless += homeless
                    done = await over(self._writer, copies)
                    taken.over += len(done)
                    await consumer.settle([*orphans, *done])


def _advice(taken: _Taken) -> str:
    return (
        f"{taken.over} were of steps that are over, {taken.orphans} rest as orphans now, {taken.homeless} were of subscriptions "
        "or days that are gone"
    )
