"""`/v1/messages` and what was published into a room, for reading."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

import msgspec
from litestar import get
from msgspec import Struct

from rooms.domain.ids import MessageId, room_of
from rooms.domain.message import MessageStatus, status_of
from rooms.domain.principal import Principal
from rooms.domain.states import LogKind, Scope, State
from rooms.errors import NotFoundError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.deliveries import DeliveryPage, delivery_out
from rooms.rest.filters import (
    BusinessKey,
    CallerId,
    Correlation,
    DeliveryState,
    EventType,
    Version,
    to_filter,
)
from rooms.rest.pages import Cursor, Limit, Since, Until, cut, open_cursor, seal_cursor
from rooms.rest.paths import IdPath, RoomPath, parse_id, parse_room
from rooms.rest.problems import documented
from rooms.storage import deliveries as delivery_records
from rooms.storage import messages as records
from rooms.storage import rooms as room_records
from rooms.storage.transactions import transaction

_LIST: Final = "messages"
_DELIVERIES: Final = "message deliveries"
_JOURNEY: Final = "journey"
_TAGS: Final = ["messages"]
_READ: Final = needs(Scope.MANAGE, Scope.OPERATE)
_EMPTY: Final = b"null"

_AFTER: Final[Mapping[str, State]] = {
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
"""The state that a step leads to; the others leave it as it is."""
_FAR_OFF: Final = "scheduled"
"""How the detail of a step ends that leads beyond the broker's horizon."""


class MessageHead(Struct, kw_only=True):
    """A message without its payload; `fanout`: to how many subscriptions it went. `id` is ours, `caller_id` its publisher's."""

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


class MessageOut(MessageHead, kw_only=True):
    """A message; `payload` as it was published. `status` is told from `states`: how many deliveries are in each."""

    status: MessageStatus
    states: dict[str, int]
    headers: Any
    payload: Any


class MessagePage(Struct, kw_only=True):
    """Messages, newest first."""

    items: list[MessageHead]
    next_cursor: str | None


class StepOut(Struct, kw_only=True):
    """One step of a message's way; `state`: where it left the delivery, null where it left it as it was. `writer`, of
    `writer_kind` and on `worker_host`, wrote it; `worker` is the writer that made the attempt.
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


class Journey(Struct, kw_only=True):
    """The log of a message, in its order."""

    items: list[StepOut]
    next_cursor: str | None


@get("/rooms/{room_id:str}/messages", opt=_READ, responses=documented(), tags=_TAGS, summary="List messages of a room")
async def list_messages(
    *,
    services: Given,
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
    """What was published into the room, newest first; `state`: what has a delivery in that state."""
    room = parse_room(room_id)
    before = open_cursor(services.seal, _LIST, cursor)
    wanted = to_filter(
        since=since,
        until=until,
        event_type=event_type,
        version=version,
        state=in_state,
        correlation_id=correlation_id,
        business_key=business_key,
    )
    async with transaction(services.engine) as connection:
        await room_records.find_room(connection, principal.organisation_id, room)
        found = await records.list_messages(
            connection, room, wanted, caller_id=caller_id, before=before, limit=limit + 1
        )
    page, last = cut(found, limit, lambda message: message.id)
    return MessagePage(
        items=[MessageHead(**_head(message)) for message in page],
        next_cursor=seal_cursor(services.seal, _LIST, last),
    )


@get("/messages/{message_id:str}", opt=_READ, responses=documented(), tags=_TAGS, summary="Read a message")
async def read_message(services: Given, principal: Caller, message_id: IdPath) -> MessageOut:
    """One message with its payload, and how it stands, also before it is due."""
    identity = parse_message(message_id)
    async with transaction(services.engine) as connection:
        await check_room(connection, principal, identity)
        found = await records.find_message(connection, room_of(identity), identity)
        due, states = await records.standing(connection, room_of(identity), identity)
    return MessageOut(
        **_head(found),
        status=status_of(states, due=due),
        states={state.value: count for state, count in sorted(states.items())},
        headers=msgspec.Raw(found.headers or _EMPTY),
        payload=msgspec.Raw(found.payload or _EMPTY),
    )


@get(
    "/messages/{message_id:str}/deliveries",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="List the deliveries of a message",
)
async def list_message_deliveries(
    services: Given, principal: Caller, message_id: IdPath, limit: Limit = 50, cursor: Cursor = None
) -> DeliveryPage:
    """One delivery for each subscription that the message went to."""
    identity = parse_message(message_id)
    after = open_cursor(services.seal, _DELIVERIES, cursor)
    async with transaction(services.engine) as connection:
        await check_room(connection, principal, identity)
        found = await delivery_records.deliveries_of_message(
            connection, room_of(identity), identity, after=after, limit=limit + 1
        )
        if not found and after is None:
            await records.find_message(connection, room_of(identity), identity)
    page, last = cut(found, limit, lambda delivery: delivery.id)
    return DeliveryPage(
        items=[delivery_out(delivery) for delivery in page],
        next_cursor=seal_cursor(services.seal, _DELIVERIES, last),
    )


@get(
    "/messages/{message_id:str}/journey",
    opt=_READ,
    responses=documented(),
    tags=_TAGS,
    summary="Read what happened to a message",
)
async def read_journey(
    services: Given, principal: Caller, message_id: IdPath, limit: Limit = 200, cursor: Cursor = None
) -> Journey:
    """Every step of the message and its deliveries, oldest first."""
    identity = parse_message(message_id)
    after = _position(open_cursor(services.seal, _JOURNEY, cursor))
    async with transaction(services.engine) as connection:
        await check_room(connection, principal, identity)
        found = await records.journey(connection, room_of(identity), identity, after=after, limit=limit + 1)
        if not found and after is None:
            await records.find_message(connection, room_of(identity), identity)
    page, last = cut(found, limit, lambda step: f"{step.ts.isoformat()} {step.writer_id} {step.writer_seq}")
    return Journey(
        items=[_step(step) for step in page],
        next_cursor=seal_cursor(services.seal, _JOURNEY, last),
    )


def parse_message(text: str) -> MessageId:
    """A message's id; NotFoundError where the text can be none."""
    return MessageId(parse_id(text, "message"))


async def check_room(connection: Any, principal: Principal, identity: MessageId) -> None:
    """NotFoundError where the message can be none of the organisation's."""
    # The room is told by the id itself; whose it is decides whether there is such a message at all.
    try:
        await room_records.find_room(connection, principal.organisation_id, room_of(identity))
    except NotFoundError as exc:
        raise records.missing(identity) from exc


def _position(text: str | None) -> tuple[datetime, int, int] | None:
    if text is None:
        return None
    at, writer, count = text.split(" ")
    return datetime.fromisoformat(at), int(writer), int(count)


def _head(found: records.Message) -> dict[str, Any]:
    return {name: getattr(found, name) for name in MessageHead.__struct_fields__}


def _step(found: records.Step) -> StepOut:
    same = {
        name: getattr(found, name) for name in StepOut.__struct_fields__ if name not in {"state", "answer", "writer"}
    }
    return StepOut(
        **same,
        state=_left(found),
        answer=None if found.answer_head is None else found.answer_head.decode("utf-8", "replace"),
        writer=f"{found.writer_id}:{found.writer_seq}",
    )


def _left(found: records.Step) -> State | None:
    if found.detail is not None and found.detail.endswith(_FAR_OFF):
        return State.SCHEDULED
    if found.kind == LogKind.RESTORED and found.detail == State.HELD:
        return State.HELD
    return _AFTER.get(found.kind)


ROUTES: Final = [list_messages, read_message, list_message_deliveries, read_journey]
