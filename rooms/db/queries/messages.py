"""Read published messages, their delivery states and their log for the API."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    RowMapping,
    ScalarSelect,
    Text,
    exists,
    false,
    func,
    literal,
    or_,
    select,
    tuple_,
)
from sqlalchemy import Uuid as UuidType
from sqlalchemy import cast as sql_cast
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.tables.messages import deliveries, delivery_log, message_ids, messages
from rooms.db.tables.processes import writers
from rooms.domain.event_type_pattern import EVERY_EVENT_TYPE, is_pattern
from rooms.domain.ids import KeyId, MessageId, OrganisationId, RoomId, created_ms, first_id
from rooms.domain.state_machine import State
from rooms.errors import NotFoundError

_MAX_MS: Final = (1 << 48) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ListFilter:
    """Narrow a list of messages or deliveries; None: no restriction.

    `since` (inclusive) and `until` (exclusive) refer to the time in the id.
    """

    since: datetime | None = None
    until: datetime | None = None
    event_type: str | None = None
    version: int | None = None
    state: State | None = None
    correlation_id: str | None = None
    event_types: tuple[str, ...] | None = None
    """The patterns that a key is restricted to."""

    def id_bounds(self, column: ColumnElement[str]) -> list[ColumnElement[bool]]:
        """Return the times as bounds on ids.

        They select partitions, and the primary key finds them.
        """
        bounds: list[ColumnElement[bool]] = []
        if self.since is not None:
            bounds.append(column >= first_id(_ms(self.since)))
        if self.until is not None:
            bounds.append(column < first_id(_ms(self.until)))
        return bounds

    def message_conditions(self) -> list[ColumnElement[bool]]:
        """Return the conditions on the message."""
        wanted: list[tuple[ColumnElement[Any], Any]] = [
            (messages.c.event_type, self.event_type),
            (messages.c.event_version, self.version),
            (messages.c.correlation_id, self.correlation_id),
        ]
        return [
            *(column == value for column, value in wanted if value is not None),
            *event_type_conditions(self.event_types),
        ]


def event_type_conditions(
    patterns: Collection[str] | None, name: ColumnElement[str] = messages.c.event_type
) -> list[ColumnElement[bool]]:
    """Return the condition that an event type matches a pattern; None: no condition."""
    if patterns is None:
        return []
    matching = [
        name.startswith(pattern[:-1], autoescape=True) if is_pattern(pattern) else name == pattern
        for pattern in patterns
        if pattern != EVERY_EVENT_TYPE
    ]
    return [] if EVERY_EVENT_TYPE in patterns else [or_(false(), *matching)]


def _ms(at: datetime) -> int:
    # Rounded up: an id has whole milliseconds, and what was created before `at` must not be found.
    return min(max(-int(-at.timestamp() * 1000 // 1), 0), _MAX_MS)


HEAD_COLUMNS: Final = tuple(
    column for column in messages.c if column.name not in {"payload", "headers"}
)
"""The columns of a message in lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRecord:
    """Hold a message; `headers` and `payload` are JSON as published (None in lists).

    `publisher_organisation_id` None: the room's owner published it.
    """

    id: MessageId
    room_id: RoomId
    event_type: str
    version: int
    priority: int
    fanout: int
    published_at: datetime
    expires_at: datetime | None
    publisher_id: KeyId | None
    publisher_organisation_id: OrganisationId | None
    application: str | None
    correlation_id: str
    ordering_key: str | None
    due_at: datetime
    business_key: str | None
    caller_id: str | None
    headers: bytes | None = None
    payload: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """Hold a row of the log."""

    ts: datetime
    writer_id: int
    writer_seq: int
    kind: str
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
    answer_head: bytes | None
    target_host: str | None
    worker: int | None
    worker_host: str | None
    writer_kind: str | None
    """The kind of process that wrote it; None: its writer is no longer on record."""
    event_type: str | None
    event_version: int | None
    correlation_id: str | None


def message_not_found(identity: object) -> NotFoundError:
    """Build the error for a message that is not there."""
    return NotFoundError(f"there is no message {identity}")


async def find_message(
    connection: AsyncConnection, room: RoomId, identity: MessageId
) -> MessageRecord:
    """Return one message with its payload. NotFoundError."""
    statement = select(messages).where(messages.c.room_id == room, messages.c.id == identity)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise message_not_found(identity)
    return message_from_row(row)


def deliveries_of(room: RoomId, identity: MessageId) -> list[ColumnElement[bool]]:
    """Return the conditions for the deliveries of a message; they have ids of its millisecond."""
    at_ms = created_ms(identity)
    return [
        deliveries.c.room_id == room,
        deliveries.c.id >= first_id(at_ms),
        deliveries.c.id < first_id(at_ms + 1),
        deliveries.c.message_id == identity,
    ]


async def delivery_states(
    connection: AsyncConnection,
    room: RoomId,
    identity: MessageId,
    conditions: Sequence[ColumnElement[bool]] = (),
) -> tuple[bool, Mapping[State, int]]:
    """Return whether a message is due, and its number of deliveries in each state.

    PostgreSQL's clock decides. Only deliveries that meet `conditions` are counted.
    """
    counted = (
        select(deliveries.c.state, func.count())
        .where(*deliveries_of(room, identity), *conditions)
        .group_by(deliveries.c.state)
    )
    due = select(func.coalesce(messages.c.due_at <= func.now(), literal(True))).where(
        messages.c.room_id == room, messages.c.id == identity
    )
    is_due = bool(await connection.scalar(due))
    return is_due, {State(row[0]): row[1] for row in await connection.execute(counted)}


async def timeline(
    connection: AsyncConnection,
    room: RoomId,
    identity: MessageId,
    *,
    conditions: Sequence[ColumnElement[bool]] = (),
    delivery: str | None = None,
    after: tuple[datetime, int, int] | None,
    limit: int,
) -> Sequence[TimelineRow]:
    """Return the log of a message in order: by time, and within one writer by number.

    Only the steps that meet `conditions`, and of one delivery if it is given.
    """
    order = (delivery_log.c.ts, delivery_log.c.writer_id, delivery_log.c.writer_seq)
    columns = [column for column in delivery_log.c if column.name != "worker_host"]
    # The writer's own host is the host of every row that names no other.
    host = func.coalesce(delivery_log.c.worker_host, writers.c.host).label("worker_host")
    statement = (
        select(*columns, host, writers.c.kind.label("writer_kind"))
        .outerjoin(writers, writers.c.id == delivery_log.c.writer_id)
        .where(delivery_log.c.room_id == room, delivery_log.c.message_id == identity, *conditions)
        .order_by(*order)
        .limit(limit)
    )
    if delivery is not None:
        statement = statement.where(delivery_log.c.delivery_id == delivery)
    if after is not None:
        statement = statement.where(tuple_(*order) > after)
    return [
        TimelineRow(**{name: row[name] for name in TimelineRow.__dataclass_fields__})
        for row in (await connection.execute(statement)).mappings()
    ]


def stored_caller_id(publisher: OrganisationId | None, caller_id: str) -> str:
    """Return a caller's id as it is stored; `publisher` None: the room's owner gave it."""
    return caller_id if publisher is None else f"{publisher} {caller_id}"


def has_caller_id(room: RoomId, stored: str) -> ColumnElement[bool]:
    """Return the condition that a message has a caller's id, as it is stored."""
    found: ScalarSelect[str] = (
        select(message_ids.c.message_id)
        .where(message_ids.c.room_id == room, message_ids.c.caller_id == stored)
        .scalar_subquery()
    )
    return messages.c.id == found


def same_millisecond(
    column: ColumnElement[str], other: ColumnElement[str]
) -> list[ColumnElement[bool]]:
    """Return the condition that ids are of the millisecond of another id, as bounds on a key.

    Deliveries are created in the millisecond of their message: the first 12 digits are equal.
    """
    born = func.left(sql_cast(other, Text), 13)
    low, high = (
        sql_cast(born.op("||")(literal(rest)), UuidType(as_uuid=False))
        for rest in ("-0000-0000-000000000000", "-ffff-ffff-ffffffffffff")
    )
    return [column >= low, column <= high]


def has_delivery(room: RoomId, state: State) -> ColumnElement[bool]:
    """Return the condition that a message has a delivery in a state."""
    return exists(
        select(deliveries.c.id).where(
            deliveries.c.room_id == room,
            *same_millisecond(deliveries.c.id, messages.c.id),
            deliveries.c.message_id == messages.c.id,
            deliveries.c.state == state.value,
        )
    )


def message_from_row(row: RowMapping) -> MessageRecord:
    """Build a message from a row, with headers and payload if they were selected."""
    extra: dict[str, Any] = {name: row[name] for name in ("headers", "payload") if name in row}
    stored = row["caller_id"]
    return MessageRecord(
        id=MessageId(row["id"]),
        room_id=RoomId(row["room_id"]),
        event_type=row["event_type"],
        version=row["event_version"],
        priority=row["priority"],
        fanout=row["fanout"],
        published_at=row["published_at"],
        expires_at=row["expires_at"],
        publisher_id=row["publisher_id"],
        publisher_organisation_id=row["publisher_organisation_id"],
        application=row["application"],
        correlation_id=row["correlation_id"],
        ordering_key=row["ordering_key"],
        due_at=row["due_at"] or row["published_at"],
        business_key=row["business_key"],
        # Another organisation's id is stored behind that organisation and a space.
        caller_id=None if stored is None else stored.rpartition(" ")[2],
        **extra,
    )
