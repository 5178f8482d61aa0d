"""The check of sequence numbers that users copy names what is missing and what came again."""

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import count

from rooms.domain.ids import IdGenerator, RoomId
from tests.support.docs_shell import steps
from tests.support.service import ROOT

IDS = IdGenerator(lambda _bits: 0)
DAY_MS = 86_400_000
FIRST_DAY_MS = 1_790_000_000_000
PAGE = ROOT / "docs/guides/ordering-and-filters.md"

Receipt = tuple[int, str]
"""A sequence number and a message id."""


def published(number: int, day: float = 0.0) -> Receipt:
    """Return a message that was published so many days after the first one, some ms after others."""
    return number, IDS.generate(RoomId(7), int(FIRST_DAY_MS + day * DAY_MS) + next(MOMENTS))


MOMENTS = count()


def check(*receipts: Receipt) -> Sequence[str]:
    """Run the page's script on these messages of one key; return its lines, without the ids."""
    (script,) = (step.text for step in steps(PAGE.read_text()) if step.file == "check_sequence.py")
    lines = [
        json.dumps({"ordering_key": "k", "sequence": number, "message_id": message})
        for number, message in receipts
    ]
    done = subprocess.run(
        [sys.executable, "-c", script],
        input="\n".join([*lines, json.dumps({"message_id": "unnumbered"})]),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return [line.partition(":")[0] for line in done.stdout.splitlines()]


def test_gaps_and_repetitions_of_one_series_are_named() -> None:
    one, two, four, five = (published(number) for number in (1, 2, 4, 5))
    late = published(6, 20.0)
    assert check(one, two, four, two, five, late) == ["k 2 came again", "k 3 is missing"]
    three = published(3)
    assert check(one, two, four, three, three) == ["k 3 came again"]


def test_a_new_series_is_neither_a_repetition_nor_without_its_gaps() -> None:
    old = [published(number) for number in (1, 2, 3)]
    assert check(*old, published(2, 31.0), published(4, 31.1)) == [
        "k 1 is missing",
        "k 3 is missing",
    ]
    new = [published(number, 31.0) for number in (1, 2, 3, 4)]
    assert check(*old, *new) == []
    assert check(*old, *new, new[1]) == ["k 2 came again"]
    assert check(*old, published(1, 31.0), published(1, 62.0)) == []


def test_series_keep_their_gaps_apart() -> None:
    one, two, three = (published(number) for number in (1, 2, 3))
    new = [published(number, 40.0) for number in (1, 2, 3)]
    assert check(one, three, *new) == ["k 2 is missing"]
    # Sidelined messages of the old series stay longer than others, and may be shoveled later.
    assert check(one, three, *new, two) == []
    assert check(one, three, new[2], two, new[0]) == ["k 2 is missing"]
    assert check(one, two, three, *new, two) == ["k 2 came again"]


def test_what_may_be_a_new_series_is_named_as_such() -> None:
    old = [published(number) for number in (1, 2)]
    four, five = published(4, 45.0), published(5, 45.0)
    assert check(*old, four, five) == [
        "k 3 is missing",
        "k 1 to 2 may be missing",
    ]
    late = published(2, 44.9)
    assert check(*old, five, late) == ["k 1 is missing", "k 3 is missing", "k 4 is missing"]
    # An unfinished message keeps its key's numbers, however long the key is idle.
    assert check(*old, published(3, 45.0), old[1]) == ["k 2 came again", "k 1 to 2 may be missing"]
