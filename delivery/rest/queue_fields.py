"""The bodies of `/v1/queues`."""

from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from delivery.handlers.pair import names_of
from rooms.domain.magazine import DEFAULT_SHARDS, MAX_BATCH, MAX_CONSUMERS, MAX_SHARDS
from rooms.domain.names import MAX_NAME, NAME_PATTERN
from rooms.domain.queue import MAX_SHOVELS, SHOVEL_S, SWEEP_S, Batching, Queue, ShovelPlan

_DAY_S: Final = 86_400
_MAX_S: Final = 3650 * _DAY_S
_MIN_SWEEP_S: Final = 120
_MAX_WAIT_MS: Final = 30_000

Name = Annotated[
    str, Meta(pattern=NAME_PATTERN, min_length=1, max_length=MAX_NAME, description="One in the organisation.")
]
Shards = Annotated[int, Meta(ge=1, le=MAX_SHARDS, description="Of each of its magazines; fixed for good.")]
Concurrency = Annotated[
    int, Meta(ge=1, le=MAX_CONSUMERS, description="Consumers in each process that serves the queue.")
]
MessageExpiryS = Annotated[int, Meta(ge=1, le=_MAX_S, description="A message's lifetime, in s; null: for ever.")]
QueueExpiryS = Annotated[
    int, Meta(ge=1, le=_MAX_S, description="The queue's own, from its creation, in s; null: for ever.")
]
SweepDurationS = Annotated[
    int, Meta(ge=_MIN_SWEEP_S, le=30 * _DAY_S, description="What a consumer has for longer, in s, is stuck.")
]
MessageId = Annotated[str, Meta(min_length=1, max_length=256, description="The sender's own; without one it gets one.")]


class ShovelFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """How what handlers failed at comes back."""

    interval_s: Annotated[int, Meta(ge=1, le=30 * _DAY_S, description="Between two passes.")] = SHOVEL_S
    concurrency: Annotated[int, Meta(ge=1, le=64, description="Batches under way at a time.")] = 4
    one_shot: Annotated[bool, Meta(description="One pass at once, and then no shovel any more.")] = False
    max_shovels: Annotated[
        int, Meta(ge=1, le=10_000, description="What came back so often stays: poison must not circle.")
    ] = MAX_SHOVELS


class BatchingFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """How many messages a handler of batches gets at a time."""

    max_size: Annotated[int, Meta(ge=1, le=MAX_BATCH)]
    max_wait_ms: Annotated[int, Meta(ge=0, le=_MAX_WAIT_MS, description="The first waits so long for the others.")] = 0


class QueueNew(Struct, forbid_unknown_fields=True, kw_only=True):
    """A queue to make."""

    name: Name
    shards: Shards = DEFAULT_SHARDS
    concurrency: Concurrency = 1
    message_expiry_s: MessageExpiryS | None = None
    queue_expiry_s: QueueExpiryS | None = None
    sweep_duration_s: SweepDurationS = SWEEP_S
    shovel: ShovelFields | None = msgspec.field(default_factory=ShovelFields)
    batching: BatchingFields | None = None


class QueueChange(Struct, forbid_unknown_fields=True, kw_only=True):
    """What to change of a queue; what is left out stays. `shovel` and `batching` are replaced as a whole, null: none."""

    concurrency: Concurrency | UnsetType = UNSET
    message_expiry_s: MessageExpiryS | UnsetType | None = UNSET
    queue_expiry_s: QueueExpiryS | UnsetType | None = UNSET
    sweep_duration_s: SweepDurationS | UnsetType = UNSET
    shovel: ShovelFields | UnsetType | None = UNSET
    batching: BatchingFields | UnsetType | None = UNSET


class QueueOut(Struct, kw_only=True):
    """A queue. `active` is false once its expiry passed: nothing is taken or handed out any more. `store_name` is its name in
    the magazines' store, in metrics and in logs.
    """

    name: str
    store_name: str
    active: bool
    shards: int
    concurrency: int
    message_expiry_s: int | None
    queue_expiry_s: int | None
    sweep_duration_s: int
    shovel: ShovelFields | None
    batching: BatchingFields | None
    magazine: str
    sideline: str
    created_at: datetime
    updated_at: datetime


class QueuePage(Struct, kw_only=True):
    """Queues, by name."""

    items: list[QueueOut]
    next_cursor: str | None


class QueueMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    """A message for handlers."""

    id: MessageId | None = None
    payload: msgspec.Raw


class QueueBatch(Struct, forbid_unknown_fields=True, kw_only=True):
    """Several messages."""

    messages: Annotated[list[QueueMessage], Meta(min_length=1, max_length=MAX_BATCH)]


class QueueAccepted(Struct, kw_only=True):
    """It is in the queue, durably."""

    id: str


class QueueBatchAccepted(Struct, kw_only=True):
    """They are in the queue, durably, in this order."""

    messages: list[QueueAccepted]


def fields_of(data: QueueNew | QueueChange) -> dict[str, Any]:
    """The fields that were given, as the domain has them."""
    fields = {name: value for name, value in msgspec.structs.asdict(data).items() if value is not UNSET}
    for name, kind in (("shovel", ShovelPlan), ("batching", Batching)):
        if fields.get(name) is not None:
            fields[name] = kind(**msgspec.structs.asdict(fields[name]))
    return fields


def queue_out(queue: Queue) -> QueueOut:
    """A queue as the API tells it."""
    settings = queue.settings
    main, sideline = names_of(queue.name)
    plan, batching = settings.shovel, settings.batching
    return QueueOut(
        name=queue.name,
        store_name=queue.store_name,
        active=queue.active,
        shards=settings.shards,
        concurrency=settings.concurrency,
        message_expiry_s=settings.message_expiry_s,
        queue_expiry_s=settings.queue_expiry_s,
        sweep_duration_s=settings.sweep_duration_s,
        shovel=None if plan is None else msgspec.convert(plan, ShovelFields, from_attributes=True),
        batching=None if batching is None else msgspec.convert(batching, BatchingFields, from_attributes=True),
        magazine=main,
        sideline=sideline,
        created_at=queue.created_at,
        updated_at=queue.updated_at,
    )
