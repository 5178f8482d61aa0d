"""Define retry policies and retry decisions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooms.domain.state_machine import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Hold the effective policy of a subscription: the room's with its overrides."""

    delay_ms: int
    multiplier: float
    attempts: int
    """Retries after the first attempt; 0: none."""
    max_delay_ms: int | None = None
    jitter: float = 0.0
    """Fraction of the delay, 0 to 1, by which it varies at random; 0: the exact formula."""
    terminal_statuses: frozenset[int] = frozenset()
    ignorable_statuses: frozenset[int] = frozenset()
    version: int = 1
    """The version of the subscription's settings, which the log names beside each attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Retry after `delay_ms`. The next attempt has the number `attempt`."""

    attempt: int
    delay_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sideline:
    """Sideline the delivery."""

    reason: Reason
    disable_endpoint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Drop the delivery: its subscription ignores the status that came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire:
    """Expire the delivery: the next attempt would be after the message's expiry."""


RetryDecision = Retry | Sideline | Drop | Expire


def advised_settings(recommended: Mapping[str, Any]) -> dict[str, float]:
    """Return the settings of a subscription, by field, that a recommended policy stands for.

    They are all that retries depend on, so what the room sets does not change what was promised.
    Advice of earlier versions has no cap and no jitter; these then follow the room.
    """
    found = {
        "delivery_delay_ms": round(recommended["delay_ms"]),
        "delivery_delay_multiplier": recommended["multiplier"],
        "delivery_attempts": recommended["redeliveries"],
    }
    if (cap := recommended.get("max_delay_ms")) is not None:
        found["delivery_max_delay_ms"] = round(cap)
    if (jitter := recommended.get("jitter")) is not None:
        found["delivery_jitter"] = jitter
    return found
