"""Compute what another organisation's subscription was entitled to at each past time.

It is read from grants, which are never deleted, and from the history of subscriptions.
"""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.grants import grants_since
from rooms.db.catalog.rooms import find_any_room, room_not_found
from rooms.db.catalog.subscriptions import interests_to_json
from rooms.domain.room import Room, Subscription
from rooms.domain.sharing import GrantKind, ReapprovalField

MAX_PERIODS: Final = 1000
"""The most changes of its event types that are read, the newest; earlier ones count for nothing."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# Entries that workers write have no event types. While it was pending, nothing was approved.
_APPROVED_TYPES: Final = text(f"""
SELECT at, types FROM (
    SELECT at, id, snapshot -> 'event_types' AS types,
        lag(snapshot -> 'event_types') OVER (ORDER BY at, id) AS former
    FROM subscription_history
    WHERE room_id = :room AND subscription_id = CAST(:subscription AS uuid)
        AND status <> 'pending' AND jsonb_exists(snapshot, 'event_types')
) h WHERE types IS DISTINCT FROM former ORDER BY at DESC, id DESC LIMIT {MAX_PERIODS + 1}
""")  # noqa: S608 - constants of this module


async def entitlements(
    connection: AsyncConnection, subscription: Subscription, since: datetime
) -> list[dict[str, Any]] | None:
    """Return periods with event types after a time, as a replay job takes them; None: no limit.

    The owner's own subscription has no limit. An approved one is entitled from its request on, and
    to event types that were approved later from that approval on; one by grant while there was a
    grant. ConflictError: there were too many grants since then.
    """
    room = await find_any_room(connection, subscription.room_id)
    if room is None:
        raise room_not_found(subscription.room_id)
    if room.organisation_id == subscription.organisation_id:
        return None
    periods: list[dict[str, Any]] = []
    if subscription.approved_at is not None:
        periods += await _approved_periods(connection, room, subscription)
    for grant in await grants_since(
        connection, room.id, subscription.organisation_id, GrantKind.SUBSCRIBE, since
    ):
        ends = [end for end in (grant.until, grant.revoked_at) if end is not None]
        periods.append(_period(grant.event_types, grant.starts_at, min(ends, default=None)))
    return periods


async def _approved_periods(
    connection: AsyncConnection, room: Room, subscription: Subscription
) -> list[dict[str, Any]]:
    """Return the periods of an approved subscription.

    Where the owner lets it change its event types without an approval, it could have had all.
    """
    if ReapprovalField.EVENT_TYPES not in room.reapprove_on:
        return [_period(None, subscription.created_at, None)]
    parameters = {"room": subscription.room_id, "subscription": subscription.id}
    newest_first: list[tuple[datetime, Any]] = [
        (at, types) for at, types in await connection.execute(_APPROVED_TYPES, parameters)
    ]
    if not newest_first:  # it is being created, with what the owner approved
        newest_first = [(subscription.created_at, interests_to_json(subscription.event_types))]
    periods, end = [], None
    for number, (at, types) in enumerate(newest_first, 1):
        # What it asked for at first was approved for all the time since then.
        is_first = number == len(newest_first) <= MAX_PERIODS
        names = None if types is None else tuple(sorted({one["name"] for one in types}))
        periods.append(_period(names, subscription.created_at if is_first else at, end))
        end = at
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
