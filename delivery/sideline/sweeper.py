"""Rescues entries of sidelines that were taken and never finished (row B6)."""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from delivery.sideline.shelves import Shelves
from delivery.teamwork import together
from rooms.domain.ids import DeliveryId, SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.magazine import Stored
from rooms.errors import MagazineMissingError
from rooms.magazines import Magazine
from rooms.ports import Clock
from rooms.storage.sidelines import Sidelines, Step
from rooms.storage.worklist import Worklist

_log = logging.getLogger(__name__)

SWEEP_S: Final = 20 * 60.0
FIRST_S: Final = 10 * 60.0
EVERY_S: Final = 15 * 60.0
SIDELINES_AT_A_TIME: Final = 64


class Sweeper:
    """A duty within one epoch: an older one is refused by the store (StaleEpochError), and changes nothing.

    A stuck entry whose row still names it goes to the end of its magazine and waits; any other is deleted. All sidelines are
    swept by the clock, and single ones whenever somebody asks for it by a job: the same epoch serves both.
    """

    name = "the sweep of sidelines"

    def __init__(
        self,
        sidelines: Sidelines,
        shelves: Shelves,
        worklist: Worklist,
        clock: Clock,
        *,
        epoch: int,
        swept: Callable[[int], None],
        ended: Callable[[str], None],
        older_than_s: float = SWEEP_S,
        first_s: float = FIRST_S,
        every_s: float = EVERY_S,
    ) -> None:
        """`swept` is told how many entries were rescued, and `ended` how a sweep of all ended: done or failed. The first of
        those comes `first_s` after the turn began.
        """
        self._sidelines = sidelines
        self._shelves = shelves
        self._epoch = epoch
        self._swept = swept
        self._ended = ended
        self._older_than_s = older_than_s
        self._worklist = worklist
        self._clock = clock
        self._every_s = every_s
        self._next_at = clock.monotonic() + first_s

    async def run(self, go_on: Callable[[], bool]) -> None:
        """Do what was asked for, and sweep every sideline when it is time."""
        for task in await self._worklist.open({JobKind.SWEEP_SIDELINE}) if go_on() else ():
            try:
                swept = await self.sweep(SubscriptionId(task.arguments["subscription_id"]), go_on)
            except (KeyError, ValueError) as exc:
                await self._worklist.fail(task, f"{type(exc).__name__}: {exc}")
                continue
            if not go_on():
                return
            await self._worklist.progress(task, done=swept, total=swept, result={"swept": swept})
            await self._worklist.finish(task)
        if self._clock.monotonic() >= self._next_at:
            await self._all(go_on)
            self._next_at = self._clock.monotonic() + self._every_s

    async def _all(self, go_on: Callable[[], bool]) -> None:
        try:
            await self.sweep_all(go_on)
        except Exception:
            self._ended("failed")
            raise
        self._ended("done")

    async def sweep_all(self, go_on: Callable[[], bool]) -> None:
        """Sweep every sideline once, several side by side."""

        async def one(subscription: SubscriptionId) -> None:
            await self.sweep(subscription, go_on)

        after: SubscriptionId | None = None
        while go_on() and (page := await self._sidelines.subscriptions(after)):
            await together(one, page, at_a_time=SIDELINES_AT_A_TIME)
            after = page[-1]

    async def sweep(self, subscription: SubscriptionId, go_on: Callable[[], bool]) -> int:
        """Sweep one subscription's sideline; how many stuck entries there were."""
        magazine = await self._shelves.find(subscription) if go_on() else None
        found = 0
        try:
            for shard in range(0 if magazine is None else magazine.shards):
                more = True
                while more and magazine is not None and go_on():
                    look = await magazine.sweep(shard, epoch=self._epoch, older_than_s=self._older_than_s)
                    found += len(look.taken)
                    if look.taken:
                        await self._rescue(subscription, magazine, look.taken)
                    more = look.more
        except MagazineMissingError:
            self._shelves.forget(subscription)
        return found

    async def _rescue(self, subscription: SubscriptionId, magazine: Magazine, taken: Sequence[Stored]) -> None:
        named = await self._sidelines.slots(subscription, [DeliveryId(stored.entry.id) for stored in taken])
        kept = [stored for stored in taken if named.get(DeliveryId(stored.entry.id)) == stored.slot]
        gone = [stored.slot for stored in taken if named.get(DeliveryId(stored.entry.id)) != stored.slot]
        if gone:
            await magazine.delete(gone, swept=True)
        if kept:
            await self._again(subscription, magazine, kept)
        _log.info("%d stuck entries in the sideline of subscription %s", len(taken), subscription)
        self._swept(len(taken))

    async def _again(self, subscription: SubscriptionId, magazine: Magazine, kept: Sequence[Stored]) -> None:
        slots = await magazine.reload(kept)
        moved = [(stored, slot) for stored, slot in zip(kept, slots, strict=True) if slot is not None]
        steps = [
            Step(
                delivery_id=DeliveryId(stored.entry.id),
                subscription_id=subscription,
                generation=stored.entry.generation,
                slot=stored.slot,
            )
            for stored, _ in moved
        ]
        told = await self._sidelines.moved(steps, [slot for _, slot in moved])
        late = [slot for (_, slot), knows in zip(moved, told, strict=True) if not knows]
        if late:
            await magazine.delete(late)
