"""Search a log for values of attributes whose attempts fail, by likelihood ratio.

A subscription has a usual share of failures, p0. Inside an explanation, a failure is expected with
probability 1-(1-p0)(1-p1), and outside with p0. The log-likelihood ratio of the two is a sum over
attempts, so the best interval of a value is the segment of greatest sum, for each p1 of a grid.
Silence costs nothing: only a success ends an interval. The value with the best interval takes its
attempts, and the rest is searched again. Of the subscriptions of a value, only those belong to the
explanation that fail over its whole interval. So cascades and overlapping failures stay separate.

A retry is weak evidence: a body that its endpoint cannot accept fails at each attempt.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from delivery.analytics.findings.cells import STRUCTURAL, AttemptCells, Codes, Ints, Mask

Floats = npt.NDArray[np.float64]

SHARES: Final = (0.15, 0.3, 0.5, 0.75, 0.95)
"""Values of p1."""
MIN_EVIDENCE: Final = 15.0
"""Log-likelihood ratio of an explanation in a log of MANY_ROWS; longer logs have more chances."""
MANY_ROWS: Final = 60_000
_MIN_FIRST_FAILURES: Final = 3
_AGREEMENT: Final = 5.0
_AGREEMENT_SHARE: Final = 0.03
"""Loss of evidence by which a subscription's own best interval may beat the common one."""
_MIN_COVERAGE: Final = 0.6
"""Share of a value's subscriptions that must fail for the value to be what failed."""
_LONGEST_RECOVERY_S: Final = 420
"""Seconds of health that end an incident for certain; flapping has shorter ones."""
_SPLIT_GAIN: Final = 8.0
_SUBSCRIPTION: Final = "subscription"
_EVERYTHING: Final = "everything"
_OF_A_TARGET: Final = frozenset({_SUBSCRIPTION, "target_host"})
_SEVERAL: Final = -1
"""Stands for the room of a value that several rooms have."""
MAX_EXPLANATIONS: Final = 2_000
"""Explanations of a log. The rooms share half of them, so that one cannot use up all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explain failures in bins `begin` to `end`, inclusive, by one value of an attribute."""

    attribute: str
    code: int
    begin: int
    end: int
    evidence: float
    rows: Ints
    """Places of its attempts, successes included."""
    subscriptions: Codes


@dataclass(frozen=True, slots=True)
class _Segment:
    evidence: float
    share: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualFailures:
    """Hold shares of failures outside of incidents: first attempts by subscription, and retries."""

    first: Floats
    retry: float

    @classmethod
    def measured(cls, cells: AttemptCells, usual: Mask) -> "UsualFailures":
        """Measure the shares of these rows; little traffic is drawn to the share of all."""
        count = len(cells.keys)
        fresh = usual & cells.first
        tried = np.bincount(
            cells.subscription[fresh], weights=cells.attempts[fresh], minlength=count
        )
        fresh_failed = fresh & cells.failed
        failed = np.bincount(
            cells.subscription[fresh_failed], weights=cells.attempts[fresh_failed], minlength=count
        )
        common = np.clip((failed.sum() + 1) / (tried.sum() + 100), *_COMMON_SHARE)
        first = (failed + common * _PRIOR_ATTEMPTS) / (tried + _PRIOR_ATTEMPTS)
        again = usual & ~cells.first
        retried = cells.attempts[again].sum()
        retry = (cells.attempts[again & cells.failed].sum() + 10) / (retried + 20)
        return cls(first=np.clip(first, *_USUAL_SHARE), retry=float(np.clip(retry, 0.3, 0.95)))


_COMMON_SHARE: Final = (0.002, 0.25)
_USUAL_SHARE: Final = (0.002, 0.5)
_PRIOR_ATTEMPTS: Final = 40
_BLOCKS: Final = 24


def calm_rows(cells: AttemptCells) -> Mask:
    """Return the rows of each subscription's calmer half: where the first guess of p0 is taken."""
    order = np.argsort(cells.subscription, kind="stable")
    of = cells.subscription[order]
    starts = np.searchsorted(of, np.arange(len(cells.keys)))
    counts = np.bincount(of, minlength=len(cells.keys))
    rank = np.arange(len(of)) - starts[of]
    block = np.empty(len(of), dtype=np.int64)
    block[order] = of.astype(np.int64) * _BLOCKS + rank * _BLOCKS // np.maximum(counts[of], 1)
    size = len(cells.keys) * _BLOCKS
    tried = np.bincount(block, weights=cells.attempts, minlength=size)
    failed = np.bincount(block, weights=cells.attempts * cells.failed, minlength=size)
    share = np.where(tried > 0, failed / np.maximum(tried, 1), np.inf).reshape(-1, _BLOCKS)
    blocks = np.isfinite(share).sum(axis=1)
    median = np.sort(share, axis=1)[np.arange(len(share)), np.maximum(blocks - 1, 0) // 2]
    found: Mask = (share <= median[:, None]).reshape(-1)[block]
    return found


def row_scores(cells: AttemptCells, usual: UsualFailures, p1: float) -> Floats:
    """Return the log-likelihood ratio of each row for a share p1 of failures beyond the usual."""
    p0 = np.where(cells.first, usual.first[cells.subscription], usual.retry)
    inside = np.log((1 - (1 - p0) * (1 - p1)) / p0)
    scores: Floats = np.where(cells.failed, inside, np.log(1 - p1))
    return scores * cells.attempts


class FailureScan:
    """Search the rows of a log for explanations, best first."""

    def __init__(
        self,
        cells: AttemptCells,
        usual: UsualFailures,
        *,
        attributes: Sequence[str] = STRUCTURAL,
    ) -> None:
        self._cells = cells
        count = len(cells.bin)
        self._least_evidence = MIN_EVIDENCE + max(math.log(max(count, 1) / MANY_ROWS), 0.0)
        self._scores = np.empty((count, len(SHARES)), dtype=np.float32)
        for place, p1 in enumerate(SHARES):
            self._scores[:, place] = row_scores(cells, usual, p1)
        self._codes = {
            _SUBSCRIPTION: cells.subscription,
            **{name: cells.attributes[name].codes for name in attributes},
            _EVERYTHING: np.zeros(count, dtype=np.int32),
        }
        self._alive = np.ones(count, dtype=np.bool_)
        self._rows: dict[tuple[str, int], Ints] = {}
        self._room_of: dict[tuple[str, int], int] = {}
        rooms = cells.attributes["room_id"].codes
        for name, codes in self._codes.items():
            order = np.argsort(codes, kind="stable")
            values, starts = np.unique(codes[order], return_index=True)
            for value, of_value in zip(values.tolist(), np.split(order, starts[1:]), strict=True):
                if value >= 0:
                    self._rows[name, value] = of_value
                    own = rooms[of_value]
                    self._room_of[name, value] = int(own[0]) if (own == own[0]).all() else _SEVERAL

    def explanations(self) -> Iterator[Explanation]:
        """Yield explanations, each of attempts that none before it has taken.

        After the strongest half of MAX_EXPLANATIONS the rooms take turns, each with its strongest.
        """
        names = list(self._codes)
        heap: _Heap = []
        for of in self._rows:
            self._push(heap, 0, names.index(of[0]), of)
        taken: dict[tuple[str, int], list[tuple[int, int]]] = {}
        found, of_rooms = 0, Counter[int]()
        while heap and found < MAX_EXPLANATIONS:
            turn, _, place, value, segment = heapq.heappop(heap)
            of = (names[place], value)
            room = self._room_of[of]
            if found >= MAX_EXPLANATIONS // 2 and turn < of_rooms[room]:
                heapq.heappush(heap, (of_rooms[room], -segment.evidence, place, value, segment))
                continue
            # Only where attempts were taken from a segment is it another one now.
            if any(b >= segment.begin and a <= segment.end for a, b in taken.pop(of, ())):
                self._push(heap, turn, place, of)
                continue
            explanation = self._refined(of, segment)
            if explanation is None:
                # The value does not explain this interval; it may explain another one.
                self._rows[of] = _outside(self._cells.bin, self._rows[of], segment)
            else:
                found += 1
                of_rooms[room] += 1
                yield explanation
                self._alive[explanation.rows] = False
                for name, codes in self._codes.items():
                    for one in np.unique(codes[explanation.rows]).tolist():
                        taken.setdefault((name, one), []).append(
                            (explanation.begin, explanation.end)
                        )
                taken.pop(of, None)
            self._push(heap, turn, place, of)

    def _push(self, heap: "_Heap", turn: int, place: int, of: tuple[str, int]) -> None:
        """Push the best segment of a value, if it has enough evidence."""
        segment = self._best(self._rows[of])
        if segment.evidence >= self._least_evidence:
            heapq.heappush(heap, (turn, -segment.evidence, place, of[1], segment))

    def _best(self, rows: Ints) -> _Segment:
        """Return the segment of greatest sum over all shares."""
        rows = rows[self._alive[rows]]
        if not self._cells.failed[rows].any():
            return _NOTHING
        bins, sums = self._sums(rows)
        return _best_segment(sums, bins)

    def _sums(self, rows: Ints) -> tuple[Ints, Floats]:
        """Return the bins of rows and their sums, one column a share."""
        bins = self._cells.bin[rows]
        starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
        sums = np.add.reduceat(self._scores[rows], starts, axis=0, dtype=np.float64)
        return bins[starts], sums

    def _refined(self, of: tuple[str, int], segment: _Segment) -> Explanation | None:
        """Return the explanation by those subscriptions that fail over the whole interval."""
        segment = self._unbroken(self._rows[of], segment)
        rows = self._near(self._rows[of], segment)
        children = self._children(rows)
        if not children:
            return None
        best = {child: self._best(own) for child, own in children.items()}
        choices = [segment]
        if len(children) > 1:
            top = max(best, key=lambda child: best[child].evidence)
            choices.append(best[top])
        fitted = [self._fit(children, best, choice) for choice in choices]
        evidence, span, members = max(fitted, key=lambda one: one[0])
        if evidence < self._least_evidence or not members:
            return None
        if of[0] not in _OF_A_TARGET and not self._covers(children, span, members):
            return None
        taken = np.concatenate([_between(self._cells.bin, children[one], span) for one in members])
        fresh = self._cells.failed[taken] & self._cells.first[taken]
        if self._cells.attempts[taken][fresh].sum() < _MIN_FIRST_FAILURES:
            return None
        return Explanation(
            attribute=of[0],
            code=of[1],
            begin=span.begin,
            end=span.end,
            evidence=evidence,
            rows=np.sort(taken),
            subscriptions=np.array(sorted(members), dtype=np.int32),
        )

    def _unbroken(self, rows: Ints, segment: _Segment) -> _Segment:
        """Return the stronger part of a segment that is two failures with health between them."""
        while True:
            inside = _between(self._cells.bin, rows, segment)
            inside = inside[self._alive[inside]]
            bins, sums = self._sums(inside)
            gap = _best_segment(-sums[:, segment.share : segment.share + 1], bins)
            around = np.searchsorted(bins, (gap.begin, gap.end))
            first, last = max(around[0] - 1, 0), min(around[1] + 1, len(bins) - 1)
            if (bins[last] - bins[first]) * self._cells.bin_s < _LONGEST_RECOVERY_S:
                return segment
            parts = [
                _best_segment(sums[some], bins[some])
                for some in (slice(0, int(around[0])), slice(int(around[1]) + 1, None))
                if len(bins[some])
            ]
            if sum(part.evidence for part in parts) < segment.evidence + _SPLIT_GAIN:
                return segment
            segment = max(parts, key=lambda part: part.evidence)

    def _near(self, rows: Ints, segment: _Segment) -> Ints:
        # No further than recovery takes: there may be another failure of the same subscriptions.
        extent = _LONGEST_RECOVERY_S // self._cells.bin_s
        bins = self._cells.bin[rows]
        low, high = np.searchsorted(bins, (segment.begin - extent, segment.end + extent + 1))
        near = rows[low:high]
        return near[self._alive[near]]

    def _children(self, rows: Ints) -> dict[int, Ints]:
        """Return the rows of each subscription, by time."""
        of = self._cells.subscription[rows]
        order = np.argsort(of, kind="stable")
        values, starts = np.unique(of[order], return_index=True)
        return dict(zip(values.tolist(), np.split(rows[order], starts[1:]), strict=True))

    def _fit(
        self, children: dict[int, Ints], best: dict[int, _Segment], span: _Segment
    ) -> tuple[float, _Segment, list[int]]:
        """Return evidence, interval and members of the subscriptions that agree on an interval."""
        members: list[int] = []
        for _ in range(2):
            inside = {child: self._evidence(rows, span) for child, rows in children.items()}
            members = [
                child
                for child, evidence in inside.items()
                if evidence > 0
                and evidence >= best[child].evidence * (1 - _AGREEMENT_SHARE) - _AGREEMENT
            ]
            if not members:
                return 0.0, span, []
            rows = np.sort(np.concatenate([children[child] for child in members]))
            fitted = self._best(rows)
            if (fitted.begin, fitted.end) == (span.begin, span.end):
                break
            span = fitted
        return sum(max(self._evidence(children[one], span), 0.0) for one in members), span, members

    def _evidence(self, rows: Ints, span: _Segment) -> float:
        """Return the evidence for an interval with its share of failures."""
        inside = _between(self._cells.bin, rows, span)
        if not len(inside):
            return 0.0
        return float(self._scores[inside, span.share].sum(dtype=np.float64))

    def _covers(self, children: dict[int, Ints], span: _Segment, members: list[int]) -> bool:
        """Return True if most of the value's subscriptions with attempts in the interval failed."""
        least = 1 / SHARES[span.share]
        tried = sum(
            int(self._cells.attempts[_between(self._cells.bin, rows, span)].sum()) >= least
            for child, rows in children.items()
            if child not in members
        )
        return len(members) >= _MIN_COVERAGE * (len(members) + tried)


_Heap = list[tuple[int, float, int, int, _Segment]]
"""Segments by turn, then by evidence; with the place of the attribute, and the value."""
_NOTHING: Final = _Segment(0.0, 0, 0, 0)


def _between(bins: Ints, rows: Ints, span: _Segment) -> Ints:
    own = bins[rows]
    low, high = np.searchsorted(own, (span.begin, span.end + 1))
    return rows[low:high]


def _outside(bins: Ints, rows: Ints, span: _Segment) -> Ints:
    own = bins[rows]
    low, high = np.searchsorted(own, (span.begin, span.end + 1))
    return np.concatenate((rows[:low], rows[high:]))


def _best_segment(sums: Floats, bins: Ints) -> _Segment:
    """Return the best segment of scores, one column a share."""
    total = np.cumsum(sums, axis=0)
    before = total - sums
    gains = total - np.minimum.accumulate(before, axis=0)
    ends = np.argmax(gains, axis=0)
    best = gains[ends, np.arange(sums.shape[1])]
    share = int(np.argmax(best))
    if best[share] <= 0:
        return _NOTHING
    end = int(ends[share])
    begin = int(np.argmin(before[: end + 1, share]))
    return _Segment(float(best[share]), share, int(bins[begin]), int(bins[end]))


def search(cells: AttemptCells) -> tuple[list[Explanation], UsualFailures]:
    """Return the explanations of a log, and its usual failures.

    The first search takes p0 from the calmer half of each subscription, which is too low. The
    second takes it from all that the first has not explained beyond doubt.
    """
    usual = UsualFailures.measured(cells, calm_rows(cells))
    explained = np.zeros(len(cells.bin), dtype=np.bool_)
    for one in FailureScan(cells, usual, attributes=_CROSSING).explanations():
        if one.evidence >= _BEYOND_DOUBT:
            explained[_unusual(cells, one)] = True
    usual = UsualFailures.measured(cells, ~explained)
    return _absorbed(cells, list(FailureScan(cells, usual).explanations())), usual


def _unusual(cells: AttemptCells, one: Explanation) -> Ints:
    """Return its rows, without subscriptions that fail in part during most of their attempts."""
    count = len(cells.keys)
    of = cells.subscription[one.rows]
    attempts = cells.attempts[one.rows]
    tried = np.bincount(of, weights=attempts, minlength=count)
    failed = np.bincount(of, weights=attempts * cells.failed[one.rows], minlength=count)
    whole = np.bincount(cells.subscription, weights=cells.attempts, minlength=count)
    usual = (failed < _MOSTLY * tried) & (tried > _MOSTLY * whole)
    rows: Ints = one.rows[~usual[of]]
    return rows


_MOSTLY: Final = 0.6


def _absorbed(cells: AttemptCells, found: list[Explanation]) -> list[Explanation]:
    """Add explanations to a stronger one whose value and interval most of their failures have."""
    kept: list[Explanation] = []
    margin = _MARGIN_S // cells.bin_s
    for one in sorted(found, key=lambda one: -one.evidence):
        failed = one.rows[cells.failed[one.rows]]
        least = _MIN_ABSORBED * cells.attempts[failed].sum()
        for place, other in enumerate(kept):
            alike = (cells.bin[failed] >= other.begin - margin) & (
                cells.bin[failed] <= other.end + margin
            )
            if other.attribute in cells.attributes:
                alike &= cells.attributes[other.attribute].codes[failed] == other.code
            elif other.attribute == _SUBSCRIPTION:
                alike &= cells.subscription[failed] == other.code
            if cells.attempts[failed[alike]].sum() >= least:
                kept[place] = replace(
                    other,
                    rows=np.union1d(other.rows, one.rows),
                    subscriptions=np.union1d(other.subscriptions, one.subscriptions),
                )
                break
        else:
            kept.append(one)
    return kept


_MARGIN_S: Final = 60
_MIN_ABSORBED: Final = 0.6


_BEYOND_DOUBT: Final = 30.0
_CROSSING: Final = ("worker_host", "worker_version", "typed_version")
"""Attributes whose values cross subscriptions, beside which the first search takes only these."""
