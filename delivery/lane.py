"""A lane: one subscription's attempts in one worker, so that a webhook that hangs delays nobody else.

busy        more waits than slots are free: further copies stay in the queue, unclaimed
saturated   copies wait and no slot was freed for a second: what waits is held in PostgreSQL and comes back
            when slots are free again
closed      paused, disabled or deleted: what waits is held, or cancelled
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from delivery.endpoint import Endpoint
from rooms.domain.copy import Copy

SATURATED_AFTER_S: Final = 1.0
_LEAST: Final = 16
_MOST: Final = 512


class Lane:
    """The copies that wait and the slots that work on them. Times are monotonic seconds, given by the caller."""

    __slots__ = (
        "_capacity",
        "_freed_at",
        "_full",
        "_kept_short",
        "busy",
        "disabled",
        "endpoint",
        "ramping",
        "slots",
        "waiting",
    )

    def __init__(self, endpoint: Endpoint, *, slots: int, now: float) -> None:
        self.endpoint = endpoint
        self.slots = slots
        self.waiting: deque[Copy] = deque()
        self.busy = 0
        self.ramping = False
        """More slots are about to be put to work."""
        self.disabled = False
        """The endpoint has answered 410, and the records may not say so yet."""
        self._capacity = _LEAST
        self._freed_at = now
        self._full = False
        self._kept_short = False

    def offer(self, copies: Iterable[Copy], now: float) -> None:
        """Let copies wait."""
        if not self.waiting and self.busy < self.slots:
            self._freed_at = now
        self.waiting.extend(copies)

    def startable(self) -> int:
        """How many slots have something to do and do nothing."""
        return min(len(self.waiting), self.slots - self.busy)

    def take(self) -> Copy | None:
        """The next copy for a slot; None where the lane is empty."""
        if self.waiting:
            return self.waiting.popleft()
        if self._kept_short:
            # It ran dry while copies were kept from it: it is fast, and may have more at hand.
            self._capacity, self._kept_short = min(_MOST, self._capacity * 2), False
        return None

    def freed(self, now: float) -> None:
        """A slot has finished an attempt."""
        self._freed_at = now

    def full(self) -> bool:
        """Whether copies of this lane had better stay in the queue. Once full, it stays so until half is gone."""
        self._full = len(self.waiting) > (self._capacity // 2 if self._full else self._capacity)
        self._kept_short = self._kept_short or self._full
        return self._full

    def saturated(self, now: float) -> bool:
        """Whether every slot has been stuck for so long that nothing should wait for them in memory."""
        return self.busy >= self.slots and now - self._freed_at >= SATURATED_AFTER_S

    def drain(self) -> list[Copy]:
        """Everything that waits, taken out; the lane starts small again."""
        self._capacity = _LEAST
        waiting, self.waiting = list(self.waiting), deque()
        return waiting

    def room(self) -> int:
        """How many copies more could be kept here, at work or waiting."""
        return max(0, self.slots - self.busy + self._capacity - len(self.waiting))
