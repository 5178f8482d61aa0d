"""Serve `/r1/…/pub/v1`: publish an event, read what became of it, and stop it."""

from dataclasses import replace
from typing import Any, Final

import msgspec
from litestar import Request, Response, delete, get, post

from rooms.api.auth import OF_EVENTS, Caller, ServicesDep, moves_messages
from rooms.api.changes import Change, ChangeDep
from rooms.api.codec import decode_kept
from rooms.api.deps import ApiServices
from rooms.api.fast_routes import JSON, REPLAYED_HEADER, read_request
from rooms.api.govstack.bodies import EventItem, PublishedItem, PublishItem
from rooms.api.govstack.callers import AddressDep, find_publisher
from rooms.api.govstack.operations import NOT_THERE, Operation, Reply, declare, hiding, problem
from rooms.api.message_changes import WRITE, cancel
from rooms.api.messages import READ, MessageResponse, describe_message
from rooms.api.params import IdPath, NamePath, parse_message, parse_name
from rooms.db.catalog.event_types import find_event_type
from rooms.db.connection import transaction
from rooms.domain.govstack import event_item
from rooms.domain.ids import MessageId, OrganisationId, RoomId, room_of
from rooms.domain.principal import Principal
from rooms.domain.state_machine import UNFINISHED, Scope
from rooms.errors import ConflictError, FieldProblem, InvalidError, NotFoundError

_PATH: Final = "/pub/v1/{event_type:str}"
_EVENT: Final = _PATH + "/{event_id:str}"
_FIELDS: Final = {"event_type": "eventType", "payload": "event"}
"""GovStack's names of the fields of a message."""


@post(
    _PATH,
    status_code=201,
    opt=moves_messages(Scope.PUBLISH, allows=OF_EVENTS)
    | declare(
        Operation(
            body=PublishItem,
            headers={"Idempotency-Key": "Ours. A repeated request with it is published once."},
            replies={
                201: Reply(
                    "The event is stored",
                    PublishedItem,
                    {REPLAYED_HEADER: "Ours. `true`: the answer to an earlier request"},
                ),
                404: problem("The room has no such event type"),
                409: problem("Ours. The Idempotency-Key was used for another event"),
            },
        )
    ),
    summary="Publish an event",
)
async def publish_event(
    request: Request[Any, Principal, Any],
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    event_type: NamePath,
) -> Response[PublishedItem]:
    """Store an event durably, with one delivery for each subscription to its type.

    All events of a type have one ordering key, so that a subscription with FIFO gets them in order.
    """
    body, key = await read_request(
        request.scope["headers"], request.receive, services.settings.max_resource_body_bytes
    )
    data: PublishItem = decode_kept(body, PublishItem)
    if data.event_type != event_type:
        raise InvalidError(FieldProblem("eventType", "is not the event type of the path"))
    answer, replayed = await publish(
        services,
        principal,
        address.room_id,
        event_type=event_type,
        payload=bytes(data.event),
        key=key,
    )
    headers = {REPLAYED_HEADER: "true"} if replayed else {}
    return Response(PublishedItem(id=answer), status_code=201, headers=headers)


async def publish(
    services: ApiServices,
    principal: Principal,
    room: RoomId,
    *,
    event_type: str,
    payload: bytes,
    key: str | None,
) -> tuple[str, bool]:
    """Publish a payload; return the message's id, and whether it was published before.

    NotFoundError: there is no such event type. InvalidError names fields as GovStack does.
    """
    name = msgspec.json.encode(event_type)
    body = b'{"event_type":%b,"ordering_key":%b,"payload":%b}' % (name, name, payload)
    with hiding():
        try:
            parse_name(event_type)
            answer = await services.publisher.publish(principal, room, body, key)
        except InvalidError as exc:
            if any(one.field == "event_type" for one in exc.problems):
                # It is not there, or its schema cannot be used.
                async with transaction(services.engine) as connection:
                    await find_event_type(connection, room, event_type)
            raise InvalidError(*map(_renamed, exc.problems)) from exc
    return msgspec.json.decode(answer.body)["message_id"], answer.replayed


def _renamed(found: FieldProblem) -> FieldProblem:
    name, dot, rest = found.field.partition(".")
    return replace(found, field=f"{_FIELDS.get(name, name)}{dot}{rest}")


@get(
    _EVENT,
    opt=READ | declare(Operation(replies={200: Reply("The event", EventItem)})),
    summary="Read the status of an event",
)
async def read_event(
    services: ServicesDep,
    principal: Caller,
    address: AddressDep,
    event_type: NamePath,
    event_id: IdPath,
) -> Response[bytes]:
    """Return the event with its `status` and the number of its deliveries in each state.

    For the room's owner, the publisher and subscribers, who see what `/v1/messages/{id}` shows.
    """
    with hiding():
        found = await find_event(services, principal, address.room_id, event_id, event_type)
    body = await describe_event(services, found)
    return Response(body, media_type=JSON)


async def find_event(
    services: ApiServices,
    principal: Principal,
    room: RoomId,
    event_id: str,
    event_type: str | None = None,
) -> MessageResponse:
    """Return an event of a room as the principal sees it; `event_type`: of this. NotFoundError."""
    found = await describe_message(services, principal, _in_room(room, event_id))
    if event_type not in {None, found.event_type}:
        raise NotFoundError(NOT_THERE)
    return found


async def describe_event(services: ApiServices, found: MessageResponse) -> bytes:
    """Return an event as an EventItem with its status."""
    async with transaction(services.engine) as connection:
        organisation = found.publisher_organisation_id
        publisher = await find_publisher(
            connection,
            None if organisation is None else OrganisationId(organisation),
            found.application,
        )
    payload = found.payload
    return event_item(
        found.id,
        found.event_type,
        None if payload is msgspec.UNSET else bytes(payload),
        publisher=publisher,
        more={"status": found.status.value, "states": found.states},
    )


@delete(
    _EVENT,
    opt=WRITE
    | declare(
        Operation(
            replies={
                204: Reply("It is not delivered to any further subscriber"),
                409: problem("Ours. It is being delivered at this moment, and not elsewhere"),
            }
        )
    ),
    summary="Stop an event",
)
async def stop_event(
    *,
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    address: AddressDep,
    event_type: NamePath,
    event_id: IdPath,
) -> None:
    """Stop the processing of an event: deliveries that wait, also for a retry, are cancelled.

    For the room's owner, and for the publisher while it may publish the event type. An event that
    is processed to the end stays as it is.
    """
    with hiding():
        await find_event(services, principal, address.room_id, event_id, event_type)
        await _stop(services, principal, change, _in_room(address.room_id, event_id))


async def _stop(
    services: ApiServices, principal: Principal, change: Change, identity: MessageId
) -> None:
    try:
        await cancel(services, principal, change, identity)
    except ConflictError:
        found = await describe_message(services, principal, identity)
        if not UNFINISHED.isdisjoint(found.states):
            raise


def _in_room(room: RoomId, event_id: str) -> MessageId:
    identity = parse_message(event_id)
    if room_of(identity) != room:
        raise NotFoundError(NOT_THERE)
    return identity


ROUTES: Final = [publish_event, read_event, stop_event]
