"""Queue items of several parties, which take turns."""

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)
T = TypeVar("T")


class Turns(Generic[P, T]):
    """Queue items: parties take turns, one item each, and those of one party keep their order.

    A party that comes is after all others. So an item waits for one of each other party, for each
    item of its own before it. A party takes memory only while it has items.
    """

    __slots__ = ("_count", "_order", "_queues")

    def __init__(self) -> None:
        self._queues: dict[P, deque[T]] = {}
        self._order: deque[P] = deque()
        """The parties that have items, in the order of their turns."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, party: P, item: T) -> None:
        """Add an item of a party."""
        queue = self._queues.get(party)
        if queue is None:
            self._queues[party] = deque((item,))
            self._order.append(party)
        else:
            queue.append(item)
        self._count += 1

    def first(self) -> T:
        """Return the item whose turn it is. IndexError: there is none."""
        return self._queues[self._order[0]][0]

    def popleft(self) -> T:
        """Remove and return the item whose turn it is. IndexError: there is none."""
        party = self._order.popleft()
        queue = self._queues[party]
        item = queue.popleft()
        if queue:
            self._order.append(party)
        else:
            del self._queues[party]
        self._count -= 1
        return item
