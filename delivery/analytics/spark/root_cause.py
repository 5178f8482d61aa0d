"""Find attributes that the failures of an incident share and other attempts do not.

For each value of each attribute, compute the log-odds of failed attempts of the incident against
all other attempts. Values that only failures have are compared with all other failures. Each count
is smoothed by a half. z is log-odds by standard error and states the certainty; the shares state
the coverage.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_SMOOTHING: Final = 0.5
_MIN_SHARE: Final = 0.5
_MIN_Z: Final = 3.0
MAX_CAUSES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """A common attribute value; `inside` and `outside` are shares, 0 to 1."""

    attribute: str
    value: str
    inside: float
    outside: float
    log_odds: float
    z: float


def find_causes(
    inside: Mapping[tuple[str, str], int], all_attempts: Mapping[tuple[str, str], int]
) -> list[RootCause]:
    """Return the causes, most certain first. Counts are by (attribute, value)."""
    totals, attempts = _sums(inside), _sums(all_attempts)
    found = [
        _cause(
            attribute,
            value,
            count=count,
            inside=totals[attribute],
            total=all_attempts.get((attribute, value), count),
            attempts=attempts.get(attribute, 0),
        )
        for (attribute, value), count in inside.items()
    ]
    telling = (
        cause
        for cause in found
        if cause.inside >= _MIN_SHARE and cause.z >= _MIN_Z and cause.log_odds > 0
    )
    return _strongest_by_attribute(telling)


def _sums(counts: Mapping[tuple[str, str], int]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for (attribute, _), count in counts.items():
        sums[attribute] = sums.get(attribute, 0) + count
    return sums


def _cause(
    attribute: str, value: str, *, count: int, inside: int, total: int, attempts: int
) -> RootCause:
    outside, others = max(total - count, 0), max(attempts - inside, 0)
    cells = (
        count + _SMOOTHING,
        inside - count + _SMOOTHING,
        outside + _SMOOTHING,
        max(others - outside, 0) + _SMOOTHING,
    )
    log_odds = math.log(cells[0] / cells[1]) - math.log(cells[2] / cells[3])
    return RootCause(
        attribute=attribute,
        value=value,
        inside=count / inside if inside else 0.0,
        outside=outside / others if others else 0.0,
        log_odds=log_odds,
        z=log_odds / math.sqrt(sum(1 / cell for cell in cells)),
    )


def _strongest_by_attribute(causes: Iterable[RootCause]) -> list[RootCause]:
    """Return the most certain cause of each attribute."""
    chosen: dict[str, RootCause] = {}
    for cause in sorted(causes, key=lambda cause: (-cause.z, cause.attribute, cause.value)):
        chosen.setdefault(cause.attribute, cause)
    return list(chosen.values())[:MAX_CAUSES]
