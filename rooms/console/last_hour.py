"""Read the last hour by the minute, for the charts of a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rooms.console.page import Page

_COUNTS: Final = ("delivered", "failed", "sidelined")
_SHARES: Final = ("p50", "p95", "p99")


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
