"""Limit rates by key with token buckets, within one process."""

from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_MAX_BUCKETS: Final = 10_000


class TokenBuckets(Generic[K]):
    """Give each key `per_s` tokens a second, and up to `per_s` at once. 0: no limit.

    It remembers 10,000 keys. A key that was forgotten begins with a full bucket.
    """

    def __init__(self, per_s: int, monotonic: Callable[[], float]) -> None:
        self._per_s = per_s
        self._monotonic = monotonic
        self._buckets: dict[K, tuple[float, float]] = {}

    def take(self, key: K) -> bool:
        """Take one token, and return whether there was one."""
        if not self._per_s:
            return True
        now = self._monotonic()
        tokens, since = self._buckets.get(key, (float(self._per_s), now))
        tokens = min(float(self._per_s), tokens + (now - since) * self._per_s)
        if tokens < 1:
            return False
        if key not in self._buckets and len(self._buckets) >= _MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        self._buckets[key] = (tokens - 1, now)
        return True

    def refund(self, key: K) -> None:
        """Return a token that was not needed after all."""
        if (bucket := self._buckets.get(key)) is not None:
            self._buckets[key] = bucket[0] + 1, bucket[1]
