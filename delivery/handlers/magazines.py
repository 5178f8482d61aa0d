"""Open the two magazines of a handler queue: main and sideline."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from rooms.domain.handler_queue import HandlerQueue
from rooms.domain.magazine import Entry, MagazineName, main_magazine_name, sideline_name
from rooms.ports import Magazine, Magazines

_MAX_SLOTS_PER_S: Final = 1_000_000
"""More than can be loaded into a shard in a second.

A magazine that is created again starts beyond all slots it ever had.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueMagazines:
    """Hold the open magazines of a queue."""

    main: Magazine
    sideline: Magazine


def magazine_names(queue: str) -> tuple[MagazineName, MagazineName]:
    """Return the names of both, from a queue's `store_name`, or for the API from its `name`."""
    return main_magazine_name(queue), sideline_name(queue)


async def create_queue_magazines(
    magazines: Magazines, queue: HandlerQueue, now: datetime
) -> QueueMagazines:
    """Create missing ones. Main deletes expired messages; in the sideline the shovel does."""
    beginning = max(0, int((now - queue.created_at).total_seconds())) * _MAX_SLOTS_PER_S
    main, sideline = magazine_names(queue.store_name)
    shards = queue.settings.shards
    return QueueMagazines(
        main=await magazines.create(main, shards=shards, expires=True, first_pointer=beginning),
        sideline=await magazines.create(sideline, shards=shards, first_pointer=beginning),
    )


async def open_queue_magazines(magazines: Magazines, queue: str) -> QueueMagazines:
    """Open both. MagazineMissingError: one of them does not exist."""
    main, sideline = magazine_names(queue)
    return QueueMagazines(main=await magazines.open(main), sideline=await magazines.open(sideline))


async def drop_queue_magazines(magazines: Magazines, queue: str) -> None:
    """Drop both with their entries, and the queue's record; safe to repeat."""
    for name in magazine_names(queue):
        await magazines.drop(name)
    await magazines.delete_queue_record(queue)


class QueueMagazineCache:
    """Open the magazines of each queue once."""

    def __init__(self, magazines: Magazines) -> None:
        self._magazines = magazines
        self._open: dict[str, tuple[datetime, QueueMagazines]] = {}

    async def get(self, queue: HandlerQueue) -> QueueMagazines:
        """Return the open magazines. MagazineMissingError: they do not exist."""
        known = self._open.get(queue.store_name)
        # A queue that was created later has other magazines, even under the same store name.
        if known is None or known[0] != queue.created_at:
            known = queue.created_at, await open_queue_magazines(self._magazines, queue.store_name)
            self._open[queue.store_name] = known
        return known[1]

    async def create(self, queue: HandlerQueue, now: datetime) -> QueueMagazines:
        """Return the magazines; create those that are missing."""
        pair = await create_queue_magazines(self._magazines, queue, now)
        self._open[queue.store_name] = queue.created_at, pair
        return pair

    def retain(self, queues: Collection[str]) -> None:
        """Forget the magazines of all queues but these: deleted ones would stay for ever."""
        for queue in self._open.keys() - set(queues):
            del self._open[queue]

    def invalidate(self, queue: str) -> None:
        """Open the magazines again the next time."""
        self._open.pop(queue, None)


def to_sideline_entry(entry: Entry, reason: str, detail: str | None) -> Entry:
    """Return the entry with the reason for which it is sidelined."""
    return replace(entry, reason=reason, detail=detail)


def to_main_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries as a shovel loads them into main."""
    return [
        replace(entry, reason=None, detail=None, shovels=entry.shovels + 1) for entry in entries
    ]
