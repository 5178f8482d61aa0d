"""Define rooms, subscriptions, and the headers that a subscription may add."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.operational_event import DEFAULT_OPERATIONAL_EVENTS, OperationalEvent
from rooms.domain.sharing import ReapprovalField, SubscriptionPolicy, Visibility
from rooms.domain.state_machine import SubscriptionStatus, SubscriptionType
from rooms.domain.subscription_status import Suspension
from rooms.domain.throttle import NO_SETTINGS, ThrottleSettings

OPERATIONAL_NAME: Final = "~operational"
"""The subscription of a room's `operational_url`; '~' is in no name that users may choose."""
DEFAULT_REAPPROVAL: Final = frozenset({ReapprovalField.PUSH_URL, ReapprovalField.EVENT_TYPES})
DEFAULT_DELIVERY_DELAY_MS: Final = 1000
DEFAULT_DELIVERY_DELAY_MULTIPLIER: Final = 2.0
DEFAULT_DELIVERY_ATTEMPTS: Final = 5
"""The retry policy that the command line and the console propose for a new room."""
MAX_HEADERS: Final = 50
MAX_HEADER_BYTES: Final = 8192
"""Most bytes of all names and values."""
_MAX_HEADER_NAME: Final = 128
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE: Final = re.compile(r"(?:[!-~](?:[ \t!-~]*[!-~])?)?")
# Headers that the sender, the signature or the connection sets.
_RESERVED_HEADERS: Final = re.compile(
    r"content-.*|webhook-.*|rooms-.*|ce-.*|proxy-.*|host|connection|keep-alive|transfer-encoding"
    r"|te|trailer|upgrade|expect|accept-encoding|date|user-agent",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Describe a room and its retry defaults. No expiration, or 0, means never."""

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
    throttle: ThrottleSettings = NO_SETTINGS
    ordered: bool = False
    """Default of its subscriptions."""
    operational_url: str | None = None
    """URL that receives operational events."""
    operational_events: frozenset[OperationalEvent] = DEFAULT_OPERATIONAL_EVENTS
    """The events that the room sends."""
    visibility: Visibility = Visibility.PRIVATE
    subscription_policy: SubscriptionPolicy = SubscriptionPolicy.OWNER_ONLY
    reapprove_on: frozenset[ReapprovalField] = DEFAULT_REAPPROVAL
    reapproval_ended: Mapping[ReapprovalField, datetime] = field(default_factory=dict)
    """Since when fields need no approval that needed one before."""
    transparent: bool = False
    """Publishers see the names of all subscriptions that their messages reach."""
    govstack: bool = False
    """GovStack's interfaces serve it, under its owner's member id and its name."""
    plan_version: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Interest:
    """Hold one entry of a subscription's `event_types`: a type and its versions (None: all)."""

    name: str
    versions: frozenset[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """Describe a subscription with its overrides (None: the room's value)."""

    id: SubscriptionId
    room_id: RoomId
    organisation_id: OrganisationId
    """The subscriber; the room may belong to another organisation."""
    application: str | None = None
    name: str
    type: SubscriptionType
    event_types: tuple[Interest, ...] | None
    """None: every type of the room."""
    filter: str | None = None
    """A CEL expression; None: every message of its types matches."""
    ordered: bool | None = None
    """Messages with the same ordering key are delivered in order; None: the room's value."""
    push_url: str | None
    delivery_delay_ms: int | None
    delivery_delay_multiplier: float | None
    delivery_attempts: int | None
    delivery_max_delay_ms: int | None = None
    delivery_jitter: float | None = None
    message_expiration_ms: int | None = None
    """The lifetime of its deliveries, where the room's is not shorter."""
    header_names: tuple[str, ...] = ()
    """Names of the headers of each call; their values are secrets."""
    terminal_statuses: frozenset[int] = frozenset()
    ignorable_statuses: frozenset[int] = frozenset()
    max_receives: int | None
    throttle: ThrottleSettings = NO_SETTINGS
    operational: bool = False
    """It receives operational events and no messages."""
    cloud_events: bool
    event_item: bool = False
    """PUSH: the body of its webhook is GovStack's EventItem around the payload."""
    ack_by_next_pull: bool = False
    """PULL: a pull by the interface of GovStack's first implementation acknowledges the one before.
    """
    native: bool = False
    """PULL: clients of the broker read its queue, and pulling through the API is not possible."""
    status: SubscriptionStatus
    own_status: SubscriptionStatus | None = None
    """The subscriber's own status while something suspends the subscription."""
    suspended_by: frozenset[Suspension] = frozenset()
    backfill: bool = False
    """On approval it gets what was published since the request."""
    start_at: datetime | None = None
    """It gets what was published from then on, as far as it was entitled to it."""
    approved_at: datetime | None = None
    former_types: tuple[str, ...] = ()
    """Patterns of event types that it took before: deliveries of these may be unfinished."""
    proposal: Mapping[str, Any] | None = None
    """Column values that wait for approval; until then the present ones apply."""
    status_reason: str | None
    status_since: datetime
    version: int
    created_at: datetime
    updated_at: datetime

    @property
    def belongs_to_room(self) -> bool:
        """Return whether the room made it for its `operational_url`."""
        return self.operational and self.name == OPERATIONAL_NAME


def destination_name(room: RoomId, subscription: SubscriptionId) -> str:
    """Return `room-{room}::subscription-{subscription}`, the same for PUSH and PULL."""
    return f"room-{room}::subscription-{subscription}"


def header_problems(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and problem of each invalid header; the name is empty for all of them together."""
    if len(headers) > MAX_HEADERS:
        yield "", f"takes at most {MAX_HEADERS} headers"
    if sum(len(name) + len(value) + 4 for name, value in headers.items()) > MAX_HEADER_BYTES:
        yield "", f"names and values together take at most {MAX_HEADER_BYTES} bytes"
    seen: set[str] = set()
    for name, value in headers.items():
        shown = name[:_MAX_HEADER_NAME]
        if not _HEADER_NAME.fullmatch(name) or len(name) > _MAX_HEADER_NAME:
            yield (
                shown,
                f"a header's name is a token of RFC 9110 of at most {_MAX_HEADER_NAME} characters",
            )
        elif _RESERVED_HEADERS.fullmatch(name):
            yield shown, "this header is set by the service"
        elif name.lower() in seen:
            yield shown, "this header occurs twice (header names ignore case)"
        seen.add(name.lower())
        if not _HEADER_VALUE.fullmatch(value):
            yield shown, "a header's value is visible ASCII, with spaces only in between"
