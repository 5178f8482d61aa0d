"""Limit how often a key may call, with one token bucket a key in this process."""

from collections.abc import Callable

from rooms.domain.ids import KeyId
from rooms.errors import RateLimitedError
from rooms.token_buckets import TokenBuckets


class KeyRateLimiter:
    """Allow each key `per_s` requests a second, and as many at once after a second of quiet.

    0: unlimited.
    """

    def __init__(self, per_s: int, monotonic: Callable[[], float]) -> None:
        self._per_s = per_s
        self._buckets: TokenBuckets[KeyId] = TokenBuckets(per_s, monotonic)

    def acquire(self, key: KeyId) -> None:
        """Count one request. RateLimitedError: the key has no request left."""
        if self._per_s and not self._buckets.take(key):
            raise RateLimitedError(f"this key may make {self._per_s} requests a second")
