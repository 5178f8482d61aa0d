"""Rooms, event types and subscriptions as the rest of the house sees them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.lane import NO_SETTINGS, LaneSettings
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
    lane: LaneSettings = NO_SETTINGS
    ordered: bool = False
    """What subscriptions are that say nothing themselves."""
    operational_url: str | None = None
    """Where its owner is told of endpoints that were disabled."""
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
    filter: str | None = None
    """A CEL expression; None: it wants every message of its types."""
    ordered: bool | None = None
    """What has an ordering key comes one after the other; None: as its room says."""
    push_url: str | None
    delivery_delay_ms: int | None
    delivery_delay_multiplier: float | None
    delivery_attempts: int | None
    headers: Mapping[str, str] = field(default_factory=dict)
    terminal_statuses: frozenset[int] = frozenset()
    ignorable_statuses: frozenset[int] = frozenset()
    max_receives: int | None
    lane: LaneSettings = NO_SETTINGS
    operational: bool = False
    """Made by the room for its `operational_url`."""
    cloud_events: bool
    native: bool = False
    """PULL: clients of the broker's own read its queue, and nobody pulls through us (row E8)."""
    status: SubscriptionStatus
    status_reason: str | None
    status_since: datetime
    version: int
    created_at: datetime
    updated_at: datetime
