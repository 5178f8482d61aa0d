"""Copies that get no attempt here and now: held until their lane takes them, or cancelled with their subscription."""

from collections.abc import Iterable, Sequence

from delivery.crowding import Crowding
from delivery.endpoints import Unusable
from delivery.lane import Lane
from delivery.lanes import Lanes
from delivery.settler import Settler
from rooms.domain.copy import Copy
from rooms.domain.states import Reason, State
from rooms.storage.outcomes import Outcome


class Refusals:
    """`selective`: the queue keeps what a busy lane has no room for. Where it does not, that is held; then publishers need
    not be told of lanes that are crowded.
    """

    def __init__(self, lanes: Lanes, settler: Settler, crowding: Crowding) -> None:
        self._lanes = lanes
        self._settler = settler
        self._crowding = crowding
        self.selective = True

    def end(self, copies: Iterable[Copy], to: State, reason: Reason) -> None:
        """Have copies end without an attempt."""
        for copy in copies:
            self._settler.add(Outcome(copy=copy, to=to, reason=reason))

    def closed(self, lane: Lane, copies: Sequence[Copy], reason: Reason) -> None:
        """Hold copies of a lane that is closed for this reason."""
        if reason is Reason.SATURATED:
            lane.turned_away += len(copies)
        self.end(copies, State.HELD, reason)

    def without_endpoint(self, copies: Iterable[Copy], known: Unusable | None) -> None:
        """Nobody can be called: the subscription is gone (None), or its settings make no endpoint."""
        if known is None:
            self.end(copies, State.CANCELLED, Reason.SUBSCRIPTION_DELETED)
        else:
            self.end(copies, State.HELD, Reason.DISABLED)

    def surplus(self, lane: Lane, now: float) -> None:
        """Hold what the lane will not get to soon, where the queue cannot keep it."""
        if not self.selective:
            self.end(lane.surplus(now), State.HELD, Reason.SATURATED)

    def look(self, now: float) -> list[Copy]:
        """Hold what waits in lanes that are closed, and more than they can do; what waited too long for its claim, to be
        given back. Lanes at rest are forgotten.
        """
        late: list[Copy] = []
        for lane in self._lanes:
            if lane.waiting or lane.identity in self._lanes.full:
                reason = lane.closed(now)
                if reason is not None:
                    self.closed(lane, lane.drain(), reason)
                else:
                    late += lane.outlived(now)
                    self.surplus(lane, now)
                self._lanes.emptier(lane)
            elif lane.idle(now):
                self._lanes.forget(lane)
        if self.selective:
            self._crowding.look(now)
        return late
