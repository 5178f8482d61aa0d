"""Summarize deliveries: what became of them over time, and how long they took."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rooms.domain.state_machine import State

BARS: Final = 40
_GOOD: Final = frozenset({State.DELIVERED, State.HANDED_OVER})
_BAD: Final = frozenset({State.SIDELINED, State.EXPIRED})
_OFF: Final = frozenset({State.CANCELLED, State.DROPPED, State.PURGED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Hold what became of the newest deliveries, and percentiles of delivered ones, in ms.

    `bars`: numbers over equal times, by the class of their colour, oldest first.
    """

    count: int
    delivered: int
    failed: int
    unfinished: int
    retried: int
    since: datetime
    until: datetime
    bars: Sequence[tuple[str, Sequence[int]]]
    latencies_ms: Sequence[float | None]
    """Each delivered one's, oldest first."""
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None

    @property
    def success(self) -> float | None:
        """Return the share of delivered ones among those that are over; None: none is."""
        over = self.delivered + self.failed
        return self.delivered / over if over else None


def summarize(deliveries: Sequence[Mapping[str, Any]]) -> Health | None:
    """Return a summary of deliveries as the API lists them; None: there are none."""
    if not deliveries:
        return None
    begun = [datetime.fromisoformat(one["created_at"]) for one in deliveries]
    since, until = min(begun), max(begun)
    width = max((until - since) / BARS, timedelta(milliseconds=1))
    bars = {kind: [0] * BARS for kind in ("good", "busy", "off", "bad")}
    for one, at in zip(deliveries, begun, strict=True):
        bars[_kind(one["state"])][min(BARS - 1, int((at - since) / width))] += 1
    latencies = [
        _latency_ms(one) for one in reversed(deliveries) if one["state"] == State.DELIVERED
    ]
    ordered = sorted(latencies)
    kinds = [_kind(one["state"]) for one in deliveries]
    return Health(
        count=len(deliveries),
        delivered=kinds.count("good"),
        failed=kinds.count("bad"),
        unfinished=kinds.count("busy"),
        retried=sum((one["attempts"] or 0) > 1 for one in deliveries),
        since=since,
        until=until,
        bars=list(bars.items()),
        latencies_ms=latencies,
        p50_ms=_percentile(ordered, 0.5),
        p95_ms=_percentile(ordered, 0.95),
        p99_ms=_percentile(ordered, 0.99),
    )


def _kind(state: str) -> str:
    if state in _GOOD:
        return "good"
    if state in _BAD:
        return "bad"
    return "off" if state in _OFF else "busy"


def _latency_ms(delivery: Mapping[str, Any]) -> float:
    """Return the time from when a delivery was due until it was delivered."""
    begun = datetime.fromisoformat(delivery["created_at"])
    if delivery["due_at"] is not None:
        begun = max(begun, datetime.fromisoformat(delivery["due_at"]))
    return max(0.0, (datetime.fromisoformat(delivery["updated_at"]) - begun) / _MILLISECOND)


_MILLISECOND: Final = timedelta(milliseconds=1)


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share does not exceed; None: no values."""
    if not ordered:
        return None
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
