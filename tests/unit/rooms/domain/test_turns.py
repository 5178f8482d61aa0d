"""Test turns of parties: each item once, in its party's order, and none waits for all of another's.

Random additions and removals are compared with a plain list of what waits.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.turns import Turns

PARTIES = "abcd"
STEPS = st.lists(st.sampled_from([*PARTIES, None]), max_size=60)
"""A party adds an item; None: one is taken, if any waits."""


@given(STEPS)
def test_each_item_is_taken_once_in_its_partys_order(steps: list[str | None]) -> None:
    turns: Turns[str, int] = Turns()
    waiting: list[tuple[str, int]] = []
    for number, party in enumerate([*steps, *[None] * len(steps)]):
        if party is not None:
            turns.append(party, number)
            waiting.append((party, number))
        elif waiting:
            first = turns.first()
            assert turns.popleft() == first
            owner = {item: own for own, item in waiting}[first]
            assert first == next(item for own, item in waiting if own == owner)
            waiting.remove((owner, first))
        assert len(turns) == len(waiting)
        assert bool(turns) is bool(waiting)
    assert not turns
    assert not turns._queues, "a party without items takes no memory"
    assert not turns._order


@given(STEPS)
def test_an_item_waits_for_one_of_each_other_party_for_each_of_its_own(
    steps: list[str | None],
) -> None:
    turns: Turns[str, tuple[str, int]] = Turns()
    allowed: dict[tuple[str, int], int] = {}
    """By item that waits: the turns of its own party up to its own."""
    passed: dict[tuple[str, int], Counter[str]] = {}
    for number, party in enumerate([*steps, *[None] * len(steps)]):
        if party is not None:
            item = party, number
            turns.append(party, item)
            allowed[item] = 1 + sum(own == party for own, _ in passed)
            passed[item] = Counter()
        elif turns:
            taken = turns.popleft()
            del passed[taken], allowed[taken]
            for item, counts in passed.items():
                counts[taken[0]] += 1
                assert counts[taken[0]] <= allowed[item]


@given(st.lists(st.sampled_from(PARTIES), max_size=40))
def test_what_waits_together_is_taken_in_rounds(parties: list[str]) -> None:
    """The first item of each party, then the second of each; in a round, the first to come first."""
    turns: Turns[str, tuple[str, int]] = Turns()
    seen: Counter[str] = Counter()
    for party in parties:
        turns.append(party, (party, seen[party]))
        seen[party] += 1
    order = list(seen)
    expected = sorted(
        ((party, rank) for party in order for rank in range(seen[party])),
        key=lambda item: (item[1], order.index(item[0])),
    )
    assert [turns.popleft() for _ in range(len(turns))] == expected


def test_nothing_is_taken_where_nothing_waits() -> None:
    turns: Turns[str, int] = Turns()
    with pytest.raises(IndexError):
        turns.first()
    with pytest.raises(IndexError):
        turns.popleft()
    assert len(turns) == 0
