"""Tells publishers which lanes get far more than they can do, so that what is published to those is held at once."""

from collections.abc import Callable
from typing import Final

from delivery.lanes import Lanes
from rooms.domain.ids import SubscriptionId
from rooms.domain.states import Reason

_EVERY_S: Final = 1.0
_MOST: Final = 100
"""At a time, as a wake-up carries so many names; with looks four times a second that is 400 lanes a second."""


class Crowding:
    """`tell` is called with each crowded lane about once a second."""

    def __init__(self, lanes: Lanes, tell: Callable[[SubscriptionId], None]) -> None:
        self._lanes = lanes
        self._tell = tell
        self._told: dict[SubscriptionId, float] = {}

    def look(self, now: float) -> None:
        """Tell what is to be told. `now`: monotonic seconds."""
        # What is closed for another reason is to be held for that one.
        crowded = [
            lane.identity for lane in self._lanes if lane.crowded and lane.closed(now) in {None, Reason.SATURATED}
        ]
        self._told = {identity: self._told.get(identity, 0.0) for identity in crowded}
        due = [identity for identity in crowded if now - self._told[identity] >= _EVERY_S]
        for identity in sorted(due, key=self._told.__getitem__)[:_MOST]:
            self._told[identity] = now
            self._tell(identity)
