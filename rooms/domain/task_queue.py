"""Queue tasks in memory, and hand out what has the highest priority first."""

from collections import deque
from collections.abc import Iterable
from typing import Final

from rooms.domain.delivery_task import PRIORITIES, DeliveryTask

_LEVELS: Final = 2 * PRIORITIES


class TaskQueue:
    """Hold tasks by priority, those of one priority in the order in which they came.

    Tasks that are `behind` come after all others of their priority.
    """

    __slots__ = ("_count", "_levels")

    def __init__(self) -> None:
        self._levels = tuple(deque[DeliveryTask]() for _ in range(_LEVELS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, task: DeliveryTask) -> None:
        """Add a task."""
        self._levels[_LEVELS - 1 - 2 * task.priority - (not task.behind)].append(task)
        self._count += 1

    def extend(self, tasks: Iterable[DeliveryTask]) -> None:
        """Add tasks."""
        for task in tasks:
            self.append(task)

    def popleft(self) -> DeliveryTask:
        """Remove and return the next task. IndexError: there is none."""
        for level in self._levels:
            if level:
                self._count -= 1
                return level.popleft()
        raise IndexError("the queue is empty")

    def clear(self) -> None:
        """Remove all tasks."""
        for level in self._levels:
            level.clear()
        self._count = 0
