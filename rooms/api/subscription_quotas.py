"""Check the quotas `subscriptions` of a room and of the organisation that subscribes to it."""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db import quotas as records
from rooms.domain.ids import RoomId
from rooms.domain.principal import Principal
from rooms.domain.quota import QuotaLimit
from rooms.errors import QuotaConflictError


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionsLeft:
    """Hold how many subscriptions may still be created; None: any number."""

    in_room: int | None
    of_organisation: int | None

    def check(self, created: int = 0) -> None:
        """Raise QuotaConflictError where there may be no other after `created` new ones."""
        _check(self.in_room, created, "this room")
        _check(self.of_organisation, created, "your organisation")


def _check(left: int | None, created: int, whose: str) -> None:
    if left is not None and created >= left:
        raise QuotaConflictError(
            f"{whose} has as many subscriptions as its quota subscriptions allows",
            limit=QuotaLimit.SUBSCRIPTIONS,
        )


async def subscriptions_left(
    connection: AsyncConnection, principal: Principal, room: RoomId
) -> SubscriptionsLeft:
    """Return what the quotas leave to a principal in a room that the transaction has locked."""
    in_room = (await records.find_quotas(connection, room=room)).subscriptions
    own = None if principal.quotas is None else principal.quotas.subscriptions
    if in_room is not None:
        in_room -= await records.count_subscriptions(connection, room=room)
    if own is not None:
        own -= await records.count_subscriptions(connection, organisation=principal.organisation_id)
    return SubscriptionsLeft(in_room=in_room, of_organisation=own)
