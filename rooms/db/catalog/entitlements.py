"""Compute what another organisation's subscription might receive at past times."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.grants import grants_since
from rooms.db.catalog.rooms import find_any_room, room_not_found
from rooms.domain.room import Subscription
from rooms.domain.sharing import GrantKind

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


async def entitlements(
    connection: AsyncConnection, subscription: Subscription, since: datetime
) -> list[dict[str, Any]] | None:
    """Return periods with event types after a time, as a replay job takes them; None: no limit.

    The owner's own subscription has no limit. An approved one is entitled from its request on; one
    by grant while there was a grant. ConflictError: there were too many grants since then.
    """
    room = await find_any_room(connection, subscription.room_id)
    if room is None:
        raise room_not_found(subscription.room_id)
    if room.organisation_id == subscription.organisation_id:
        return None
    periods: list[dict[str, Any]] = []
    if subscription.approved_at is not None:
        periods.append(_period(None, subscription.created_at, None))
    for grant in await grants_since(
        connection, room.id, subscription.organisation_id, GrantKind.SUBSCRIBE, since
    ):
        ends = [end for end in (grant.until, grant.revoked_at) if end is not None]
        periods.append(_period(grant.event_types, grant.starts_at, min(ends, default=None)))
    return periods


def _period(
    event_types: tuple[str, ...] | None, start: datetime, end: datetime | None
) -> dict[str, Any]:
    return {
        "event_types": None if event_types is None else list(event_types),
        "from_us": _us(start),
        "until_us": None if end is None else _us(end),
    }


def _us(at: datetime) -> int:
    """Return microseconds since 1970, as exactly as PostgreSQL stores times."""
    return (at - _EPOCH) // timedelta(microseconds=1)
