"""Store what a room's owner allows other organisations.

A grant is never deleted: `revoked_at` ends it. So what an organisation was entitled to at a past
time can be computed. Every change needs `touch_room` in its transaction.
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    Integer,
    RowMapping,
    Select,
    and_,
    bindparam,
    literal,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.db.tables.rooms import LIVE_GRANT, grants, rooms
from rooms.domain.event_type_pattern import MAX_PATTERNS
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.principal import Principal
from rooms.domain.sharing import Grant, GrantId, GrantKind
from rooms.errors import ConflictError, NotFoundError

MAX_GRANTS: Final = 1000
"""The most grants of a room that have not ended."""
MAX_GRANTED: Final = 20_000
"""The most event types that they name together; every publisher keeps them in memory."""
_NOT_ENDED: Final = and_(
    grants.c.revoked_at.is_(None), or_(grants.c.until.is_(None), grants.c.until > func.now())
)
_HAS_ENDED: Final = and_(grants.c.revoked_at.is_(None), grants.c.until <= func.now())
_HAS_BEGUN: Final = and_(
    grants.c.revoked_at.is_(None), grants.c.begins_later, grants.c.starts_at <= func.now()
)
"""Conditions for grants whose time has ended, or begun, and which no change has applied yet."""
_DUE: Final = (
    select(
        grants.c.room_id,
        rooms.c.organisation_id,
        func.row_number()
        .over(partition_by=rooms.c.organisation_id, order_by=grants.c.room_id)
        .label("turn"),
    )
    .join(rooms, rooms.c.id == grants.c.room_id)
    .where(
        grants.c.room_id.not_in(bindparam("left_out", expanding=True)),
        rooms.c.deleting.is_(False),
        or_(_HAS_ENDED, _HAS_BEGUN),
    )
    .group_by(grants.c.room_id, rooms.c.organisation_id)
    .subquery()
)
_DUE_ROOMS: Final = (
    select(_DUE.c.room_id, _DUE.c.organisation_id)
    .order_by(
        _DUE.c.turn,
        _DUE.c.organisation_id <= bindparam("after", type_=rooms.c.organisation_id.type),
        _DUE.c.organisation_id,
    )
    .limit(bindparam("most", type_=Integer))
)


async def create_grant(
    connection: AsyncConnection,
    room: RoomId,
    identity: GrantId,
    *,
    organisation: OrganisationId | None,
    kind: GrantKind,
    event_types: Sequence[str] | None,
    starts_at: datetime | None,
    until: datetime | None,
) -> Grant:
    """Create a grant; `organisation` None: for every organisation.

    ConflictError: the room has too many, or they name too many event types.
    """
    await _check_bounds(connection, room, organisation, kind, len(event_types or ()))
    values: dict[str, Any] = {
        "room_id": room,
        "id": identity,
        "organisation_id": organisation,
        "kind": kind.value,
        "event_types": None if event_types is None else list(event_types),
        "until": until,
    }
    if starts_at is not None:
        later = literal(starts_at) > func.statement_timestamp()
        values |= {"starts_at": starts_at, "begins_later": later}
    row = await connection.execute(insert(grants).values(values).returning(grants))
    return _grant(row.mappings().one())


async def _check_bounds(
    connection: AsyncConnection,
    room: RoomId,
    organisation: OrganisationId | None,
    kind: GrantKind,
    named: int,
) -> None:
    size = func.cardinality(grants.c.event_types)
    same = and_(
        grants.c.organisation_id.is_not_distinct_from(organisation), grants.c.kind == kind.value
    )
    counts = select(func.count(), func.sum(size), func.sum(size).filter(same)).where(
        grants.c.room_id == room, _NOT_ENDED
    )
    count, all_named, same_named = (await connection.execute(counts)).one()
    if count >= MAX_GRANTS:
        raise ConflictError(f"a room has at most {MAX_GRANTS} grants; revoke some of them")
    if named and (same_named or 0) + named > MAX_PATTERNS:
        raise ConflictError(
            f"the grants of one kind to one organisation name at most {MAX_PATTERNS} event types; "
            "use patterns such as order.*"
        )
    if named and (all_named or 0) + named > MAX_GRANTED:
        raise ConflictError(
            f"the grants of a room name at most {MAX_GRANTED} event types; "
            "use patterns such as order.*"
        )


async def list_grants(
    connection: AsyncConnection,
    room: RoomId,
    *,
    kind: GrantKind | None,
    organisation: OrganisationId | None,
    ended: bool,
    before: str | None,
    limit: int,
) -> Sequence[Grant]:
    """Return grants of a room, newest first; `ended`: also those that are over."""
    statement = _grants(room).order_by(grants.c.id.desc()).limit(limit)
    if kind is not None:
        statement = statement.where(grants.c.kind == kind.value)
    if organisation is not None:
        statement = statement.where(grants.c.organisation_id == organisation)
    if not ended:
        statement = statement.where(_NOT_ENDED)
    if before is not None:
        statement = statement.where(grants.c.id < before)
    return [_grant(row) for row in (await connection.execute(statement)).mappings()]


async def list_own_grants(
    connection: AsyncConnection,
    principal: Principal,
    *,
    kind: GrantKind | None,
    organisation: OrganisationId | None,
    ended: bool,
    before: tuple[RoomId, str] | None,
    limit: int,
) -> Sequence[tuple[str, Grant]]:
    """Return the grants of the principal's rooms, each with the room's name.

    They come by room, and in it newest first. A restricted key sees its own rooms only. `before`:
    the room and grant that came last.
    """
    of_room = select(grants).where(grants.c.room_id == rooms.c.id)
    if kind is not None:
        of_room = of_room.where(grants.c.kind == kind.value)
    if organisation is not None:
        of_room = of_room.where(grants.c.organisation_id == organisation)
    if not ended:
        of_room = of_room.where(_NOT_ENDED)
    if before is not None:
        room, identity = before
        of_room = of_room.where(or_(rooms.c.id < room, grants.c.id < identity))
    # Of each room no more than are wanted, so that few are read however many there are.
    found = of_room.order_by(grants.c.id.desc()).limit(limit).lateral("found")
    statement = (
        select(rooms.c.name, found)
        .select_from(rooms.join(found, true()))
        .where(rooms.c.organisation_id == principal.organisation_id, rooms.c.deleting.is_(False))
        .order_by(rooms.c.id.desc(), found.c.id.desc())
        .limit(limit)
    )
    if principal.rooms is not None:
        statement = statement.where(rooms.c.id.in_(principal.rooms))
    if before is not None:
        statement = statement.where(rooms.c.id <= before[0])
    return [(row["name"], _grant(row)) for row in (await connection.execute(statement)).mappings()]


async def find_grant(
    connection: AsyncConnection, room: RoomId, identity: str, kind: GrantKind
) -> Grant:
    """Return a grant of this kind that has not ended. NotFoundError: the room has none such."""
    statement = _grants(room).where(
        grants.c.id == identity, grants.c.kind == kind.value, _NOT_ENDED
    )
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise NotFoundError(f"there is no grant {identity}")
    return _grant(row)


async def revoke_grant(connection: AsyncConnection, room: RoomId, identity: str) -> Grant:
    """End a grant now. Repeating the call is harmless. NotFoundError: the room has none such."""
    row = await connection.execute(
        update(grants)
        .where(grants.c.room_id == room, grants.c.id == identity)
        # The time after the room was locked: a walk that saw the grant is of an earlier one.
        .values(revoked_at=func.coalesce(grants.c.revoked_at, func.statement_timestamp()))
        .returning(grants)
    )
    found = row.mappings().one_or_none()
    if found is None:
        raise NotFoundError(f"there is no grant {identity}")
    return _grant(found)


async def subscribe_grants(connection: AsyncConnection, room: RoomId) -> Sequence[Grant]:
    """Return the grants to subscribe that are valid now."""
    statement = _grants(room).where(grants.c.kind == GrantKind.SUBSCRIBE.value, LIVE_GRANT)
    return [_grant(row) for row in (await connection.execute(statement)).mappings()]


async def has_ended_grant(
    connection: AsyncConnection, room: RoomId, organisation: OrganisationId, since: datetime
) -> bool:
    """Return whether a grant to subscribe, one for all included, has ended since then."""
    end = func.least(grants.c.until, grants.c.revoked_at)
    statement = _grants(room).where(
        grants.c.kind == GrantKind.SUBSCRIBE.value,
        or_(grants.c.organisation_id == organisation, grants.c.organisation_id.is_(None)),
        end > since,
        end <= func.clock_timestamp(),
    )
    return bool(await connection.scalar(select(statement.exists())))


async def grants_since(
    connection: AsyncConnection,
    room: RoomId,
    organisation: OrganisationId,
    kind: GrantKind,
    since: datetime,
) -> Sequence[Grant]:
    """Return the grants of a kind, those for all included, that ended after `since` or not at all.

    ConflictError: they are more than `MAX_GRANTS`, or name more than `MAX_GRANTED` event types.
    """
    end = func.least(grants.c.until, grants.c.revoked_at)
    statement = _grants(room).where(
        grants.c.kind == kind.value,
        or_(grants.c.organisation_id == organisation, grants.c.organisation_id.is_(None)),
        or_(end.is_(None), end > since),
    )
    found = statement.subquery()
    sizes = select(func.count(), func.sum(func.cardinality(found.c.event_types)))
    count, named = (await connection.execute(sizes.select_from(found))).one()
    if count > MAX_GRANTS or (named or 0) > MAX_GRANTED:
        raise ConflictError(
            f"since then the room's owner has granted {count} times, which is too often to tell "
            "what was granted at each time; begin later"
        )
    return [_grant(row) for row in (await connection.execute(statement)).mappings()]


async def rooms_with_due_grants(
    connection: AsyncConnection,
    *,
    after: OrganisationId,
    left_out: Collection[RoomId],
    limit: int,
) -> list[tuple[RoomId, OrganisationId]]:
    """Return rooms with grants whose time began or ended and was not applied, and their owners.

    The first room of each owner comes first, then the second, in the order of the owners' ids from
    the one behind `after` on. `left_out`: rooms that are not returned.
    """
    found = await connection.execute(
        _DUE_ROOMS, {"after": after, "left_out": sorted(left_out), "most": limit}
    )
    return [(RoomId(room), OrganisationId(owner)) for room, owner in found]


async def mark_applied(connection: AsyncConnection, room: RoomId) -> frozenset[GrantKind]:
    """Mark the grants of a room whose time has begun or ended, so that they are applied once.

    Return of which kinds they are.
    """
    begun = update(grants).where(grants.c.room_id == room, _HAS_BEGUN).values(begins_later=False)
    ended = update(grants).where(grants.c.room_id == room, _HAS_ENDED)
    found: set[GrantKind] = set()
    for statement in (begun, ended.values(revoked_at=grants.c.until)):
        kinds = await connection.execute(statement.returning(grants.c.kind))
        found |= set(map(GrantKind, kinds.scalars()))
    return frozenset(found)


def _grants(room: RoomId) -> Select[Any]:
    return select(grants).where(grants.c.room_id == room)


def _grant(row: RowMapping) -> Grant:
    return Grant(
        id=GrantId(row["id"]),
        room_id=RoomId(row["room_id"]),
        organisation_id=None
        if row["organisation_id"] is None
        else OrganisationId(row["organisation_id"]),
        kind=GrantKind(row["kind"]),
        event_types=None if row["event_types"] is None else tuple(row["event_types"]),
        starts_at=row["starts_at"],
        until=row["until"],
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
    )
