"""Define rate limits, concurrency limits and circuit breakers of webhooks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

DEFAULT_TIMEOUT_MS: Final = 15_000
DEFAULT_CIRCUIT_WINDOW_MS: Final = 60_000
DEFAULT_CIRCUIT_OPEN_MS: Final = 30_000
"""Defaults for rooms and subscriptions without a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottlePolicy:
    """Hold the effective settings of a subscription: the room's with its overrides.

    None and 0 switch a feature off.
    """

    max_concurrency: int | None = None
    """Concurrent attempts in each worker; None: the installation's default."""
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    """Timeout of one attempt."""
    rate_per_s: float | None = None
    """Attempts per second of all workers together."""
    rate_burst: int = 1
    """Most attempts at once after a pause."""
    circuit_failures: int = 0
    """Failures in a row, within the window, that open the circuit."""
    circuit_window_ms: int = DEFAULT_CIRCUIT_WINDOW_MS
    circuit_open_ms: int = DEFAULT_CIRCUIT_OPEN_MS
    """Time from the opening to the first probe, and between probes."""
    drain_per_s: float | None = None
    """Deliveries per second that are released after a pause, a 410 or an open circuit."""
    disable_after_ms: int | None = None
    """Time with only failures that disables the endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleSettings:
    """Hold the settings of a room or of a subscription.

    None: the room's value, or the default. 0 switches a feature off, whatever the room's value.
    """

    max_concurrency: int | None = None
    timeout_ms: int | None = None
    rate_per_s: float | None = None
    rate_burst: int | None = None
    circuit_failures: int | None = None
    circuit_window_ms: int | None = None
    circuit_open_ms: int | None = None
    drain_per_s: float | None = None
    disable_after_ms: int | None = None


NO_SETTINGS: Final = ThrottleSettings()
NO_LIMITS: Final = ThrottlePolicy()
THROTTLE_SETTINGS: Final = tuple(field.name for field in fields(ThrottleSettings))
"""Names of the settings of rooms and subscriptions."""


def throttle_policy(settings: Mapping[str, float | None]) -> ThrottlePolicy:
    """Return the policy of these settings. None and 0 mean the default."""

    def whole(name: str) -> int | None:
        value = settings[name]
        return int(value) if value else None

    rate_per_s = settings["rate_per_s"] or None
    return ThrottlePolicy(
        max_concurrency=whole("max_concurrency"),
        timeout_ms=whole("timeout_ms") or DEFAULT_TIMEOUT_MS,
        rate_per_s=rate_per_s,
        rate_burst=whole("rate_burst") or max(1, math.ceil(rate_per_s or 1)),
        circuit_failures=whole("circuit_failures") or 0,
        circuit_window_ms=whole("circuit_window_ms") or DEFAULT_CIRCUIT_WINDOW_MS,
        circuit_open_ms=whole("circuit_open_ms") or DEFAULT_CIRCUIT_OPEN_MS,
        drain_per_s=settings["drain_per_s"] or None,
        disable_after_ms=whole("disable_after_ms"),
    )


class CircuitState(StrEnum):
    """Name the state of a circuit. `half_open`: a probe is in flight. `off`: none is set."""

    OFF = "off"
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
