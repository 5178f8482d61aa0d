"""How far down the outbox to look, and how long to let copies gather."""

from typing import Final

from rooms.storage.relay import Batch

BEGINNING: Final = 0
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
    """The low-water mark of one relay: a due time (epoch microseconds) below which it sent everything it saw."""

    def __init__(self) -> None:
        self._low_us = BEGINNING
        self._next_look_s = 0.0

    def begin(self, now_s: float) -> int:
        """From where the claim at `now_s` (monotonic) looks."""
        if now_s >= self._next_look_s:
            self._low_us = BEGINNING
        return self._low_us

    def forget(self) -> None:
        """Look at everything next."""
        self._next_look_s = 0.0

    def saw(self, batch: Batch, *, limit: int, begun_s: float, ended_s: float) -> None:
        """Raise the mark by what the claim left nothing of."""
        looked = self._low_us == BEGINNING
        if batch.found < limit and batch.found == len(batch.copies) + len(batch.unreadable):
            self._low_us = batch.at_us - COMMIT_US
        else:
            self._low_us = max(self._low_us, min(batch.highest_due_us, batch.at_us) - COMMIT_US)
        if looked:
            rest_s = max(LOOK_S, LOOK_SHARE * (ended_s - begun_s))
            self._next_look_s = ended_s + min(LONGEST_BETWEEN_LOOKS_S, rest_s)


def linger_s(found: int, elapsed_s: float) -> float:
    """How long to wait before the next claim, when the last one, `elapsed_s` after the one before, found so many."""
    if found <= 1:
        return 0.0
    return min(LONGEST_LINGER_S, found / max(elapsed_s, 1e-4) * LINGER_S_AT_1000 / 1000)
