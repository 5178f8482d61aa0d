"""What a push worker takes its copies from."""

from typing import Final, Protocol

from rooms.ports import Consumer

CREDIT: Final = 20_000
"""Copies a worker may have in hand: enough for hundreds of endpoints that hang in all of their slots, and, where the queue
cannot keep what a lane has no time for, ten seconds' work of a lane that does 2,000 a second, which so is never held.
"""


class Queue(Protocol):
    """Claimed copies, at most `credit` of them unsettled."""

    def consume(self, *, credit: int) -> Consumer:
        """As `rooms.ports.Broker` does it for PUSH."""
        ...
