"""Read the names of subscriptions, of their rooms and of their organisations."""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_NAMES: Final = text("""
SELECT s.id::text, s.name, r.name AS room, o.name AS organisation
FROM subscriptions s JOIN rooms r ON r.id = s.room_id JOIN organisations o ON o.id = s.organisation_id
WHERE s.id = ANY (CAST(:ids AS uuid[]))
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionName:
    """The names of a subscription, of its room and of its organisation."""

    id: str
    name: str
    room: str
    organisation: str


async def subscription_names(
    connection: AsyncConnection, ids: Collection[str]
) -> list[SubscriptionName]:
    """Return the names of those that exist, of all organisations."""
    rows = await connection.execute(_NAMES, {"ids": list(ids)})
    return [SubscriptionName(**row) for row in rows.mappings()]
