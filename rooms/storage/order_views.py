"""Ordering keys as people see them."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import DeliveryId, SubscriptionId, room_of
from rooms.domain.states import State

_MOST_COUNTED: Final = 10_000
_LIST: Final = text(f"""
    SELECT m.ordering_key, k.head_id::text, t.state::text, k.since, (
        SELECT count(*) FROM (
            SELECT FROM ordered_waiting w WHERE w.room_id = k.room_id AND w.subscription_id = k.subscription_id AND w.key = k.key
            LIMIT {_MOST_COUNTED}) w), k.key
    FROM ordered_keys k JOIN deliveries t ON t.room_id = k.room_id AND t.id = k.head_id
        JOIN messages m ON m.room_id = t.room_id AND m.id = t.message_id
    WHERE k.room_id = :room AND k.subscription_id = :subscription AND k.key > :after
        AND (NOT :parked OR t.state = '{State.SIDELINED}')
    ORDER BY k.key LIMIT :limit
""")  # noqa: S608 - text of our own


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStanding:
    """An ordering key of a subscription: its head since when in what state, and how many wait behind (10,000 at most)."""

    ordering_key: str
    digest: bytes
    head: DeliveryId
    state: State
    since: datetime
    waiting: int


async def list_keys(
    connection: AsyncConnection, subscription: SubscriptionId, *, parked: bool, after: bytes, limit: int
) -> list[KeyStanding]:
    """The keys of a subscription under which something is under way, by digest; `parked`: whose head is sidelined."""
    found = await connection.execute(
        _LIST,
        {
            "room": room_of(subscription),
            "subscription": subscription,
            "after": after,
            "limit": limit,
            "parked": parked,
        },
    )
    return [
        KeyStanding(
            ordering_key=ordering_key,
            digest=bytes(key),
            head=DeliveryId(head),
            state=State(state),
            since=since,
            waiting=waiting,
        )
        for ordering_key, head, state, since, waiting, key in found
    ]
