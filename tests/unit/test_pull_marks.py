"""Where takes begin to look: never past what nobody has taken, for longer than a second."""

import random

import pytest

from rooms.pulling.marks import BEHIND_US, MOST_QUEUES, WHOLE_EVERY_US, Marks
from rooms.storage.leases import Row, Standing
from rooms.storage.takes import WHOLE, Taken

AT_US = 10**15
ROWS: list[Row] = []


def taken(*, more: bool, last: tuple[int, int] | None, at_us: int = AT_US) -> Taken:
    return Taken(Standing.OPEN, ROWS, more, at_us, last)


def test_a_take_that_emptied_the_queue_leaves_no_mark() -> None:
    marks: Marks[str] = Marks()
    assert marks.saw("a", WHOLE, taken(more=False, last=(4, 7))) is False
    assert marks.saw("a", WHOLE, taken(more=False, last=None)) is False
    assert marks.low("a") is WHOLE


def test_a_full_take_is_followed_by_one_from_where_it_ended() -> None:
    marks: Marks[str] = Marks()
    assert marks.saw("a", WHOLE, taken(more=True, last=(7, 1234))) is True
    assert marks.low("a") == (AT_US - BEHIND_US, AT_US - BEHIND_US, 1234, *[0] * 7)
    assert marks.low("b") is WHOLE


def test_what_is_found_empty_from_a_mark_on_is_looked_at_whole_before_anybody_is_told() -> None:
    marks: Marks[str] = Marks()
    marks.saw("a", WHOLE, taken(more=True, last=(4, 1234)))
    assert marks.saw("a", marks.low("a"), taken(more=False, last=None)) is True
    assert marks.low("a") is WHOLE
    assert marks.saw("a", WHOLE, taken(more=False, last=None)) is False


def test_once_a_second_the_whole_queue_is_looked_at() -> None:
    marks: Marks[str] = Marks()
    marks.saw("a", WHOLE, taken(more=True, last=(4, 1)))
    marks.saw("a", marks.low("a"), taken(more=True, last=(4, 2), at_us=AT_US + WHOLE_EVERY_US - 1))
    assert marks.low("a") is not WHOLE
    marks.saw("a", marks.low("a"), taken(more=True, last=(4, 3), at_us=AT_US + WHOLE_EVERY_US))
    assert marks.low("a") is WHOLE


def test_the_marks_that_are_kept_are_bounded() -> None:
    marks: Marks[int] = Marks()
    for key in range(MOST_QUEUES + 10):
        marks.saw(key, WHOLE, taken(more=True, last=(4, 1)))
    assert marks.low(0) is WHOLE
    assert marks.low(MOST_QUEUES + 9) is not WHOLE


@pytest.mark.parametrize("seed", range(50))
def test_nothing_that_waited_before_is_passed_over(seed: int) -> None:
    """Takes over a queue in memory; what is added is due at the moment it is added, or was begun a little before."""
    draw, marks = random.Random(seed), Marks[str]()
    queue = sorted((-draw.randrange(10), draw.randrange(AT_US)) for _ in range(200))
    now = AT_US
    while queue:
        now += draw.randrange(50_000)
        low, most = marks.low("a"), draw.randrange(1, 20)
        seen = [item for item in queue if item[1] >= low[9 + item[0]]]
        assert seen == queue
        got = seen[:most]
        last = None if not got else (-got[-1][0], got[-1][1])
        marks.saw("a", low, taken(more=len(got) >= most, last=last, at_us=now))
        queue = queue[len(got) :]
        if draw.randrange(4) == 0 and now < AT_US + 10_000_000:
            queue = sorted([*queue, (-draw.randrange(10), now - draw.randrange(BEHIND_US // 2))])
