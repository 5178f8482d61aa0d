"""Serve `/v1/messages` and the messages of a room, for reading."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from litestar import get
from msgspec import Struct

from rooms.api.auth import OF_EVENTS, Caller, ServicesDep, require_scopes
from rooms.api.deliveries import DeliveryPage, to_delivery_response
from rooms.api.errors import documented_responses
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import (
    BusinessKey,
    CallerId,
    Correlation,
    DeliveryState,
    EventType,
    IdPath,
    RoomPath,
    Since,
    Until,
    Version,
    parse_id,
    parse_room,
    to_filter,
)
from rooms.db.catalog import rooms as room_records
from rooms.db.connection import transaction
from rooms.db.queries import deliveries as delivery_records
from rooms.db.queries import messages as records
from rooms.domain.ids import MessageId, room_of
from rooms.domain.message import MessageStatus, message_status
from rooms.domain.principal import Principal
from rooms.domain.state_machine import LogKind, Scope, State
from rooms.errors import NotFoundError

_LIST: Final = "messages"
_DELIVERIES: Final = "message deliveries"
_TIMELINE: Final = "journey"
_TAGS: Final = ["messages"]
_READ: Final = require_scopes(Scope.MANAGE, Scope.OPERATE, allows=OF_EVENTS)
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
_SCHEDULED: Final = "scheduled"
"""The end of a step's detail where the new due time is beyond the broker's look-ahead."""


class MessageSummary(Struct, kw_only=True):
    """Describe a message without its payload.

    `fanout`: the number of its subscriptions; `caller_id`: the id that its publisher gave.
    """

    id: str
    room_id: int
    event_type: str
    version: int
    priority: int
    fanout: int
    published_at: datetime
    expires_at: datetime | None
    publisher_id: str | None
    correlation_id: str
    ordering_key: str | None
    due_at: datetime
    business_key: str | None
    caller_id: str | None


class MessageResponse(MessageSummary, kw_only=True):
    """Describe a message with its payload as it was published.

    `status` follows from `states`, the number of deliveries in each state.
    """

    status: MessageStatus
    states: dict[str, int]
    headers: Any
    payload: Any


class MessagePage(Struct, kw_only=True):
    """List messages, newest first."""

    items: list[MessageSummary]
    next_cursor: str | None


class TimelineEntry(Struct, kw_only=True):
    """Describe one step of a message.

    `state`: the delivery's state after it; null: unchanged. `writer`, of `writer_kind` on
    `worker_host`, wrote it; `worker` is the writer that made the attempt.
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
    writer: str
    writer_kind: str | None
    event_type: str | None
    event_version: int | None
    correlation_id: str | None


class MessageTimeline(Struct, kw_only=True):
    """Describe the log of a message, oldest first."""

    items: list[TimelineEntry]
    next_cursor: str | None


@get(
    "/rooms/{room_id:str}/messages",
    opt=_READ,
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
) -> MessagePage:
    """List the messages of a room, newest first; `state`: those with a delivery in that state."""
    room = parse_room(room_id)
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    message_filter = to_filter(
        since=since,
        until=until,
        event_type=event_type,
        version=version,
        state=in_state,
        correlation_id=correlation_id,
        business_key=business_key,
    )
    async with transaction(services.engine) as connection:
        await room_records.find_room(connection, principal, room)
        found = await records.list_messages(
            connection,
            room,
            message_filter,
            caller_id=caller_id,
            before=page.after,
            limit=page.fetch_limit,
        )
    return page.respond(
        MessagePage,
        found,
        lambda message: MessageSummary(**_summary_fields(message)),
        position=lambda message: message.id,
    )


@get(
    "/messages/{message_id:str}",
    opt=_READ,
    responses=documented_responses(),
    tags=_TAGS,
    summary="Read a message",
)
async def read_message(
    services: ServicesDep, principal: Caller, message_id: IdPath
) -> MessageResponse:
    """Return one message with its payload and status, also before it is due."""
    identity = parse_message(message_id)
    async with transaction(services.engine) as connection:
        await check_room(connection, principal, identity)
        found = await records.find_message(connection, room_of(identity), identity)
        due, states = await records.delivery_states(connection, room_of(identity), identity)
    return MessageResponse(
        **_summary_fields(found),
        status=message_status(states, is_due=due),
        states={state.value: count for state, count in sorted(states.items())},
        headers=msgspec.Raw(found.headers or _JSON_NULL),
        payload=msgspec.Raw(found.payload or _JSON_NULL),
    )


@get(
    "/messages/{message_id:str}/deliveries",
    opt=_READ,
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
    """List one delivery for each subscription of the message."""
    identity = parse_message(message_id)
    page = PageRequest(services.cipher, _DELIVERIES, limit, cursor)
    async with transaction(services.engine) as connection:
        await check_room(connection, principal, identity)
        found = await delivery_records.deliveries_of_message(
            connection, room_of(identity), identity, after=page.after, limit=page.fetch_limit
        )
        if not found and page.after is None:
            await records.find_message(connection, room_of(identity), identity)
    return page.respond(
        DeliveryPage, found, to_delivery_response, position=lambda delivery: delivery.id
    )


@get(
    "/messages/{message_id:str}/journey",
    opt=_READ,
    responses=documented_responses(),
    tags=_TAGS,
    summary="Read the timeline of a message",
)
async def read_journey(
    services: ServicesDep,
    principal: Caller,
    message_id: IdPath,
    limit: Limit = 200,
    cursor: Cursor = None,
) -> MessageTimeline:
    """List every step of the message and its deliveries, oldest first."""
    identity = parse_message(message_id)
    page = PageRequest(services.cipher, _TIMELINE, limit, cursor)
    after = _parse_position(page.after)
    async with transaction(services.engine) as connection:
        await check_room(connection, principal, identity)
        found = await records.timeline(
            connection, room_of(identity), identity, after=after, limit=page.fetch_limit
        )
        if not found and after is None:
            await records.find_message(connection, room_of(identity), identity)
    return page.respond(
        MessageTimeline,
        found,
        _to_timeline_entry,
        position=lambda step: f"{step.ts.isoformat()} {step.writer_id} {step.writer_seq}",
    )


def parse_message(text: str) -> MessageId:
    """Return a message's id. NotFoundError: the text cannot be an id."""
    return MessageId(parse_id(text, "message"))


async def check_room(connection: Any, principal: Principal, identity: MessageId) -> None:
    """Raise NotFoundError where the message cannot belong to the organisation."""
    # The id contains the room; the room's owner decides whether the message exists for the caller.
    try:
        await room_records.find_room(connection, principal, room_of(identity))
    except NotFoundError as exc:
        raise records.message_not_found(identity) from exc


def _parse_position(text: str | None) -> tuple[datetime, int, int] | None:
    if text is None:
        return None
    at, writer, count = text.split(" ")
    return datetime.fromisoformat(at), int(writer), int(count)


def _summary_fields(message: records.MessageRecord) -> dict[str, Any]:
    return {name: getattr(message, name) for name in MessageSummary.__struct_fields__}


def _to_timeline_entry(step: records.TimelineRow) -> TimelineEntry:
    same = {
        name: getattr(step, name)
        for name in TimelineEntry.__struct_fields__
        if name not in {"state", "answer", "writer"}
    }
    return TimelineEntry(
        **same,
        state=_state_after(step),
        answer=None if step.answer_head is None else step.answer_head.decode("utf-8", "replace"),
        writer=f"{step.writer_id}:{step.writer_seq}",
    )


def _state_after(step: records.TimelineRow) -> State | None:
    if step.detail is not None and step.detail.endswith(_SCHEDULED):
        return State.SCHEDULED
    if step.kind == LogKind.RESTORED and step.detail == State.HELD:
        return State.HELD
    return _STATE_AFTER.get(step.kind)


ROUTES: Final = [list_messages, read_message, list_message_deliveries, read_journey]
