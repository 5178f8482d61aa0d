"""Queue tasks in memory by priority; rooms alternate within each priority."""

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

from rooms.domain.delivery_task import PRIORITIES, DeliveryTask
from rooms.domain.ids import RoomId

_LEVELS: Final = 2 * PRIORITIES


class _Level(NamedTuple):
    """Hold the tasks of one level; `turns` names the rooms that have some, the next one first."""

    turns: deque[RoomId]
    by_room: dict[RoomId, deque[DeliveryTask]]


class TaskQueue:
    """Hold tasks by priority, and hand out what has the highest one first.

    Tasks that are `behind` come after all others, whatever their priority: it is the organisation's
    own choice, and would let its backlog go before the messages of others. At each level rooms
    take turns, and those of one room come in the order of their arrival. So a burst in one room
    does not delay the others. Rooms stand for organisations here, which a task does not name.
    """

    __slots__ = ("_count", "_levels")

    def __init__(self) -> None:
        self._levels = tuple(_Level(deque(), {}) for _ in range(_LEVELS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, task: DeliveryTask) -> None:
        """Add a task."""
        level = PRIORITIES - 1 - task.priority
        turns, by_room = self._levels[level + PRIORITIES if task.behind else level]
        room = task.room_id
        if (tasks := by_room.get(room)) is None:
            tasks = by_room[room] = deque()
            turns.append(room)
        tasks.append(task)
        self._count += 1

    def extend(self, tasks: Iterable[DeliveryTask]) -> None:
        """Add tasks."""
        for task in tasks:
            self.append(task)

    def popleft(self) -> DeliveryTask:
        """Remove and return the next task. IndexError: there is none."""
        for turns, by_room in self._levels:
            if turns:
                tasks = by_room[turns[0]]
                task = tasks.popleft()
                if tasks:
                    turns.rotate(-1)
                else:
                    del by_room[turns.popleft()]
                self._count -= 1
                return task
        raise IndexError("the queue is empty")

    def clear(self) -> None:
        """Remove all tasks."""
        for turns, by_room in self._levels:
            turns.clear()
            by_room.clear()
        self._count = 0
