"""Search readings of an answer for hidden texts, in a bounded number of steps.

The subscriber chooses both the texts and the answer, so both may be made to cost as much as
possible: texts that all begin alike, and an answer that repeats this beginning.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from typing import Final

BEGINNING_LENGTH: Final = 8
"""Texts are found by their beginnings of this length; shorter ones are not searched."""
_MAX_SEPARATE: Final = 10
"""Beginnings that are searched one by one. More of them are looked up at each place instead."""
_SAMPLE: Final = BEGINNING_LENGTH // 2
"""Of each occurrence of a beginning, one of the pieces of this length, side by side, is a part."""
_HIT_STEPS: Final = 6
_COMPARISON_STEPS: Final = 2
_CHARACTERS_PER_STEP: Final = 64
_ENDING_STEPS: Final = 20

Span = tuple[int, int | None]
"""Where a text begins and ends; None: it is cut off, at the end."""


class StepLimitError(Exception):
    """Report that a search would take more steps than it may."""


class Steps:
    """Count down the steps that are left of a search.

    A step is a unit of work that takes about as long as a look-up in a set.
    """

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, steps: int) -> None:
        """Raise StepLimitError if fewer steps are left."""
        self.left -= steps
        if self.left < 0:
            raise StepLimitError


class TextSearch:
    """Find texts of at least BEGINNING_LENGTH characters."""

    __slots__ = ("_beginnings", "_groups", "_samples")

    def __init__(self, texts: Iterable[str]) -> None:
        """Search for `texts`, the longest of which come first."""
        self._groups: dict[str, list[str]] = {}
        for text in texts:
            self._groups.setdefault(text[:BEGINNING_LENGTH], []).append(text)
        self._beginnings = sorted(self._groups)
        self._samples: frozenset[str] = frozenset()
        if len(self._groups) > _MAX_SEPARATE:
            self._samples = frozenset(
                beginning[place : place + _SAMPLE]
                for beginning in self._groups
                for place in range(_SAMPLE)
            )

    def spans(self, reading: str, steps: Steps, *, shortest: int) -> list[Span]:
        """Return spans that together cover all occurrences, in any order.

        At the end of the reading also that of the beginning of a text, of `shortest` characters or
        more, at most BEGINNING_LENGTH. Raises StepLimitError.
        """
        spans: list[Span] = []
        for beginning in self._found_beginnings(reading, steps):
            spans += self._group_spans(reading, beginning, steps)
        if shortest < BEGINNING_LENGTH:
            begin = self._short_ending(reading, steps, shortest)
            if begin is not None:
                spans.append((begin, None))
        return spans

    def _found_beginnings(self, reading: str, steps: Steps) -> Collection[str]:
        length, groups = len(reading), self._groups
        if not self._samples:
            steps.take(length * len(groups) // _MAX_SEPARATE)
            return [beginning for beginning in groups if beginning in reading]
        steps.take(length // _SAMPLE)
        samples = range(0, length - _SAMPLE + 1, _SAMPLE)
        if self._samples.isdisjoint([reading[at : at + _SAMPLE] for at in samples]):
            return ()
        steps.take(length)
        places = range(length - BEGINNING_LENGTH + 1)
        return groups.keys() & [reading[at : at + BEGINNING_LENGTH] for at in places]

    def _group_spans(self, reading: str, beginning: str, steps: Steps) -> Iterator[Span]:
        """Yield the spans of the texts with this beginning, those that overlap as one."""
        steps.take(len(reading) // _MAX_SEPARATE)
        start = covered = -1
        begin = reading.find(beginning)
        while begin >= 0:
            steps.take(_HIT_STEPS)
            end = _longest_end(reading, begin, self._groups[beginning], covered, steps)
            if end > covered:
                if begin > covered:
                    if start >= 0:
                        yield start, covered
                    start = begin
                if end > len(reading):
                    yield start, None
                    return
                covered = end
            begin = reading.find(beginning, begin + 1)
        if start >= 0:
            yield start, covered

    def _short_ending(self, reading: str, steps: Steps, shortest: int) -> int | None:
        """Return where the longest end begins that is a beginning shorter than BEGINNING_LENGTH."""
        steps.take(_ENDING_STEPS)
        beginnings = self._beginnings
        length = len(reading)
        for begin in range(max(0, length - BEGINNING_LENGTH + 1), length - shortest + 1):
            ending = reading[begin:]
            place = bisect_left(beginnings, ending)
            if place < len(beginnings) and beginnings[place].startswith(ending):
                return begin
        return None


def _longest_end(reading: str, begin: int, texts: Iterable[str], covered: int, steps: Steps) -> int:
    """Return where the longest of `texts` ends that begins here, or `covered` if that is later.

    Behind the end of the reading: the text is cut off.
    """
    for text in texts:
        length = len(text)
        end = begin + length
        if end <= covered:
            break  # as are all shorter ones
        steps.take(_COMPARISON_STEPS + length // _CHARACTERS_PER_STEP)
        if reading.startswith(text, begin):
            return end
        if end > len(reading) and text.startswith(reading[begin:]):
            return end
    return covered
