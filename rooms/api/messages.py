"""Serve `/v1/messages` and the messages of a room, for reading."""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from litestar import Request, get
from litestar.params import QueryParameter
from msgspec import UNSET, Meta, Struct, UnsetType

from rooms.api.auth import (
    FOR_EVERY_KEY,
    Caller,
    ServicesDep,
    for_portals,
    require_scopes,
)
from rooms.api.changes import payload_read
from rooms.api.deliveries import DeliveryPage, to_visible_delivery
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
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
    parse_id,
    parse_room,
    to_filter,
)
from rooms.db.catalog.organisations import Member, find_members
from rooms.db.connection import transaction
from rooms.db.journal import append
from rooms.db.queries import deliveries as delivery_records
from rooms.db.queries import messages as records
from rooms.db.queries.message_list import ListedMessage, PublisherFilter
from rooms.db.queries.message_list import list_messages as list_visible
from rooms.db.queries.message_scope import (
    MessageScope,
    MessageView,
    count_own_subscriptions,
    find_message_view,
    find_others_subscriptions,
    find_participant_scope,
    is_payload_visible,
)
from rooms.domain.ids import MessageId, OrganisationId, SubscriptionId, room_of
from rooms.domain.message import MessageStatus, message_status
from rooms.domain.principal import Principal
from rooms.domain.state_machine import LogKind, Reason, Scope, State

_LIST: Final = "messages"
_DELIVERIES: Final = "message deliveries"
_TIMELINE: Final = "journey"
_TAGS: Final = ["messages"]
READ: Final = require_scopes(Scope.MANAGE, Scope.OPERATE, allows=FOR_EVERY_KEY)
_JSON_NULL: Final = b"null"

_STATE_AFTER: Final[Mapping[str, State]] = {
    LogKind.ENQUEUED: State.QUEUED,
    LogKind.COMING_DUE: State.QUEUED,
    LogKind.RETRY_SCHEDULED: State.QUEUED,
    LogKind.HELD: State.HELD,
    LogKind.RELEASED: State.QUEUED,
    LogKind.LEASED: State.LEASED,
    LogKind.LEASE_ENDED: State.QUEUED,
    LogKind.NACKED: State.QUEUED,
    LogKind.PULL_ACKED: State.DELIVERED,
    LogKind.SIDELINED: State.SIDELINED,
    LogKind.SHOVELED: State.QUEUED,
    LogKind.DELIVERED: State.DELIVERED,
    LogKind.EXPIRED: State.EXPIRED,
    LogKind.CANCELLED: State.CANCELLED,
    LogKind.DROPPED: State.DROPPED,
    LogKind.PURGED: State.PURGED,
    LogKind.HANDED_OVER: State.HANDED_OVER,
    LogKind.RESTORED: State.QUEUED,
    LogKind.REPLAYED: State.QUEUED,
}
"""The state after a step; other steps do not change it."""
_PUBLISHER_FIELDS: Final = (
    "publisher_id",
    "publisher_organisation_id",
    "publisher_organisation",
    "application",
)
_PUBLISHERS_OWN: Final = ("business_key", "caller_id")
"""Fields that the publisher gave for itself: no subscriber reads them here."""
_SCHEDULED: Final = "scheduled"
"""The end of a step's detail where the new due time is beyond the broker's look-ahead."""
_PLAIN_DETAILS: Final = frozenset({*Reason, *State, "moved", "moved, scheduled"})
"""Details of a step that say nothing of what an endpoint answered."""


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


class MessagePage(Struct, kw_only=True):
    """List messages, newest first."""

    items: list[MessageSummary]
    next_cursor: str | None


class TimelineEntry(Struct, kw_only=True):
    """Describe one step of a message.

    `state`: the delivery's state after it; null: unchanged. `writer`, of `writer_kind` on
    `worker_host`, wrote it; `worker` is the writer that made the attempt. The step `published`
    names key, organisation and application. Only the room's owner sees `writer`. What the endpoint
    of another organisation answered is left out.
    """

    ts: datetime
    kind: str
    state: State | None
    subscription_id: str | None
    delivery_id: str | None
    generation: int | None
    attempt: int | None
    fanout: int | None
    delay_ms: int | None
    latency_ms: float | None
    http_status: int | None
    error_class: str | None
    detail: str | None
    answer: str | None
    target_host: str | None
    worker: int | None
    worker_host: str | None
    writer: str | None
    writer_kind: str | None
    event_type: str | None
    event_version: int | None
    correlation_id: str | None
    publisher_id: str | None
    publisher_organisation_id: str | None
    publisher_organisation: str | None
    application: str | None


class MessageTimeline(Struct, kw_only=True):
    """Describe the log of a message, oldest first."""

    items: list[TimelineEntry]
    next_cursor: str | None


@get(
    "/rooms/{room_id:str}/messages",
    opt=READ,
    responses=documented_responses(),
    tags=_TAGS,
    summary="List messages of a room",
)
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
) -> MessagePage:
    """List the messages of a room, newest first; `state`: those with a delivery in that state.

    The owner sees all of them. Others see those that they published, and those with a delivery to
    a subscription of their own; a filter for anything else finds nothing.
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
        found = await list_visible(
            connection,
            scope,
            message_filter,
            by_publisher,
            subscription=None if queue is None else SubscriptionId(queue),
            before=page.after,
            limit=page.fetch_limit,
        )
        members = await find_members(
            connection, _publishers(scope, [one.message for one in found if one.received is None])
        )
    return page.respond(
        MessagePage,
        found,
        lambda one: _to_summary(one, scope, members),
        position=lambda one: one.position,
    )


@get(
    "/messages/{message_id:str}",
    opt=for_portals(READ),
    responses=documented_responses(),
    tags=_TAGS,
    summary="Read a message",
)
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
        members = await find_members(connection, _publishers(view.scope, [found]))
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
    responses=documented_responses(),
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


@get(
    "/messages/{message_id:str}/journey",
    opt=for_portals(READ),
    responses=documented_responses(),
    tags=_TAGS,
    summary="Read the timeline of a message",
)
async def read_journey(
    *,
    services: ServicesDep,
    principal: Caller,
    message_id: IdPath,
    limit: Limit = 200,
    cursor: Cursor = None,
    delivery: Annotated[
        str | None, QueryParameter(name="delivery_id", description="Only steps of this delivery.")
    ] = None,
) -> MessageTimeline:
    """List every step of the message and its deliveries, oldest first.

    The room's owner sees all. Others see the steps of their own deliveries, from `enqueued` on; the
    publisher sees the step `published` too.
    """
    identity = parse_message(message_id)
    page = PageRequest(services.cipher, _TIMELINE, limit, cursor)
    after = _parse_position(page.after)
    wanted = parse_filter_id("delivery_id", delivery)
    async with transaction(services.engine) as connection:
        view = await find_message_view(connection, principal, identity)
        found = await records.timeline(
            connection,
            room_of(identity),
            identity,
            conditions=view.visible_steps(),
            delivery=wanted,
            after=after,
            limit=page.fetch_limit,
        )
        if not found and after is None and view.message is None:
            raise records.message_not_found(identity)
        named = {step.subscription_id for step in found if step.subscription_id is not None}
        others = await find_others_subscriptions(connection, view.scope, named)
        published = [view.message] if view.message is not None and view.sees_counts else []
        members = await find_members(connection, _publishers(view.scope, published))
    return page.respond(
        MessageTimeline,
        found,
        lambda step: _to_timeline_entry(step, view, members, others),
        position=lambda step: f"{step.ts.isoformat()} {step.writer_id} {step.writer_seq}",
    )


def parse_message(text: str) -> MessageId:
    """Return a message's id. NotFoundError: the text cannot be an id."""
    return MessageId(parse_id(text, "message"))


def _parse_position(text: str | None) -> tuple[datetime, int, int] | None:
    if text is None:
        return None
    at, writer, count = text.split(" ")
    return datetime.fromisoformat(at), int(writer), int(count)


def _publishers(scope: MessageScope, found: Iterable[records.MessageRecord]) -> set[OrganisationId]:
    return {one for message in found if (one := _publisher_of(scope, message)) is not None}


def _publisher_of(scope: MessageScope, message: records.MessageRecord) -> OrganisationId | None:
    if message.publisher_id is None:
        return None  # Rooms itself published it
    return message.publisher_organisation_id or scope.room.organisation_id


def _publisher_fields(
    scope: MessageScope,
    message: records.MessageRecord | None,
    members: Mapping[OrganisationId, Member],
) -> dict[str, Any]:
    whose = None if message is None else _publisher_of(scope, message)
    member = None if whose is None else members.get(whose)
    return {
        "publisher_id": None if message is None else message.publisher_id,
        "publisher_organisation_id": whose,
        "publisher_organisation": None if member is None else member.name,
        "application": None if message is None else message.application,
    }


def _to_summary(
    listed: ListedMessage, scope: MessageScope, members: Mapping[OrganisationId, Member]
) -> MessageSummary:
    return MessageSummary(**_summary_fields(listed.message, scope, members, listed.received))


def _summary_fields(
    message: records.MessageRecord,
    scope: MessageScope,
    members: Mapping[OrganisationId, Member],
    received: int | None,
) -> dict[str, Any]:
    """Return the fields of `MessageSummary`; `received`: as many subscriptions of a subscriber."""
    fields = {
        name: getattr(message, name)
        for name in MessageSummary.__struct_fields__
        if name not in _PUBLISHER_FIELDS
    }
    if received is None:
        return fields | _publisher_fields(scope, message, members)
    return fields | dict.fromkeys((*_PUBLISHER_FIELDS, *_PUBLISHERS_OWN)) | {"fanout": received}


def _to_timeline_entry(
    step: records.TimelineRow,
    view: MessageView,
    members: Mapping[OrganisationId, Member],
    others: Collection[str],
) -> TimelineEntry:
    same = {
        name: getattr(step, name)
        for name in TimelineEntry.__struct_fields__
        if name not in {"state", "answer", "writer", *_PUBLISHER_FIELDS}
    }
    answer = None if step.answer_head is None else step.answer_head.decode("utf-8", "replace")
    if step.subscription_id in others:
        answer = None
        same["detail"] = step.detail if step.detail in _PLAIN_DETAILS else None
    is_publish = step.kind == LogKind.PUBLISHED and view.sees_counts
    return TimelineEntry(
        **same,
        **_publisher_fields(view.scope, view.message if is_publish else None, members),
        state=_state_after(step),
        answer=answer,
        # Its numbers count what the process wrote, for others too.
        writer=f"{step.writer_id}:{step.writer_seq}" if view.scope.owns else None,
    )


def _state_after(step: records.TimelineRow) -> State | None:
    if step.detail is not None and step.detail.endswith(_SCHEDULED):
        return State.SCHEDULED
    if step.kind == LogKind.RESTORED and step.detail == State.HELD:
        return State.HELD
    return _STATE_AFTER.get(step.kind)


ROUTES: Final = [list_messages, read_message, list_message_deliveries, read_journey]
