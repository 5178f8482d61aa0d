"""`/v1/queues`: handler queues, and what is put into them."""

from dataclasses import replace
from typing import Annotated, Final

from litestar import Response, delete, get, patch, post
from litestar.params import JSONBody, PathParameter, QueryParameter

from delivery.handlers.pair import make_pair
from delivery.rest.queue_fields import (
    QueueAccepted,
    QueueBatch,
    QueueBatchAccepted,
    QueueChange,
    QueueMessage,
    QueueNew,
    QueueOut,
    QueuePage,
    fields_of,
    queue_out,
)
from rooms.domain.job import JobKind
from rooms.domain.magazine import Entry, main_of
from rooms.domain.names import NAME_PATTERN
from rooms.domain.principal import Principal
from rooms.domain.queue import Queue, QueueSettings
from rooms.domain.states import Scope
from rooms.errors import (
    ConflictError,
    FieldProblem,
    InvalidError,
    MagazineMissingError,
    MagazineUnavailableError,
    TooLargeError,
)
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body
from rooms.rest.jobs import JobAccepted, accepted
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.problems import documented
from rooms.rest.services import Services
from rooms.storage import jobs as job_records
from rooms.storage import queues as records
from rooms.storage.signals import Channel
from rooms.storage.transactions import transaction

_LIST: Final = "queues"
_TAGS: Final = ["queues"]
_READ: Final = needs(Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH)
_WRITE: Final = needs(Scope.MANAGE)
_PUBLISH: Final = needs(Scope.PUBLISH)
OF_SUBSCRIPTIONS: Final = "subscription-"

QueuePath = Annotated[str, PathParameter(description="The queue's name.", schema_extra={"pattern": NAME_PATTERN})]


@post(
    "/queues",
    dto=Body[QueueNew],
    return_dto=None,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Make a handler queue",
)
async def create_queue(data: JSONBody[QueueNew], services: Given, principal: Caller) -> QueueOut:
    """201 with the queue, its main magazine and its sideline. 409: the organisation has a queue of this name."""
    try:
        main_of(data.name)
        if data.name.startswith(OF_SUBSCRIPTIONS):
            raise ValueError(f"names that begin with {OF_SUBSCRIPTIONS} are those of subscriptions' sidelines")
    except ValueError as exc:
        raise InvalidError(FieldProblem("name", str(exc))) from exc
    fields = {name: value for name, value in fields_of(data).items() if name != "name"}
    async with transaction(services.engine) as connection:
        queue = await records.create_queue(
            connection,
            principal.organisation_id,
            data.name,
            QueueSettings(**fields),
            new_id=services.ids.global_id(services.clock.now_ms()),
        )
        # Before the commit: where the store is away there is no queue.
        await make_pair(services.magazines, queue, queue.created_at)
        await services.magazines.keep_queue(queue.record())
    services.signals.ring(Channel.QUEUES, queue.name)
    return queue_out(queue)


@get("/queues", opt=_READ, responses=documented(), tags=_TAGS, summary="List handler queues")
async def list_queues(services: Given, principal: Caller, limit: Limit = 50, cursor: Cursor = None) -> QueuePage:
    """The organisation's queues."""
    after = open_cursor(services.seal, _LIST, cursor)
    async with transaction(services.engine) as connection:
        found = await records.list_queues(connection, principal.organisation_id, after=after, limit=limit + 1)
    page, last = cut(found, limit, lambda queue: queue.name)
    return QueuePage(
        items=[queue_out(queue) for queue in page],
        next_cursor=seal_cursor(services.seal, _LIST, last),
    )


@get("/queues/{queue:str}", opt=_READ, responses=documented(), tags=_TAGS, summary="Read a handler queue")
async def read_queue(services: Given, principal: Caller, queue: QueuePath) -> QueueOut:
    """One queue; what is in it tell its magazines."""
    return queue_out(await _found(services, principal, queue))


@patch(
    "/queues/{queue:str}",
    dto=Body[QueueChange],
    return_dto=None,
    opt=_WRITE,
    responses=documented(409),
    tags=_TAGS,
    summary="Change a handler queue",
)
async def change_queue(data: JSONBody[QueueChange], services: Given, principal: Caller, queue: QueuePath) -> QueueOut:
    """The changed queue; whoever serves it follows at once."""
    fields = fields_of(data)
    async with transaction(services.engine) as connection:
        found = await records.find_queue(connection, principal.organisation_id, queue, lock=True)
        if not fields:
            return queue_out(found)
        changed = await records.change_queue(connection, found.store_name, replace(found.settings, **fields))
    services.signals.ring(Channel.QUEUES, queue)
    return queue_out(changed)


@delete(
    "/queues/{queue:str}",
    status_code=202,
    opt=_WRITE,
    responses=documented(),
    tags=_TAGS,
    summary="Delete a handler queue",
)
async def delete_queue(
    services: Given,
    principal: Caller,
    queue: QueuePath,
    confirm: Annotated[
        str | None, QueryParameter(description="The queue's name, so that nobody deletes by mistake.")
    ] = None,
) -> Response[JobAccepted]:
    """202 with the job that deletes the queue and what is in it; it is gone for every request at once."""
    async with transaction(services.engine) as connection:
        found = await records.find_queue(connection, principal.organisation_id, queue, lock=True)
        if confirm != found.name:
            raise InvalidError(FieldProblem("confirm", "repeat the queue's name here: what is in it is deleted"))
        await records.mark_deleting(connection, found.store_name)
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            JobKind.DELETE_QUEUE,
            new_id=services.ids.global_id(services.clock.now_ms()),
            room=None,
            arguments={"queue": queue, "store_name": found.store_name},
        )
    services.signals.ring(Channel.QUEUES, queue)
    return accepted(job)


@post(
    "/queues/{queue:str}/messages",
    status_code=202,
    dto=Body[QueueMessage],
    return_dto=None,
    opt=_PUBLISH,
    responses=documented(409, 413),
    tags=_TAGS,
    summary="Put a message into a handler queue",
)
async def load_message(
    data: JSONBody[QueueMessage], services: Given, principal: Caller, queue: QueuePath
) -> QueueAccepted:
    """202: it is kept as durably as the magazines' store keeps anything. 503: that is in doubt; sent again, it may be
    handled twice.
    """
    return (await _load(services, principal, queue, [data]))[0]


@post(
    "/queues/{queue:str}/messages/batch",
    status_code=202,
    dto=Body[QueueBatch],
    return_dto=None,
    opt=_PUBLISH,
    responses=documented(409, 413),
    tags=_TAGS,
    summary="Put several messages into a handler queue",
)
async def load_messages(
    data: JSONBody[QueueBatch], services: Given, principal: Caller, queue: QueuePath
) -> QueueBatchAccepted:
    """As for one message; they stand in one shard, in their order."""
    return QueueBatchAccepted(messages=await _load(services, principal, queue, data.messages))


async def _load(
    services: Services, principal: Principal, name: str, messages: list[QueueMessage]
) -> list[QueueAccepted]:
    queue = await _found(services, principal, name)
    if not queue.active:
        raise ConflictError("the queue has expired: it takes no messages any more")
    most = services.settings.max_payload_bytes
    for message in messages:
        if (size := len(bytes(message.payload))) > most:
            # Near the limit of a store it could be loaded, but not sidelined, where it has its reason with it.
            raise TooLargeError(f"payload: {size} bytes; the limit is {most}")
    now = services.clock.now()
    entries = [
        Entry(
            id=message.id or services.ids.global_id(services.clock.now_ms()),
            body=bytes(message.payload),
            expires_at=queue.expires_at(now),
        )
        for message in messages
    ]
    try:
        await (await services.magazines.open(main_of(queue.store_name))).load(entries)
    except MagazineMissingError as exc:
        raise MagazineUnavailableError("the queue's magazines are not there: they are made anew soon") from exc
    services.signals.ring(Channel.MESSAGES, queue.store_name)
    services.metrics.queue_loaded.labels(queue.store_name).inc(len(entries))
    return [QueueAccepted(id=entry.id) for entry in entries]


async def _found(services: Services, principal: Principal, name: str) -> Queue:
    async with transaction(services.engine) as connection:
        return await records.find_queue(connection, principal.organisation_id, name)


ROUTES: Final = [create_queue, list_queues, read_queue, change_queue, delete_queue, load_message, load_messages]
