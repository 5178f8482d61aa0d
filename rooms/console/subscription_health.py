"""Read how subscriptions are: which fail, and with which others; their last hour and deliveries."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rooms.console.page import Page
from rooms.domain.state_machine import State
from rooms.domain.subscription_health import SubscriptionHealth

_MOST: Final = 200
"""Subscriptions of one answer of `/v1/status`."""
_KINDS: Final = {
    SubscriptionHealth.DISABLED: "bad",
    SubscriptionHealth.CIRCUIT_OPEN: "bad",
    SubscriptionHealth.FAILING: "bad",
    SubscriptionHealth.DEGRADED: "warn",
    SubscriptionHealth.PAUSED: "off",
    SubscriptionHealth.LAGGING: "warn",
    SubscriptionHealth.HAS_SIDELINED: "off",
}
_COUNTS: Final = ("delivered", "failed", "sidelined")
_SHARES: Final = ("p50", "p95", "p99")
BARS: Final = 40
_GOOD: Final = frozenset({State.DELIVERED, State.HANDED_OVER})
_BAD: Final = frozenset({State.SIDELINED, State.EXPIRED})
_OFF: Final = frozenset({State.CANCELLED, State.DROPPED, State.PURGED})


def health_labels(page: Page) -> dict[str, tuple[str, str]]:
    """Return the look and the name of each condition, in the viewer's language."""
    names = {
        SubscriptionHealth.DISABLED: page.text("disabled"),
        SubscriptionHealth.CIRCUIT_OPEN: page.text("circuit open"),
        SubscriptionHealth.FAILING: page.text("failing"),
        SubscriptionHealth.DEGRADED: page.text("unsteady"),
        SubscriptionHealth.PAUSED: page.text("paused with deliveries"),
        SubscriptionHealth.LAGGING: page.text("behind"),
        SubscriptionHealth.HAS_SIDELINED: page.text("well, with a sideline"),
    }
    return {condition.value: (_KINDS[condition], name) for condition, name in names.items()}


def subscription_names(listed: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return names of subscriptions by id: with the room where two have the same name."""
    count = Counter(one["name"] for one in listed)
    return {
        one["subscription_id"]: one["name"]
        if count[one["name"]] == 1
        else f"{one['room']}/{one['name']}"
        for one in listed
    }


async def find_unhealthy(
    page: Page, subscriptions: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Any]] | None:
    """Return the status of those own subscriptions that are not well, by id.

    None: the viewer may not read it.
    """
    own = [one["id"] for one in subscriptions if one["organisation_id"] == page.me.organisation_id]
    if not own:
        return {}
    status = await page.optional("/status", subscription_id=",".join(own[:_MOST]), limit=_MOST)
    if status is None:
        return None
    return {one["subscription_id"]: one for one in status["subscriptions"]}


async def find_failing_together(
    page: Page, subscription_id: str
) -> tuple[list[str], dict[str, str]]:
    """Return the ids of those that fail together with a subscription, and the names by id."""
    status = await page.optional("/status", limit=_MOST)
    listed = [] if status is None else status["subscriptions"]
    (together,) = [
        one["together_with"] for one in listed if one["subscription_id"] == subscription_id
    ] or [[]]
    return together, subscription_names(listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastHour:
    """Hold a value for each minute, oldest first, by the name of the count or percentile."""

    since: str
    until: str
    counts: Mapping[str, Sequence[int]]
    latencies_ms: Sequence[tuple[str, Sequence[float | None]]]
    hour_ms: Mapping[str, float | None]
    """The percentiles of the whole hour."""

    @property
    def highest_ms(self) -> float | None:
        """Return the value at the top of the chart of latencies; None: it is empty."""
        known = (value for _, values in self.latencies_ms for value in values if value is not None)
        return max(known, default=None)


async def read_last_hour(page: Page, path: str) -> LastHour | None:
    """Return what `path` of the API counts; None: the viewer may not read it."""
    found: dict[str, Any] | None = await page.optional(path)
    if found is None:
        return None
    minutes = found["minutes"]
    return LastHour(
        since=minutes[0]["start"],
        until=minutes[-1]["start"],
        counts={name: [one[name] for one in minutes] for name in _COUNTS},
        latencies_ms=[(name, [one[f"{name}_ms"] for one in minutes]) for name in _SHARES],
        hour_ms={name: found["latency"][f"{name}_ms"] for name in _SHARES},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySummary:
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


def summarize(deliveries: Sequence[Mapping[str, Any]]) -> DeliverySummary | None:
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
    return DeliverySummary(
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
