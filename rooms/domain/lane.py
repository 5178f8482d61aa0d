"""How fast a webhook may be called, and when it is spared."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final

TIMEOUT_MS: Final = 15_000
CIRCUIT_WINDOW_MS: Final = 60_000
CIRCUIT_OPEN_MS: Final = 30_000
"""What holds where neither subscription nor room says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePolicy:
    """The effective settings of a subscription's lane: its room's, with its own overrides. None and 0: not so."""

    max_concurrency: int | None = None
    """Attempts at a time in each worker; None: the installation's default."""
    timeout_ms: int = TIMEOUT_MS
    """How long one attempt may take."""
    rate_per_s: float | None = None
    """Attempts a second, all workers together."""
    rate_burst: int = 1
    """How many may come at once after a rest."""
    circuit_failures: int = 0
    """So many failures in a row, within the window, open the circuit."""
    circuit_window_ms: int = CIRCUIT_WINDOW_MS
    circuit_open_ms: int = CIRCUIT_OPEN_MS
    """From the opening to the first probe, and from probe to probe."""
    drain_per_s: float | None = None
    """How many of those that were held for a pause, a disabled endpoint or an open circuit go on in a second."""
    disable_after_ms: int | None = None
    """Nothing but failures for so long disables the endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """What a room or a subscription itself says of lanes. None: nothing, so the room's value or the default holds; 0 of what
    may be off: off, whatever the room says.
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


NO_SETTINGS: Final = LaneSettings()
NO_LIMITS: Final = LanePolicy()
LANE_SETTINGS: Final = tuple(field.name for field in fields(LaneSettings))
"""What rooms and subscriptions call them."""


def lane_policy(found: Mapping[str, float | None]) -> LanePolicy:
    """The policy of these settings, where null and 0 stand for what holds if nothing is said; 0 overrides a room's value."""

    def whole(name: str) -> int | None:
        value = found[name]
        return int(value) if value else None

    rate_per_s = found["rate_per_s"] or None
    return LanePolicy(
        max_concurrency=whole("max_concurrency"),
        timeout_ms=whole("timeout_ms") or TIMEOUT_MS,
        rate_per_s=rate_per_s,
        rate_burst=whole("rate_burst") or max(1, math.ceil(rate_per_s or 1)),
        circuit_failures=whole("circuit_failures") or 0,
        circuit_window_ms=whole("circuit_window_ms") or CIRCUIT_WINDOW_MS,
        circuit_open_ms=whole("circuit_open_ms") or CIRCUIT_OPEN_MS,
        drain_per_s=found["drain_per_s"] or None,
        disable_after_ms=whole("disable_after_ms"),
    )


class Circuit(StrEnum):
    """Whether attempts are made: `half_open` is open with a probe under way, `off` is nothing set."""

    OFF = "off"
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
