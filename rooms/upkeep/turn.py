"""A turn: the time in which a duty is this process's, in one epoch."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from rooms.ports import Membership


class Span(Protocol):
    """A time in which a duty is done."""

    def goes_on(self) -> bool:
        """Whether there is still time for another statement; to be asked before each."""
        ...

    async def rest(self, seconds: float) -> None:
        """Wait so long, or until it is over."""
        ...


class Stay:
    """All the time until `stop`: for a duty that asks by itself what is this process's."""

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop

    def goes_on(self) -> bool:
        """Whether nobody said stop."""
        return not self._stop.is_set()

    async def rest(self, seconds: float) -> None:
        """Wait so long, or until somebody says stop."""
        await first(self._stop.wait(), within_s=seconds)


class Turn:
    """Ends with the epoch of its partition, or with `stop`."""

    def __init__(self, membership: Membership, partition: str, epoch: int, stop: asyncio.Event) -> None:
        self._membership = membership
        self._partition = partition
        self.epoch = epoch
        self._stop = stop

    def goes_on(self) -> bool:
        """Whether there is still time for another statement; to be asked before each."""
        return not self._stop.is_set() and self._membership.epoch(self._partition) == self.epoch

    async def rest(self, seconds: float) -> None:
        """Wait so long, or until the turn is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.goes_on() and (left := end - loop.time()) > 0:
            await first(self._membership.changed(), self._stop.wait(), within_s=left)


async def turn_of(membership: Membership, partition: str, stop: asyncio.Event) -> Turn | None:
    """The next turn at a partition, as soon as it comes; None where `stop` came first."""
    while not stop.is_set():
        epoch = membership.epoch(partition)
        if epoch is not None:
            return Turn(membership, partition, epoch, stop)
        await first(membership.changed(), stop.wait())
    return None


async def first(*waits: Coroutine[Any, Any, object], within_s: float | None = None) -> None:
    """Until one of these is over, or so many seconds."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
