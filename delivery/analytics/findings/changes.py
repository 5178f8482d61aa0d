"""Find what changed right before an incident, as far as the log shows it.

The log shows the first use of an event version, of a version of Rooms, of a worker process, and of
a subscription's new settings.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from delivery.analytics.findings.cells import DISPLAYED, AttemptCells, Ints
from delivery.analytics.findings.edges import Edge

_BEFORE_S: Final = 900.0
"""Seconds before the begin in which a change may have caused an incident."""
_MIN_SHARE: Final = 0.5
"""Share of the failures that have a new version or process."""
_MAX_CHANGES: Final = 10
_FIRST_USES: Final = ("typed_version", "worker_version", "worker")
SETTINGS: Final = "policy_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """First use of a value, in seconds since 1970; `key`: of this subscription only."""

    at_s: float
    attribute: str
    value: str
    key: int | None = None


class ChangeLog:
    """First uses of values in a log, without those that it began with."""

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

    def before(self, begin: Edge, keys: tuple[int, ...], failures: Ints) -> list[Change]:
        """Return what changed before an incident of these subscriptions, the latest first."""
        cells = self._cells
        low, high = (begin.at - _BEFORE_S) / cells.bin_s, begin.high / cells.bin_s + 1
        found = []
        total = cells.attempts[failures].sum()
        for name, first in self._first_uses.items():
            attribute = cells.attributes[name]
            for code, at in first.items():
                having = failures[attribute.codes[failures] == code] if low <= at <= high else []
                if len(having) and cells.attempts[having].sum() >= _MIN_SHARE * total:
                    text = attribute.texts[code]
                    shown = DISPLAYED.get(name, name)
                    found.append(Change(at_s=float(at * cells.bin_s), attribute=shown, value=text))
        for at, place, version in self._settings:
            key = int(cells.keys[place])
            if low <= at <= high and key in keys:
                when = float(at * cells.bin_s)
                found.append(Change(at_s=when, attribute=SETTINGS, value=str(version), key=key))
        return sorted(found, key=lambda one: (-one.at_s, one.attribute, one.value))[:_MAX_CHANGES]


_POLICY_BITS: Final = 31


def _first_bins(values: Ints, bins: Ints) -> dict[int, int]:
    """Return the first bin of each value; the bins ascend."""
    found, first = np.unique(values, return_index=True)
    return dict(zip(found.tolist(), bins[first].tolist(), strict=True))
