"""What rooms and subscriptions say of lanes on the wire: how fast webhooks are called, and when they are spared."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, Struct, UnsetType

from rooms.domain.lane import LaneSettings
from rooms.errors import FieldProblem

_MOST_MS: Final = 365 * 86_400_000
_SLOWEST_PER_S: Final = 0.001

MaxConcurrency = Annotated[
    int, Meta(ge=1, le=1000, description="Calls at a time at most, in each worker; null: the installation's.")
]
TimeoutMs = Annotated[int, Meta(ge=100, le=30_000, description="For one call of the webhook, in ms; null: 15,000.")]
RatePerS = Annotated[
    float,
    Meta(ge=0, le=100_000, description="Calls a second at most, all workers together; from 0.001 on. 0: no limit."),
]
RateBurst = Annotated[
    int, Meta(ge=1, le=100_000, description="How many may come at once after a rest; null: those of one second.")
]
CircuitFailures = Annotated[
    int, Meta(ge=0, le=1000, description="So many failures in a row open the circuit. null or 0: it never opens.")
]
CircuitWindowMs = Annotated[
    int, Meta(ge=1, le=_MOST_MS, description="Within so many ms they have to come; null: 60,000.")
]
CircuitOpenMs = Annotated[
    int, Meta(ge=100, le=_MOST_MS, description="From its opening to a probe, and between probes, in ms; null: 30,000.")
]
DrainPerS = Annotated[
    float,
    Meta(
        ge=0,
        le=100_000,
        description="How many that were held for a pause, a disabled endpoint or an open circuit go on in a second; from "
        "0.001 on. 0: as many as the endpoint takes.",
    ),
]
DisableAfterMs = Annotated[
    int,
    Meta(ge=0, le=_MOST_MS, description="Nothing but failures for so long disables the endpoint. null or 0: never."),
]


class LaneNew(Struct, forbid_unknown_fields=True, kw_only=True):
    """Of something new; a subscription follows its room in what is null, and 0 turns off what the room has on."""

    max_concurrency: MaxConcurrency | None = None
    timeout_ms: TimeoutMs | None = None
    rate_per_s: RatePerS | None = None
    rate_burst: RateBurst | None = None
    circuit_failures: CircuitFailures | None = None
    circuit_window_ms: CircuitWindowMs | None = None
    circuit_open_ms: CircuitOpenMs | None = None
    drain_per_s: DrainPerS | None = None
    disable_after_ms: DisableAfterMs | None = None


class LaneChange(Struct, forbid_unknown_fields=True, kw_only=True):
    """What to change of it."""

    max_concurrency: MaxConcurrency | UnsetType | None = UNSET
    timeout_ms: TimeoutMs | UnsetType | None = UNSET
    rate_per_s: RatePerS | UnsetType | None = UNSET
    rate_burst: RateBurst | UnsetType | None = UNSET
    circuit_failures: CircuitFailures | UnsetType | None = UNSET
    circuit_window_ms: CircuitWindowMs | UnsetType | None = UNSET
    circuit_open_ms: CircuitOpenMs | UnsetType | None = UNSET
    drain_per_s: DrainPerS | UnsetType | None = UNSET
    disable_after_ms: DisableAfterMs | UnsetType | None = UNSET


def lane_problems(fields: Mapping[str, Any]) -> Iterator[FieldProblem]:
    """Rates that are so small that they are no rates."""
    for name in ("rate_per_s", "drain_per_s"):
        value = fields.get(name)
        if value and value < _SLOWEST_PER_S:
            yield FieldProblem(name, f"is 0 (no limit) or {_SLOWEST_PER_S} a second and more")


def lane_out(settings: LaneSettings) -> dict[str, Any]:
    """The fields of a room or a subscription that are its lanes'."""
    return asdict(settings)
