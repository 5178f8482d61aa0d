"""Explanation: what the failures of an incident have in common that other attempts have not.

For each value of each attribute, the log-odds of finding it inside (failed attempts of the incident) against outside (all
other attempts; for what only a failure has, all other failures), each count smoothed by a half, with its standard error: z says how sure it is, the shares how much it covers.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

_SMOOTH: Final = 0.5
_LEAST_SHARE: Final = 0.5
_LEAST_Z: Final = 3.0
MOST: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A value that the failures have in common; `inside` and `outside` are shares, 0 to 1."""

    attribute: str
    value: str
    inside: float
    outside: float
    log_odds: float
    z: float


def explain(inside: Mapping[tuple[str, str], int], everything: Mapping[tuple[str, str], int]) -> list[Cause]:
    """What sets the failures inside apart, the surest first. Counts are by (attribute, value)."""
    totals, attempts = _sums(inside), _sums(everything)
    found = [
        _cause(
            attribute,
            value,
            count=count,
            inside=totals[attribute],
            everywhere=everything.get((attribute, value), count),
            attempts=attempts.get(attribute, 0),
        )
        for (attribute, value), count in inside.items()
    ]
    telling = (cause for cause in found if cause.inside >= _LEAST_SHARE and cause.z >= _LEAST_Z and cause.log_odds > 0)
    return _best(telling)


def _sums(counts: Mapping[tuple[str, str], int]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for (attribute, _), count in counts.items():
        sums[attribute] = sums.get(attribute, 0) + count
    return sums


def _cause(attribute: str, value: str, *, count: int, inside: int, everywhere: int, attempts: int) -> Cause:
    outside, others = max(everywhere - count, 0), max(attempts - inside, 0)
    cells = (count + _SMOOTH, inside - count + _SMOOTH, outside + _SMOOTH, max(others - outside, 0) + _SMOOTH)
    log_odds = math.log(cells[0] / cells[1]) - math.log(cells[2] / cells[3])
    return Cause(
        attribute=attribute,
        value=value,
        inside=count / inside if inside else 0.0,
        outside=outside / others if others else 0.0,
        log_odds=log_odds,
        z=log_odds / math.sqrt(sum(1 / cell for cell in cells)),
    )


def _best(causes: Iterable[Cause]) -> list[Cause]:
    """By how surely; of one attribute only the best."""
    chosen: dict[str, Cause] = {}
    for cause in sorted(causes, key=lambda cause: (-cause.z, cause.attribute, cause.value)):
        chosen.setdefault(cause.attribute, cause)
    return list(chosen.values())[:MOST]
