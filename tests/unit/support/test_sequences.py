from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.support.sequences import Numbered, SequenceChecker


def checked(*receipts: Numbered) -> SequenceChecker:
    checker = SequenceChecker()
    checker.receive(*receipts)
    return checker


def received(key: str, *numbers: int) -> list[Numbered]:
    """Return the receipts of messages whose ids follow from their numbers."""
    return [Numbered(key, number, f"{key}-{number}") for number in numbers]


def test_complete_numbers_have_neither_gap_nor_repetition() -> None:
    checker = checked(*received("a", 1, 2, 3), *received("b", 1))
    assert checker.gaps() == {}
    assert checker.repetitions() == {}
    assert checker.contradictions() == []
    assert checker.last() == {"a": 3, "b": 1}


def test_a_gap_is_named_by_its_key_and_closed_by_its_number() -> None:
    checker = checked(*received("a", 2, 5), *received("b", 1, 2))
    assert checker.gaps() == {"a": [1, 3, 4]}
    checker.receive(*received("a", 3, 1))
    assert checker.gaps() == {"a": [4]}
    assert checker.repetitions() == {}


def test_what_follows_the_last_number_is_no_gap_yet() -> None:
    assert checked(*received("a", 1, 2)).gaps() == {}


def test_a_repetition_is_counted_for_each_key_and_number() -> None:
    checker = checked(*received("a", 1, 2, 1, 1), *received("b", 1))
    assert checker.repetitions() == {("a", 1): 2}
    assert checker.replayed() == frozenset()
    checker.receive(Numbered("a", 2, "a-2", replayed=True))
    assert checker.repetitions() == {("a", 1): 2, ("a", 2): 1}
    assert checker.replayed() == {("a", 2)}


def test_a_number_of_two_messages_is_a_contradiction() -> None:
    checker = checked(Numbered("a", 1, "x"), Numbered("a", 1, "y"), Numbered("b", 1, "z"))
    assert checker.contradictions() == ["a 1 is the number of x, y"]


def test_a_message_of_two_numbers_is_a_contradiction() -> None:
    checker = checked(Numbered("a", 1, "x"), Numbered("a", 2, "x"))
    assert checker.contradictions() == ["x has the numbers [('a', 1), ('a', 2)]"]


def test_a_message_without_a_number_is_a_contradiction() -> None:
    checker = checked(Numbered("a", None, "x"))
    assert checker.contradictions() == ["x of a has no number"]
    assert checker.last() == {}


@given(
    planted=st.dictionaries(
        st.sampled_from("abc"),
        st.lists(st.integers(min_value=0, max_value=3), min_size=1, max_size=12),
    ),
    random=st.randoms(use_true_random=False),
)
def test_every_planted_gap_and_repetition_is_named(
    planted: dict[str, list[int]], random: Random
) -> None:
    """Receive each number as often as planted, in any order."""
    times = Counter(
        {(key, n): count for key, counts in planted.items() for n, count in enumerate(counts, 1)}
    )
    receipts = [one for key, number in times.elements() for one in received(key, number)]
    random.shuffle(receipts)
    checker = checked(*receipts)
    last = {
        key: max(n for n, count in enumerate(counts, 1) if count)
        for key, counts in planted.items()
        if any(counts)
    }
    assert checker.last() == last
    assert {(key, n) for key, missing in checker.gaps().items() for n in missing} == {
        (key, n) for (key, n), count in times.items() if not count and n < last.get(key, 0)
    }
    assert checker.repetitions() == {one: count - 1 for one, count in times.items() if count > 1}
    assert checker.contradictions() == []
