"""How long to let work gather before the next round of it, so that rounds are few where there is much and quick where there is little."""

import math
from typing import Final

_MEMORY_S: Final = 0.5
"""How far back it looks, about: a burst is no rate, or whatever comes behind it would wait for company that does not come."""
_NOTHING_S: Final = 0.0005
"""Less is not worth a timer."""
_SHORTEST_S: Final = 1e-4


class Gathering:
    """`longest_s` where `full_per_s` or more come each second. At half of that it is an eighth, since rounds cost little as long as
    nobody is short of time, and the wait shows. Times are monotonic seconds, given by the caller.
    """

    __slots__ = ("_at", "_full_per_s", "_longest_s", "_per_s")

    def __init__(self, *, longest_s: float, full_per_s: float) -> None:
        self._longest_s = longest_s
        self._full_per_s = full_per_s
        self._per_s = 0.0
        self._at = 0.0

    def pause_s(self, count: int, now: float) -> float:
        """So many came since the last call: how long to wait before the next round."""
        elapsed = max(_SHORTEST_S, now - self._at)
        kept = math.exp(-elapsed / _MEMORY_S)
        self._at = now
        self._per_s = self._per_s * kept + count / elapsed * (1 - kept)
        pause_s = self._longest_s * min(1.0, self._per_s / self._full_per_s) ** 3
        return pause_s if pause_s >= _NOTHING_S else 0.0
