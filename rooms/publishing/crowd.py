"""Which PUSH subscriptions have far more than their endpoints can do, as workers tell. What is published to them is held at
once: no worker has to take it from the queue only to hold it, so they cost the others little.

A hint, kept for a moment: whoever is held without need is let go by any worker that has room, and whoever is queued all the
same is held by the worker that meets it.
"""

from collections.abc import Callable, Iterable
from typing import Final

from rooms.domain.ids import SubscriptionId

KEPT_S: Final = 3.0
"""A worker tells once a second."""


class Crowd:
    """What this process has heard lately. `monotonic` gives seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._until: dict[SubscriptionId, float] = {}
        self._earliest = 0.0
        self._members: frozenset[SubscriptionId] = frozenset()

    def heard(self, names: Iterable[str]) -> None:
        """These are crowded now; of the others nothing is said."""
        now = self._monotonic()
        self._until |= dict.fromkeys(map(SubscriptionId, names), now + KEPT_S)
        self._look(now)

    def members(self) -> frozenset[SubscriptionId]:
        """Who is crowded; the same object as long as nothing changes."""
        if self._until and (now := self._monotonic()) >= self._earliest:
            self._look(now)
        return self._members

    def _look(self, now: float) -> None:
        self._until = {identity: until for identity, until in self._until.items() if until > now}
        self._earliest = min(self._until.values(), default=0.0)
        if self._members != self._until.keys():
            self._members = frozenset(self._until)
