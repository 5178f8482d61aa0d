"""Test the order in which tasks in memory are handed out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.task_queue import TaskQueue
from tests.support.tasks import make_task

TASKS = st.lists(st.tuples(st.integers(0, 9), st.booleans()))


@given(TASKS, st.integers(0, 20))
def test_the_highest_priority_comes_first_and_what_is_behind_last_in_it(
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
    assert rest == sorted(left, key=lambda task: (-task.priority, task.behind))
    assert len(queue) == 0


def test_an_empty_queue_has_no_next_task() -> None:
    queue = TaskQueue()
    queue.append(make_task("one"))
    queue.clear()
    assert not queue
    with pytest.raises(IndexError):
        queue.popleft()
