"""Find incidents: what failed, when, and which subscriptions it hit.

The search explains failures by values of attributes (`scan.py`). Each explanation is an incident.
Explanations without a common value are one incident if they begin and end at the same time, unless
chance explains that, or the subscriptions have failed separately at other times. A subscription
that fails all the time is chronic, is listed separately, and joins no incident.

The begin of an incident is a range: between the last success before it and its first failure
nothing was tried, and in a partial outage successes go on. Each gap between two attempts is a place
where it may have begun. Its weight is the likelihood of the attempts after it, times the length of
the gap. The range has 90 % of the weight, and the estimate is its median. The end is found in the
same way from the other side.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from delivery.analytics.findings.cells import BROUGHT, AttemptCells, Ints, Mask
from delivery.analytics.findings.scan import Explanation, Floats, UsualFailures, row_scores, search
from delivery.analytics.findings.series import FailureSeries
from delivery.analytics.findings.turns import take_turns

CLOCK_ERROR_S: Final = 2.0
"""Seconds by which the clocks of workers may differ."""
_TAIL: Final = 0.05
_NEAR_S: Final = 600.0
"""Seconds from the nearest failure at which a silence counts half."""
_STEPS: Final = 64
_LONGEST_SILENCE_S: Final = 900.0
"""Silence after the last attempt in which an incident may have ended; after it, it is open."""
_SLICES: Final = 12
_CHRONIC_MINUTES: Final = 0.25
_CHRONIC_SLICES: Final = 0.6
"""Share of the log's twelfths with a quarter of their minutes failing that makes it chronic."""
_LOOK_BACK_S: Final = 12 * 3600
_TOGETHER_S: Final = 45.0
_UNSURE_S: Final = 180.0
_LEAST_LOG_S: Final = 3600.0
"""Difference of begins, and of ends, of subscriptions that failed together for unknown reasons."""
_MAX_CHANCE: Final = 0.05
"""Expected pairs of incidents that coincide by chance, above which none is put together."""
_ALIKE: Final = 0.5
_LONGEST_ATTEMPT_S: Final = 60.0
"""Seconds from the start of an attempt in which its delivery is sidelined; it has 15 by default."""
SHARED, SINGLE, CHRONIC = "shared", "single", "chronic"
MAX_CHRONIC: Final = 500
"""Chronic subscriptions that are listed: the causes of each are compared with the whole log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Hold an estimate with its range, in seconds since 1970."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Describe subscriptions that failed together. `kind`: shared (several), single, or chronic."""

    kind: str
    begin: Edge
    end: Edge
    open: bool
    """True if nothing has succeeded since."""
    keys: tuple[int, ...]
    """Subscriptions, ascending."""
    failures: int
    attempts: int
    first_failures: int
    """Failed first attempts: deliveries that are late because of it."""
    rows: Ints
    """Places of its failures in the cells."""
    explained_by: tuple[str, str] | None
    """Attribute and value by which it was found."""


def find_incidents(
    cells: AttemptCells, series: Iterable[FailureSeries], *, first: int, minutes: int
) -> list[Incident]:
    """Return the incidents by start; the log has `minutes` from minute `first`."""
    if not len(cells.bin):
        return []
    chronic = [one for one in series if _is_chronic(one, first, minutes)]
    is_chronic = np.isin(cells.keys, [one.key for one in chronic])[cells.subscription]
    usual_rows = np.flatnonzero(~is_chronic)
    found = _chronic_incidents(cells, chronic)
    if len(usual_rows):
        others = cells.chosen(~is_chronic)
        explanations, usual = search(others)
        found += _Describer(others, usual, explanations, usual_rows).incidents()
    return sorted(found, key=lambda one: (one.begin.at, one.end.at, one.keys))


def _is_chronic(series: FailureSeries, first: int, minutes: int) -> bool:
    """Return True if a quarter of the minutes fail in most twelfths of the log with attempts."""
    width = max(minutes / _SLICES, 1.0)
    slices = np.minimum(((series.minutes - first) / width).astype(np.int64), _SLICES - 1)
    active = np.bincount(slices, minlength=_SLICES)
    failing = np.bincount(slices, weights=series.failing_mask(), minlength=_SLICES)
    tried = active > 0
    chronic = failing[tried] >= _CHRONIC_MINUTES * active[tried]
    return int(tried.sum()) > _SLICES // 2 and float(chronic.mean()) >= _CHRONIC_SLICES


def _chronic_incidents(cells: AttemptCells, chronic: Sequence[FailureSeries]) -> list[Incident]:
    """Return the incidents of chronic subscriptions, of those that are listed."""
    places = np.searchsorted(cells.keys, np.array([one.key for one in chronic], dtype=np.int64))
    failures = np.array([one.failures.sum() for one in chronic], dtype=np.int64)
    listed = np.sort(take_turns(cells.rooms()[places], failures, MAX_CHRONIC))
    failed = np.flatnonzero(cells.failed)
    failed = failed[np.argsort(cells.subscription[failed], kind="stable")]
    of = cells.subscription[failed]
    begins, ends = (np.searchsorted(of, places[listed], side) for side in ("left", "right"))
    return [
        _chronic_incident(cells, chronic[one], failed[begin:end])
        for one, begin, end in zip(listed.tolist(), begins, ends, strict=True)
    ]


def _chronic_incident(cells: AttemptCells, series: FailureSeries, own: Ints) -> Incident:
    failing = (series.minutes[series.failing_mask()] * 60).astype(np.float64)
    begin, end = float(failing[0]), float(failing[-1] + 60.0)
    last_attempt = float(series.minutes[-1] * 60)
    last = float((cells.bin[-1] + 1) * cells.bin_s)
    # It fails in part, so only a longer health than usual says that it is over.
    _, goes_on = silence_after(failing, last_attempt)
    return Incident(
        kind=CHRONIC,
        begin=Edge(at=begin, low=begin, high=begin + 60.0),
        end=Edge(at=end, low=end - 60.0, high=end),
        open=goes_on and last - last_attempt < _LOOK_BACK_S,
        keys=(series.key,),
        failures=int(series.failures.sum()),
        attempts=int(series.attempts.sum()),
        first_failures=int(series.first_failures.sum()),
        rows=own,
        explained_by=None,
    )


class _Describer:
    """Turn explanations into incidents."""

    def __init__(
        self,
        cells: AttemptCells,
        usual: UsualFailures,
        explanations: Sequence[Explanation],
        places: Ints,
    ) -> None:
        self._cells = cells
        self._usual = usual
        self._explanations = explanations
        self._places = places
        self._taken = np.zeros(len(cells.bin), dtype=np.bool_)
        for one in explanations:
            self._taken[one.rows] = True
        order = np.argsort(cells.subscription, kind="stable")
        starts = np.searchsorted(cells.subscription[order], np.arange(len(cells.keys) + 1))
        self._rows_of = [order[a:b] for a, b in pairwise(starts.tolist())]

    def incidents(self) -> list[Incident]:
        """Return the incidents of all explanations."""
        found = [self._incident(one) for one in self._explanations]
        found.sort(key=lambda one: (one.begin.at, one.end.at, one.keys))
        return _put_together(found, self._cells)

    def _incident(self, one: Explanation) -> Incident:
        cells = self._cells
        begin, end, is_open = self._edges(one)
        own = np.concatenate([self._rows_of[place] for place in one.subscriptions])
        during = own[(cells.bin[own] >= one.begin) & (cells.bin[own] <= one.end)]
        failed = np.sort(one.rows[cells.failed[one.rows]])
        attribute = cells.attributes.get(one.attribute)
        return Incident(
            kind=SHARED if len(one.subscriptions) > 1 else SINGLE,
            begin=begin,
            end=end,
            open=is_open,
            keys=tuple(sorted(cells.keys[one.subscriptions].tolist())),
            failures=int(cells.attempts[failed].sum()),
            attempts=int(cells.attempts[during].sum()),
            first_failures=int(cells.attempts[failed[cells.first[failed]]].sum()),
            rows=self._places[failed],
            explained_by=None if attribute is None else (one.attribute, attribute.texts[one.code]),
        )

    def _edges(self, one: Explanation) -> tuple[Edge, Edge, bool]:
        """Return begin, end, and whether nothing has succeeded since."""
        cells = self._cells
        reach = _LOOK_BACK_S // cells.bin_s
        rows = np.concatenate([self._rows_of[place] for place in one.subscriptions])
        bins = cells.bin[rows]
        own = (bins >= one.begin - reach) & (bins <= one.end + reach)
        if one.attribute in cells.attributes:
            own &= cells.attributes[one.attribute].codes[rows] == one.code
        mine: Mask = np.zeros(len(cells.bin), dtype=np.bool_)
        mine[one.rows] = True
        rows = np.sort(rows[own & (mine[rows] | ~self._taken[rows])])
        attempts = cells.attempts[one.rows]
        share = float(attempts[cells.failed[one.rows]].sum() / attempts.sum())
        scores = row_scores(cells, self._usual, min(max(share, 0.1), 0.99))[rows]
        times = bin_times(cells.bin[rows], cells.bin_s)
        middle = (one.begin + one.end + 1) * cells.bin_s / 2
        early, late = times <= middle, times >= middle
        if not early.any():
            early = times <= times[np.flatnonzero(mine[rows])[0]]
        if not late.any():
            late = times >= times[np.flatnonzero(mine[rows])[-1]]
        log = bin_times(cells.bin[[0, -1]], cells.bin_s)
        begin = estimate_edge(
            times[early], scores[early], limit=self._earliest(one), resolution_s=cells.bin_s
        )
        until, recent = silence_after(times[late], float(log[1]))
        if one.attribute in BROUGHT and not recent:
            # What is no longer used fails no longer.
            until = float(times[-1])
        end = mirrored(
            estimate_edge(
                -times[late][::-1], scores[late][::-1], limit=-until, resolution_s=cells.bin_s
            )
        )
        # Open: the evidence goes on to the last attempt, and that is recent.
        last = (
            float(times[one_last]) if (one_last := _last_failing(scores, mine[rows])) >= 0 else 0.0
        )
        is_open = recent and last >= float(times[-1])
        return begin, end, is_open

    def _earliest(self, one: Explanation) -> float:
        """Return the time before which an incident cannot have begun.

        An endpoint may be down before anything is sent to it. What we or a publisher brought, such
        as a version, begins to fail with its first use.
        """
        bins = self._cells.bin
        if one.attribute in BROUGHT:
            bins = bins[self._cells.attributes[one.attribute].codes == one.code]
        return float(bin_times(bins[:1], self._cells.bin_s)[0])


def _last_failing(scores: Ints, mine: Mask) -> int:
    places = np.flatnonzero(mine & (scores > 0))
    return int(places[-1]) if len(places) else -1


def _put_together(found: Sequence[Incident], cells: AttemptCells) -> list[Incident]:
    """Merge incidents that began and ended together, where chance does not explain it."""
    # In a log of minutes, everything coincides with everything.
    log_s = max(float(cells.bin[-1] - cells.bin[0] + 1) * cells.bin_s, _LEAST_LOG_S)
    lengths = [one.end.at - one.begin.at for one in found]
    usual_s = max(float(np.median(lengths)), _TOGETHER_S) if lengths else _TOGETHER_S
    pairs = len(found) * (len(found) - 1) / 2
    groups: list[list[Incident]] = []
    for one in found:
        fitting = [
            group
            for group in groups
            if all(
                _coincidence(one, other, log_s, usual_s) * pairs <= _MAX_CHANCE
                and not _apart(one, other, found)
                for other in group
            )
        ]
        if fitting:
            fitting[0].append(one)
        else:
            groups.append([one])
    return [_merged(group) for group in groups]


def _coincidence(one: Incident, other: Incident, log_s: float, usual_s: float) -> float:
    """Return the chance that two independent incidents coincide as well; 1 if they do not."""
    begins = _tolerance_s(one.begin, other.begin)
    ends = _tolerance_s(one.end, other.end)
    begun = abs(one.begin.at - other.begin.at) <= begins
    ended = abs(one.end.at - other.end.at) <= ends or (one.open and other.open)
    # The sets at last, as there are many pairs, and incidents of many subscriptions.
    if not (begun and ended) or set(one.keys) & set(other.keys):
        return 1.0
    return min(2 * begins / log_s, 1.0) * min(2 * ends / usual_s, 1.0)


def _tolerance_s(one: Edge, other: Edge) -> float:
    """Return by how much two estimates of one time may differ."""
    unsure = (one.high - one.low + other.high - other.low) / 2
    return min(max(unsure, _TOGETHER_S), _UNSURE_S)


def _apart(one: Incident, other: Incident, found: Sequence[Incident]) -> bool:
    """Return True if either has failed at another time without the other."""
    for mine, theirs in ((one, other), (other, one)):
        for third in found:
            if third is mine or third is theirs:
                continue
            keys = set(third.keys)
            if keys & set(mine.keys) and not keys & set(theirs.keys):
                return True
    return False


def _merged(group: Sequence[Incident]) -> Incident:
    if len(group) == 1:
        return group[0]
    largest = max(group, key=lambda one: one.failures)
    return replace(
        largest,
        kind=SHARED,
        open=any(one.open for one in group),
        keys=tuple(sorted({key for one in group for key in one.keys})),
        failures=sum(one.failures for one in group),
        attempts=sum(one.attempts for one in group),
        first_failures=sum(one.first_failures for one in group),
        rows=np.sort(np.concatenate([one.rows for one in group])),
        explained_by=None,
    )


def count_sidelined(cells: AttemptCells, incident: Incident) -> int:
    """Return the deliveries of the incident's kind that were sidelined during it.

    An attempt counts from its start, and its delivery is sidelined at its end.
    """
    until = incident.end.at + _LONGEST_ATTEMPT_S
    low, high = np.searchsorted(
        cells.bin, (incident.begin.at // cells.bin_s, until // cells.bin_s + 1)
    )
    rows = low + np.flatnonzero(cells.sidelined[low:high])
    own = np.isin(cells.keys[cells.subscription[rows]], incident.keys)
    if incident.explained_by is not None and incident.explained_by[0] in _OF_MESSAGES:
        attribute = cells.attributes[incident.explained_by[0]]
        code = attribute.texts.index(incident.explained_by[1])
        own &= attribute.codes[rows] == code
    return int(cells.sidelined[rows[own]].sum())


_OF_MESSAGES: Final = frozenset({"event_type", "event_version", "typed_version", "room_id"})


def earlier_alike(found: Sequence[Incident]) -> list[int]:
    """Return for each incident how many before it hit mostly the same subscriptions alike."""
    counts = []
    for place, one in enumerate(found):
        keys = set(one.keys)
        counts.append(
            sum(
                other.kind != CHRONIC
                and other.explained_by == one.explained_by
                and len(keys & set(other.keys)) >= _ALIKE * len(keys | set(other.keys))
                for other in found[:place]
            )
        )
    return counts
