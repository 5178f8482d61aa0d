"""What a process may do, and until when it may believe so: kept here, asked without waiting for anybody."""

import asyncio
from collections.abc import Collection, Coroutine, Mapping
from typing import Any

from rooms.ports import Clock


class Tenure:
    """The holds of one member under one deadline. Of the event loop's thread alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holds: dict[str, int] = {}
        self._until = 0.0
        self._change = asyncio.Event()

    @property
    def holds(self) -> Mapping[str, int]:
        """Epoch by partition, whatever the time."""
        return self._holds

    def lasts(self) -> bool:
        """Whether the deadline is still ahead."""
        return self._clock.monotonic() < self._until

    def epoch(self, partition: str) -> int | None:
        """The epoch of a hold, while the deadline is ahead."""
        return self._holds.get(partition) if self.lasts() else None

    def prove(self, until: float) -> None:
        """The store knows that we live: believe in the holds until then (of `Clock.monotonic`)."""
        revived = bool(self._holds) and not self.lasts()
        self._until = until
        if revived:
            self._tell()

    def take(self, holds: Mapping[str, int]) -> None:
        """These are ours now."""
        if holds:
            self._holds.update(holds)
            self._tell()

    def give_up(self, partitions: Collection[str]) -> None:
        """These are not ours any more, from this moment; tell the store afterwards."""
        if gone := self._holds.keys() & partitions:
            for partition in gone:
                del self._holds[partition]
            self._tell()

    def end(self) -> None:
        """Nothing is ours any more."""
        self._until = 0.0
        if self._holds:
            self._holds.clear()
            self._tell()

    def changed(self) -> Coroutine[Any, Any, object]:
        """Until the next change, from this call on, whenever it is awaited."""
        return self._change.wait()

    def _tell(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()
