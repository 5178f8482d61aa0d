"""Serve `/v1/search`: find anything by an id, a name or a key."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, TypeVar

from litestar import get
from litestar.params import QueryParameter
from msgspec import Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import FOR_EVERY_KEY, Caller, ServicesDep, require_scopes
from rooms.db.catalog.access import find_access
from rooms.db.catalog.api_keys import KeyKind, find_key
from rooms.db.catalog.handler_queues import find_queue
from rooms.db.catalog.organisations import find_organisation
from rooms.db.catalog.subscriptions import find_visible_subscription
from rooms.db.connection import transaction
from rooms.db.jobs.jobs import find_job
from rooms.db.queries.deliveries import find_delivery
from rooms.db.queries.message_scope import MessageView, find_message_view
from rooms.db.queries.messages import MessageRecord
from rooms.db.queries.search import Search
from rooms.domain.ids import (
    MAX_ROOM,
    DeliveryId,
    JobId,
    MessageId,
    RoomId,
    SubscriptionId,
    is_id,
    room_of,
)
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import NotFoundError

T = TypeVar("T")

MAX_TEXT: Final = 256
MAX_OF_KIND: Final = 10
"""So many results of a kind are returned."""
_SCOPES: Final = (Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH, Scope.SUBSCRIBE)
_MESSAGES: Final = (Scope.MANAGE, Scope.OPERATE, Scope.VIEW)
_DELIVERIES: Final = (*_MESSAGES, Scope.SUBSCRIBE)
_EVENT_TYPES: Final = (*_MESSAGES, Scope.PUBLISH)
_ROOMS: Final = (*_MESSAGES, Scope.PUBLISH, Scope.SUBSCRIBE)


class SearchKind(StrEnum):
    """Name what was found."""

    ROOM = "room"
    SUBSCRIPTION = "subscription"
    EVENT_TYPE = "event_type"
    MESSAGE = "message"
    DELIVERY = "delivery"
    JOB = "job"
    KEY = "key"
    QUEUE = "queue"
    ORGANISATION = "organisation"


class SearchField(StrEnum):
    """Name what matched."""

    ID = "id"
    NAME = "name"
    CALLER_ID = "caller_id"
    BUSINESS_KEY = "business_key"
    CORRELATION_ID = "correlation_id"
    ORDERING_KEY = "ordering_key"


class SearchResult(Struct, kw_only=True):
    """Describe something that was found.

    `id`: that of an event type or a handler queue is its name. `name`: of a message or a delivery,
    the event type; of a job, its kind. `at`: when it was published or created.
    """

    kind: SearchKind
    field: SearchField
    id: str
    name: str
    room_id: int | None = None
    room: str | None = None
    at: datetime | None = None


class SearchResponse(Struct, kw_only=True):
    """List what was found: by id first, then by name, then messages by their keys."""

    items: list[SearchResult]


@get(
    "/search",
    opt=require_scopes(*_SCOPES, allows=FOR_EVERY_KEY),
    tags=["messages"],
    summary="Search by id, name or key",
)
async def search(
    services: ServicesDep,
    principal: Caller,
    q: Annotated[
        str,
        QueryParameter(min_length=1, max_length=MAX_TEXT, description="An id, a name or a key."),
    ],
) -> SearchResponse:
    """Find what has this id, this name, or this key; at most ten of each kind.

    Ids of messages, deliveries, subscriptions, jobs, keys and rooms; names of rooms, subscriptions
    and event types, also parts of them; exact names of handler queues; exact ids that publishers
    gave, and business keys. Correlation ids and ordering keys are compared with the newest 20,000
    messages of your own rooms; the list of a room's messages finds older ones. Only what the key
    may read is found.
    """
    wanted = q.strip()
    if not wanted:
        return SearchResponse(items=[])
    async with transaction(services.engine) as connection:
        found = [one async for one in _by_id(connection, principal, wanted)]
        if not found:
            found += [one async for one in _by_name(connection, principal, wanted)]
            found += [one async for one in _by_key(connection, principal, wanted)]
    return SearchResponse(items=found)


async def _by_id(
    connection: AsyncConnection, principal: Principal, wanted: str
) -> AsyncIterator[SearchResult]:
    """Yield what has this id."""
    identity = wanted.lower()
    if wanted.isascii() and wanted.isdecimal() and 1 <= int(wanted) <= MAX_ROOM:
        if principal.has_scope(*_ROOMS) and (
            access := await _found(find_access(connection, principal, RoomId(int(wanted))))
        ):
            yield _room(access.room.id, access.room.name, SearchField.ID)
        return
    if not is_id(identity):
        return
    of_room = bool(room_of(identity))
    async for one in (_of_room if of_room else _of_no_room)(connection, principal, identity):
        yield one


async def _of_room(
    connection: AsyncConnection, principal: Principal, identity: str
) -> AsyncIterator[SearchResult]:
    """Yield the message, delivery or subscription of an id."""
    if principal.has_scope(*_MESSAGES):
        view = await _found(find_message_view(connection, principal, MessageId(identity)))
        if view is not None and view.message is not None:
            yield _message(view, view.message, SearchField.ID)
    if not principal.has_scope(*_DELIVERIES):
        return
    delivery = await _found(
        find_delivery(connection, principal, DeliveryId(identity), due_only=principal.sees_due_only)
    )
    if delivery is not None:
        yield SearchResult(
            kind=SearchKind.DELIVERY,
            field=SearchField.ID,
            id=delivery.id,
            name=delivery.event_type,
            room_id=delivery.room_id,
            at=delivery.created_at,
        )
    subscription = await _found(
        find_visible_subscription(connection, principal, SubscriptionId(identity))
    )
    if subscription is not None:
        yield SearchResult(
            kind=SearchKind.SUBSCRIPTION,
            field=SearchField.ID,
            id=subscription.id,
            name=subscription.name,
            room_id=subscription.room_id,
        )


async def _of_no_room(
    connection: AsyncConnection, principal: Principal, identity: str
) -> AsyncIterator[SearchResult]:
    """Yield the job, key or organisation of an id."""
    if principal.has_scope(*_MESSAGES) and principal.event_types is None:
        job = await _found(find_job(connection, principal, JobId(identity)))
        if job is not None:
            yield SearchResult(
                kind=SearchKind.JOB,
                field=SearchField.ID,
                id=job.id,
                name=job.kind,
                room_id=job.room_id,
                at=job.created_at,
            )
    if principal.has_scope(Scope.ADMIN) and not principal.is_restricted:
        key = await find_key(connection, principal.organisation_id, identity)
        if key is not None and key.kind is not KeyKind.SESSION:
            yield SearchResult(kind=SearchKind.KEY, field=SearchField.ID, id=key.id, name=key.name)
    if principal.has_scope(Scope.PLATFORM):
        organisation = await _found(find_organisation(connection, identity))
        if organisation is not None:
            yield SearchResult(
                kind=SearchKind.ORGANISATION,
                field=SearchField.ID,
                id=organisation.id,
                name=organisation.name,
            )


async def _by_name(
    connection: AsyncConnection, principal: Principal, wanted: str
) -> AsyncIterator[SearchResult]:
    """Yield what has this name, or a name with this text in it."""
    names = Search(connection, principal, wanted, limit=MAX_OF_KIND)
    if principal.has_scope(*_ROOMS):
        for room in await names.rooms():
            if await _found(find_access(connection, principal, room.id)):
                yield _room(room.id, room.name, SearchField.NAME)
    if principal.has_scope(*_DELIVERIES) and principal.event_types is None:
        for subscription in await names.subscriptions():
            yield SearchResult(
                kind=SearchKind.SUBSCRIPTION,
                field=SearchField.NAME,
                id=subscription.id,
                name=subscription.name,
                room_id=subscription.room_id,
                room=subscription.room,
            )
    async for one in _types_and_queues(connection, principal, names, wanted):
        yield one


async def _types_and_queues(
    connection: AsyncConnection, principal: Principal, names: Search, wanted: str
) -> AsyncIterator[SearchResult]:
    """Yield event types and the handler queue of this name."""
    if not principal.has_scope(*_EVENT_TYPES):
        return
    for event_type in await names.event_types():
        if principal.may_use_event_type(event_type.name):
            yield SearchResult(
                kind=SearchKind.EVENT_TYPE,
                field=SearchField.NAME,
                id=event_type.name,
                name=event_type.name,
                room_id=event_type.room_id,
                room=event_type.room,
            )
    if not principal.is_restricted:
        queue = await _found(find_queue(connection, principal.organisation_id, wanted))
        if queue is not None:
            yield SearchResult(
                kind=SearchKind.QUEUE, field=SearchField.NAME, id=queue.name, name=queue.name
            )


async def _by_key(
    connection: AsyncConnection, principal: Principal, wanted: str
) -> AsyncIterator[SearchResult]:
    """Yield messages with this key, each once."""
    if not principal.has_scope(*_MESSAGES):
        return
    keys = Search(connection, principal, wanted, limit=MAX_OF_KIND)
    found = [(one, SearchField.CALLER_ID) for one in await keys.by_caller_id()]
    found += [(one, SearchField.BUSINESS_KEY) for one in await keys.by_business_key()]
    found += [(one, SearchField(field)) for one, field in await keys.by_recent_key()]
    seen: set[str] = set()
    for identity, matched in found:
        if identity in seen:
            continue
        seen.add(identity)
        view = await _found(find_message_view(connection, principal, identity))
        # Subscribers of others' messages read none of the publisher's ids and keys.
        if view is not None and view.message is not None and view.sees_counts:
            yield _message(view, view.message, matched)


async def _found(look: Awaitable[T]) -> T | None:
    with suppress(NotFoundError):
        return await look
    return None


def _room(identity: RoomId, name: str, matched: SearchField) -> SearchResult:
    return SearchResult(
        kind=SearchKind.ROOM, field=matched, id=str(identity), name=name, room_id=identity
    )


def _message(view: MessageView, message: MessageRecord, matched: SearchField) -> SearchResult:
    return SearchResult(
        kind=SearchKind.MESSAGE,
        field=matched,
        id=view.identity,
        name=message.event_type,
        room_id=view.scope.room.id,
        room=view.scope.room.name,
        at=message.published_at,
    )


ROUTES: Final = [search]
