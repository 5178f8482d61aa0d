"""Tells the records how many attempts at a time are made where that is less than what is allowed."""

from collections.abc import Callable
from typing import Final

from delivery.lanes import Lanes
from rooms.storage.lanes import SharedLanes

_EVERY_S: Final = 5.0


class Reports:
    """`slowed` is told how many lanes of this worker are kept below what they may do by trouble of their endpoints."""

    def __init__(self, lanes: Lanes, shared: SharedLanes, *, slowed: Callable[[int], None]) -> None:
        self._lanes = lanes
        self._shared = shared
        self._slowed = slowed
        self._next = 0.0

    async def send(self, now: float) -> None:
        """Report what has changed, every few seconds. `now`: monotonic seconds. Errors of the records rise."""
        if now < self._next:
            return
        self._next = now + _EVERY_S
        cut = [lane for lane in self._lanes if lane.concurrency.cut]
        self._slowed(len(cut))
        news = [lane for lane in cut if lane.reported != lane.slots]
        news += [lane for lane in self._lanes if lane.reported is not None and not lane.concurrency.cut]
        if news:
            await self._shared.report([(lane.identity, lane.slots) for lane in news])
        for lane in news:
            lane.reported = lane.slots if lane.concurrency.cut else None
