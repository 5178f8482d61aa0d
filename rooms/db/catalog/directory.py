"""List the rooms that their owners made visible to every organisation."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import RoomId
from rooms.domain.principal import Principal
from rooms.domain.sharing import SubscriptionPolicy

MAX_EVENT_TYPES: Final = 50
"""The most event types of a room that are shown."""
MAX_SCHEMA_BYTES: Final = 4096
"""The largest schema that is shown."""
MAX_ROOM_BYTES: Final = 32 * 1024
"""The bytes of schemas of a room that are shown, in the order of the names."""

_LIST: Final = text("""
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


async def list_rooms(
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
        "max_schema": MAX_SCHEMA_BYTES,
        "max_room": MAX_ROOM_BYTES,
        "max_types": MAX_EVENT_TYPES,
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
        for row in (await connection.execute(_LIST, parameters)).mappings()
    ]
