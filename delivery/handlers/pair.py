"""The two magazines of a handler queue, and what is done with both."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from rooms.domain.magazine import Entry, MagazineName, main_of, sideline_of
from rooms.domain.queue import Queue
from rooms.magazines import Magazine, Magazines

_PER_S: Final = 1_000_000
"""More than anybody loads into a shard within a second: a magazine made anew begins beyond all slots it ever had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Main and sideline."""

    main: Magazine
    sideline: Magazine


def names_of(queue: str) -> tuple[MagazineName, MagazineName]:
    """Return their names, in the store for a queue's `store_name`, in the API for its `name`."""
    return main_of(queue), sideline_of(queue)


async def make_pair(magazines: Magazines, queue: Queue, now: datetime) -> Pair:
    """Make what is not there. Messages expire in the main magazine; in the sideline a shovel looks at it."""
    beginning = max(0, int((now - queue.created_at).total_seconds())) * _PER_S
    main, sideline = names_of(queue.store_name)
    shards = queue.settings.shards
    return Pair(
        main=await magazines.create(main, shards=shards, expires=True, beginning=beginning),
        sideline=await magazines.create(sideline, shards=shards, beginning=beginning),
    )


async def open_pair(magazines: Magazines, queue: str) -> Pair:
    """MagazineMissingError: one of them is not there."""
    main, sideline = names_of(queue)
    return Pair(main=await magazines.open(main), sideline=await magazines.open(sideline))


async def drop_pair(magazines: Magazines, queue: str) -> None:
    """Forget both with all that is in them, and the queue's record. Broken off, it is done again from the front."""
    for name in names_of(queue):
        await magazines.drop(name)
    await magazines.forget_queue(queue)


class Pairs:
    """Opens each pair once."""

    def __init__(self, magazines: Magazines) -> None:
        self._magazines = magazines
        self._open: dict[str, tuple[datetime, Pair]] = {}

    async def find(self, queue: Queue) -> Pair:
        """MagazineMissingError: it is not there (any more)."""
        known = self._open.get(queue.store_name)
        # One that was made later has other magazines, also where it has the same name in the store.
        if known is None or known[0] != queue.created_at:
            known = queue.created_at, await open_pair(self._magazines, queue.store_name)
            self._open[queue.store_name] = known
        return known[1]

    async def make(self, queue: Queue, now: datetime) -> Pair:
        """The pair, made where it is not there, or not whole."""
        pair = await make_pair(self._magazines, queue, now)
        self._open[queue.store_name] = queue.created_at, pair
        return pair

    def forget(self, queue: str) -> None:
        """It was said to be missing: look anew the next time."""
        self._open.pop(queue, None)


def aside(entry: Entry, why: str, detail: str | None) -> Entry:
    """The entry as the sideline gets it."""
    return replace(entry, reason=why, detail=detail)


def back(entries: Sequence[Entry]) -> list[Entry]:
    """Entries as the main magazine gets them from a shovel."""
    return [replace(entry, reason=None, detail=None, shovels=entry.shovels + 1) for entry in entries]
