"""Retries: success by number of the attempt, and the policies that no other one beats."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from delivery.report.company import Read, Row

_Z: Final = 1.96
FRONTS: Final = 3
"""Subscriptions whose policies are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One number of the attempt (0: the first try) over all subscriptions; `low` to `high` is where the share may lie (95 %)."""

    attempt: int
    attempts: int
    share: float
    low: float
    high: float
    mean_wait_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """The steps in their order, and the advice (with its front) of those that would gain most."""

    steps: Sequence[Step]
    advised: Sequence[Row]
    fronts: Mapping[str, Sequence[Row]]

    @property
    def told(self) -> list[Row]:
        """The advice that is drawn."""
        sound = [row for row in self.advised if row["reproduced"] and self.fronts.get(row["subscription_id"])]
        return sorted(sound, key=lambda row: (-_gain(row), str(row["subscription_id"])))[:FRONTS]


def _gain(row: Row) -> float:
    return float(row["recommended_delivered"] or 0.0) - float(row["measured_delivered"])


def retries_of(read: Read) -> Retries:
    """From the tables `hazards`, `advice` and `advice_front`."""
    sums: dict[int, list[float]] = {}
    for row in read("hazards"):
        known = sums.setdefault(row["attempt"], [0, 0, 0.0, 0])
        known[0] += row["attempts"]
        known[1] += row["successes"]
        if row["mean_delay_ms"] is not None:
            known[2] += row["mean_delay_ms"] * row["attempts"]
            known[3] += row["attempts"]
    fronts: dict[str, list[Row]] = {}
    for row in read("advice_front"):
        fronts.setdefault(row["subscription_id"], []).append(row)
    steps = [_step(number, *known) for number, known in sorted(sums.items()) if known[0]]
    return Retries(steps=steps, advised=read("advice"), fronts=fronts)


def _step(number: int, attempts: float, successes: float, waited_ms: float, waits: float) -> Step:
    low, high = wilson(int(successes), int(attempts))
    return Step(
        attempt=number,
        attempts=int(attempts),
        share=successes / attempts,
        low=low,
        high=high,
        mean_wait_s=waited_ms / waits / 1e3 if waits else None,
    )


def wilson(successes: int, attempts: int) -> tuple[float, float]:
    """Where a share lies with 95 % confidence (Wilson's interval)."""
    share, square = successes / attempts, _Z**2
    middle = share + square / (2 * attempts)
    off = _Z * math.sqrt(share * (1 - share) / attempts + square / (4 * attempts**2))
    whole = 1 + square / attempts
    return max((middle - off) / whole, 0.0), min((middle + off) / whole, 1.0)
