"""Compare the priorities of wait queues that share a notify name, as selectors of one queue do."""

from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

from delivery.pull.dispatch import CONSUMER_PRIORITIES

IDLE: Final = -1
"""The priority of a member that neither leases nor waits for a statement."""

Member = TypeVar("Member", bound=Hashable)


class NameGroup(Generic[Member]):
    """Count the members that lease, or wait for a statement, by priority. All steps are O(1).

    The caller records each change of a member while there are several; a single one waits for none.
    """

    def __init__(self) -> None:
        self._priorities: dict[Member, int] = {}
        self._counts = [0] * CONSUMER_PRIORITIES

    def __len__(self) -> int:
        return len(self._priorities)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._priorities)

    def add(self, member: Member) -> None:
        """Add a member, which is idle."""
        self._priorities[member] = IDLE

    def remove(self, member: Member) -> None:
        """Remove a member."""
        self.record(member, IDLE)
        del self._priorities[member]

    def record(self, member: Member, priority: int) -> None:
        """Record the highest priority for which a member leases, or waits for a statement."""
        former = self._priorities[member]
        if former == priority:
            return
        self._priorities[member] = priority
        if former != IDLE:
            self._counts[former] -= 1
        if priority != IDLE:
            self._counts[priority] += 1

    def must_wait(self, member: Member) -> bool:
        """Return whether another member with a higher priority goes first."""
        return len(self) > 1 and any(self._counts[self._priorities[member] + 1 :])
