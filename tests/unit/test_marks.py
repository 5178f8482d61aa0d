"""Low-water marks: whatever is committed late, they never step over it, within what they promise."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.brokers.marks import BEGINNING, COMMIT_US, START_US, Marks
from rooms.domain.copy import PRIORITIES
from rooms.domain.ids import SubscriptionId
from rooms.storage.outbox import Claim

NOBODY: frozenset[SubscriptionId] = frozenset()
T0 = 1_750_000_000_000_000
ONE, TWO = SubscriptionId("one"), SubscriptionId("two")


def claim(at_us: int, *, oldest: int = 10, newest: int = 10, taken: dict[int, int] | None = None) -> Claim:
    return Claim(at_us=at_us, oldest=oldest, newest=newest, highest_due_us=taken or {}, found=0, copies=[])


def test_at_first_everything_is_looked_at() -> None:
    assert Marks().low(NOBODY) == (BEGINNING,) * PRIORITIES


def test_after_a_look_that_left_nothing_all_marks_are_just_below_it() -> None:
    marks = Marks()
    marks.saw(claim(T0), everything=True)
    assert marks.low(NOBODY) == (T0 - START_US,) * PRIORITIES


def test_after_a_full_batch_only_what_it_reached_is_marked() -> None:
    """Priorities above the lowest one taken had nothing more; in the lowest there may be more from its last due time on."""
    marks = Marks()
    marks.saw(claim(T0, taken={9: T0 - 5_000_000, 4: T0 - 9_000_000}), everything=False)
    low = marks.low(NOBODY)
    assert low[:5] == (T0 - START_US,) * 5
    assert low[5] == T0 - 9_000_000 - START_US
    assert low[6:] == (BEGINNING,) * 4


def test_forgetting_looks_at_everything_again() -> None:
    marks = Marks()
    marks.low(frozenset({ONE}))
    marks.saw(claim(T0), everything=True)
    marks.forget()
    assert marks.low(frozenset({ONE})) == (BEGINNING,) * PRIORITIES


def test_a_transaction_under_way_holds_the_marks_at_the_look_before_it() -> None:
    marks = Marks()
    marks.saw(claim(T0, oldest=10, newest=10), everything=True)
    marks.saw(claim(T0 + 100_000, oldest=10, newest=12), everything=True)  # 10 and 11 began since
    assert marks.low(NOBODY)[0] == T0 - START_US
    marks.saw(claim(T0 + 200_000, oldest=12, newest=15), everything=True)  # they ended; 12 began after the second look
    assert marks.low(NOBODY)[0] == T0 + 100_000 - START_US
    marks.saw(claim(T0 + 300_000, oldest=15, newest=15), everything=True)
    assert marks.low(NOBODY)[0] == T0 + 300_000 - START_US


def test_a_transaction_that_takes_long_holds_them_only_so_far() -> None:
    marks = Marks()
    for step in range(100):
        marks.saw(claim(T0 + step * 100_000, oldest=5, newest=10 + step), everything=True)
    assert marks.low(NOBODY)[0] == T0 + 99 * 100_000 - COMMIT_US - START_US
    assert len(marks._claims) < 10, "looks of long ago are forgotten"


def test_what_is_passed_over_is_seen_again_once_it_is_admitted() -> None:
    marks = Marks()
    marks.saw(claim(T0), everything=True)
    marks.low(frozenset({ONE}))
    marks.saw(claim(T0 + 1_000_000), everything=True)
    marks.low(frozenset({ONE, TWO}))
    marks.saw(claim(T0 + 2_000_000), everything=True)
    assert marks.low(frozenset({ONE, TWO}))[0] == T0 + 2_000_000 - START_US
    assert marks.low(frozenset({ONE}))[0] == T0 + 1_000_000 - START_US
    marks.saw(claim(T0 + 3_000_000), everything=True)
    assert marks.low(NOBODY)[0] == T0 - START_US
    marks.saw(claim(T0 + 4_000_000), everything=True)
    assert marks.low(NOBODY)[0] == T0 + 4_000_000 - START_US, "once"


@dataclass
class Row:
    due_us: int
    visible_us: int
    transaction: int
    priority: int
    subscription: SubscriptionId


@given(st.integers(0, 2**32), st.floats(0.0, 1.0))
def test_against_a_queue_that_commits_late(seed: int, slowness: float) -> None:
    """A model: transactions fix due times as they begin and commit up to the promised time later, while a consumer claims
    in small batches and passes over subscriptions in turn. Once all is committed, claims from the marks alone find all.
    """
    chance = random.Random(seed)
    rows: list[Row] = []
    begun: list[tuple[int, int, int]] = []
    at = T0
    for number in range(60):
        at += chance.randrange(1, 40_000)
        ends = at + int(chance.random() * slowness * (COMMIT_US - 1))
        begun.append((number, at, ends))
        rows += [
            Row(at, ends, number, chance.randrange(10), chance.choice([ONE, TWO])) for _ in range(chance.randrange(4))
        ]
    marks, left = Marks(), list(rows)

    def look(now: int, excluded: frozenset[SubscriptionId], limit: int) -> int:
        low = marks.low(excluded)
        seen = [
            row
            for row in left
            if row.visible_us <= now
            and row.due_us <= now
            and row.subscription not in excluded
            and row.due_us >= low[PRIORITIES - 1 - row.priority]
        ]
        seen.sort(key=lambda row: (-row.priority, row.due_us))
        taken = seen[:limit]
        for row in taken:
            left.remove(row)
        newest = sum(start <= now for _, start, _ in begun)
        oldest = min((number for number, start, ends in begun if start <= now < ends), default=newest)
        highest: dict[int, int] = {}
        for row in taken:
            highest[row.priority] = max(row.due_us, highest.get(row.priority, 0))
        found = claim(now, oldest=oldest, newest=newest, taken=highest)
        marks.saw(found, everything=len(taken) < limit)
        return len(taken)

    now = T0
    while now < at + COMMIT_US:
        look(now, frozenset(chance.sample([ONE, TWO], chance.randrange(3))), chance.randrange(1, 6))
        now += chance.randrange(1, 60_000)
    while look(now, NOBODY, 5):
        now += 1
    assert left == []


@pytest.mark.parametrize("priority", range(PRIORITIES))
def test_marks_run_from_the_highest_priority_to_the_lowest(priority: int) -> None:
    marks = Marks()
    marks.saw(claim(T0, taken={priority: T0 - 1}), everything=False)
    low = marks.low(NOBODY)
    assert low[PRIORITIES - 1 - priority] == T0 - 1 - START_US
    assert all(mark == BEGINNING for mark in low[PRIORITIES - priority :])
