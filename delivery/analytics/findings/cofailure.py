"""Find subscriptions that fail in the same minutes more often than chance explains.

For a, b and ab bad minutes out of T: Jaccard = ab/(a+b-ab), lift = ab·T/(a·b), φ =
(ab·T-a·b)/√(a·b·(T-a)(T-b)).

Failures come in runs, so a test on independent minutes would find every pair significant. The null
distribution shifts one series of the pair circularly, which keeps the runs and the habits of a day.
Shifts by every lag cannot show a p-value below 1/T. So where no other lag has as many common
minutes, the tail is that of a compound Poisson process: each run of one series meets each run of
the other independently, at a uniform lag.

The p-values are corrected over all pairs by Benjamini-Hochberg with weights: pairs with a host or a
network in common are few, and share half of the allowed errors. So the significance of a pair does
not vanish with the number of subscriptions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final, Self

import numpy as np

from delivery.analytics.findings.cells import Ints
from delivery.analytics.findings.series import FailureSeries, Floats
from delivery.analytics.findings.turns import take_turns

FALSE_DISCOVERY_RATE: Final = 0.05
"""Expected share of chance pairs among significant pairs."""
_MIN_BAD: Final = 3
_MIN_BOTH: Final = 2
MAX_SUBSCRIPTIONS: Final = 2_000
"""Subscriptions that are compared, the rooms in turns, most bad minutes first."""
MAX_PAIRS: Final = 20_000
"""Pairs in the result, strongest first; so many are tested, in long logs fewer."""
_PAIR_MINUTES: Final = MAX_PAIRS * 30 * 24 * 60
"""Pairs times minutes of the log that are tested: all pairs of 30 days, as a test reads the log."""
_BLOCK_MINUTES: Final = 4096
"""Bad minutes that are compared at once: the memory of a longer log is that of a short one."""
_DAY_MINUTES: Final = 24 * 60
_HABIT_MINUTES: Final = 20
"""Minutes by which a daily habit varies."""
_TAIL_STEPS: Final = 128
_LEAST_P: Final = 1e-300
Kin = Mapping[int, frozenset[str]]
"""Hosts and networks of each subscription."""
_ONE_ROOM: Final[Mapping[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class CofailurePair:
    """Hold two subscriptions, `first` < `second`, and their bad minutes; `q` is the adjusted p."""

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
    series: Sequence[FailureSeries],
    *,
    first: int,
    minutes: int,
    bad_minutes: Mapping[int, Ints],
    kin: Kin,
    rooms: Mapping[int, int] = _ONE_ROOM,
) -> list[CofailurePair]:
    """Return pairs that share bad minutes, strongest first; the log has `minutes` from `first`.

    `bad_minutes` are those of each subscription in incidents, besides those of the series itself.
    `rooms` numbers the room of each subscription.
    """
    none = np.zeros(0, dtype=np.int64)
    candidates = [
        (one, np.union1d(one.bad_minutes(), bad_minutes.get(one.key, none)) - first)
        for one in series
    ]
    chosen = sorted(
        (found for found in candidates if len(found[1]) >= _MIN_BAD), key=lambda f: f[0].key
    )
    turns = take_turns(
        np.array([rooms.get(one.key, 0) for one, _ in chosen], dtype=np.int64),
        np.array([len(places) for _, places in chosen], dtype=np.int64),
        MAX_SUBSCRIPTIONS,
    )
    chosen = [chosen[place] for place in np.sort(turns).tolist()]
    if len(chosen) < 2:  # noqa: PLR2004 - a pair
        return []
    keys = [one.key for one, _ in chosen]
    bad = [places for _, places in chosen]
    both = _common_minutes(bad)
    left, right = np.nonzero(np.triu(both >= _MIN_BOTH, k=1))
    counts = np.array([len(places) for places in bad], dtype=np.float64)
    phi = _phi(both[left, right], counts[left], counts[right], minutes)
    most = min(MAX_PAIRS, max(_PAIR_MINUTES // minutes, 1))
    strongest = np.lexsort((right, left, -phi))[:most]
    left, right = left[strongest], right[strongest]
    runs = [_runs(places) for places in bad]
    are_kin = np.array(
        [
            not kin.get(keys[a], _NO_KIN).isdisjoint(kin.get(keys[b], _NO_KIN))
            for a, b in zip(left, right, strict=True)
        ],
        dtype=np.bool_,
    )
    p = np.array(
        [
            _p_value((bad[a], bad[b]), (runs[a], runs[b]), int(both[a, b]), minutes, are_kin=of_kin)
            for a, b, of_kin in zip(left, right, are_kin.tolist(), strict=True)
        ]
    )
    # Pairs without common minutes count as tests with p = 1.
    q = _weighted_benjamini_hochberg(
        p, are_kin, tests=len(keys) * (len(keys) - 1) // 2, kin=_kin_pairs(keys, kin)
    )
    failures = [_Failures.of(one) for one, _ in chosen]
    pairs = [
        CofailurePair(
            first=keys[a],
            second=keys[b],
            bad_first=len(bad[a]),
            bad_second=len(bad[b]),
            bad_both=int(both[a, b]),
            jaccard=float(both[a, b] / (counts[a] + counts[b] - both[a, b])),
            lift=float(both[a, b] * minutes / (counts[a] * counts[b])),
            phi=float(phi[strongest[number]]),
            pearson=round(failures[a].correlation(failures[b], minutes), 6),
            p=float(p[number]),
            q=float(q[number]),
        )
        for number, (a, b) in enumerate(zip(left, right, strict=True))
    ]
    return sorted(pairs, key=lambda pair: (pair.q, -pair.phi, pair.first, pair.second))


_NO_KIN: Final[frozenset[str]] = frozenset()


def _common_minutes(bad: Sequence[Ints]) -> Ints:
    """Return the number of common bad minutes of each two series; the diagonal is undefined."""
    rows = np.repeat(np.arange(len(bad)), [len(places) for places in bad])
    _, minute, times = np.unique(np.concatenate(bad), return_inverse=True, return_counts=True)
    shared = times > 1
    column = np.cumsum(shared) - 1
    rows, minute = rows[shared[minute]], minute[shared[minute]]
    order = np.argsort(minute, kind="stable")
    rows, column = rows[order], column[minute[order]]
    cuts = np.searchsorted(column, range(0, int(shared.sum()) + _BLOCK_MINUTES, _BLOCK_MINUTES))
    both = np.zeros((len(bad), len(bad)), dtype=np.int64)
    for begin, end in pairwise(cuts.tolist()):
        marks = np.zeros((len(bad), _BLOCK_MINUTES), dtype=np.float32)
        marks[rows[begin:end], column[begin:end] % _BLOCK_MINUTES] = 1
        both += np.rint(marks @ marks.T).astype(np.int64)
    return both


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failures:
    """Hold the failures of a series in the minutes that have any, with their sums."""

    minutes: Ints
    counts: Floats
    total: float
    squares: float

    @classmethod
    def of(cls, series: FailureSeries) -> Self:
        some = series.failures > 0
        counts = series.failures[some].astype(np.float64)
        return cls(
            minutes=series.minutes[some],
            counts=counts,
            total=float(counts.sum()),
            squares=float(counts @ counts),
        )

    def correlation(self, other: Self, span: int) -> float:
        """Return Pearson's correlation over all minutes; 0 if one of the two never changes."""
        _, mine, its = np.intersect1d(
            self.minutes, other.minutes, assume_unique=True, return_indices=True
        )
        products = float(self.counts[mine] @ other.counts[its])
        spread = (span * self.squares - self.total**2) * (span * other.squares - other.total**2)
        if spread <= 0:
            return 0.0
        return (span * products - self.total * other.total) / float(np.sqrt(spread))


def _phi(both: Ints, a: Floats, b: Floats, span: int) -> Floats:
    spread = a * b * (span - a) * (span - b)
    found: Floats = np.where(
        spread > 0, (both * span - a * b) / np.sqrt(np.maximum(spread, 1.0)), 0.0
    )
    return found


def _kin_pairs(keys: Sequence[int], kin: Kin) -> int:
    """Return about how many pairs have a host or a network in common."""
    sizes: dict[str, int] = {}
    for key in keys:
        for name in kin.get(key, _NO_KIN):
            sizes[name] = sizes.get(name, 0) + 1
    return sum(size * (size - 1) // 2 for size in sizes.values())


def _runs(places: Ints) -> Ints:
    """Return the lengths of runs of minutes; a single minute between two is bridged."""
    cuts = np.flatnonzero(np.diff(places) > 2) + 1  # noqa: PLR2004 - one minute between
    return np.array([len(run) for run in np.split(places, cuts)], dtype=np.int64)


def _p_value(
    places: tuple[Ints, Ints], runs: tuple[Ints, Ints], both: int, span: int, *, are_kin: bool
) -> float:
    """Return the probability of so many common bad minutes by chance."""
    common = _common_by_lag(places[0], places[1], span)
    if _is_habit(common, both, span):
        # The same time of each day is no evidence between strangers.
        return float(np.count_nonzero(common >= both / 2)) / span if are_kin else 1.0
    as_many = int(np.count_nonzero(common >= both))
    near = int(max(runs[0].max(), runs[1].max()))
    near_as_many = int(np.count_nonzero(common[:near] >= both))
    near_as_many += int(np.count_nonzero(common[len(common) - near :] >= both))
    if as_many > near_as_many:
        return as_many / span
    return min(max(_tail(runs[0], runs[1], both, span), _LEAST_P), as_many / span)


def _is_habit(common: Ints, both: int, span: int) -> bool:
    """Return True if the series meet at each lag of whole days half as often as a habit would."""
    days = span // _DAY_MINUTES
    if days < 2:  # noqa: PLR2004 - a repetition
        return False
    for day in range(1, days):
        low = day * _DAY_MINUTES - _HABIT_MINUTES
        met = int(common[low : low + 2 * _HABIT_MINUTES + 1].max())
        if met < max(both * (1 - day / days) / 2, 1):
            return False
    return True


def _tail(a: Ints, b: Ints, both: int, span: int) -> float:
    """Return the chance of `both` common minutes if each two runs meet at a uniform lag."""
    unit = max(both / _TAIL_STEPS, 1.0)
    steps = int(np.ceil(both / unit))
    # There are many runs in a long log, but few lengths.
    (a, of_a), (b, of_b) = (np.unique(lengths, return_counts=True) for lengths in (a, b))
    times = np.outer(of_a, of_b).ravel()
    shorter = np.minimum(a[:, None], b[None, :]).ravel()
    differ = np.abs(a[:, None] - b[None, :]).ravel()
    # An overlap of the whole shorter run is as likely as the runs differ; each shorter one by 2.
    rate: Floats = np.bincount(shorter, weights=times * (differ + 1) / span).astype(np.float64)
    longer = np.cumsum(np.bincount(shorter, weights=times)[::-1])[::-1]
    rate[:-1] += 2 / span * longer[1:]
    rate[0] = 0.0
    sizes = np.minimum(np.round(np.arange(len(rate)) / unit), steps).astype(np.int64)
    sizes[1:] = np.maximum(sizes[1:], 1)
    jumps: Floats = np.bincount(sizes, weights=rate, minlength=steps + 1)[: steps + 1].astype(
        np.float64
    )
    # Panjer's recursion for the sum of the overlaps; `steps` stands for all that are as large.
    total = jumps.sum()
    weights = np.arange(steps + 1) * jumps
    chance = np.zeros(steps)
    chance[0] = np.exp(-total)
    for size in range(1, steps):
        chance[size] = weights[1 : size + 1] @ chance[size - 1 :: -1][:size] / size
    rest = 1.0 - float(chance.sum())
    # Below the precision of the sum, the tail is bounded by Chernoff's inequality.
    return rest if rest > _PRECISION else _bound(jumps, steps)


_PRECISION: Final = 1e-11


def _bound(jumps: Floats, steps: int) -> float:
    theta = np.linspace(0.0, 60.0 / max(steps, 1), 400)[:, None]
    growth = (jumps[None, :] * np.expm1(theta * np.arange(len(jumps))[None, :])).sum(axis=1)
    return float(np.exp(np.min(growth - theta[:, 0] * steps)))


def _common_by_lag(a: Ints, b: Ints, span: int) -> Ints:
    """Return the number of common bad minutes at each circular lag."""
    if len(a) * len(b) <= span * 8:
        lags = (a[:, None] - b[None, :]) % span
        return np.bincount(lags.ravel(), minlength=span)
    edges = _edges(a), _edges(b)
    if len(edges[0]) * len(edges[1]) <= span * 8:
        return _common_of_runs(*edges, span)
    size = _fft_size(span)
    common = np.zeros(span, dtype=np.int64)
    full = np.rint(np.fft.irfft(_spectrum(a, size) * np.conj(_spectrum(b, size)), size)).astype(
        np.int64
    )
    common[:span] += full[:span]
    common[1:] += full[size - span + 1 :]
    return common


def _edges(places: Ints) -> Ints:
    """Return the begin of each run of minutes and the minute after its end, in turns."""
    cuts = np.flatnonzero(np.diff(places) > 1) + 1
    begins, ends = places[[0, *cuts]], places[[*(cuts - 1), -1]] + 1
    return np.column_stack((begins, ends)).ravel()


def _common_of_runs(a: Ints, b: Ints, span: int) -> Ints:
    """Return the number of common minutes at each circular lag of two series, by their edges.

    Over the lags the number bends only where two edges meet, so it is summed up twice.
    """
    lags = (a[:, None] - b[None, :]).ravel() + span
    sign = (np.resize((1, -1), len(a))[:, None] * np.resize((1, -1), len(b))[None, :]).ravel()
    bends = np.rint(np.bincount(lags, weights=sign, minlength=2 * span + 1)).astype(np.int64)
    slope = -np.cumsum(bends)[:-1]
    common = np.cumsum(slope)
    # The sums from lag 1 - span on; a lag below 0 is one from the end.
    full = np.zeros(2 * span, dtype=np.int64)
    full[1:] = common[: 2 * span - 1]
    found: Ints = full[:span] + full[span:]
    return found


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


def _weighted_benjamini_hochberg(
    p: Floats, are_kin: np.ndarray[tuple[int], np.dtype[np.bool_]], *, tests: int, kin: int
) -> Floats:
    """Adjust p-values by Benjamini-Hochberg with half of the errors for the `kin` pairs.

    `tests` counts the omitted tests with p = 1 too.
    """
    kin = min(max(kin, 1), tests)
    others = max(tests - kin, 1)
    halves = 2.0 if 0 < kin < tests else 1.0
    scaled = np.where(are_kin, p * halves * kin, p * halves * others)
    order = np.argsort(scaled, kind="stable")
    ranks = np.arange(1, len(p) + 1)
    stepped = np.minimum.accumulate((scaled[order] / ranks)[::-1])[::-1]
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted
