"""Test the order in which tasks in memory are handed out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.task_queue import TaskQueue
from tests.support.tasks import make_task

TASKS = st.lists(st.tuples(st.integers(0, 9), st.booleans()))


@given(TASKS, st.integers(0, 20))
def test_the_highest_priority_comes_first_and_what_is_behind_after_all_others(
    shapes: list[tuple[int, bool]], before: int
) -> None:
    """Some are taken before the rest is added."""
    tasks = [
        replace(make_task(f"s{number}", priority=priority), behind=behind)
        for number, (priority, behind) in enumerate(shapes)
    ]
    queue = TaskQueue()
    queue.extend(tasks[:before])
    taken = [queue.popleft() for _ in range(len(queue) // 2)]
    queue.extend(tasks[before:])
    left = [task for task in tasks if task not in taken]
    assert len(queue) == len(left)
    rest = [queue.popleft() for _ in range(len(queue))]
    assert rest == sorted(left, key=lambda task: (task.behind, -task.priority))
    assert len(queue) == 0


def test_an_empty_queue_has_no_next_task() -> None:
    queue = TaskQueue()
    queue.append(make_task("one"))
    queue.clear()
    assert not queue
    with pytest.raises(IndexError):
        queue.popleft()


def test_rooms_take_turns_within_a_priority() -> None:
    queue = TaskQueue()
    queue.extend([make_task(f"large-{number}", room=1) for number in range(5)])
    queue.extend([make_task(f"small-{number}", room=2) for number in range(2)])
    queue.append(make_task("urgent", room=1, priority=5))
    queue.extend([make_task("last", room=3)])
    assert [queue.popleft().subscription_id for _ in range(len(queue))] == [
        "urgent",
        "large-0",
        "small-0",
        "last",
        "large-1",
        "small-1",
        "large-2",
        "large-3",
        "large-4",
    ]


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans())))
def test_every_task_comes_once_and_those_of_a_room_in_order(
    steps: list[tuple[int, bool]],
) -> None:
    """A step adds a task to a room, and may take one."""
    queue, taken = TaskQueue(), []
    for number, (room, takes) in enumerate(steps):
        queue.append(make_task(str(number), room=room))
        if takes:
            taken.append(queue.popleft())
    taken += [queue.popleft() for _ in range(len(queue))]
    assert len(taken) == len(steps)
    for room in range(1, 5):
        assert [task.subscription_id for task in taken if task.room_id == room] == [
            str(number) for number, step in enumerate(steps) if step[0] == room
        ]
