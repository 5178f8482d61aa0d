"""How often a key may ask: a bucket of tokens a key, in this process."""

from collections.abc import Callable

from rooms.buckets import Buckets
from rooms.domain.ids import KeyId
from rooms.errors import RateLimitedError


class Rates:
    """Lets each key make `per_s` requests a second, and as many at once after a quiet second. 0: unlimited."""

    def __init__(self, per_s: int, monotonic: Callable[[], float]) -> None:
        self._per_s = per_s
        self._buckets: Buckets[KeyId] = Buckets(per_s, monotonic)

    def take(self, key: KeyId) -> None:
        """Count one request. RateLimitedError where the key has none left."""
        if self._per_s and not self._buckets.take(key):
            raise RateLimitedError(f"this key may make {self._per_s} requests a second")
