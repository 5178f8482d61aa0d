"""Read a subscription's sideline, for the API and for jobs that select from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    FromClause,
    RowMapping,
    Select,
    and_,
    func,
    select,
    text,
    true,
    tuple_,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.bounded_counts import MAX_COUNTED
from rooms.db.sideline.entries import EntryRef
from rooms.db.tables.messages import deliveries, messages, sidelined
from rooms.db.tables.rooms import rooms, subscriptions
from rooms.domain.ids import DeliveryId, MessageId, RoomId, SubscriptionId
from rooms.domain.magazine import Slot
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Reason, State, SubscriptionStatus

MAX_SCANNED: Final = 5000
"""The most entries that one statement looks at to find those that are wanted."""
_MIN_SCANNED: Final = 100
_MAX_SCANS: Final = 10
"""For a page of entries, of which the first may all be of deliveries that went on."""


GRACE_S: Final = 10.0
"""So long after its begin a transaction is taken for one that may yet add an entry."""
# An entry has the time at which its transaction began, and is seen after the commit. A statement
# that adds entries locks the table first of all, whatever it waits for then. Other old transactions
# only read, as an export or a backup does for hours.
_SETTLED_UNTIL: Final = text("""
SELECT least(now(), min(a.xact_start)) FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND (
    a.xact_start > now() - :grace_s * interval '1 s' OR a.pid IN (
        SELECT l.pid FROM pg_locks l
        WHERE l.relation = CAST('sidelined' AS regclass) AND l.mode = 'RowExclusiveLock'
    )
)
""")


def _is_current(entries: FromClause) -> ColumnElement[bool]:
    """Return the condition that a delivery is still in the sideline by the entry."""
    return and_(
        deliveries.c.room_id == entries.c.room_id,
        deliveries.c.id == entries.c.id,
        deliveries.c.generation == entries.c.generation,
        deliveries.c.state == State.SIDELINED.value,
    )


_EXPIRED: Final = func.coalesce(deliveries.c.expires_at <= func.now(), False)
_OF_MESSAGE: Final = and_(
    messages.c.room_id == deliveries.c.room_id, messages.c.id == deliveries.c.message_id
)


SidelinePosition = tuple[datetime, DeliveryId]
"""The end of a page: when its last delivery was sidelined, and its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidelineFilter:
    """Select from a sideline; None and empty: no restriction.

    `since` (inclusive) and `until` (exclusive) are times at which deliveries were sidelined.
    """

    since: datetime | None = None
    until: datetime | None = None
    reason: Reason | None = None
    event_type: str | None = None
    error: str | None = None
    """Part of the last error, without regard to case."""
    correlation_ids: tuple[str, ...] = ()
    ordering_keys: tuple[str, ...] = ()
    business_keys: tuple[str, ...] = ()
    deliveries: tuple[DeliveryId, ...] = ()
    shovelable_below: int | None = None
    """Only those that were shoveled less often than this, and have not expired."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShovelPreview:
    """Hold what a shovel would do.

    It would queue so many for each reason, leave those that were shoveled too often, and end those
    that have expired.
    """

    queued: Mapping[str, int]
    too_often: int
    expired: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SidelinedDelivery:
    """Describe a sidelined delivery.

    If its message is gone (an orphan), what the message would say is None.
    """

    ref: EntryRef
    message_id: MessageId
    reason: str
    sidelined_at: datetime
    attempts: int
    shovel_count: int
    last_status: int | None
    last_error: str | None
    expires_at: datetime | None
    correlation_id: str | None
    event_type: str | None
    event_version: int | None
    published_at: datetime | None
    ordering_key: str | None
    business_key: str | None

    @property
    def position(self) -> SidelinePosition:
        """Return the position from which a page that ends with it is continued."""
        return self.sidelined_at, self.ref.delivery_id


@dataclass(frozen=True, slots=True, kw_only=True)
class SidelineScan:
    """Hold the entries that one statement found, and where the next goes on.

    `further` None: there are no more.
    """

    found: Sequence[SidelinedDelivery]
    further: SidelinePosition | None


def _entry_conditions(wanted: SidelineFilter) -> list[ColumnElement[bool]]:
    """Return the conditions that need no more than the entry."""
    conditions: list[ColumnElement[bool]] = []
    if wanted.since is not None:
        conditions.append(sidelined.c.since >= wanted.since)
    if wanted.until is not None:
        conditions.append(sidelined.c.since < wanted.until)
    if wanted.reason is not None:
        conditions.append(sidelined.c.reason == wanted.reason.value)
    if wanted.deliveries:
        conditions.append(sidelined.c.id.in_(wanted.deliveries))
    return conditions


def _conditions(wanted: SidelineFilter) -> list[ColumnElement[bool]]:
    """Return the conditions on the delivery and its message."""
    conditions: list[ColumnElement[bool]] = []
    if wanted.event_type is not None:
        conditions.append(messages.c.event_type == wanted.event_type)
    if wanted.error is not None:
        conditions.append(deliveries.c.last_error.icontains(wanted.error, autoescape=True))
    if wanted.correlation_ids:
        conditions.append(messages.c.correlation_id.in_(wanted.correlation_ids))
    if wanted.ordering_keys:
        conditions.append(messages.c.ordering_key.in_(wanted.ordering_keys))
    if wanted.business_keys:
        conditions.append(messages.c.business_key.in_(wanted.business_keys))
    if wanted.shovelable_below is not None:
        conditions += [~_shoveled_too_often(wanted.shovelable_below), ~_EXPIRED]
    return conditions


def _shoveled_too_often(max_shovels: int) -> ColumnElement[bool]:
    return deliveries.c.shovels >= max_shovels


def _select(
    room: RoomId, subscription: SubscriptionId, wanted: SidelineFilter, *columns: Any
) -> Select[Any]:
    return (
        select(*columns)
        .select_from(
            sidelined.join(deliveries, _is_current(sidelined)).outerjoin(messages, _OF_MESSAGE)
        )
        .where(
            sidelined.c.room_id == room,
            sidelined.c.subscription_id == subscription,
            *_entry_conditions(wanted),
            *_conditions(wanted),
        )
    )


async def sideline_page(
    connection: AsyncConnection,
    room: RoomId,
    subscription: SubscriptionId,
    wanted: SidelineFilter,
    *,
    after: SidelinePosition | None,
    limit: int,
) -> Sequence[SidelinedDelivery]:
    """Return the first entries that a few scans find, in the order in which they were sidelined."""
    found: list[SidelinedDelivery] = []
    for _ in range(_MAX_SCANS):
        scan = await scan_sideline(
            connection, room, subscription, wanted, after=after, limit=limit - len(found)
        )
        found += scan.found
        if len(found) == limit or scan.further is None:
            break
        after = scan.further
    return found


async def scan_sideline(
    connection: AsyncConnection,
    room: RoomId,
    subscription: SubscriptionId,
    wanted: SidelineFilter,
    *,
    after: SidelinePosition | None,
    limit: int,
    max_scanned: int = MAX_SCANNED,
) -> SidelineScan:
    """Look at the next entries, at most `max_scanned`, in the order in which they were sidelined.

    Return at most `limit` of them that are wanted. A rare key costs several calls, and none of them
    walks through a whole sideline.
    """
    entries = select(sidelined).where(
        sidelined.c.room_id == room,
        sidelined.c.subscription_id == subscription,
        *_entry_conditions(wanted),
    )
    if after is not None:
        entries = entries.where(tuple_(sidelined.c.since, sidelined.c.id) > after)
    conditions = _conditions(wanted)
    # Entries of deliveries that went on stay until the audit, and are not found.
    size = max_scanned if conditions else min(max(limit, _MIN_SCANNED), max_scanned)
    window = entries.order_by(sidelined.c.since, sidelined.c.id).limit(size).cte("window_rows")
    last = (
        select(window.c.since, window.c.id)
        .order_by(window.c.since.desc(), window.c.id.desc())
        .limit(1)
        .cte("window_end")
    )
    found = (
        select(
            *window.c,
            deliveries.c.message_id,
            deliveries.c.attempts,
            deliveries.c.shovels,
            deliveries.c.last_status,
            deliveries.c.last_error,
            deliveries.c.expires_at,
            messages.c.correlation_id,
            messages.c.event_type,
            messages.c.event_version,
            messages.c.published_at,
            messages.c.ordering_key,
            messages.c.business_key,
        )
        .select_from(window.join(deliveries, _is_current(window)).outerjoin(messages, _OF_MESSAGE))
        .where(*conditions)
        .order_by(window.c.since, window.c.id)
        .limit(limit)
        .subquery("found")
    )
    statement = (
        select(
            *found.c,
            last.c.since.label("end_since"),
            last.c.id.label("end_id"),
            select(func.count()).select_from(window).scalar_subquery().label("scanned"),
        )
        .select_from(last.outerjoin(found, true()))
        .order_by(found.c.since, found.c.id)
    )
    rows = (await connection.execute(statement)).mappings().all()
    items = [_sidelined(row) for row in rows if row["id"] is not None]
    if len(items) == limit:
        return SidelineScan(found=items, further=items[-1].position)
    is_end = not rows or rows[0]["scanned"] < size
    further = None if is_end else (rows[0]["end_since"], DeliveryId(rows[0]["end_id"]))
    return SidelineScan(found=items, further=further)


async def sideline_count(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId, wanted: SidelineFilter
) -> int:
    """Count the entries."""
    return int(
        (await connection.execute(_select(room, subscription, wanted, func.count()))).scalar_one()
    )


async def count_sideline_bounded(
    connection: AsyncConnection,
    room: RoomId,
    subscription: SubscriptionId,
    wanted: SidelineFilter,
    *,
    most: int = MAX_COUNTED,
) -> int | None:
    """Count the entries; None: the sideline has more than `most`, wanted ones or others."""
    # The reason is not in the index: looked for there, the statement might read a whole sideline.
    first = select(sidelined).where(
        sidelined.c.room_id == room,
        sidelined.c.subscription_id == subscription,
        *_entry_conditions(replace(wanted, reason=None)),
    )
    ordered = first.order_by(sidelined.c.since, sidelined.c.id)
    window = ordered.limit(most + 1).cte("window_rows")
    counted = (
        select(func.count())
        .select_from(window.join(deliveries, _is_current(window)).outerjoin(messages, _OF_MESSAGE))
        .where(*_conditions(wanted))
    )
    if wanted.reason is not None:
        counted = counted.where(window.c.reason == wanted.reason.value)
    size = select(func.count()).select_from(window)
    statement = select(counted.scalar_subquery(), size.scalar_subquery())
    found, scanned = (await connection.execute(statement)).one()
    return None if scanned > most else int(found)


async def end_of_preview(connection: AsyncConnection, wanted: SidelineFilter) -> datetime:
    """Return the filter's end, or the time before which no entry can be added if that is earlier.

    By the clock of PostgreSQL, which stamps entries: the begin of the oldest transaction in
    progress that may add one.
    """
    found = await connection.execute(_SETTLED_UNTIL, {"grace_s": GRACE_S})
    settled: datetime = found.scalar_one()
    return settled if wanted.until is None else min(wanted.until, settled)


async def sideline_summary(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId, wanted: SidelineFilter
) -> Mapping[str, int]:
    """Count the entries for each reason."""
    statement = _select(
        room, subscription, wanted, sidelined.c.reason, func.count().label("sidelined")
    ).group_by(sidelined.c.reason)
    return {row.reason: row.sidelined for row in await connection.execute(statement)}


async def preview_shovel(
    connection: AsyncConnection,
    room: RoomId,
    subscription: SubscriptionId,
    wanted: SidelineFilter,
    *,
    max_shovels: int,
) -> ShovelPreview:
    """Return what a shovel would do that leaves entries which were shoveled `max_shovels` times."""
    often = _shoveled_too_often(max_shovels)
    statement = _select(
        room,
        subscription,
        wanted,
        sidelined.c.reason,
        func.count().filter(~often & ~_EXPIRED).label("queued"),
        func.count().filter(often).label("too_often"),
        func.count().filter(~often & _EXPIRED).label("expired"),
    ).group_by(sidelined.c.reason)
    rows = (await connection.execute(statement)).all()
    return ShovelPreview(
        queued={row.reason: row.queued for row in rows if row.queued},
        too_often=sum(row.too_often for row in rows),
        expired=sum(row.expired for row in rows),
    )


async def oldest_sidelined(
    connection: AsyncConnection, room: RoomId, subscription: SubscriptionId
) -> datetime | None:
    """Return when the oldest entry was sidelined; None: there is none."""
    page = await sideline_page(
        connection, room, subscription, SidelineFilter(), after=None, limit=1
    )
    return page[0].sidelined_at if page else None


async def list_sidelined_subscriptions(
    connection: AsyncConnection, principal: Principal, *, before: str | None, limit: int
) -> Sequence[tuple[SubscriptionId, str]]:
    """Return ids and names of the subscriptions that have a sideline magazine, newest first.

    Those of the principal only.
    """
    statement = (
        select(subscriptions.c.id, subscriptions.c.name)
        .join(rooms, rooms.c.id == subscriptions.c.room_id)
        .where(
            subscriptions.c.organisation_id == principal.organisation_id,
            rooms.c.deleting.is_(False),
            subscriptions.c.status != SubscriptionStatus.DELETED,
            subscriptions.c.sideline_shards.is_not(None),
        )
        .order_by(subscriptions.c.id.desc())
        .limit(limit)
    )
    if before is not None:
        statement = statement.where(subscriptions.c.id < before)
    if principal.rooms is not None:
        statement = statement.where(rooms.c.id.in_(principal.rooms))
    if principal.subscriptions is not None:
        statement = statement.where(subscriptions.c.id.in_(principal.subscriptions))
    rows = (await connection.execute(statement)).all()
    return [(SubscriptionId(identity), name) for identity, name in rows]


def _sidelined(row: RowMapping) -> SidelinedDelivery:
    return SidelinedDelivery(
        ref=EntryRef(
            delivery_id=DeliveryId(row["id"]),
            subscription_id=SubscriptionId(row["subscription_id"]),
            generation=row["generation"],
            slot=None if row["shard"] is None else Slot(row["shard"], row["pointer"]),
        ),
        message_id=MessageId(row["message_id"]),
        reason=row["reason"],
        sidelined_at=row["since"],
        attempts=row["attempts"],
        shovel_count=row["shovels"],
        last_status=row["last_status"],
        last_error=row["last_error"],
        expires_at=row["expires_at"],
        correlation_id=row["correlation_id"],
        event_type=row["event_type"],
        event_version=row["event_version"],
        published_at=row["published_at"],
        ordering_key=row["ordering_key"],
        business_key=row["business_key"],
    )
