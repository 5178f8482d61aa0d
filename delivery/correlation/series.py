"""Failing minutes of subscriptions as arrays: small enough for one process, whatever the log was."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_LEAST_FAILURES: Final = 2
_LEAST_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A subscription's attempts and failures in the minutes (since 1970, ascending) in which it had any."""

    key: int
    minutes: Ints
    attempts: Ints
    failures: Ints
    fresh: Ints
    """First tries among the failures: each is another delivery."""

    def bad(self) -> Ints:
        """The minutes with at least two failures that are at least half of all attempts."""
        enough = self.failures >= _LEAST_FAILURES
        return self.minutes[enough & (self.failures >= _LEAST_SHARE * self.attempts)]

    def failing(self) -> npt.NDArray[np.bool_]:
        """For each minute, whether at least half of its attempts failed, be it one alone."""
        failing: npt.NDArray[np.bool_] = self.failures >= np.maximum(_LEAST_SHARE * self.attempts, 1)
        return failing


def series_of(rows: Mapping[str, Ints]) -> Iterator[Series]:
    """The series in columns (sub_key, minute, attempts, failures, fresh), in whatever order; ascending by key."""
    order = np.lexsort((rows["minute"], rows["sub_key"]))
    sorted_rows = {name: values[order] for name, values in rows.items()}
    keys = sorted_rows["sub_key"]
    cuts = np.flatnonzero(np.diff(keys)) + 1
    bounds = [0, *cuts.tolist(), len(keys)]
    for begin, end in pairwise(bounds):
        if end > begin:
            some = slice(begin, end)
            yield Series(
                key=int(keys[begin]),
                minutes=sorted_rows["minute"][some],
                attempts=sorted_rows["attempts"][some],
                failures=sorted_rows["failures"][some],
                fresh=sorted_rows["fresh"][some],
            )
