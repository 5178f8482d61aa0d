"""Read what publishing needs to know of a room in one statement, as of one moment.

Idempotency keys and caller's ids are also looked up here; the publish statement takes them.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Collection, Mapping
from typing import Final

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db.connection import autocommit, snapshot, transaction
from rooms.db.operational.outbox import HAS_RECIPIENT
from rooms.db.publish.insert import IDEMPOTENCY_TTL
from rooms.db.statement_parts import ROOM_LIFETIME_MS
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.quota import Quotas
from rooms.domain.sharing import GrantKind, Visibility
from rooms.domain.state_machine import SubscriptionType

_OWNER_RECEIVES: Final = HAS_RECIPIENT.format(condition="o.organisation_id = r.organisation_id")
_PAGE: Final = 5000
"""Subscriptions that are read and decoded at a time: a few milliseconds of the event loop."""
_FIRST_ID: Final = "00000000-0000-0000-0000-000000000000"
_SUBSCRIPTIONS: Final = """
    SELECT coalesce(json_agg(json_build_object(
            'id', s.id, 'organisation_id', s.organisation_id, 'type', s.type, 'version', s.version - s.lane_changes, 'event_types', s.event_types, 'filter', s.filter,
            'ordered', coalesce(s.ordered, r.ordered), 'expiration_ms', s.message_expiration_ms)
            ORDER BY s.id), '[]')::text
        FROM (SELECT * FROM subscriptions s WHERE s.room_id = r.id AND s.id > :after
            AND s.status NOT IN ('pending', 'deleted', 'rejected', 'terminated') ORDER BY s.id LIMIT :page) s
"""
_LOAD_ROUTING: Final = text(f"""
SELECT r.organisation_id::text, r.plan_version,
    {ROOM_LIFETIME_MS},
    r.transparent, r.quotas,
    '{OperationalEvent.MESSAGE_COMPLETED}' = ANY (r.operational_events) AND {_OWNER_RECEIVES},
    (SELECT o.status = 'active' FROM organisations o WHERE o.id = r.organisation_id),
    (SELECT coalesce(json_agg(json_build_object(
            'organisation_id', g.organisation_id, 'event_types', g.event_types,
            'starts_ms', (extract(epoch FROM g.starts_at) * 1000)::int8, 'until_ms', (extract(epoch FROM g.until) * 1000)::int8)), '[]')::text
        FROM grants g WHERE g.room_id = r.id AND g.kind = '{GrantKind.PUBLISH}' AND g.revoked_at IS NULL),
    r.visibility = '{Visibility.LISTED}',
    (SELECT coalesce(json_agg(json_build_object(
            'organisation_id', g.organisation_id,
            'starts_ms', (extract(epoch FROM g.starts_at) * 1000)::int8, 'until_ms', (extract(epoch FROM g.until) * 1000)::int8)), '[]')::text
        FROM grants g WHERE g.room_id = r.id AND g.kind = '{GrantKind.SUBSCRIBE}' AND g.revoked_at IS NULL),
    ({_SUBSCRIPTIONS}) AS subscriptions,
    (SELECT coalesce(json_agg(json_build_object(
            'name', t.name, 'version', v.version, 'schema', v.schema::text)), '[]')::text
        FROM event_types t JOIN event_type_versions v ON v.room_id = t.room_id AND v.event_type_id = t.id
        WHERE t.room_id = r.id)
FROM rooms r WHERE r.id = :room AND NOT r.deleting
""")  # noqa: S608 - constants of this package
_LOAD_SUBSCRIPTIONS: Final = text(f"SELECT ({_SUBSCRIPTIONS}) FROM rooms r WHERE r.id = :room")  # noqa: S608 - constants of this package


class InterestRecord(msgspec.Struct, frozen=True):
    """Read one entry of a subscription's `event_types`; the name may be a pattern."""

    name: str
    versions: frozenset[int] | None = None


class SubscriptionRecord(msgspec.Struct, frozen=True):
    """Read a subscription that is not deleted.

    `event_types` None: all of them; `filter` None: no filter.
    """

    id: SubscriptionId
    organisation_id: OrganisationId
    type: SubscriptionType
    version: int
    event_types: tuple[InterestRecord, ...] | None
    filter: str | None = None
    ordered: bool = False
    """True if messages with an ordering key come in order."""
    expiration_ms: int | None = None
    """The longest lifetime of its deliveries; None: that of their messages."""


class VersionRecord(msgspec.Struct, frozen=True):
    """Read a version of an event type; `schema` is JSON text, None: any payload."""

    name: str
    version: int
    schema: str | None


class GrantRecord(msgspec.Struct, frozen=True):
    """Read a grant, times in epoch ms. `organisation_id` None: every organisation."""

    organisation_id: OrganisationId | None
    starts_ms: int
    until_ms: int | None

    def is_valid(self, now_ms: int) -> bool:
        """Return whether it has begun and has not ended."""
        return self.starts_ms <= now_ms and (self.until_ms is None or now_ms < self.until_ms)


class PublishGrantRecord(GrantRecord, frozen=True, kw_only=True):
    """Read a grant to publish these event types; None: all of them."""

    event_types: tuple[str, ...] | None


class RoutingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what publishing needs to know of a room. Subscriptions come oldest first."""

    room_id: RoomId
    organisation_id: OrganisationId
    plan_version: int
    expiration_ms: int | None
    transparent: bool = False
    quotas: Quotas | None = None
    """The room's own; None: it has none."""
    tracks_completion: bool = False
    """The owner receives an event when all deliveries of a message have ended."""
    owner_active: bool = True
    grants: tuple[PublishGrantRecord, ...] = ()
    subscribe_grants: tuple[GrantRecord, ...] = ()
    """They say which organisations know the room, though they may publish nothing."""
    listed: bool = False
    """The room is in the directory of all organisations."""
    subscriptions: tuple[SubscriptionRecord, ...]
    versions: tuple[VersionRecord, ...]


_subscriptions: Final = msgspec.json.Decoder(tuple[SubscriptionRecord, ...])
_grants: Final = msgspec.json.Decoder(tuple[PublishGrantRecord, ...])
_subscribe_grants: Final = msgspec.json.Decoder(tuple[GrantRecord, ...])
_versions: Final = msgspec.json.Decoder(tuple[VersionRecord, ...])


async def load_routing(engine: AsyncEngine, room: RoomId) -> RoutingRecord | None:
    """Return the room's routing as of now; None if there is no room, or it is being deleted.

    StorageUnavailableError, StorageRefusedError.
    """
    async with snapshot(engine) as connection:
        page = {"room": room, "after": _FIRST_ID, "page": _PAGE}
        row = (await connection.execute(_LOAD_ROUTING, page)).one_or_none()
        if row is None:
            return None
        subscriptions = _subscriptions.decode(row.subscriptions)
        last = subscriptions
        while len(last) == _PAGE:
            page["after"] = last[-1].id
            last = _subscriptions.decode(await connection.scalar(_LOAD_SUBSCRIPTIONS, page))
            subscriptions += last
    (
        organisation,
        plan_version,
        expiration_ms,
        transparent,
        quotas,
        tracks_completion,
        active,
        grants,
        listed,
        subscribe_grants,
        _,
        versions,
    ) = row
    return RoutingRecord(
        room_id=room,
        organisation_id=organisation,
        plan_version=plan_version,
        expiration_ms=expiration_ms or None,
        transparent=transparent,
        quotas=Quotas.from_document(quotas),
        tracks_completion=tracks_completion,
        owner_active=active,
        grants=_grants.decode(grants),
        listed=listed,
        subscribe_grants=_subscribe_grants.decode(subscribe_grants),
        subscriptions=subscriptions,
        versions=_versions.decode(versions),
    )


_FIND_PLAN_VERSION: Final = text("SELECT plan_version FROM rooms WHERE id = :room AND NOT deleting")


async def find_plan_version(engine: AsyncEngine, room: RoomId) -> int | None:
    """Return the current version of a room's routing; None as for `load_routing`.

    StorageUnavailableError, StorageRefusedError.
    """
    async with autocommit(engine) as connection:
        found: int | None = (
            await connection.execute(_FIND_PLAN_VERSION, {"room": room})
        ).scalar_one_or_none()
    return found


_FIND_KEY: Final = text(
    "SELECT request_hash, answer FROM idempotency_keys "  # noqa: S608 - constants of this package
    f"WHERE room_id = :room AND key = :key AND created_at > now() - interval '{IDEMPOTENCY_TTL}'"
)


async def find_idempotency_key(
    engine: AsyncEngine, room: RoomId, key: str
) -> tuple[bytes, bytes] | None:
    """Return the hash of the request that took a key, and its answer; None if the key is free.

    StorageUnavailableError, StorageRefusedError.
    """
    async with transaction(engine) as connection:
        row = (await connection.execute(_FIND_KEY, {"room": room, "key": key})).one_or_none()
    return None if row is None else (row[0], row[1])


_FIND_CALLER_IDS: Final = text(
    "SELECT caller_id, content_hash, answer FROM message_ids "
    "WHERE room_id = :room AND caller_id = ANY (:ids)"
)


async def find_caller_ids(
    engine: AsyncEngine, room: RoomId, ids: Collection[str]
) -> Mapping[str, tuple[bytes, bytes]]:
    """Return for the ids that are used the hash of their message's content, and its answer.

    StorageUnavailableError, StorageRefusedError.
    """
    async with transaction(engine) as connection:
        rows = await connection.execute(_FIND_CALLER_IDS, {"room": room, "ids": list(ids)})
        return {row[0]: (row[1], row[2]) for row in rows}
