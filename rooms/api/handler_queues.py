"""Serve `/v1/queues`: handler queues and the messages that clients put into them."""

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.params import JSONBody, PathParameter, QueryParameter
from msgspec import UNSET, Meta, Struct, UnsetType

from delivery.handlers.magazines import create_queue_magazines, magazine_names
from rooms.api.auth import Caller, ServicesDep, moves_messages, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body, bounded_batch
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.jobs import JobAccepted, accepted_response
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.db.catalog import handler_queues as records
from rooms.db.connection import LONG_PAUSE, transaction
from rooms.db.jobs import jobs as job_records
from rooms.db.notify import Channel
from rooms.domain.handler_queue import (
    DEFAULT_SHOVEL_INTERVAL_S,
    DEFAULT_SWEEP_S,
    MAX_SHOVELS,
    Batching,
    HandlerQueue,
    QueueSettings,
    ShovelSettings,
)
from rooms.domain.job import JobKind
from rooms.domain.magazine import (
    DEFAULT_SHARDS,
    MAX_BATCH,
    MAX_CONSUMERS,
    MAX_SHARDS,
    Entry,
    main_magazine_name,
)
from rooms.domain.names import MAX_NAME, NAME_PATTERN
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import (
    ConflictError,
    FieldProblem,
    InvalidError,
    MagazineMissingError,
    MagazineUnavailableError,
    TooLargeError,
)

_DAY_S: Final = 86_400
_MAX_S: Final = 3650 * _DAY_S
_MIN_SWEEP_S: Final = 120
_MAX_WAIT_MS: Final = 30_000

QueueName = Annotated[
    str,
    Meta(
        pattern=NAME_PATTERN,
        min_length=1,
        max_length=MAX_NAME,
        description="One in the organisation.",
    ),
]
Shards = Annotated[
    int, Meta(ge=1, le=MAX_SHARDS, description="Of each of its magazines; it cannot be changed.")
]
Concurrency = Annotated[
    int,
    Meta(ge=1, le=MAX_CONSUMERS, description="Consumers in each process that serves the queue."),
]
MessageExpiryS = Annotated[
    int, Meta(ge=1, le=_MAX_S, description="The lifetime of a message in s; null: unlimited.")
]
QueueExpiryS = Annotated[
    int,
    Meta(
        ge=1, le=_MAX_S, description="The queue's lifetime from its creation in s; null: unlimited."
    ),
]
SweepDurationS = Annotated[
    int,
    Meta(
        ge=_MIN_SWEEP_S,
        le=30 * _DAY_S,
        description="Messages that a consumer holds for longer, in s, are stuck.",
    ),
]
MessageId = Annotated[
    str,
    Meta(
        min_length=1, max_length=256, description="The sender's id; generated where it is absent."
    ),
]


class QueueShovelFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Set how failed messages return to the queue."""

    interval_s: Annotated[int, Meta(ge=1, le=30 * _DAY_S, description="Between two passes.")] = (
        DEFAULT_SHOVEL_INTERVAL_S
    )
    concurrency: Annotated[int, Meta(ge=1, le=64, description="Batches at a time.")] = 4
    one_shot: Annotated[bool, Meta(description="One pass at once, then no more shovels.")] = False
    max_shovels: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Entries that returned so often stay: poison messages must not circle.",
        ),
    ] = MAX_SHOVELS


class QueueBatchingFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Set how many messages a batch handler gets at a time."""

    max_size: Annotated[int, Meta(ge=1, le=MAX_BATCH)]
    max_wait_ms: Annotated[
        int, Meta(ge=0, le=_MAX_WAIT_MS, description="How long the first message waits for others.")
    ] = 0


class CreateHandlerQueue(Struct, forbid_unknown_fields=True, kw_only=True):
    """Create a queue."""

    name: QueueName
    shards: Shards = DEFAULT_SHARDS
    concurrency: Concurrency = 1
    message_expiry_s: MessageExpiryS | None = None
    queue_expiry_s: QueueExpiryS | None = None
    sweep_duration_s: SweepDurationS = DEFAULT_SWEEP_S
    shovel: QueueShovelFields | None = msgspec.field(default_factory=QueueShovelFields)
    batching: QueueBatchingFields | None = None


class UpdateHandlerQueue(Struct, forbid_unknown_fields=True, kw_only=True):
    """Change the given fields of a queue.

    `shovel` and `batching` are replaced as a whole; null: none.
    """

    concurrency: Concurrency | UnsetType = UNSET
    message_expiry_s: MessageExpiryS | UnsetType | None = UNSET
    queue_expiry_s: QueueExpiryS | UnsetType | None = UNSET
    sweep_duration_s: SweepDurationS | UnsetType = UNSET
    shovel: QueueShovelFields | UnsetType | None = UNSET
    batching: QueueBatchingFields | UnsetType | None = UNSET


class HandlerQueueResponse(Struct, kw_only=True):
    """Describe a queue.

    `active` is false after its expiry: nothing is accepted or delivered any more. `store_name` is
    its name in the magazines' store, in metrics and in logs.
    """

    name: str
    store_name: str
    active: bool
    shards: int
    concurrency: int
    message_expiry_s: int | None
    queue_expiry_s: int | None
    sweep_duration_s: int
    shovel: QueueShovelFields | None
    batching: QueueBatchingFields | None
    magazine: str
    sideline: str
    created_at: datetime
    updated_at: datetime


class HandlerQueuePage(Struct, kw_only=True):
    """List queues, by name."""

    items: list[HandlerQueueResponse]
    next_cursor: str | None


class QueueMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """Hold a message for handlers."""

    id: MessageId | None = None
    payload: msgspec.Raw


class QueueMessageBatch(Struct, forbid_unknown_fields=True, kw_only=True):
    """Hold several messages."""

    messages: Annotated[list[QueueMessage], Meta(min_length=1, max_length=MAX_BATCH)]


class _BatchBody(Body[QueueMessageBatch]):
    """Count the messages of a batch before any of them becomes an object."""

    def decode_bytes(self, value: bytes) -> Any:
        """Return the checked body."""
        return super().decode_bytes(bounded_batch(value, MAX_BATCH))


class AcceptedQueueMessage(Struct, kw_only=True):
    """Confirm that a message is stored durably."""

    id: str


class AcceptedQueueBatch(Struct, kw_only=True):
    """Confirm that messages are stored durably, in this order."""

    messages: list[AcceptedQueueMessage]


def to_settings_fields(data: CreateHandlerQueue | UpdateHandlerQueue) -> dict[str, Any]:
    """Return the given fields as domain values."""
    fields = {
        name: value for name, value in msgspec.structs.asdict(data).items() if value is not UNSET
    }
    for name, kind in (("shovel", ShovelSettings), ("batching", Batching)):
        if fields.get(name) is not None:
            fields[name] = kind(**msgspec.structs.asdict(fields[name]))
    return fields


def to_queue_response(queue: HandlerQueue) -> HandlerQueueResponse:
    """Return a queue as the API shows it."""
    settings = queue.settings
    main, sideline = magazine_names(queue.name)
    plan, batching = settings.shovel, settings.batching
    return HandlerQueueResponse(
        name=queue.name,
        store_name=queue.store_name,
        active=queue.active,
        shards=settings.shards,
        concurrency=settings.concurrency,
        message_expiry_s=settings.message_expiry_s,
        queue_expiry_s=settings.queue_expiry_s,
        sweep_duration_s=settings.sweep_duration_s,
        shovel=None
        if plan is None
        else msgspec.convert(plan, QueueShovelFields, from_attributes=True),
        batching=None
        if batching is None
        else msgspec.convert(batching, QueueBatchingFields, from_attributes=True),
        magazine=main,
        sideline=sideline,
        created_at=queue.created_at,
        updated_at=queue.updated_at,
    )


_LIST: Final = "queues"
_TAGS: Final = ["queues"]
_READ: Final = require_scopes(Scope.MANAGE, Scope.OPERATE, Scope.PUBLISH)
_WRITE: Final = require_scopes(Scope.MANAGE)
_PUBLISH_SCOPES: Final = moves_messages(Scope.PUBLISH, allows=())
SUBSCRIPTION_PREFIX: Final = "subscription-"

QueuePath = Annotated[
    str, PathParameter(description="The queue's name.", schema_extra={"pattern": NAME_PATTERN})
]


@post(
    "/queues",
    dto=Body[CreateHandlerQueue],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Create a handler queue",
)
async def create_queue(
    data: JSONBody[CreateHandlerQueue], services: ServicesDep, principal: Caller, change: ChangeDep
) -> HandlerQueueResponse:
    """Create the queue, its main magazine and its sideline.

    409: the name is taken, or the organisation has as many queues as it may.
    """
    try:
        main_magazine_name(data.name)
        if data.name.startswith(SUBSCRIPTION_PREFIX):
            raise ValueError(
                f"names with {SUBSCRIPTION_PREFIX} are reserved for subscriptions' sidelines"
            )
    except ValueError as exc:
        raise InvalidError(FieldProblem("name", str(exc))) from exc
    fields = {name: value for name, value in to_settings_fields(data).items() if name != "name"}
    async with change.transaction() as connection:
        await connection.execute(LONG_PAUSE)
        await records.check_queue_count(
            connection, principal.organisation_id, services.settings.max_handler_queues
        )
        queue = await records.create_queue(
            connection,
            principal.organisation_id,
            data.name,
            QueueSettings(**fields),
            new_id=services.ids.generate_global(services.clock.now_ms()),
        )
        # Before the commit: without its magazines the queue must not exist.
        async with services.magazine_turns.slot(principal.organisation_id):
            await create_queue_magazines(services.magazines, queue, queue.created_at)
            await services.magazines.save_queue_record(queue.to_record())
    services.notifier.notify(Channel.QUEUES, queue.name)
    return to_queue_response(queue)


@get("/queues", opt=_READ, tags=_TAGS, summary="List handler queues")
async def list_queues(
    services: ServicesDep, principal: Caller, limit: Limit = 50, cursor: Cursor = None
) -> HandlerQueuePage:
    """List the organisation's queues."""
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        found = await records.list_queues(
            connection, principal.organisation_id, after=page.after, limit=page.fetch_limit
        )
    return page.respond(
        HandlerQueuePage, found, to_queue_response, position=lambda queue: queue.name
    )


@get("/queues/{queue:str}", opt=_READ, tags=_TAGS, summary="Read a handler queue")
async def read_queue(
    services: ServicesDep, principal: Caller, queue: QueuePath
) -> HandlerQueueResponse:
    """Return one queue; its magazines show its contents."""
    return to_queue_response(await _find_queue(services, principal, queue))


@patch(
    "/queues/{queue:str}",
    dto=Body[UpdateHandlerQueue],
    return_dto=None,
    opt=_WRITE,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Change a handler queue",
)
async def change_queue(
    data: JSONBody[UpdateHandlerQueue],
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    queue: QueuePath,
) -> HandlerQueueResponse:
    """Change the queue; the processes that serve it follow at once."""
    fields = to_settings_fields(data)
    async with change.transaction() as connection:
        found = await records.find_queue(connection, principal.organisation_id, queue, lock=True)
        if not fields:
            return to_queue_response(found)
        change.before = {name: getattr(found.settings, name) for name in fields}
        changed = await records.update_queue(
            connection,
            found.store_name,
            replace(found.settings, **fields),
            shovel_requested="shovel" in fields,
        )
    services.notifier.notify(Channel.QUEUES, queue)
    return to_queue_response(changed)


@delete(
    "/queues/{queue:str}",
    status_code=202,
    opt=_WRITE,
    tags=_TAGS,
    summary="Delete a handler queue",
)
async def delete_queue(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    queue: QueuePath,
    confirm: Annotated[
        str | None,
        QueryParameter(description="The queue's name, to prevent deleting by mistake."),
    ] = None,
) -> Response[JobAccepted]:
    """Start the job that deletes the queue and its contents. For requests it is gone at once."""
    async with change.transaction() as connection:
        found = await records.find_queue(connection, principal.organisation_id, queue, lock=True)
        if confirm != found.name:
            raise InvalidError(
                FieldProblem("confirm", "repeat the queue's name here: what is in it is deleted")
            )
        change.before = {"name": found.name}
        await records.mark_deleting(connection, found.store_name)
        job = await job_records.create_job(
            connection,
            principal.organisation_id,
            JobKind.DELETE_QUEUE,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            room=None,
            arguments={"queue": queue, "store_name": found.store_name},
        )
    services.notifier.notify(Channel.QUEUES, queue)
    return accepted_response(job)


@post(
    "/queues/{queue:str}/messages",
    status_code=202,
    dto=Body[QueueMessage],
    return_dto=None,
    opt=_PUBLISH_SCOPES,
    responses=documented_responses(409, 413),
    tags=_TAGS,
    summary="Put a message into a handler queue",
)
async def load_message(
    data: JSONBody[QueueMessage], services: ServicesDep, principal: Caller, queue: QueuePath
) -> AcceptedQueueMessage:
    """Store a message as durably as the magazines' store does.

    503: the result is unknown; if it is sent again, it may be handled twice.
    """
    return (await _load_all(services, principal, queue, [data]))[0]


@post(
    "/queues/{queue:str}/messages/batch",
    status_code=202,
    dto=_BatchBody,
    return_dto=None,
    opt=_PUBLISH_SCOPES,
    responses=documented_responses(409, 413),
    tags=_TAGS,
    summary="Put several messages into a handler queue",
)
async def load_messages(
    data: JSONBody[QueueMessageBatch], services: ServicesDep, principal: Caller, queue: QueuePath
) -> AcceptedQueueBatch:
    """Store messages as for one message; they are in one shard, in their order."""
    return AcceptedQueueBatch(messages=await _load_all(services, principal, queue, data.messages))


async def _load_all(
    services: ApiServices, principal: Principal, queue_name: str, messages: list[QueueMessage]
) -> list[AcceptedQueueMessage]:
    queue = await _find_queue(services, principal, queue_name)
    if not queue.active:
        raise ConflictError("the queue has expired: it accepts no messages")
    most = services.settings.max_payload_bytes
    for message in messages:
        if (size := len(bytes(message.payload))) > most:
            # Near a store's limit it could be loaded but not sidelined, where its reason is stored
            # with it.
            raise TooLargeError(f"payload: {size} bytes; the limit is {most}")
    now = services.clock.now()
    entries = [
        Entry(
            id=message.id or services.ids.generate_global(services.clock.now_ms()),
            body=bytes(message.payload),
            expires_at=queue.expires_at(now),
        )
        for message in messages
    ]
    name = main_magazine_name(queue.store_name)
    try:
        async with services.magazine_turns.slot(principal.organisation_id):
            await (await services.magazines.open(name)).load(entries)
    except MagazineMissingError as exc:
        raise MagazineUnavailableError(
            "the queue's magazines do not exist: they are created again soon"
        ) from exc
    services.notifier.notify(Channel.MESSAGES, queue.store_name)
    metrics = services.metrics
    metrics.queue_series.of(metrics.queue_loaded, queue.store_name).inc(len(entries))
    return [AcceptedQueueMessage(id=entry.id) for entry in entries]


async def _find_queue(services: ApiServices, principal: Principal, name: str) -> HandlerQueue:
    async with transaction(services.engine) as connection:
        return await records.find_queue(connection, principal.organisation_id, name)


ROUTES: Final = [
    create_queue,
    list_queues,
    read_queue,
    change_queue,
    delete_queue,
    load_message,
    load_messages,
]
