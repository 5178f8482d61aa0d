"""How often a key may ask: a bucket of tokens a key, in this process."""

from collections.abc import Callable
from typing import Final

from rooms.domain.ids import KeyId
from rooms.errors import RateLimitedError

_MOST_KNOWN: Final = 10_000


class Rates:
    """Lets each key make `per_s` requests a second, and as many at once after a quiet second. 0: unlimited."""

    def __init__(self, per_s: int, monotonic: Callable[[], float]) -> None:
        self._per_s = per_s
        self._monotonic = monotonic
        self._buckets: dict[KeyId, tuple[float, float]] = {}

    def take(self, key: KeyId) -> None:
        """Count one request. RateLimitedError where the key has none left."""
        if not self._per_s:
            return
        now = self._monotonic()
        tokens, since = self._buckets.get(key, (float(self._per_s), now))
        tokens = min(float(self._per_s), tokens + (now - since) * self._per_s)
        if tokens < 1:
            raise RateLimitedError(f"this key may make {self._per_s} requests a second")
        if key not in self._buckets and len(self._buckets) >= _MOST_KNOWN:
            del self._buckets[next(iter(self._buckets))]
        self._buckets[key] = (tokens - 1, now)
