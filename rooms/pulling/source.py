"""Where messages are leased from; which one it is depends on who carries the copies."""

from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.pulling.line import Ask, Got
from rooms.pulling.queue import Key
from rooms.storage.leases import Row

Ring = Callable[[Iterable[SubscriptionId]], None]
"""Tells who waits that there may be something for these subscriptions, or that there never will be."""


class Source(Protocol):
    """Queues of PULL subscriptions (an async context manager; leaving leaves nothing with this process)."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def take(self, asked: Sequence[Ask[Key]]) -> list[Got[Row]]:
        """Lease what is there. StorageUnavailableError, StorageRefusedError: as for a pull."""
        ...

    async def look(self, keys: Collection[Key]) -> Collection[SubscriptionId]:
        """Those of the queues that wait which should be rung."""
        ...

    def left(self, key: Key) -> None:
        """No poll waits there any more."""
        ...

    def changed(self, rooms: frozenset[RoomId]) -> None:
        """Settings of these rooms (empty: any) have changed: subscriptions may be paused or gone."""
        ...
