"""Hold what a running service says fails now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Self

MARKS: Final = {
    "failing": "✕",
    "circuit_open": "✕",
    "disabled": "■",
    "paused": "‖",
    "unsteady": "▲",
    "behind": "▲",
    "resting": "○",
}
"""A shape for each condition, as no colour says more than its words."""


_HEALTHY: Final = frozenset({"resting"})
"""Conditions in which nothing fails at present."""


def utc_time(text: str) -> datetime:
    """Return a time of the answer in UTC: PostgreSQL's time zone may be another one."""
    return datetime.fromisoformat(text).astimezone(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Hold the names of a subscription, of its room and of its organisation."""

    name: str
    room: str | None = None
    organisation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStatus:
    """Hold the answer of `GET /v1/status`, and the address that was asked."""

    url: str
    at: datetime
    parts_down: Sequence[str]
    troubled: Sequence[Mapping[str, Any]]
    total: int
    names: Mapping[str, Names] = field(default_factory=dict)

    @property
    def failing(self) -> Sequence[Mapping[str, Any]]:
        """Return the subscriptions that are not well at present."""
        return [one for one in self.troubled if one["condition"] not in _HEALTHY]

    @property
    def resting(self) -> Sequence[Mapping[str, Any]]:
        """Return those that are well, and whose sideline is not empty."""
        return [one for one in self.troubled if one["condition"] in _HEALTHY]

    @classmethod
    def from_answer(cls, url: str, answer: Mapping[str, Any]) -> Self:
        """Read the body of an answer."""
        troubled = answer["subscriptions"]
        return cls(
            url=url,
            at=utc_time(answer["at"]),
            parts_down=sorted(
                name for name, state in answer["health"]["parts"].items() if state != "up"
            ),
            troubled=troubled,
            total=answer["subscriptions_total"],
            names={
                one["subscription_id"]: Names(name=one["name"], room=one["room"])
                for one in troubled
            },
        )
