"""Serve `/v1/messages` and the messages of a room, for reading."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, get
from litestar.params import QueryParameter
from msgspec import UNSET, Meta, Struct, UnsetType

from rooms.api.auth import FOR_EVERY_KEY, Caller, ServicesDep, for_portals, require_scopes
from rooms.api.changes import payload_read
from rooms.api.deliveries import DeliveryPage, to_visible_delivery
from rooms.api.deps import ApiServices
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import (
    BusinessKey,
    CallerId,
    Correlation,
    DeliveredTo,
    DeliveryState,
    EventType,
    IdPath,
    PublisherApplication,
    PublisherOrganisation,
    RoomPath,
    Since,
    Until,
    Version,
    WithPayload,
    parse_filter_id,
    parse_message,
    parse_room,
    to_filter,
)
from rooms.db.catalog.organisations import ListedOrganisation, find_members
from rooms.db.connection import transaction
from rooms.db.journal import append
from rooms.db.queries import deliveries as delivery_records
from rooms.db.queries import messages as records
from rooms.db.queries.message_list import (
    CountedStates,
    ListedMessage,
    PublisherFilter,
    count_states,
)
from rooms.db.queries.message_list import list_messages as list_visible
from rooms.db.queries.message_scope import (
    MessageScope,
    count_own_subscriptions,
    find_message_view,
    find_participant_scope,
    is_payload_visible,
)
from rooms.db.queries.messages import MessageRecord
from rooms.domain.ids import MessageId, OrganisationId, SubscriptionId, room_of
from rooms.domain.message import MessageStatus, message_status
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope

_LIST: Final = "messages"
_DELIVERIES: Final = "message deliveries"
_TAGS: Final = ["messages"]
READ: Final = require_scopes(Scope.MANAGE, Scope.OPERATE, allows=FOR_EVERY_KEY)
_JSON_NULL: Final = b"null"

_PUBLISHERS_OWN: Final = ("business_key", "caller_id")
"""Fields that the publisher gave for itself: no subscriber reads them here."""
PUBLISHER_FIELDS: Final = (
    "publisher_id",
    "publisher_organisation_id",
    "publisher_organisation",
    "application",
)


class MessageSummary(Struct, kw_only=True):
    """Describe a message without its payload.

    `fanout`: the number of its subscriptions; `caller_id`: the id that its publisher gave. A
    subscriber sees neither the publisher nor its keys and ids, and `fanout` counts its own.
    """

    id: str
    room_id: int
    event_type: str
    version: int
    priority: int
    fanout: int
    published_at: datetime
    expires_at: datetime | None
    publisher_id: Annotated[str | None, Meta(description="The API key that published it.")]
    publisher_organisation_id: str | None
    publisher_organisation: str | None
    application: Annotated[str | None, Meta(description="That of the publishing key.")]
    correlation_id: str
    ordering_key: str | None
    due_at: datetime
    business_key: str | None
    caller_id: str | None


class MessageResponse(MessageSummary, kw_only=True):
    """Describe a message with its payload as it was published.

    `status` follows from `states`, the number of deliveries in each state: for owner and publisher
    of all, for a subscriber of its own. `headers` and `payload` are absent for a subscriber in
    another organisation's room until the message is due and not held back by the owner.
    """

    status: MessageStatus
    states: dict[str, int]
    headers: Any | UnsetType = UNSET
    payload: Any | UnsetType = UNSET


class ListedMessageResponse(MessageSummary, kw_only=True):
    """Describe a message of a list.

    `status` and `states` are those of `GET /v1/messages/{id}`. They are absent unless
    `with_states` asks for them, and for the messages of a page after its first 20,000 deliveries.
    """

    status: MessageStatus | UnsetType = UNSET
    states: dict[str, int] | UnsetType = UNSET


class MessagePage(Struct, kw_only=True):
    """List messages, newest first."""

    items: list[ListedMessageResponse]
    next_cursor: str | None


@get("/rooms/{room_id:str}/messages", opt=READ, tags=_TAGS, summary="List messages of a room")
async def list_messages(
    *,
    services: ServicesDep,
    principal: Caller,
    room_id: RoomPath,
    limit: Limit = 50,
    cursor: Cursor = None,
    since: Since = None,
    until: Until = None,
    event_type: EventType = None,
    version: Version = None,
    in_state: DeliveryState = None,
    correlation_id: Correlation = None,
    business_key: BusinessKey = None,
    caller_id: CallerId = None,
    publisher_organisation: PublisherOrganisation = None,
    application: PublisherApplication = None,
    subscription: DeliveredTo = None,
    with_states: Annotated[
        bool, QueryParameter(description="Count the deliveries of each message by state.")
    ] = False,
) -> MessagePage:
    """List the messages of a room, newest first; `state`: those with a delivery in that state.

    The owner sees all of them. Others see those that they published, and those with a delivery to
    a subscription of their own; a filter for anything else finds nothing. In
    another organisation's room a call looks at about 10,000 deliveries, or at 1,000 of each
    subscription if these are more, so a page may have few or no items while `next_cursor` is set.
    """
    room = parse_room(room_id)
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    message_filter = to_filter(
        since=since,
        until=until,
        event_type=event_type,
        version=version,
        state=in_state,
        correlation_id=correlation_id,
        principal=principal,
    )
    whose = parse_filter_id("publisher_organisation_id", publisher_organisation)
    queue = parse_filter_id("subscription_id", subscription)
    by_publisher = PublisherFilter(
        organisation=None if whose is None else OrganisationId(whose),
        application=application,
        caller_id=caller_id,
        business_key=business_key,
    )
    async with transaction(services.engine) as connection:
        scope = await find_participant_scope(connection, principal, room)
        scan = await list_visible(
            connection,
            scope,
            message_filter,
            by_publisher,
            subscription=None if queue is None else SubscriptionId(queue),
            before=page.after,
            limit=page.fetch_limit,
        )
        found = scan.found
        members = await find_members(
            connection, publishers(scope, [one.message for one in found if one.received is None])
        )
        counted = await count_states(connection, scope, found) if with_states else {}
    return page.respond(
        MessagePage,
        found,
        lambda one: _to_listed(one, scope, members, counted.get(one.message.id)),
        position=lambda one: one.position,
        further=scan.further,
    )


@get("/messages/{message_id:str}", opt=for_portals(READ), tags=_TAGS, summary="Read a message")
async def read_message(
    *,
    request: Request[Any, Principal, Any],
    services: ServicesDep,
    principal: Caller,
    message_id: IdPath,
    payload: WithPayload = True,
) -> MessageResponse:
    """Return one message with its payload and status, also before it is due.

    A key that has only the scope `view` gets no headers and no payload. What a person reads in the
    console is an entry of the journal.
    """
    return await describe_message(
        services, principal, parse_message(message_id), with_payload=payload, scope=request.scope
    )


async def describe_message(
    services: ApiServices,
    principal: Principal,
    identity: MessageId,
    *,
    with_payload: bool = True,
    scope: Mapping[str, Any] | None = None,
) -> MessageResponse:
    """Return one message as the principal sees it. NotFoundError.

    `scope`: of the request, for the journal. Without it, no person gets the payload.
    """
    with_payload = with_payload and principal.reads_payloads
    with_payload = with_payload and not (principal.is_session and scope is None)
    async with transaction(services.engine) as connection:
        view = await find_message_view(connection, principal, identity)
        found = await records.find_message(connection, room_of(identity), identity)
        due, states = await records.delivery_states(
            connection, room_of(identity), identity, view.counted_deliveries()
        )
        received = None if view.sees_counts else await count_own_subscriptions(connection, view)
        shown = with_payload and await is_payload_visible(connection, view)
        members = await find_members(connection, publishers(view.scope, [found]))
        if shown and principal.is_session and scope is not None:
            entry = payload_read(services, principal, scope, object_path=f"/v1/messages/{identity}")
            await append(connection, entry)
    return MessageResponse(
        **_summary_fields(found, view.scope, members, received),
        status=message_status(states, is_due=due),
        states={state.value: count for state, count in sorted(states.items())},
        headers=msgspec.Raw(found.headers or _JSON_NULL) if shown else UNSET,
        payload=msgspec.Raw(found.payload or _JSON_NULL) if shown else UNSET,
    )


@get(
    "/messages/{message_id:str}/deliveries",
    opt=for_portals(READ),
    tags=_TAGS,
    summary="List the deliveries of a message",
)
async def list_message_deliveries(
    services: ServicesDep,
    principal: Caller,
    message_id: IdPath,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> DeliveryPage:
    """List one delivery for each subscription of the message.

    The room's owner sees those of all subscriptions, a publisher only in a transparent room; others
    see their own.
    """
    identity = parse_message(message_id)
    page = PageRequest(services.cipher, _DELIVERIES, limit, cursor)
    async with transaction(services.engine) as connection:
        view = await find_message_view(connection, principal, identity)
        found = await delivery_records.deliveries_of_message(
            connection, view, after=page.after, limit=page.fetch_limit
        )
        if not found and page.after is None and view.message is None:
            raise records.message_not_found(identity)
    return page.respond(
        DeliveryPage,
        found,
        lambda delivery: to_visible_delivery(delivery, view),
        position=lambda delivery: delivery.id,
    )


def _to_listed(
    listed: ListedMessage,
    scope: MessageScope,
    members: Mapping[OrganisationId, ListedOrganisation],
    counted: CountedStates | None,
) -> ListedMessageResponse:
    found = ListedMessageResponse(
        **_summary_fields(listed.message, scope, members, listed.received)
    )
    if counted is not None:
        found.status = message_status(counted.states, is_due=counted.is_due)
        found.states = {state.value: count for state, count in sorted(counted.states.items())}
    return found


def _summary_fields(
    message: records.MessageRecord,
    scope: MessageScope,
    members: Mapping[OrganisationId, ListedOrganisation],
    received: int | None,
) -> dict[str, Any]:
    """Return the fields of `MessageSummary`; `received`: as many subscriptions of a subscriber."""
    fields = {
        name: getattr(message, name)
        for name in MessageSummary.__struct_fields__
        if name not in PUBLISHER_FIELDS
    }
    if received is None:
        return fields | publisher_fields(scope, message, members)
    return fields | dict.fromkeys((*PUBLISHER_FIELDS, *_PUBLISHERS_OWN)) | {"fanout": received}


def publishers(scope: MessageScope, found: Iterable[MessageRecord]) -> set[OrganisationId]:
    """Return the organisations that published these messages."""
    return {one for message in found if (one := _publisher_of(scope, message)) is not None}


def _publisher_of(scope: MessageScope, message: MessageRecord) -> OrganisationId | None:
    if message.publisher_id is None:
        return None  # Rooms itself published it
    return message.publisher_organisation_id or scope.room.organisation_id


def publisher_fields(
    scope: MessageScope,
    message: MessageRecord | None,
    members: Mapping[OrganisationId, ListedOrganisation],
) -> dict[str, Any]:
    """Return the values of `PUBLISHER_FIELDS`: null without a message, and of Rooms itself."""
    whose = None if message is None else _publisher_of(scope, message)
    member = None if whose is None else members.get(whose)
    return {
        "publisher_id": None if message is None else message.publisher_id,
        "publisher_organisation_id": whose,
        "publisher_organisation": None if member is None else member.name,
        "application": None if message is None else message.application,
    }


ROUTES: Final = [
    list_messages,
    read_message,
    list_message_deliveries,
]
