"""Find subscriptions that fail in the same minutes more often than chance explains.

For a, b and ab bad minutes out of T: Jaccard = ab/(a+b-ab), lift = ab·T/(a·b), φ =
(ab·T-a·b)/√(a·b·(T-a)(T-b)).

Failures come in runs, so a test on independent minutes would find every pair significant. The null
distribution shifts one series of the pair circularly by every lag, which keeps the runs. Its
p-values are corrected over all pairs by Benjamini-Hochberg. No p-value is below 1/T, so a short log
yields incidents, which need no significance, rather than pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from delivery.analytics.spark.counts import FailureSeries, Floats, Ints

FALSE_DISCOVERY_RATE: Final = 0.05
"""Expected share of chance pairs among significant pairs."""
_MIN_BAD: Final = 3
_MIN_BOTH: Final = 2
MAX_SUBSCRIPTIONS: Final = 2_000
"""Subscriptions that are compared, most bad minutes first."""
MAX_PAIRS: Final = 20_000
"""Pairs in the result, strongest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CofailurePair:
    """Two subscriptions, `first` < `second`, and their bad minutes; `q` is the adjusted p."""

    first: int
    second: int
    bad_first: int
    bad_second: int
    bad_both: int
    jaccard: float
    lift: float
    phi: float
    pearson: float
    p: float
    q: float

    @property
    def significant(self) -> bool:
        """Return True if chance does not explain the pair."""
        return self.q <= FALSE_DISCOVERY_RATE


def find_cofailures(
    series: Sequence[FailureSeries], *, first: int, minutes: int
) -> list[CofailurePair]:
    """Return pairs that share bad minutes, strongest first; the log has `minutes` from `first`."""
    candidates = [(one, one.bad_minutes() - first) for one in series]
    chosen = sorted(
        (found for found in candidates if len(found[1]) >= _MIN_BAD),
        key=lambda f: (-len(f[1]), f[0].key),
    )
    chosen = sorted(chosen[:MAX_SUBSCRIPTIONS], key=lambda found: found[0].key)
    if len(chosen) < 2:  # noqa: PLR2004 - a pair
        return []
    bad = [found[1] for found in chosen]
    failures = np.zeros((len(chosen), minutes), dtype=np.float32)
    marks = np.zeros((len(chosen), minutes), dtype=np.float32)
    for row, (one, places) in enumerate(chosen):
        failures[row, one.minutes - first] = one.failures
        marks[row, places] = 1
    both = np.rint(marks @ marks.T).astype(np.int64)
    with np.errstate(invalid="ignore"):
        pearson = np.atleast_2d(np.nan_to_num(np.corrcoef(failures)))
    left, right = np.nonzero(np.triu(both >= _MIN_BOTH, k=1))
    p = np.array(
        [
            _p_value(bad[a], bad[b], int(both[a, b]), minutes)
            for a, b in zip(left, right, strict=True)
        ]
    )
    # Pairs without common minutes count as tests with p = 1.
    q = _benjamini_hochberg(p, tests=len(chosen) * (len(chosen) - 1) // 2)
    pairs = [
        _to_pair(
            (chosen[a][0].key, chosen[b][0].key),
            a=len(bad[a]),
            b=len(bad[b]),
            ab=int(both[a, b]),
            span=minutes,
            pearson=float(pearson[a, b]),
            p=float(p[number]),
            q=float(q[number]),
        )
        for number, (a, b) in enumerate(zip(left, right, strict=True))
    ]
    return sorted(
        pairs, key=lambda pair: (pair.q > FALSE_DISCOVERY_RATE, -pair.phi, pair.first, pair.second)
    )[:MAX_PAIRS]


def _to_pair(
    keys: tuple[int, int], *, a: int, b: int, ab: int, span: int, pearson: float, p: float, q: float
) -> CofailurePair:
    spread = float(a) * b * (span - a) * (span - b)
    return CofailurePair(
        first=keys[0],
        second=keys[1],
        bad_first=a,
        bad_second=b,
        bad_both=ab,
        jaccard=ab / (a + b - ab),
        lift=ab * span / (a * b),
        phi=(ab * span - a * b) / spread**0.5 if spread else 0.0,
        pearson=round(float(pearson), 6),
        p=p,
        q=q,
    )


def _p_value(a: Ints, b: Ints, both: int, span: int) -> float:
    """Return the share of circular lags with at least as many common bad minutes as lag 0."""
    if len(a) * len(b) <= span * 8:
        lags = (a[:, None] - b[None, :]) % span
        common = np.bincount(lags.ravel(), minlength=span)
    else:
        size = _fft_size(span)
        common = np.zeros(span, dtype=np.int64)
        full = np.rint(np.fft.irfft(_spectrum(a, size) * np.conj(_spectrum(b, size)), size)).astype(
            np.int64
        )
        common[:span] += full[:span]
        common[1:] += full[size - span + 1 :]
    return float(np.count_nonzero(common >= both)) / span


def _fft_size(span: int) -> int:
    """Return a power of two at which no two lags overlap."""
    size = 1
    while size < 2 * span:
        size *= 2
    return size


def _spectrum(places: Ints, size: int) -> np.ndarray[tuple[int], np.dtype[np.complex128]]:
    line = np.zeros(size)
    line[places] = 1
    return np.fft.rfft(line)


def _benjamini_hochberg(p: Floats, *, tests: int) -> Floats:
    """Adjust p-values by Benjamini-Hochberg; `tests` counts the omitted tests with p = 1 too."""
    order = np.argsort(p, kind="stable")
    ranks = np.arange(1, len(p) + 1)
    stepped = np.minimum.accumulate((p[order] * tests / ranks)[::-1])[::-1]
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted
