"""Leases straight from the outbox, where PostgreSQL is the broker."""

from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Self

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.pulling.line import Ask, Got
from rooms.pulling.marks import Marks
from rooms.pulling.queue import Key, refusal
from rooms.storage.lease_ends import LeaseEnds
from rooms.storage.leases import Row, Wanted, take
from rooms.storage.writer import Writer


class OutboxSource:
    """`rooms.pulling.source.Source` on the outbox."""

    def __init__(self, takers: Sequence[Writer], ends: LeaseEnds) -> None:
        """Each of `takers` takes once at a time."""
        self._takers = list(takers)
        self._ends = ends
        self._marks: Marks[Key] = Marks()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing stays with a process but what was leased."""

    async def take(self, asked: Sequence[Ask[Key]]) -> list[Got[Row]]:
        """Lease what is due, all in one statement."""
        lows = [self._marks.low(ask.key) for ask in asked]
        writer = self._takers.pop()
        try:
            taken = await take(
                writer,
                [Wanted(ask.key.packed(), ask.most, ask.lease_ms, low) for ask, low in zip(asked, lows, strict=True)],
            )
        finally:
            self._takers.append(writer)
        return [
            Got(found.rows, self._marks.saw(ask.key, low, found), refusal(found.standing, ask.key))
            for found, low, ask in zip(taken, lows, asked, strict=True)
        ]

    async def look(self, keys: Collection[Key]) -> Collection[SubscriptionId]:
        """Those with something due."""
        return await self._ends.due({(key.room, key.subscription) for key in keys})

    def left(self, key: Key) -> None:
        """Nothing was kept for those who waited."""

    def changed(self, rooms: frozenset[RoomId]) -> None:
        """Every take looks for itself."""
