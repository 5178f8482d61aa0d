"""Co-failure: which subscriptions fail in the same minutes more often than chance lets them.

With a, b and ab bad minutes of T: Jaccard ab/(a+b-ab), lift ab·T/(a·b), φ = (ab·T-a·b)/√(a·b·(T-a)(T-b)). Failures come in
runs, so that a table of independent minutes would find everything significant; the null is the pair itself with one of the
two shifted in a circle by every possible lag, which keeps the runs. Its p-values go through Benjamini-Hochberg over all
pairs. T minutes give no p below 1/T: a short log shows incidents, which no significance gates, rather than pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from delivery.correlation.series import Floats, Ints, Series

RATE: Final = 0.05
"""Of the pairs called significant, at most this share is expected to be chance."""
_LEAST_BAD: Final = 3
_LEAST_BOTH: Final = 2
MOST: Final = 2_000
"""Subscriptions that are compared, those with most bad minutes first."""
KEPT: Final = 20_000
"""Pairs that are told, the strongest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two subscriptions, `first` < `second`; bad minutes of each and of both; `q` is the adjusted p."""

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
        """Whether the pair is more than chance."""
        return self.q <= RATE


def cofailures(series: Sequence[Series], *, first: int, minutes: int) -> list[Pair]:
    """The pairs that share bad minutes, the strongest first. The log spans `minutes` from minute `first`."""
    candidates = [(one, one.bad() - first) for one in series]
    chosen = sorted(
        (found for found in candidates if len(found[1]) >= _LEAST_BAD), key=lambda f: (-len(f[1]), f[0].key)
    )
    chosen = sorted(chosen[:MOST], key=lambda found: found[0].key)
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
    left, right = np.nonzero(np.triu(both >= _LEAST_BOTH, k=1))
    p = np.array([_p(bad[a], bad[b], int(both[a, b]), minutes) for a, b in zip(left, right, strict=True)])
    # Pairs that share nothing were tested as well: their p is 1.
    q = _adjusted(p, tests=len(chosen) * (len(chosen) - 1) // 2)
    pairs = [
        _pair(
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
    return sorted(pairs, key=lambda pair: (pair.q > RATE, -pair.phi, pair.first, pair.second))[:KEPT]


def _pair(keys: tuple[int, int], *, a: int, b: int, ab: int, span: int, pearson: float, p: float, q: float) -> Pair:
    spread = float(a) * b * (span - a) * (span - b)
    return Pair(
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


def _p(a: Ints, b: Ints, both: int, span: int) -> float:
    """The share of all lags, none among them, at which as many bad minutes meet as do without one."""
    if len(a) * len(b) <= span * 8:
        lags = (a[:, None] - b[None, :]) % span
        met = np.bincount(lags.ravel(), minlength=span)
    else:
        size = _fast(span)
        met = np.zeros(span, dtype=np.int64)
        full = np.rint(np.fft.irfft(_spectrum(a, size) * np.conj(_spectrum(b, size)), size)).astype(np.int64)
        met[:span] += full[:span]
        met[1:] += full[size - span + 1 :]
    return float(np.count_nonzero(met >= both)) / span


def _fast(span: int) -> int:
    """A length that the transform is quick with, and in which no two lags meet."""
    size = 1
    while size < 2 * span:
        size *= 2
    return size


def _spectrum(places: Ints, size: int) -> np.ndarray[tuple[int], np.dtype[np.complex128]]:
    line = np.zeros(size)
    line[places] = 1
    return np.fft.rfft(line)


def _adjusted(p: Floats, *, tests: int) -> Floats:
    """Benjamini-Hochberg over `tests` tests of which these are the ones with the small p."""
    order = np.argsort(p, kind="stable")
    ranks = np.arange(1, len(p) + 1)
    stepped = np.minimum.accumulate((p[order] * tests / ranks)[::-1])[::-1]
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted
