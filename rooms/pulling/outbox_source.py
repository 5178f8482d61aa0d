"""Leases straight from the outbox, where PostgreSQL is the broker."""

import asyncio
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Final, Self

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.pulling.line import Ask, Got
from rooms.pulling.marks import Marks
from rooms.pulling.queue import Key, refusal
from rooms.pulling.source import Ring
from rooms.storage.lease_ends import LeaseEnds
from rooms.storage.leases import Row
from rooms.storage.orphans import sideline
from rooms.storage.takes import Wanted, take
from rooms.storage.writer import Writer

AHEAD_S: Final = 2.0
"""How far ahead a look sees what comes due: further than to the next one."""
_LATE_S: Final = 0.001
"""Who looks a moment too early finds nothing, and is not rung again before the next look."""


class OutboxSource:
    """`rooms.pulling.source.Source` on the outbox."""

    def __init__(self, takers: Sequence[Writer], ends: LeaseEnds, ring: Ring) -> None:
        """Each of `takers` takes once at a time. `ring` is called when something comes due that a look has seen coming."""
        self._takers = list(takers)
        self._ends = ends
        self._ring = ring
        self._coming: dict[SubscriptionId, asyncio.TimerHandle] = {}
        self._marks: Marks[Key] = Marks()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing stays with a process but what was leased."""
        for timer in self._coming.values():
            timer.cancel()

    async def take(self, asked: Sequence[Ask[Key]]) -> list[Got[Row]]:
        """Lease what is due, all in one statement."""
        lows = [self._marks.low(ask.key) for ask in asked]
        writer = self._takers.pop()
        try:
            taken = await take(
                writer,
                [Wanted(ask.key.packed(), ask.most, ask.lease_ms, low) for ask, low in zip(asked, lows, strict=True)],
            )
            orphans = [(ask.key.room, one) for found, ask in zip(taken, asked, strict=True) for one in found.orphans]
            if orphans:
                await sideline(writer, orphans)
        finally:
            self._takers.append(writer)
        return [
            Got(found.rows, self._marks.saw(ask.key, low, found), refusal(found.standing, ask.key))
            for found, low, ask in zip(taken, lows, asked, strict=True)
        ]

    async def look(self, keys: Collection[Key]) -> Collection[SubscriptionId]:
        """Those with something due. What is due soon is rung for when it is."""
        found = await self._ends.due({(key.room, key.subscription) for key in keys}, ahead_s=AHEAD_S)
        loop = asyncio.get_running_loop()
        for subscription, wait_s in found.items():
            if wait_s > 0:
                if (before := self._coming.get(subscription)) is not None:
                    before.cancel()
                self._coming[subscription] = loop.call_later(wait_s + _LATE_S, self._is_due, subscription)
        return [subscription for subscription, wait_s in found.items() if wait_s <= 0]

    def _is_due(self, subscription: SubscriptionId) -> None:
        del self._coming[subscription]
        self._ring([subscription])

    def left(self, key: Key) -> None:
        """Nothing was kept for those who waited."""

    def changed(self, rooms: frozenset[RoomId]) -> None:
        """Every take looks for itself."""
