"""The lanes of one worker, by subscription, and which of them are so full that the queue passes them over."""

from collections.abc import Callable, Iterable, Iterator

from delivery.endpoint import Endpoint
from delivery.lane import Lane
from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId


class Lanes:
    """`exclude` is told of each change in what is to be passed over. `slots`: attempts at a time in each lane."""

    def __init__(self, *, slots: int, exclude: Callable[[frozenset[SubscriptionId]], None]) -> None:
        self._slots = slots
        self._exclude = exclude
        self._lanes: dict[SubscriptionId, Lane] = {}
        self.full: frozenset[SubscriptionId] = frozenset()

    def __iter__(self) -> Iterator[Lane]:
        return iter(list(self._lanes.values()))

    def __len__(self) -> int:
        return len(self._lanes)

    def enter(self, endpoint: Endpoint, now: float) -> Lane:
        """The lane of an endpoint's subscription, made when it is new; from now on it has these settings."""
        identity = endpoint.record.subscription_id
        lane = self._lanes.get(identity)
        if lane is None:
            lane = self._lanes[identity] = Lane(endpoint, slots=self._slots, now=now)
        lane.follow(endpoint, now)
        return lane

    def find(self, identity: SubscriptionId) -> Lane | None:
        """The lane of a subscription, if it has one."""
        return self._lanes.get(identity)

    def pass_over(self, identities: Iterable[SubscriptionId]) -> None:
        """Leave in the queue what the full ones among these lanes cannot keep."""
        full = {identity for identity in identities if (lane := self._lanes.get(identity)) is not None and lane.full()}
        if full - self.full:
            self._tell(self.full | full)

    def emptier(self, lane: Lane) -> None:
        """Copies left the lane: the queue may hand out more of its subscription."""
        if self.full and lane.identity in self.full and not lane.full():
            self._tell(self.full - {lane.identity})

    def forget(self, lane: Lane) -> None:
        """Keep a lane no longer that has nothing left to do."""
        del self._lanes[lane.identity]
        if lane.identity in self.full:
            self._tell(self.full - {lane.identity})

    def drain(self) -> list[Copy]:
        """Everything that waits, taken out; nothing is passed over any more."""
        copies = [copy for lane in self._lanes.values() for copy in lane.drain()]
        if self.full:
            self._tell(frozenset())
        return copies

    def _tell(self, full: frozenset[SubscriptionId]) -> None:
        self.full = full
        self._exclude(full)
