"""Define the bodies of rooms."""

from datetime import datetime
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from rooms.api.throttle_bodies import CreateThrottle, UpdateThrottle, throttle_fields
from rooms.db.catalog.access import Patterns
from rooms.domain.names import MAX_NAME, NAME_PATTERN
from rooms.domain.operational_event import DEFAULT_OPERATIONAL_EVENTS, OperationalEvent
from rooms.domain.principal import Principal
from rooms.domain.push_url import MAX_URL
from rooms.domain.room import DEFAULT_REAPPROVAL, Room
from rooms.domain.sharing import ReapprovalField, SubscriptionPolicy, Visibility
from rooms.domain.throttle import THROTTLE_SETTINGS

MAX_DELAY_MS: Final = 30 * 86_400_000
MAX_EXPIRATION_MS: Final = 100 * 365 * 86_400_000

Name = Annotated[
    str, Meta(pattern=NAME_PATTERN, min_length=1, max_length=MAX_NAME, description="Unique.")
]
Description = Annotated[str, Meta(max_length=1000)]
ExpirationMs = Annotated[
    int,
    Meta(
        ge=0,
        le=MAX_EXPIRATION_MS,
        description="The lifetime of a message in ms; null or 0: unlimited.",
    ),
]
DelayMs = Annotated[
    int, Meta(ge=0, le=MAX_DELAY_MS, description="The wait before the first redelivery, in ms.")
]
Multiplier = Annotated[
    float, Meta(ge=1.0, le=100.0, description="The factor of each further wait.")
]
DeliveryAttempts = Annotated[
    int, Meta(ge=0, le=1000, description="Redeliveries after the first attempt; 0: none.")
]
MaxDelayMs = Annotated[
    int,
    Meta(ge=0, le=MAX_DELAY_MS, description="The longest wait, in ms; null: no limit."),
]
Jitter = Annotated[
    float,
    Meta(
        ge=0.0,
        le=1.0,
        description="Random share of a wait; 0: exactly delay * multiplier ^ n.",
    ),
]


OperationalUrl = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_URL,
        description="Where to send operational events, signed and retried like any webhook: "
        "the subscription "
        "`~operational` of the room carries them, `rotate-secret` shows a signing secret.",
    ),
]
OperationalEvents = Annotated[
    list[OperationalEvent],
    Meta(
        max_length=len(OperationalEvent),
        description="The operational events that the room sends: to `operational_url` or another "
        "operational subscription of its owner, and to those of others about their own "
        "subscriptions.",
    ),
]


Ordered = Annotated[
    bool,
    Meta(
        description="The default for subscriptions: deliver messages of an ordering key one by one."
    ),
]


VisibilityField = Annotated[
    Visibility,
    Meta(description="listed: every organisation finds it in the directory."),
]
PolicyField = Annotated[
    SubscriptionPolicy,
    Meta(
        description="Who may subscribe without a grant: owner_only, approval (the owner approves "
        "each), automatic."
    ),
]
ReapproveOn = Annotated[
    list[ReapprovalField],
    Meta(
        max_length=len(ReapprovalField),
        description="Changes of another organisation's subscription that need approval again; "
        "push_url: of its host. While subscription_policy is automatic, no new change does; one "
        "that was proposed before waits on.",
    ),
]
Transparent = Annotated[
    bool,
    Meta(description="Publishers see the names of all subscriptions that their messages reach."),
]


Govstack = Annotated[
    bool,
    Meta(
        description="GovStack's interfaces serve the room: `/r1/{owner's member id}/{name}` and "
        "`/rooms/{member id}/{name}`."
    ),
]


class CreateRoom(CreateThrottle, forbid_unknown_fields=True, kw_only=True):
    """Create a room."""

    name: Name
    description: Description | None = None
    message_expiration_ms: ExpirationMs | None = None
    delivery_delay_ms: DelayMs
    delivery_delay_multiplier: Multiplier
    delivery_attempts: DeliveryAttempts
    delivery_max_delay_ms: MaxDelayMs | None = None
    delivery_jitter: Jitter = 0.0
    ordered: Ordered = False
    operational_url: OperationalUrl | None = None
    operational_events: OperationalEvents = msgspec.field(
        default_factory=lambda: sorted(DEFAULT_OPERATIONAL_EVENTS)
    )
    visibility: VisibilityField = Visibility.PRIVATE
    subscription_policy: PolicyField = SubscriptionPolicy.OWNER_ONLY
    reapprove_on: ReapproveOn = msgspec.field(default_factory=lambda: sorted(DEFAULT_REAPPROVAL))
    transparent: Transparent = False
    govstack: Govstack = False


class UpdateRoom(UpdateThrottle, forbid_unknown_fields=True, kw_only=True):
    """Change the given fields of a room; null clears."""

    name: Name | UnsetType = UNSET
    description: Description | UnsetType | None = UNSET
    message_expiration_ms: ExpirationMs | UnsetType | None = UNSET
    delivery_delay_ms: DelayMs | UnsetType = UNSET
    delivery_delay_multiplier: Multiplier | UnsetType = UNSET
    delivery_attempts: DeliveryAttempts | UnsetType = UNSET
    delivery_max_delay_ms: MaxDelayMs | UnsetType | None = UNSET
    delivery_jitter: Jitter | UnsetType = UNSET
    ordered: Ordered | UnsetType = UNSET
    operational_url: OperationalUrl | UnsetType | None = UNSET
    operational_events: OperationalEvents | UnsetType = UNSET
    visibility: VisibilityField | UnsetType = UNSET
    subscription_policy: PolicyField | UnsetType = UNSET
    reapprove_on: ReapproveOn | UnsetType = UNSET
    transparent: Transparent | UnsetType = UNSET
    govstack: Govstack | UnsetType = UNSET


class RoomResponse(Struct, kw_only=True):
    """Describe a room. `operational_url` and `operational_events` are only shown to its owner.

    `publishes`: patterns of the event types that the caller's organisation may publish now; null:
    all, empty: none.
    """

    id: int
    name: str
    description: str | None
    message_expiration_ms: int | None
    delivery_delay_ms: int
    delivery_delay_multiplier: float
    delivery_attempts: int
    delivery_max_delay_ms: int | None
    delivery_jitter: float
    ordered: bool
    max_concurrency: int | None
    timeout_ms: int | None
    rate_per_s: float | None
    rate_burst: int | None
    circuit_failures: int | None
    circuit_window_ms: int | None
    circuit_open_ms: int | None
    drain_per_s: float | None
    disable_after_ms: int | None
    operational_url: str | None
    operational_events: list[OperationalEvent] | None
    organisation_id: str
    visibility: Visibility
    subscription_policy: SubscriptionPolicy
    reapprove_on: list[ReapprovalField]
    transparent: bool
    govstack: bool
    publishes: list[str] | None
    created_at: datetime
    updated_at: datetime


class RoomPage(Struct, kw_only=True):
    """List rooms, newest first."""

    items: list[RoomResponse]
    next_cursor: str | None


def to_room_response(room: Room, principal: Principal, publishes: Patterns = None) -> RoomResponse:
    """Return a room as the API shows it to a principal, which may publish this in it."""
    own = {
        name: getattr(room, name)
        for name in RoomResponse.__struct_fields__
        if name not in THROTTLE_SETTINGS and name != "publishes"
    }
    own["publishes"] = None if publishes is None else sorted({*publishes})
    own["reapprove_on"] = sorted(room.reapprove_on)
    own["operational_events"] = sorted(room.operational_events)
    if room.organisation_id != principal.organisation_id or principal.is_subscriber_only:
        own |= {"operational_url": None, "operational_events": None}
    return RoomResponse(**own, **throttle_fields(room.throttle))
