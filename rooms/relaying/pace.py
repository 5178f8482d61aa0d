"""How far down the outbox to look, and how long to let copies gather."""

from typing import Final

from rooms.domain.copy import PRIORITIES
from rooms.storage.relay import Batch

BEGINNING: Final = 0
_NOTHING_SEEN: Final = (BEGINNING,) * PRIORITIES
COMMIT_US: Final = 500_000
"""What takes longer than this to commit is found by the next look at the whole outbox."""
LINGER_S_AT_1000: Final = 0.01
"""How long to let copies gather at 1,000 of them a second; less at less, where a claim costs little and delay shows."""
LONGEST_LINGER_S: Final = 0.03
LOOK_S: Final = 1.0
"""How often everything is looked at."""
LOOK_SHARE: Final = 20
"""At least so many times as long as a look took lies between it and the next."""
LONGEST_BETWEEN_LOOKS_S: Final = 10.0


class Low:
    """The low-water marks of one relay: for each priority, a due time (epoch microseconds) below which it sent everything
    it saw.
    """

    def __init__(self) -> None:
        self._low: tuple[int, ...] = _NOTHING_SEEN
        self._looking = True
        self._next_look_s = 0.0

    def begin(self, now_s: float) -> tuple[int, ...]:
        """From where the claim at `now_s` (monotonic) looks, for priorities from 9 down to 0."""
        if now_s >= self._next_look_s:
            self._low, self._looking = _NOTHING_SEEN, True
        return self._low

    def forget(self) -> None:
        """Look at everything next."""
        self._next_look_s = 0.0

    def saw(self, batch: Batch, *, limit: int, begun_s: float, ended_s: float) -> None:
        """Raise the marks by what the claim left nothing of."""
        begun_us, taken = batch.at_us - COMMIT_US, batch.highest_due_us
        all_there_was = batch.found < limit and batch.found == len(batch.copies) + len(batch.unreadable)
        lowest = -1 if all_there_was or batch.beyond else min(taken, default=PRIORITIES)
        low = list(self._low)
        for priority in range(max(0, lowest), PRIORITIES):
            at = PRIORITIES - 1 - priority
            low[at] = begun_us if priority > lowest else max(low[at], taken[priority] - COMMIT_US)
        self._low = tuple(low)
        if self._looking:
            rest_s = max(LOOK_S, LOOK_SHARE * (ended_s - begun_s))
            self._next_look_s = ended_s + min(LONGEST_BETWEEN_LOOKS_S, rest_s)
            self._looking = False


def linger_s(found: int, elapsed_s: float) -> float:
    """How long to wait before the next claim, when the last one, `elapsed_s` after the one before, found so many."""
    if found <= 1:
        return 0.0
    return min(LONGEST_LINGER_S, found / max(elapsed_s, 1e-4) * LINGER_S_AT_1000 / 1000)
