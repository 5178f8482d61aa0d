"""Find out what an organisation may do in a room, its own or another's.

A room exists for its owner, for those with a grant, for its subscribers, and, if it is listed, for
all. For others it is not there.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from sqlalchemy import exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.rooms import find_any_room, room_not_found
from rooms.db.tables.rooms import IS_SHOWN_IN_PORTALS, LIVE_GRANT, grants, subscriptions
from rooms.domain.event_type_pattern import covers, matches_any
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.principal import Principal
from rooms.domain.room import Room
from rooms.domain.sharing import GrantKind, SubscriptionPolicy, Visibility
from rooms.domain.state_machine import ENDED_STATUSES, SubscriptionStatus
from rooms.errors import ForbiddenError

Patterns = tuple[str, ...] | None
"""Event types by pattern; None: all, empty: none."""
_NONE: Final[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomAccess:
    """Hold what a principal may do in a room."""

    room: Room
    owns: bool
    publishes: Patterns
    """The event types that it was granted to publish; the owner: all."""
    granted: Patterns
    """The event types that it was granted to receive."""
    subscribed: bool
    """It has a subscription that has not ended."""
    approved: bool
    """The owner approved such a subscription, or the room takes all."""

    @classmethod
    def of_owner(cls, room: Room) -> "RoomAccess":
        """Return what the room's owner may do."""
        return cls(
            room=room, owns=True, publishes=None, granted=None, subscribed=False, approved=False
        )

    @property
    def visible_event_types(self) -> Patterns:
        """Return the event types whose names and schemas it may read."""
        sees_all = self.owns or self.approved or self.room.visibility is Visibility.LISTED
        return None if sees_all or self.publishes != _NONE else self.granted

    def sees_event_type(self, name: str) -> bool:
        """Return whether it may read an event type."""
        return matches_any(self.visible_event_types, name)

    def join(self) -> tuple[SubscriptionStatus, Patterns]:
        """Return the status of a new subscription, and what it may take.

        A grant to subscribe is the owner's approval. ForbiddenError: the room takes no others.
        """
        if self.owns:
            return SubscriptionStatus.ACTIVE, None
        if self.room.subscription_policy is SubscriptionPolicy.AUTOMATIC:
            return SubscriptionStatus.ACTIVE, None
        if self.granted != _NONE:
            return SubscriptionStatus.ACTIVE, self.granted
        if self.room.subscription_policy is SubscriptionPolicy.APPROVAL:
            return SubscriptionStatus.PENDING, None
        raise ForbiddenError("this room takes subscriptions only by a grant of its owner")

    @property
    def is_granted(self) -> bool:
        """Return whether a subscription would depend on a grant."""
        takes_all = self.room.subscription_policy is SubscriptionPolicy.AUTOMATIC
        return not self.owns and not takes_all and self.granted != _NONE


async def find_access(
    connection: AsyncConnection, principal: Principal, room: RoomId
) -> RoomAccess:
    """Return what the principal may do in a room. NotFoundError: the room is not there for it."""
    if not principal.may_use_room(room):
        raise room_not_found(room)
    found = await find_any_room(connection, room)
    if found is None:
        raise room_not_found(room)
    organisation = principal.organisation_id
    if found.organisation_id == organisation:
        if principal.is_portal and not await _has_shown(connection, organisation, room):
            raise room_not_found(room)
        return RoomAccess.of_owner(found)
    granted = await _read_grants(connection, organisation, [room])
    own = await connection.execute(
        select(func.bool_or(subscriptions.c.approved_at.is_not(None))).where(
            subscriptions.c.room_id == room,
            subscriptions.c.organisation_id == organisation,
            subscriptions.c.status.not_in(sorted(ENDED_STATUSES)),
        )
    )
    approved = own.scalar_one()
    access = RoomAccess(
        room=found,
        owns=False,
        publishes=granted.get((room, GrantKind.PUBLISH), _NONE),
        granted=granted.get((room, GrantKind.SUBSCRIBE), _NONE),
        subscribed=approved is not None,
        approved=bool(approved),
    )
    is_there = (
        access.publishes != _NONE
        or access.granted != _NONE
        or access.subscribed
        or found.visibility is Visibility.LISTED
    )
    if not is_there:
        raise room_not_found(room)
    return access


async def find_publishable(
    connection: AsyncConnection, principal: Principal, found: Collection[Room]
) -> dict[RoomId, Patterns]:
    """Return by room which event types the principal's organisation may publish in it."""
    organisation = principal.organisation_id
    others = [room.id for room in found if room.organisation_id != organisation]
    granted = await _read_grants(connection, organisation, others)
    return {room: granted.get((room, GrantKind.PUBLISH), _NONE) for room in others}


async def _read_grants(
    connection: AsyncConnection, organisation: OrganisationId, of: Collection[RoomId]
) -> dict[tuple[RoomId, GrantKind], Patterns]:
    """Return what an organisation was granted in rooms of others, where that is anything."""
    rows = await connection.execute(
        select(grants.c.room_id, grants.c.kind, grants.c.event_types).where(
            grants.c.room_id.in_(of),
            LIVE_GRANT,
            or_(grants.c.organisation_id == organisation, grants.c.organisation_id.is_(None)),
        )
    )
    found: dict[tuple[RoomId, GrantKind], Patterns] = {}
    for room, kind, event_types in rows:
        key = RoomId(room), GrantKind(kind)
        known = found.get(key, _NONE)
        found[key] = None if event_types is None or known is None else (*known, *event_types)
    return found


async def _has_shown(
    connection: AsyncConnection, organisation: OrganisationId, room: RoomId
) -> bool:
    """Return whether portals show a subscription to a room, be it an ended one."""
    statement = select(
        exists().where(
            subscriptions.c.room_id == room,
            subscriptions.c.organisation_id == organisation,
            subscriptions.c.status != SubscriptionStatus.DELETED.value,
            IS_SHOWN_IN_PORTALS,
        )
    )
    return bool(await connection.scalar(statement))


def is_covered(granted: Collection[str] | None, wanted: Patterns) -> bool:
    """Return whether everything that a subscription takes is among what it may take."""
    if granted is None:
        return True
    known = frozenset(granted)
    return wanted is not None and all(covers(known, pattern) for pattern in wanted)
