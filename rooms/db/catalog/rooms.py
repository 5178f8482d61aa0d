"""Store rooms, and list those that their owners made visible to every organisation.

Every change of a room, its event types or its subscriptions calls `touch_room` first, in the same
transaction. That counts the plan version up, which every publisher notices, and lets one change of
a room happen at a time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    RowMapping,
    bindparam,
    exists,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.db.tables.organisations import organisations
from rooms.db.tables.rooms import LIVE_GRANT, grants, rooms, subscriptions
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.principal import Principal
from rooms.domain.room import Room
from rooms.domain.sharing import ReapprovalField, SubscriptionPolicy, Visibility
from rooms.domain.state_machine import ENDED_STATUSES
from rooms.domain.throttle import THROTTLE_SETTINGS, ThrottleSettings
from rooms.errors import ConflictError, NotFoundError, QuotaConflictError

POLICY_COLUMNS: Final = frozenset(
    {
        "message_expiration_ms",
        "delivery_delay_ms",
        "delivery_delay_multiplier",
        "delivery_attempts",
        "delivery_max_delay_ms",
        "delivery_jitter",
        "ordered",
        *THROTTLE_SETTINGS,
    }
)
"""The columns that subscriptions inherit if they do not set them."""
MAX_LISTED_TYPES: Final = 50
"""The most event types of a room that are shown."""
MAX_LISTED_SCHEMA_BYTES: Final = 4096
"""The largest schema that is shown."""
MAX_LISTED_ROOM_BYTES: Final = 32 * 1024
"""The bytes of schemas of a room that are shown, in the order of the names."""


# Prepared once: to build a statement takes longer than PostgreSQL needs to run it.
_FIND: Final = select(rooms).where(rooms.c.id == bindparam("room"), rooms.c.deleting.is_(False))
# As an update locks it, but publishers may go on with the plan that they have.
_LOCK: Final = _FIND.with_only_columns(rooms.c.id).with_for_update(key_share=True)
_TOUCH: Final = (
    update(rooms)
    .where(rooms.c.id == bindparam("room"), rooms.c.deleting.is_(False))
    .values(plan_version=rooms.c.plan_version + 1)
    .returning(rooms)
)
# A field that is free already keeps its time; the row is locked, so this sees its former values.
_REAPPROVAL_ENDED: Final = text("""
(SELECT coalesce(jsonb_object_agg(f.name, f.at), '{}') FROM (
    SELECT key AS name, value AS at FROM jsonb_each(rooms.reapproval_ended)
    UNION ALL
    SELECT former, to_jsonb(clock_timestamp()) FROM unnest(rooms.reapprove_on) AS o (former)
) f WHERE f.name <> ALL (CAST(:asked AS text[])))
""")
_TOUCH_OWN: Final = _TOUCH.where(rooms.c.organisation_id == bindparam("owner"))


# Locked in one order, so that two of these statements cannot wait for each other.
_TOUCH_UNDER: Final = text("""
WITH found AS MATERIALIZED (
    SELECT r.id FROM rooms r
    WHERE NOT r.deleting AND (r.organisation_id = CAST(:organisation AS uuid) OR r.id IN (
        SELECT s.room_id FROM subscriptions s
        WHERE s.organisation_id = CAST(:organisation AS uuid) AND s.status <> 'deleted'))
    ORDER BY r.id FOR NO KEY UPDATE
)
UPDATE rooms r SET plan_version = r.plan_version + 1 FROM found f WHERE r.id = f.id
RETURNING r.id, CAST(r.organisation_id AS text)
""")
_LIST_LISTED: Final = text("""
SELECT r.id, r.name, r.description, r.subscription_policy, r.created_at, o.name AS owner,
    o.member_id AS owner_member_id,
    (SELECT count(*) FROM event_types t WHERE t.room_id = r.id) AS event_type_count,
    (SELECT coalesce(json_agg(json_build_object('name', t.name, 'version', t.version,
            'schema', CASE WHEN t.bytes <= :max_room THEN t.schema END
        ) ORDER BY t.name), '[]') FROM (
        SELECT t.name, v.version, v.schema,
            sum(octet_length(v.schema::text)) OVER (ORDER BY t.name) AS bytes
        FROM event_types t CROSS JOIN LATERAL (
            -- Only the beginning of a large schema is decompressed.
            SELECT v.version, CASE WHEN octet_length(left(v.schema::text, :max_schema + 1))
                <= :max_schema THEN v.schema END AS schema
            FROM event_type_versions v
            WHERE v.room_id = t.room_id AND v.event_type_id = t.id ORDER BY v.version DESC LIMIT 1
        ) v WHERE t.room_id = r.id ORDER BY t.name LIMIT :max_types
    ) t) AS event_types
FROM rooms r JOIN organisations o ON o.id = r.organisation_id
WHERE r.visibility = 'listed' AND NOT r.deleting AND o.status = 'active'
    AND r.organisation_id <> CAST(:organisation AS uuid)
    AND (CAST(:rooms AS int4[]) IS NULL OR r.id = ANY (CAST(:rooms AS int4[])))
    AND (CAST(:name AS text) IS NULL OR position(lower(:name) IN lower(r.name)) > 0)
    AND (CAST(:owner AS text) IS NULL OR o.name = :owner OR o.member_id = :owner)
    AND (CAST(:event_type AS text) IS NULL OR EXISTS (
        SELECT FROM event_types t WHERE t.room_id = r.id AND t.name = :event_type))
    AND (CAST(:before_at AS timestamptz) IS NULL OR (r.created_at, r.id) < (:before_at, :before_id))
ORDER BY r.created_at DESC, r.id DESC LIMIT :limit
""")


def room_not_found(room: object) -> NotFoundError:
    """Build the error for a room that is not there."""
    return NotFoundError(f"there is no room {room}")


async def check_room_count(
    connection: AsyncConnection, organisation: OrganisationId, most: int
) -> None:
    """Check that the organisation may have another room. QuotaConflictError: it has `most`.

    Those that are being deleted count. Creations at the same moment may exceed the bound by their
    number.
    """
    owned = select(rooms.c.id).where(rooms.c.organisation_id == organisation).limit(most).subquery()
    if (await connection.scalar(select(func.count()).select_from(owned)) or 0) >= most:
        raise QuotaConflictError(
            f"your organisation has {most} rooms, and may have no more: delete some, or ask for a"
            " larger limit (ROOMS_MAX_ROOMS)",
            limit="rooms",
        )


async def create_room(
    connection: AsyncConnection,
    organisation: OrganisationId,
    identity: RoomId,
    fields: Mapping[str, Any],
) -> Room | None:
    """Create a room; return None if another one has the id already.

    ConflictError: the name is taken.
    """
    statement = (
        insert(rooms)
        .values(id=identity, organisation_id=organisation, **fields)
        .on_conflict_do_nothing()
        .returning(rooms)
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is not None:
        return _room(row)
    same_name = select(rooms.c.id).where(
        rooms.c.organisation_id == organisation, rooms.c.name == fields["name"]
    )
    if await connection.scalar(same_name) is not None:
        raise _name_taken(fields["name"])
    return None


async def find_room(
    connection: AsyncConnection, principal: Principal, identity: RoomId, *, lock: bool = False
) -> Room:
    """Return one room that the principal's organisation owns; `lock`: until the transaction ends.

    NotFoundError, also while it is being deleted, and if the key is not for it.
    """
    if not principal.may_use_room(identity):
        raise room_not_found(identity)
    statement = select(rooms).where(
        rooms.c.id == identity,
        rooms.c.organisation_id == principal.organisation_id,
        rooms.c.deleting.is_(False),
    )
    if lock:
        statement = statement.with_for_update(key_share=True)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise room_not_found(identity)
    return _room(row)


async def find_any_room(connection: AsyncConnection, identity: RoomId) -> Room | None:
    """Return a room of any organisation; None: there is none, or it is being deleted."""
    row = (await connection.execute(_FIND, {"room": identity})).mappings().one_or_none()
    return None if row is None else _room(row)


async def find_addressed_room(connection: AsyncConnection, owner: str, name: str) -> Room | None:
    """Return the room of this name that GovStack's interfaces serve, by its owner's member id.

    None: there is none. Whether it exists for the caller is not decided here.
    """
    statement = (
        select(rooms)
        .join(organisations, organisations.c.id == rooms.c.organisation_id)
        .where(
            organisations.c.member_id == owner,
            rooms.c.name == name,
            rooms.c.govstack,
            rooms.c.deleting.is_(False),
        )
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else _room(row)


async def list_rooms(
    connection: AsyncConnection,
    principal: Principal,
    *,
    name: str | None,
    before: tuple[datetime, RoomId] | None,
    limit: int,
    shared: bool = False,
    contains: str | None = None,
    chosen: Collection[RoomId] | None = None,
) -> Sequence[Room]:
    """Return the principal's own rooms, newest first, older than `before`, if given of `name`.

    `shared`: rooms of others instead, in which it has a grant or a subscription. `contains`: only
    rooms whose name has this in it, in any case. `chosen`: only rooms of these ids.
    """
    organisation = principal.organisation_id
    statement = select(rooms).where(~rooms.c.deleting)  # as the index has it
    statement = (
        statement.where(rooms.c.organisation_id != organisation, _takes_part(organisation))
        if shared
        else statement.where(rooms.c.organisation_id == organisation)
    )
    if principal.rooms is not None:
        statement = statement.where(rooms.c.id.in_(principal.rooms))
    if name is not None:
        statement = statement.where(rooms.c.name == name)
    if contains is not None:
        statement = statement.where(rooms.c.name.icontains(contains, autoescape=True))
    if chosen is not None:
        statement = statement.where(rooms.c.id.in_(chosen))
    if before is not None:
        # The first condition is that of the index.
        statement = statement.where(
            rooms.c.created_at <= before[0], tuple_(rooms.c.created_at, rooms.c.id) < before
        )
    ordered = statement.order_by(rooms.c.created_at.desc(), -rooms.c.id).limit(limit)
    return [_room(row) for row in (await connection.execute(ordered)).mappings()]


def _takes_part(organisation: OrganisationId) -> ColumnElement[bool]:
    subscribed = exists().where(
        subscriptions.c.room_id == rooms.c.id,
        subscriptions.c.organisation_id == organisation,
        subscriptions.c.status.not_in(sorted(ENDED_STATUSES)),
    )
    granted = exists().where(
        grants.c.room_id == rooms.c.id,
        or_(grants.c.organisation_id == organisation, grants.c.organisation_id.is_(None)),
        LIVE_GRANT,
    )
    return or_(subscribed, granted)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedEventType:
    """Describe the latest version of an event type."""

    name: str
    version: int
    schema: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRoom:
    """Describe a room as the directory shows it."""

    id: RoomId
    name: str
    description: str | None
    owner: str
    owner_member_id: str | None
    subscription_policy: SubscriptionPolicy
    event_types: tuple[ListedEventType, ...]
    event_type_count: int
    created_at: datetime


async def list_listed_rooms(
    connection: AsyncConnection,
    principal: Principal,
    *,
    name: str | None,
    owner: str | None,
    event_type: str | None,
    before: tuple[datetime, RoomId] | None,
    limit: int,
) -> Sequence[ListedRoom]:
    """Return listed rooms of active organisations other than the principal's, newest first."""
    parameters = {
        "organisation": principal.organisation_id,
        "rooms": None if principal.rooms is None else sorted(principal.rooms),
        "name": name,
        "owner": owner,
        "event_type": event_type,
        "before_at": None if before is None else before[0],
        "before_id": None if before is None else before[1],
        "max_schema": MAX_LISTED_SCHEMA_BYTES,
        "max_room": MAX_LISTED_ROOM_BYTES,
        "max_types": MAX_LISTED_TYPES,
        "limit": limit,
    }
    return [
        ListedRoom(
            id=RoomId(row["id"]),
            name=row["name"],
            description=row["description"],
            owner=row["owner"],
            owner_member_id=row["owner_member_id"],
            subscription_policy=SubscriptionPolicy(row["subscription_policy"]),
            event_types=tuple(ListedEventType(**one) for one in row["event_types"]),
            event_type_count=row["event_type_count"],
            created_at=row["created_at"],
        )
        for row in (await connection.execute(_LIST_LISTED, parameters)).mappings()
    ]


async def touch_room(
    connection: AsyncConnection,
    principal: Principal,
    identity: RoomId,
    fields: Mapping[str, Any] | None = None,
) -> Room:
    """Return the principal's own room with its next plan version, locked until the end.

    `fields` are changed with it. NotFoundError; ConflictError: the name is taken.
    """
    if not principal.may_use_room(identity):
        raise room_not_found(identity)
    statement = _TOUCH_OWN
    if fields:
        statement = statement.values(**fields, updated_at=func.now())
    if fields and "reapprove_on" in fields:
        statement = statement.values(
            reapproval_ended=_REAPPROVAL_ENDED.bindparams(asked=list(fields["reapprove_on"]))
        )
    parameters = {"room": identity, "owner": principal.organisation_id}
    try:
        row = (await connection.execute(statement, parameters)).mappings().one_or_none()
    except IntegrityError as exc:
        raise _name_taken(fields["name"] if fields else identity) from exc
    if row is None:
        raise room_not_found(identity)
    if fields and POLICY_COLUMNS & fields.keys():
        # Workers cache a subscription with its effective policy, and notice a change by this
        # version.
        await connection.execute(
            update(subscriptions)
            .where(subscriptions.c.room_id == identity)
            .values(version=subscriptions.c.version + 1)
        )
    return _room(row)


async def lock_shared_room(connection: AsyncConnection, identity: RoomId) -> None:
    """Lock a room of any owner for a change that routing may not read. NotFoundError."""
    if await connection.scalar(_LOCK, {"room": identity}) is None:
        raise room_not_found(identity)


async def touch_shared_room(connection: AsyncConnection, identity: RoomId) -> Room:
    """Return a room as `touch_room` does, for any owner: a subscriber changes what is its own.

    The caller has checked that the principal may do that. NotFoundError.
    """
    row = (await connection.execute(_TOUCH, {"room": identity})).mappings().one_or_none()
    if row is None:
        raise room_not_found(identity)
    return _room(row)


async def touch_rooms_under(
    connection: AsyncConnection, organisation: OrganisationId
) -> Mapping[RoomId, OrganisationId]:
    """Touch all rooms that an organisation owns or subscribes to; return the owner of each.

    The transaction must have locked the organisation, so that it gets no further subscription.
    """
    rows = await connection.execute(_TOUCH_UNDER, {"organisation": organisation})
    return {RoomId(room): OrganisationId(owner) for room, owner in rows}


async def mark_deleting(connection: AsyncConnection, room: Room) -> None:
    """Hide the room at once and free its name; a job deletes the rest."""
    # '~' is in no name that users may choose.
    await connection.execute(
        update(rooms)
        .where(rooms.c.id == room.id)
        .values(deleting=True, name=f"{room.id}~deleting", updated_at=func.now())
    )


def _name_taken(name: object) -> ConflictError:
    return ConflictError(f"a room named {name} exists already")


def _room(row: RowMapping) -> Room:
    return Room(
        id=RoomId(row["id"]),
        organisation_id=OrganisationId(row["organisation_id"]),
        name=row["name"],
        description=row["description"],
        message_expiration_ms=row["message_expiration_ms"],
        delivery_delay_ms=row["delivery_delay_ms"],
        delivery_delay_multiplier=row["delivery_delay_multiplier"],
        delivery_attempts=row["delivery_attempts"],
        delivery_max_delay_ms=row["delivery_max_delay_ms"],
        delivery_jitter=row["delivery_jitter"],
        throttle=ThrottleSettings(**{name: row[name] for name in THROTTLE_SETTINGS}),
        ordered=row["ordered"],
        operational_url=row["operational_url"],
        operational_events=frozenset(map(OperationalEvent, row["operational_events"])),
        visibility=Visibility(row["visibility"]),
        subscription_policy=SubscriptionPolicy(row["subscription_policy"]),
        reapprove_on=frozenset(map(ReapprovalField, row["reapprove_on"])),
        reapproval_ended={
            ReapprovalField(name): datetime.fromisoformat(at)
            for name, at in row["reapproval_ended"].items()
        },
        transparent=row["transparent"],
        govstack=row["govstack"],
        plan_version=row["plan_version"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
