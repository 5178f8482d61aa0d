"""Find the attribute values that the failures of an incident have, and other attempts do not.

For each value of each attribute, p is its share of the incident's failures and q its share of the
other attempts of the same minutes. Values are ordered by the divergence of the two (Kullback and
Leibler, in nats): p·ln(p/q) + (1-p)·ln((1-p)/(1-q)). It grows with the coverage of a value as well
as with its rarity elsewhere, and not with the mere number of failures. Attributes that only
failures have are compared with all other failures of the log.

A change right before the incident is another cause: the log shows the first use of an event
version, of a version of Rooms, of a worker process, and of a subscription's new settings.

An error says how attempts failed, and not where. So it comes after the other attributes if any of
their values covers most failures.

A value that says nothing beside a stronger one is left out: the network beside the only host of it
that failed, `status` beside 503, a worker beside its whole machine. Each count is smoothed by a
half.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from delivery.analytics.findings.cells import (
    DISPLAYED,
    FAILURE_ATTRIBUTES,
    STRUCTURAL,
    AttemptCells,
    Ints,
)
from delivery.analytics.findings.incidents import Edge

_BEFORE_S: Final = 900.0
"""Seconds before the begin in which a change may have caused an incident."""
_MIN_CHANGED_SHARE: Final = 0.5
"""Share of the failures that have a new version or process."""
_MAX_CHANGES: Final = 10
_FIRST_USES: Final = ("typed_version", "worker_version", "worker")
SETTINGS: Final = "policy_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstUse:
    """Hold when a value was first used, in seconds since 1970; `key`: by this subscription only."""

    at_s: float
    attribute: str
    value: str
    key: int | None = None


class ChangeLog:
    """Hold first uses of values in a log, without those that it began with."""

    def __init__(self, cells: AttemptCells) -> None:
        self._cells = cells
        tried = np.flatnonzero(cells.attempts > 0)
        start = (int(cells.bin[0]) if len(cells.bin) else 0) + int(_BEFORE_S // cells.bin_s)
        self._first_uses = {}
        for name in _FIRST_USES:
            codes = cells.attributes[name].codes
            known = tried[codes[tried] >= 0]
            self._first_uses[name] = _first_bins(codes[known].astype(np.int64), cells.bin[known])
        with_policy = tried[cells.policy[tried] >= 0]
        joined = (cells.subscription[with_policy].astype(np.int64) << _POLICY_BITS) + cells.policy[
            with_policy
        ]
        uses = _first_bins(joined, cells.bin[with_policy])
        # The first version of a subscription that the log shows is no change.
        seen: set[int] = set()
        self._settings: list[tuple[int, int, int]] = []
        for value, at in sorted(uses.items(), key=lambda use: use[1]):
            place = value >> _POLICY_BITS
            if place in seen:
                self._settings.append((at, place, value & ((1 << _POLICY_BITS) - 1)))
            seen.add(place)
        for name, first in self._first_uses.items():
            self._first_uses[name] = {code: at for code, at in first.items() if at > start}

    def before(self, begin: Edge, keys: tuple[int, ...], failures: Ints) -> list[FirstUse]:
        """Return what changed before an incident of these subscriptions, the latest first."""
        cells = self._cells
        low, high = (begin.at - _BEFORE_S) / cells.bin_s, begin.high / cells.bin_s + 1
        found = []
        total = cells.attempts[failures].sum()
        for name, first in self._first_uses.items():
            attribute = cells.attributes[name]
            for code, at in first.items():
                having = failures[attribute.codes[failures] == code] if low <= at <= high else []
                if len(having) and cells.attempts[having].sum() >= _MIN_CHANGED_SHARE * total:
                    text = attribute.texts[code]
                    shown = DISPLAYED.get(name, name)
                    found.append(
                        FirstUse(at_s=float(at * cells.bin_s), attribute=shown, value=text)
                    )
        for at, place, version in self._settings:
            key = int(cells.keys[place])
            if low <= at <= high and key in keys:
                when = float(at * cells.bin_s)
                found.append(FirstUse(at_s=when, attribute=SETTINGS, value=str(version), key=key))
        return sorted(found, key=lambda one: (-one.at_s, one.attribute, one.value))[:_MAX_CHANGES]


_POLICY_BITS: Final = 31


def _first_bins(values: Ints, bins: Ints) -> dict[int, int]:
    """Return the first bin of each value; the bins ascend."""
    found, first = np.unique(values, return_index=True)
    return dict(zip(found.tolist(), bins[first].tolist(), strict=True))


_SMOOTHING: Final = 0.5
_MIN_SHARE: Final = 0.5
_MIN_EVIDENCE: Final = 6.0
"""Divergence times failures: a divergence of a few failures may be chance."""
_MIN_CONTRAST: Final = 100
"""Attempts for a contrast; around quiet incidents more minutes are taken."""
_MIN_ADDED: Final = 0.1
"""Divergence that a value must have among the attempts with the stronger value."""
_IMPLIED: Final = 0.99
_MOST: Final = 0.8
"""Share of the failures from which a place or version comes before the kind of error."""
_DIGITS: Final = 3
MAX_CAUSES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """Hold a common attribute value; `inside` and `outside` are shares, 0 to 1."""

    attribute: str
    value: str
    inside: float
    outside: float
    divergence: float
    log_odds: float
    z: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """Hold places of the failures of an incident, and of the attempts to compare them with."""

    inside: Ints
    outside: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    cause: RootCause
    name: str
    code: int


def find_causes(cells: AttemptCells, failures: Ints, *, begin: int, end: int) -> list[RootCause]:
    """Return the causes of failed rows in the bins `begin` to `end`, the most divergent first."""
    if not len(failures):
        return []
    tried = _Sides(inside=failures, outside=_same_minutes(cells, failures, begin, end))
    other = cells.failed.copy()
    other[failures] = False
    failed = _Sides(inside=failures, outside=np.flatnonzero(other))
    found = [
        candidate
        for names, sides in ((STRUCTURAL, tried), (FAILURE_ATTRIBUTES, failed))
        for name in names
        for candidate in _candidates(cells, sides, name)
    ]
    place = any(one.name not in FAILURE_ATTRIBUTES and one.cause.inside >= _MOST for one in found)
    found.sort(
        key=lambda one: (
            place and one.name in FAILURE_ATTRIBUTES,
            -round(one.cause.divergence, _DIGITS),
        )
    )
    kept: list[_Candidate] = []
    for one in found:
        sides = failed if one.name in FAILURE_ATTRIBUTES else tried
        if all(_adds(cells, sides, one, stronger) for stronger in kept):
            kept.append(one)
    return [one.cause for one in kept[:MAX_CAUSES]]


def _same_minutes(cells: AttemptCells, failures: Ints, begin: int, end: int) -> Ints:
    """Return the other attempts of an interval, of a longer one if they are few."""
    width = end - begin + 1
    while True:
        low, high = np.searchsorted(cells.bin, (begin, end + 1))
        rows = np.setdiff1d(np.arange(low, high), failures, assume_unique=True)
        whole = low == 0 and high == len(cells.bin)
        if whole or cells.attempts[rows].sum() >= _MIN_CONTRAST:
            return rows
        begin, end, width = begin - width, end + width, width * 3


def _candidates(cells: AttemptCells, sides: _Sides, name: str) -> Iterator[_Candidate]:
    attribute = cells.attributes[name]
    size = len(attribute.texts) + 1
    # The last place counts the rows without a value.
    inside, outside = (
        np.bincount(attribute.codes[rows] % size, weights=cells.attempts[rows], minlength=size)
        for rows in (sides.inside, sides.outside)
    )
    totals = float(inside.sum()), float(outside.sum())
    for code in np.flatnonzero(inside[:-1] >= _MIN_SHARE * totals[0]).tolist():
        cause = _cause(
            DISPLAYED.get(name, name),
            attribute.texts[code],
            inside=(float(inside[code]), totals[0]),
            outside=(float(outside[code]), totals[1]),
        )
        if cause.inside > cause.outside and cause.divergence * totals[0] >= _MIN_EVIDENCE:
            yield _Candidate(cause=cause, name=name, code=code)


def _cause(
    attribute: str, value: str, *, inside: tuple[float, float], outside: tuple[float, float]
) -> RootCause:
    cells = (inside[0], inside[1] - inside[0], outside[0], outside[1] - outside[0])
    a, b, c, d = (count + _SMOOTHING for count in cells)
    log_odds = math.log(a / b) - math.log(c / d)
    return RootCause(
        attribute=attribute,
        value=value,
        inside=inside[0] / inside[1],
        outside=outside[0] / outside[1] if outside[1] else 0.0,
        divergence=divergence(a / (a + b), c / (c + d)),
        log_odds=log_odds,
        z=log_odds / math.sqrt(1 / a + 1 / b + 1 / c + 1 / d),
    )


def divergence(p: float, q: float) -> float:
    """Return the divergence of two shares in nats, 0 if p is no greater than q."""
    if p <= q:
        return 0.0
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 else -math.log(q)


def _adds(cells: AttemptCells, sides: _Sides, one: _Candidate, stronger: _Candidate) -> bool:
    """Return True if a value says something beside a stronger one."""
    if (one.name in FAILURE_ATTRIBUTES) != (stronger.name in FAILURE_ATTRIBUTES):
        return True
    inside, outside = (
        rows[cells.attributes[stronger.name].codes[rows] == stronger.code]
        for rows in (sides.inside, sides.outside)
    )
    if one.name in FAILURE_ATTRIBUTES:
        both = np.concatenate((inside, outside))
        return _share(cells, both, one) < _IMPLIED
    # Where the stronger value leaves nothing to compare with, it explains everything.
    if cells.attempts[outside].sum() < _MIN_CONTRAST / 10:
        return False
    return divergence(_share(cells, inside, one), _share(cells, outside, one)) >= _MIN_ADDED


def _share(cells: AttemptCells, rows: Ints, one: _Candidate) -> float:
    """Return the smoothed share of a value in rows."""
    attempts: Ints = cells.attempts[rows]
    having = attempts[cells.attributes[one.name].codes[rows] == one.code].sum()
    total = float(attempts.sum())
    return float(having + _SMOOTHING) / (total + 2 * _SMOOTHING)


def describe(causes: Sequence[RootCause]) -> list[dict[str, str | float]]:
    """Return the causes as rows of a result."""
    return [
        {
            "attribute": cause.attribute,
            "value": cause.value,
            "inside": cause.inside,
            "outside": cause.outside,
            "divergence": cause.divergence,
            "log_odds": cause.log_odds,
            "z": cause.z,
        }
        for cause in causes
    ]
