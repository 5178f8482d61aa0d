"""Rooms, event types and subscriptions as the rest of the house sees them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.policy import RetryPolicy
from rooms.domain.states import SubscriptionStatus, SubscriptionType


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A room and its retry defaults (row A1). Durations in milliseconds; a null or zero expiration means never."""

    id: RoomId
    organisation_id: OrganisationId
    name: str
    description: str | None
    message_expiration_ms: int | None
    delivery_delay_ms: int
    delivery_delay_multiplier: float
    delivery_attempts: int
    delivery_max_delay_ms: int | None
    delivery_jitter: float
    plan_version: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Interest:
    """One entry of a subscription's `event_types`: a type, and the versions of it that are wanted (None: all)."""

    name: str
    versions: frozenset[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A subscription with its overrides (None: the room's value, rows A2 and A3)."""

    id: SubscriptionId
    room_id: RoomId
    name: str
    type: SubscriptionType
    event_types: tuple[Interest, ...] | None
    """None: every type of the room."""
    push_url: str | None
    delivery_delay_ms: int | None
    delivery_delay_multiplier: float | None
    delivery_attempts: int | None
    headers: Mapping[str, str] = field(default_factory=dict)
    terminal_statuses: frozenset[int] = frozenset()
    ignorable_statuses: frozenset[int] = frozenset()
    timeout_ms: int
    max_receives: int | None
    cloud_events: bool
    status: SubscriptionStatus
    status_reason: str | None
    status_since: datetime
    version: int
    created_at: datetime
    updated_at: datetime

    def policy(self, room: Room) -> RetryPolicy:
        """What holds for this subscription: each override on its own, the rest from the room."""
        return RetryPolicy(
            delay_ms=room.delivery_delay_ms if self.delivery_delay_ms is None else self.delivery_delay_ms,
            multiplier=room.delivery_delay_multiplier
            if self.delivery_delay_multiplier is None
            else self.delivery_delay_multiplier,
            attempts=room.delivery_attempts if self.delivery_attempts is None else self.delivery_attempts,
            max_delay_ms=room.delivery_max_delay_ms,
            jitter=room.delivery_jitter,
            terminal_statuses=self.terminal_statuses,
            ignorable_statuses=self.ignorable_statuses,
            version=self.version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTypeVersion:
    """One version of an event type, with its JSON Schema (None: any JSON)."""

    name: str
    version: int
    schema: object | None
