"""Define the bodies of GovStack's specification, by its names.

Fields that the specification does not have are marked as ours in their description.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from rooms.api.event_types import EventTypeName, EventTypeSchema
from rooms.domain.message import MessageStatus
from rooms.domain.sharing import APPLICATION_PATTERN
from rooms.domain.state_machine import SubscriptionStatus, SubscriptionType

DEFAULT_TTL_S: Final = 3600
MAX_TTL_S: Final = 100 * 365 * 86_400

Part = Annotated[str, Meta(pattern=APPLICATION_PATTERN)]
EventId = Annotated[
    str, Meta(pattern="^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", description="A UUID.")
]


class ClientIdentifier(Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Name a client: a member, and one of its applications.

    `applicationCode` is absent where a member published with no application.
    """

    instance_id: Part
    member_class: Part
    member_code: Part
    application_code: Part | UnsetType = UNSET


class SubscriptionOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """Choose the lifetime of a subscriber's events, and their order."""

    ttl: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=MAX_TTL_S,
                description="The lifetime of an event in seconds, at most that of the room's "
                "messages. By default 3600, or the room's if that is shorter.",
                extra_json_schema={"default": DEFAULT_TTL_S},
            ),
        ]
        | UnsetType
    ) = msgspec.field(name="TTL", default=UNSET)
    fifo: (
        Annotated[
            bool,
            Meta(
                description="Events come one by one, in the order of their commits.",
                extra_json_schema={"default": False},
            ),
        ]
        | UnsetType
    ) = msgspec.field(name="FIFO", default=UNSET)


class SubscriptionItem(Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Describe the subscription of a client to an event type.

    `id` and `status` are ignored in requests. A `subscriberId` in a request must be the caller.
    """

    event_type: EventTypeName
    id: EventId | UnsetType = UNSET
    subscriber_id: ClientIdentifier | UnsetType = UNSET
    delivery: (
        Annotated[SubscriptionType, Meta(extra_json_schema={"default": "PUSH"})] | UnsetType
    ) = UNSET
    options: SubscriptionOptions | UnsetType = UNSET
    status: (
        Annotated[
            SubscriptionStatus,
            Meta(description="Ours: `pending` until the room's owner approves."),
        ]
        | UnsetType
    ) = UNSET


class EventTypeItem(Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Describe an event type with the JSON Schema of its latest version."""

    event_type: EventTypeName
    schema: EventTypeSchema = None


class PublishItem(Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Hold an event to publish: any JSON, which keeps its bytes."""

    event_type: EventTypeName
    event: msgspec.Raw


class PublishedItem(Struct, kw_only=True):
    """Name a published event."""

    id: EventId


class EventItem(Struct, rename="camel", kw_only=True):
    """Describe an event.

    `sequence` numbers the events for one subscription with FIFO: 1, 2, 3 and so on. `publisherId`
    is absent where the publisher has no member id, or the caller may not know it.
    """

    id: EventId
    sequence: int | UnsetType = UNSET
    publisher_id: ClientIdentifier | UnsetType = UNSET
    event_type: EventTypeName
    event: Any = UNSET
    status: (
        Annotated[MessageStatus, Meta(description="Ours, where the status is read.")] | UnsetType
    ) = UNSET
    states: (
        Annotated[
            dict[str, int],
            Meta(description="Ours, where the status is read: deliveries in each state."),
        ]
        | UnsetType
    ) = UNSET
