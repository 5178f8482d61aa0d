"""What publishing needs to know of a room, read in one statement, so that all of it is of one moment."""

from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.states import SubscriptionType
from rooms.storage.transactions import transaction

_LOAD: Final = text("""
SELECT r.organisation_id::text, r.plan_version, r.message_expiration_ms,
    (SELECT coalesce(json_agg(json_build_object(
            'id', s.id, 'type', s.type, 'version', s.version, 'event_types', s.event_types, 'filter', s.filter,
            'ordered', coalesce(s.ordered, r.ordered))
            ORDER BY s.id), '[]')::text
        FROM subscriptions s WHERE s.room_id = r.id AND s.status <> 'deleted'),
    (SELECT coalesce(json_agg(json_build_object(
            'name', t.name, 'version', v.version, 'schema', v.schema::text)), '[]')::text
        FROM event_types t JOIN event_type_versions v ON v.room_id = t.room_id AND v.event_type_id = t.id
        WHERE t.room_id = r.id)
FROM rooms r WHERE r.id = :room AND NOT r.deleting
""")


class InterestRecord(msgspec.Struct, frozen=True):
    """One entry of a subscription's `event_types`."""

    name: str
    versions: frozenset[int] | None = None


class SubscriptionRecord(msgspec.Struct, frozen=True):
    """A subscription that is not deleted; `event_types` None: all of them; `filter` None: whatever they hold."""

    id: SubscriptionId
    type: SubscriptionType
    version: int
    event_types: tuple[InterestRecord, ...] | None
    filter: str | None = None
    ordered: bool = False
    """What has an ordering key comes in order."""


class VersionRecord(msgspec.Struct, frozen=True):
    """A version of an event type; `schema` is JSON text, None: any payload."""

    name: str
    version: int
    schema: str | None


class PlanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A room as publishing needs it. Subscriptions come oldest first."""

    room_id: RoomId
    organisation_id: OrganisationId
    plan_version: int
    expiration_ms: int | None
    subscriptions: tuple[SubscriptionRecord, ...]
    versions: tuple[VersionRecord, ...]


_subscriptions: Final = msgspec.json.Decoder(tuple[SubscriptionRecord, ...])
_versions: Final = msgspec.json.Decoder(tuple[VersionRecord, ...])


async def load_plan(engine: AsyncEngine, room: RoomId) -> PlanRecord | None:
    """The room as it is now; None where there is none, or it is being deleted.

    StorageUnavailableError, StorageRefusedError.
    """
    async with transaction(engine) as connection:
        row = (await connection.execute(_LOAD, {"room": room})).one_or_none()
    if row is None:
        return None
    organisation, plan_version, expiration_ms, subscriptions, versions = row
    return PlanRecord(
        room_id=room,
        organisation_id=organisation,
        plan_version=plan_version,
        expiration_ms=expiration_ms or None,
        subscriptions=_subscriptions.decode(subscriptions),
        versions=_versions.decode(versions),
    )
