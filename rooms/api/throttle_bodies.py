"""Define the throttling fields of rooms and subscriptions."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from rooms.domain.throttle import ThrottleSettings
from rooms.errors import FieldProblem

_MAX_MS: Final = 365 * 86_400_000
_MIN_RATE_PER_S: Final = 0.001

MaxConcurrency = Annotated[
    int,
    Meta(
        ge=1,
        le=1000,
        description="Calls at a time at most, in each worker; null: the installation's.",
    ),
]
TimeoutMs = Annotated[
    int, Meta(ge=100, le=30_000, description="For one call of the webhook, in ms; null: 15,000.")
]
RatePerS = Annotated[
    float,
    Meta(
        ge=0,
        le=100_000,
        description="Calls a second at most, all workers together; from 0.001 on. 0: no limit.",
    ),
]
RateBurst = Annotated[
    int,
    Meta(
        ge=1,
        le=100_000,
        description="The most calls at once after a pause; null: those of one second.",
    ),
]
CircuitFailures = Annotated[
    int,
    Meta(
        ge=0,
        le=1000,
        description="Failures in a row that open the circuit; null or 0: it never opens.",
    ),
]
CircuitWindowMs = Annotated[
    int, Meta(ge=1, le=_MAX_MS, description="The time in ms for these failures; null: 60,000.")
]
CircuitOpenMs = Annotated[
    int,
    Meta(
        ge=100,
        le=_MAX_MS,
        description="From its opening to a probe, and between probes, in ms; null: 30,000.",
    ),
]
DrainPerS = Annotated[
    float,
    Meta(
        ge=0,
        le=100_000,
        description="The most deliveries a second that go on after a pause, a disabled endpoint or "
        "an open circuit; from "
        "0.001 on. 0: as many as the endpoint takes.",
    ),
]
DisableAfterMs = Annotated[
    int,
    Meta(
        ge=0,
        le=_MAX_MS,
        description="Only failures for so long disable the endpoint; null or 0: never.",
    ),
]


class CreateThrottle(Struct, forbid_unknown_fields=True, kw_only=True):
    """Set throttling; for a subscription null follows its room, and 0 turns a setting off."""

    max_concurrency: MaxConcurrency | None = None
    timeout_ms: TimeoutMs | None = None
    rate_per_s: RatePerS | None = None
    rate_burst: RateBurst | None = None
    circuit_failures: CircuitFailures | None = None
    circuit_window_ms: CircuitWindowMs | None = None
    circuit_open_ms: CircuitOpenMs | None = None
    drain_per_s: DrainPerS | None = None
    disable_after_ms: DisableAfterMs | None = None


class UpdateThrottle(Struct, forbid_unknown_fields=True, kw_only=True):
    """Change throttling."""

    max_concurrency: MaxConcurrency | UnsetType | None = UNSET
    timeout_ms: TimeoutMs | UnsetType | None = UNSET
    rate_per_s: RatePerS | UnsetType | None = UNSET
    rate_burst: RateBurst | UnsetType | None = UNSET
    circuit_failures: CircuitFailures | UnsetType | None = UNSET
    circuit_window_ms: CircuitWindowMs | UnsetType | None = UNSET
    circuit_open_ms: CircuitOpenMs | UnsetType | None = UNSET
    drain_per_s: DrainPerS | UnsetType | None = UNSET
    disable_after_ms: DisableAfterMs | UnsetType | None = UNSET


def throttle_problems(fields: Mapping[str, Any]) -> Iterator[FieldProblem]:
    """Yield a problem for each rate that is too small."""
    for name in ("rate_per_s", "drain_per_s"):
        value = fields.get(name)
        if value and value < _MIN_RATE_PER_S:
            yield FieldProblem(name, f"is 0 (no limit) or {_MIN_RATE_PER_S} a second and more")


def throttle_fields(settings: ThrottleSettings) -> dict[str, Any]:
    """Return the throttling fields of a room or a subscription."""
    return asdict(settings)
