"""How a room or subscription wants failures repeated."""

from dataclasses import dataclass

from rooms.domain.states import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The effective policy of a subscription: its room's, with its own overrides. Source: rows A1, A3, A4."""

    delay_ms: int
    multiplier: float
    attempts: int
    """Redeliveries after the first try; 0: none."""
    max_delay_ms: int | None = None
    jitter: float = 0.0
    """Share of the wait, 0 to 1, by which it may be shortened or lengthened at random; 0: the exact formula."""
    terminal_statuses: frozenset[int] = frozenset()
    ignorable_statuses: frozenset[int] = frozenset()
    version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Try again after `delay_ms`; the next try is number `attempt`."""

    attempt: int
    delay_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sideline:
    """Put aside for a person or the shovel."""

    reason: Reason
    disable_endpoint: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Forget it: the endpoint answered with a status that its owner declared ignorable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire:
    """The next try would come after the message's expiry."""


Decision = Retry | Sideline | Drop | Expire
