"""Estimate when an incident began and ended, each as a range.

The begin is uncertain: between the last success before the incident and its first failure nothing
was tried, and in a partial outage successes go on. Each gap between two attempts is a place where
it may have begun. Its weight is the likelihood of the attempts after it, times the length of the
gap. The range has 90 % of the weight, and the estimate is its median. The end is found in the same
way from the other side.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from delivery.analytics.findings.cells import Ints
from delivery.analytics.findings.scan import Floats

CLOCK_ERROR_S: Final = 2.0
"""Seconds by which the clocks of workers may differ."""
_TAIL: Final = 0.05
_NEAR_S: Final = 600.0
"""Seconds from the nearest failure at which a silence counts half."""
_STEPS: Final = 64
_LONGEST_SILENCE_S: Final = 900.0
"""Silence after the last attempt in which an incident may have ended; after it, it is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """An estimate with its range, in seconds since 1970."""

    at: float
    low: float
    high: float


def estimate_edge(times: Floats, scores: Floats, *, limit: float, resolution_s: float) -> Edge:
    """Return where the positive scores begin.

    `times` and `scores` are of attempts, ascending, from before the begin into the incident.
    `limit`: the begin is not before it. For an end, pass negated times in reverse.
    """
    # after[k]: evidence of the incident if it began between the attempts k-1 and k.
    after = np.cumsum(scores[::-1])[::-1]
    left = np.concatenate(([min(limit, times[0])], times[:-1]))
    nearest = float(times[int(np.argmax(after))])
    steps = np.linspace(0.0, 1.0, _STEPS + 1)
    grid = left[:, None] + (times - left)[:, None] * steps
    middle = (grid[:, 1:] + grid[:, :-1]) / 2
    width = np.diff(grid, axis=1)
    prior = 1.0 / (1.0 + np.maximum(nearest - middle, 0.0) / _NEAR_S)
    weight = (width * prior * np.exp(after - after.max())[:, None]).ravel()
    if weight.sum() <= 0:
        return Edge(at=nearest, low=nearest - resolution_s, high=nearest + resolution_s)
    total = np.cumsum(weight) / weight.sum()
    ends = grid[:, 1:].ravel()
    at, low, high = (
        float(ends[min(int(np.searchsorted(total, share)), len(ends) - 1)])
        for share in (0.5, _TAIL, 1 - _TAIL)
    )
    slack = CLOCK_ERROR_S + resolution_s / 2
    return Edge(at=at, low=low - slack, high=high + slack)


def mirrored(edge: Edge) -> Edge:
    """Return an edge of negated times."""
    return Edge(at=-edge.at, low=-edge.high, high=-edge.low)


def silence_after(times: Floats, last_of_log: float) -> tuple[float, bool]:
    """Return until when an incident can have ended after its last attempt, and if it is open.

    It is open if the log ends within a usual pause of its attempts.
    """
    pause = float(np.percentile(np.diff(times), 90)) * 3 if len(times) > 2 else 0.0  # noqa: PLR2004
    allowed = max(_LONGEST_SILENCE_S, pause)
    return min(last_of_log, float(times[-1]) + allowed), last_of_log - float(times[-1]) <= allowed


def bin_times(bins: Ints, bin_s: int) -> Floats:
    """Return the middles of bins in seconds since 1970."""
    return (bins.astype(np.float64) + 0.5) * bin_s
