"""The broker's queues and PostgreSQL's rows of what it was sent."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from delivery.doctor.findings import Finding
from rooms.domain.ids import SubscriptionId
from rooms.ports import Broker, Clock
from rooms.storage.recovery import Recovery
from rooms.storage.relay import living
from rooms.storage.writer import Writer
from rooms.upkeep.queues import QueuesOfNobody
from rooms.upkeep.recovery import RecoveryOfCopies

PART: Final = "broker"
PATIENCE_S: Final = 10.0
"""How long a queue must hold too little before it counts: copies on their way in and out are counted a moment apart."""
_LOOK_S: Final = 0.5


class BrokerExamination:
    """BrokerUnavailableError where nobody can tell."""

    def __init__(
        self,
        writer: Writer,
        broker: Broker,
        clock: Clock,
        ring: Callable[[], None],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`ring` wakes the relay."""
        self._writer = writer
        self._records = Recovery(writer)
        self._broker = broker
        self._clock = clock
        self._ring = ring
        self._patience_s = patience_s

    async def run(self, *, mend: bool) -> list[Finding]:
        """Compare marks, depths and names."""
        found: list[Finding] = []
        if not await self._broker.remembers():
            count = sum((await self._records.sent()).values())
            if count:
                found.append(await self._forgotten(count, mend=mend))
        elif short := await self._short():
            found.append(await self._lost(short, mend=mend))
        return [*found, *await self._nobodys(mend=mend)]

    async def _forgotten(self, count: int, *, mend: bool) -> Finding:
        if mend:
            await self._recovery(0).run(_always)
        said = "copies in a broker that was emptied or is new"
        return Finding(part=PART, what=said, count=count, mended=count if mend else 0)

    async def _lost(self, short: Mapping[SubscriptionId | None, int], *, mend: bool) -> Finding:
        if mend:
            await self._recovery(0).run(_always)
        count = sum(short.values())
        names = ["PUSH" if queue is None else queue for queue in short]
        said = "copies that their queue does not hold"
        return Finding(part=PART, what=said, count=count, mended=count if mend else 0, examples=names)

    def _recovery(self, patience_s: float) -> RecoveryOfCopies:
        return RecoveryOfCopies(self._records, self._broker, self._clock, self._ring, patience_s=patience_s)

    async def _short(self) -> Mapping[SubscriptionId | None, int]:
        """The queues that hold too little at every look, and by how much at the least."""
        until = self._clock.monotonic() + self._patience_s
        short: dict[SubscriptionId | None, int] | None = None
        while True:
            look = await self._look()
            short = {
                queue: missing if short is None else min(missing, short[queue])
                for queue, missing in look.items()
                if short is None or queue in short
            }
            if not short or self._clock.monotonic() >= until:
                return short
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> Mapping[SubscriptionId | None, int]:
        before = await self._records.sent()
        depths = {queue: await self._broker.depth(queue) for queue in before}
        after = await self._records.sent()
        missing = {queue: min(before[queue], after.get(queue, 0)) - depth for queue, depth in depths.items()}
        return {queue: count for queue, count in missing.items() if count > 0}

    async def _nobodys(self, *, mend: bool) -> list[Finding]:
        queues = await self._broker.queues()
        alive = await living(self._writer, queues) if queues else frozenset()
        nobodys = [queue for queue in queues if queue not in alive]
        if not nobodys:
            return []
        mended = 0
        if mend:
            await QueuesOfNobody(self._writer, self._broker).run(_always)
            left = set(await self._broker.queues())
            mended = sum(queue not in left for queue in nobodys)
        said = "queues whose subscription is not there"
        return [Finding(part=PART, what=said, count=len(nobodys), mended=mended, examples=nobodys[:5])]


def _always() -> bool:
    return True
