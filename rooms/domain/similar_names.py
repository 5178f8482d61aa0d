"""Find the known name that a misspelt one is most like, for the text of an error."""

from collections.abc import Collection
from difflib import SequenceMatcher
from heapq import nlargest
from typing import Final

_MAX_NAME: Final = 64
_SIMILAR: Final = 0.6
# A whole comparison takes up to a millisecond.
_COMPARED: Final = 3


def nearest_name(name: str, known: Collection[str]) -> str | None:
    """Return the known name that is most like `name`; None: none is, or it is known itself.

    It takes some 10 µs for each known name; a caller on an event loop passes few.
    """
    if len(name) > _MAX_NAME or name in known:
        return None
    matcher = SequenceMatcher(b=name)
    bounds: list[tuple[float, str]] = []
    for one in known:
        matcher.set_seq1(one)
        if matcher.real_quick_ratio() >= _SIMILAR and (bound := matcher.quick_ratio()) >= _SIMILAR:
            bounds.append((bound, one))
    ratios: list[tuple[float, str]] = []
    for _, one in nlargest(_COMPARED, bounds):
        matcher.set_seq1(one)
        ratios.append((matcher.ratio(), one))
    ratio, nearest = max(ratios, default=(0.0, ""))
    return nearest if ratio >= _SIMILAR else None


def suggestion(name: str, known: Collection[str]) -> str:
    """Return `; is NAME meant?` with the nearest known name, or nothing."""
    nearest = nearest_name(name, known)
    return "" if nearest is None else f"; is {nearest} meant?"
