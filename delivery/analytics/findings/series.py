"""Arrange counted attempts as series of minutes, one a subscription."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from delivery.analytics.findings.cells import AttemptCells

BIN_S: Final = 15
"""Seconds of a bin of the counts that retry advice uses."""
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MIN_BAD_FAILURES: Final = 2
_MIN_BAD_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSeries:
    """Count attempts and failures of a subscription by minute since 1970, ascending."""

    key: int
    minutes: Ints
    attempts: Ints
    failures: Ints
    first_failures: Ints
    """Failed first attempts, each of another delivery."""

    def bad_minutes(self) -> Ints:
        """Return the minutes with at least two failures that are at least half of all attempts."""
        enough = self.failures >= _MIN_BAD_FAILURES
        return self.minutes[enough & (self.failures >= _MIN_BAD_SHARE * self.attempts)]

    def failing_mask(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the minutes in which at least half of the attempts failed."""
        failing: npt.NDArray[np.bool_] = self.failures >= np.maximum(
            _MIN_BAD_SHARE * self.attempts, 1
        )
        return failing


def series_by_minute(cells: AttemptCells, rows: Ints | None = None) -> list[FailureSeries]:
    """Return the series of each subscription, ascending by key, of all rows or of some."""
    some = np.arange(len(cells.bin)) if rows is None else rows
    minute = cells.bin[some] * cells.bin_s // 60
    of = cells.subscription[some].astype(np.int64)
    order = np.lexsort((minute, of))
    some, minute, of = some[order], minute[order], of[order]
    changed = (np.diff(of, prepend=-1) != 0) | (np.diff(minute, prepend=-1) != 0)
    starts = np.flatnonzero(changed)
    if not len(starts):
        return []
    attempts = cells.attempts[some]
    failed = attempts * cells.failed[some]
    columns = {
        "minutes": minute[starts],
        "attempts": np.add.reduceat(attempts, starts),
        "failures": np.add.reduceat(failed, starts),
        "first_failures": np.add.reduceat(failed * cells.first[some], starts),
    }
    keys = cells.keys[of[starts]]
    cuts = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
    return [
        FailureSeries(
            key=int(keys[begin]), **{name: values[begin:end] for name, values in columns.items()}
        )
        for begin, end in pairwise(cuts)
    ]
