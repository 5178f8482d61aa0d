"""Define the fields of a subscription that override its room's retry policy and lifetime."""

from collections.abc import Iterator
from typing import Annotated, Final

from msgspec import UNSET, Meta, UnsetType

from rooms.api.room_bodies import (
    MAX_EXPIRATION_MS,
    DelayMs,
    DeliveryAttempts,
    Jitter,
    MaxDelayMs,
    Multiplier,
)
from rooms.api.throttle_bodies import CreateThrottle, UpdateThrottle
from rooms.errors import FieldProblem

Lifetime = Annotated[
    int,
    Meta(
        ge=1,
        le=MAX_EXPIRATION_MS,
        description="The lifetime of its deliveries in ms, from when their message is due: at most "
        "that of the room. Of both, and of the message's own, the shortest counts. null: the "
        "room's.",
    ),
]
RETRY_OVERRIDES: Final = (
    "delivery_delay_ms",
    "delivery_delay_multiplier",
    "delivery_attempts",
    "delivery_max_delay_ms",
    "delivery_jitter",
)
"""Fields that only PUSH has."""
LIFETIME: Final = "message_expiration_ms"


class CreateOverrides(CreateThrottle, forbid_unknown_fields=True, kw_only=True):
    """Override the room's values; null follows the room."""

    delivery_delay_ms: DelayMs | None = None
    delivery_delay_multiplier: Multiplier | None = None
    delivery_attempts: DeliveryAttempts | None = None
    delivery_max_delay_ms: MaxDelayMs | None = None
    delivery_jitter: Jitter | None = None
    message_expiration_ms: Lifetime | None = None


class UpdateOverrides(UpdateThrottle, forbid_unknown_fields=True, kw_only=True):
    """Change the overrides."""

    delivery_delay_ms: DelayMs | UnsetType | None = UNSET
    delivery_delay_multiplier: Multiplier | UnsetType | None = UNSET
    delivery_attempts: DeliveryAttempts | UnsetType | None = UNSET
    delivery_max_delay_ms: MaxDelayMs | UnsetType | None = UNSET
    delivery_jitter: Jitter | UnsetType | None = UNSET
    message_expiration_ms: Lifetime | UnsetType | None = UNSET


def lifetime_problems(wanted: int | None, room_ms: int | None) -> Iterator[FieldProblem]:
    """Yield a problem for a lifetime above that of the room (None or 0: unlimited)."""
    if wanted is not None and room_ms and wanted > room_ms:
        yield FieldProblem(
            LIFETIME,
            f"only shortens the lifetime of the room's messages, {room_ms} ms: give at most that, "
            "or null",
        )
