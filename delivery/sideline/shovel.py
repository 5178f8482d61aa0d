"""Brings deliveries back from a sideline, or ends them there: what is chosen in PostgreSQL, batch by batch (rows B4, B5).

take (the entry is stamped) ──► one statement (`sidelined`, g → `queued`, g + 1) ──► the entry is deleted
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.sideline.order import Order
from delivery.sideline.shelves import Shelves
from rooms.domain.ids import SubscriptionId
from rooms.domain.magazine import Slot
from rooms.domain.pace import Pace
from rooms.domain.states import SubscriptionType
from rooms.errors import MagazineMissingError
from rooms.ports import Clock
from rooms.storage.shovels import Shoveled, Shovels
from rooms.storage.sideline_pages import Position, Sidelined, SidelineFilter, sideline_page
from rooms.storage.sidelines import Step
from rooms.storage.transactions import transaction

BATCH: Final = 500
_NAP_S: Final = 0.2

GoOn = Callable[[], bool]
Move = Callable[[Sequence[Step]], Awaitable[Counter[str]]]
Told = Callable[[Counter[str]], Awaitable[None]]


class Shovel:
    """Carries orders out. Errors are those of PostgreSQL and of the magazine; what was moved stays moved.

    Whoever begins anew after a crash begins at the front: what was moved is not there any more.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        shovels: Shovels,
        shelves: Shelves,
        clock: Clock,
        *,
        queued: Callable[[SubscriptionType, SubscriptionId], None],
        batch: int = BATCH,
    ) -> None:
        """`queued` is told, after each commit, that a subscription has something to be taken up."""
        self._engine = engine
        self._shovels = shovels
        self._shelves = shelves
        self._clock = clock
        self._queued = queued
        self._batch = batch

    async def shovel(self, order: Order, go_on: GoOn, told: Told, *, asked_at: datetime) -> bool:
        """Queue what is meant again. What was sidelined after `asked_at` is not, or a message that fails at once would go
        round. `told` hears of each batch; whether it came to the end.
        """

        async def move(steps: Sequence[Step]) -> Counter[str]:
            became = await self._shovels.shovel(steps, most=order.max_shovels)
            moved = [
                step
                for step, (what, _) in zip(steps, became, strict=True)
                if what in {Shoveled.QUEUED, Shoveled.EXPIRED}
            ]
            await self._forget(order.subscription, moved)
            for kind in {kind for what, kind in became if what is Shoveled.QUEUED and kind is not None}:
                self._queued(SubscriptionType(kind), order.subscription)
            return Counter(what.value for what, _ in became)

        return await self._each(order, go_on, told, asked_at=asked_at, most=order.max_shovels, move=move)

    async def purge(self, order: Order, go_on: GoOn, told: Told, *, asked_at: datetime) -> bool:
        """End what is meant as `purged`; the rest as for `shovel`."""

        async def move(steps: Sequence[Step]) -> Counter[str]:
            gone = await self._shovels.purge(steps)
            await self._forget(order.subscription, gone)
            return Counter({"purged": len(gone), "stale": len(steps) - len(gone)})

        return await self._each(order, go_on, told, asked_at=asked_at, most=None, move=move)

    async def _each(
        self, order: Order, go_on: GoOn, told: Told, *, asked_at: datetime, most: int | None, move: Move
    ) -> bool:
        until = order.wanted.until
        wanted = replace(order.wanted, until=asked_at if until is None else min(until, asked_at))
        pace = Pace(order.rate_per_s, self._clock.monotonic)
        hands = asyncio.Semaphore(order.concurrency)
        after: Position | None = None

        async def carry(steps: Sequence[Step]) -> None:
            try:
                await self._take(order.subscription, steps)
                await told(await move(steps))
            finally:
                hands.release()

        try:
            async with asyncio.TaskGroup() as group:
                while go_on():
                    page = await self._page(order, wanted, after, pace.batch(self._batch))
                    if not page:
                        return True
                    after = page[-1].position
                    chosen = [one.step for one in page if most is None or one.shovel_count < most]
                    if len(chosen) < len(page):
                        await told(Counter({Shoveled.TOO_OFTEN.value: len(page) - len(chosen)}))
                    if not chosen:
                        continue
                    if not await self._rest(pace.wait_s(len(chosen)), go_on):
                        return False
                    await hands.acquire()
                    group.create_task(carry(chosen))
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from group_error
        return False

    async def _page(
        self, order: Order, wanted: SidelineFilter, after: Position | None, limit: int
    ) -> Sequence[Sidelined]:
        async with transaction(self._engine) as connection:
            return await sideline_page(connection, order.room, order.subscription, wanted, after=after, limit=limit)

    async def _rest(self, seconds: float, go_on: GoOn) -> bool:
        """Wait so long; False where it is to end before."""
        until = self._clock.monotonic() + seconds
        while go_on():
            left = until - self._clock.monotonic()
            if left <= 0:
                return True
            await asyncio.sleep(min(left, _NAP_S))
        return False

    async def _take(self, subscription: SubscriptionId, steps: Sequence[Step]) -> None:
        # Whether an entry is there or not, its row says what becomes of it; the stamp tells a sweeper that somebody
        # began here.
        magazine = await self._shelves.find(subscription)
        slots = _slots(steps)
        if magazine is not None and slots:
            try:
                await magazine.take(slots)
            except MagazineMissingError:
                self._shelves.forget(subscription)

    async def _forget(self, subscription: SubscriptionId, steps: Sequence[Step]) -> None:
        magazine = await self._shelves.find(subscription)
        slots = _slots(steps)
        if magazine is not None and slots:
            try:
                await magazine.delete(slots)
            except MagazineMissingError:
                self._shelves.forget(subscription)


def _slots(steps: Sequence[Step]) -> list[Slot]:
    return [step.slot for step in steps if step.slot is not None]
