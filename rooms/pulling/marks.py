"""Where the next take from a queue begins to look.

What was taken stays in the index for as long as anybody's snapshot may see it. While a queue has more than is asked for,
each take begins where the one before ended, instead of walking over all that; a look at the whole queue once a
second finds what was committed behind its back, and none is told that its queue is empty before such a look.
"""

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from rooms.domain.copy import PRIORITIES
from rooms.storage.takes import WHOLE, Low, Taken

WHOLE_EVERY_US: Final = 1_000_000
BEHIND_US: Final = 100_000
"""What is published now with a higher priority may become visible so much later."""
MOST_QUEUES: Final = 1000

Key = TypeVar("Key", bound=Hashable)


class Marks(Generic[Key]):
    """The marks of the queues that one process takes from."""

    def __init__(self) -> None:
        self._low: dict[Key, tuple[Low, int]] = {}

    def low(self, key: Key) -> Low:
        """From where the next take of this queue looks, for each priority."""
        found = self._low.get(key)
        return WHOLE if found is None else found[0]

    def saw(self, key: Key, low: Low, taken: Taken) -> bool:
        """Learn from a take that looked from `low` on; whether there may be more than it saw."""
        found = self._low.pop(key, None)
        if not taken.more or taken.last is None:
            return taken.more or low is not WHOLE
        whole_us = taken.at_us if found is None or low is WHOLE else found[1]
        if taken.at_us - whole_us < WHOLE_EVERY_US:
            priority, due_us = taken.last
            above = [max(mark, taken.at_us - BEHIND_US) for mark in low[: PRIORITIES - 1 - priority]]
            rest = low[PRIORITIES - priority :]
            self._low[key] = ((*above, due_us, *rest), whole_us)
            if len(self._low) > MOST_QUEUES:
                del self._low[next(iter(self._low))]
        return True
