"""Remember which endpoints are saturated, as workers report it.

New deliveries to a saturated endpoint are held at once. No worker then claims them only to hold
them, so they cost other subscriptions little.

It is a hint that expires quickly. A worker with capacity releases what was held without need, and
a worker holds what was queued in spite of saturation.
"""

from collections.abc import Callable, Iterable
from typing import Final

from rooms.domain.ids import SubscriptionId

HINT_TTL_S: Final = 3.0
"""Workers report once a second."""


class SaturatedEndpoints:
    """Hold the recent reports of this process. `monotonic` returns seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._expires_at: dict[SubscriptionId, float] = {}
        self._next_expiry = 0.0
        self._current: frozenset[SubscriptionId] = frozenset()

    def on_notify(self, names: Iterable[str]) -> None:
        """Record subscriptions with saturated endpoints."""
        now = self._monotonic()
        self._expires_at |= dict.fromkeys(map(SubscriptionId, names), now + HINT_TTL_S)
        self._expire(now)

    def current(self) -> frozenset[SubscriptionId]:
        """Return the saturated subscriptions, as the same object until they change."""
        if self._expires_at and (now := self._monotonic()) >= self._next_expiry:
            self._expire(now)
        return self._current

    def _expire(self, now: float) -> None:
        self._expires_at = {
            identity: until for identity, until in self._expires_at.items() if until > now
        }
        self._next_expiry = min(self._expires_at.values(), default=0.0)
        if self._current != self._expires_at.keys():
            self._current = frozenset(self._expires_at)
