"""Define retry policies and retry decisions."""

from dataclasses import dataclass

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
