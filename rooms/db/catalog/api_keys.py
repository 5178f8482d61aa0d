"""Store API keys.

Only the SHA-256 of a key is kept.

A key is `rooms_`, 32 random bytes in base64url, and the CRC-32 of both in base64url. So a text that
was mistyped, cut off or made up by a scanner is refused without a look-up. Older keys have no
checksum and are as valid.

During a rotation two texts of a key are valid: the new one, and the former one until
`previous_until`.
"""

import hashlib
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import RowMapping, and_, case, insert, not_, or_, select, true, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.db.tables.organisations import api_keys
from rooms.domain.ids import KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.state_machine import Scope
from rooms.errors import UnauthenticatedError

KEY_PREFIX: Final = "rooms_"
_KEY_BYTES: Final = 32
_SHOWN_CHARACTERS: Final = 8
_SCOPES: Final = frozenset(Scope)
_LISTED: Final = ("key", "client")
"""The kinds of keys that are managed; sessions are managed by those who signed in."""


class KeyKind(StrEnum):
    """Name how a key is used."""

    KEY = "key"
    """By a program, which sends its text."""
    SESSION = "session"
    """By the browser of a person who signed in to the console: its text is in a cookie."""
    CLIENT = "client"
    """By a program that a client certificate or a trusted proxy identifies. It has no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """Describe a key: everything but its text. A restriction that is None does not apply."""

    id: KeyId
    organisation_id: OrganisationId
    name: str
    prefix: str | None
    """The first characters of its text; keys of earlier versions have none."""
    scopes: frozenset[Scope]
    application: str | None
    rooms: tuple[RoomId, ...] | None
    event_types: tuple[str, ...] | None
    """Patterns."""
    subscriptions: tuple[SubscriptionId, ...] | None
    networks: tuple[str, ...] | None
    """Addresses that may use it, as CIDR."""
    expires_at: datetime | None
    last_used_at: datetime | None
    """To the hour."""
    previous_until: datetime | None
    """The text before the last rotation is valid until then."""
    created_at: datetime
    revoked_at: datetime | None
    kind: KeyKind
    parent_id: KeyId | None
    """The key that a session came from, itself or by a link; None: there is none."""


def new_key(random: Callable[[int], bytes]) -> str:
    """Return the text of a new key; `random(n)` returns n unpredictable bytes."""
    plain = KEY_PREFIX.encode() + urlsafe_b64encode(random(_KEY_BYTES)).rstrip(b"=")
    return (plain + checksum(plain)).decode("ascii")


def checksum(plain: bytes) -> bytes:
    """Return the six characters that end a key's text."""
    return urlsafe_b64encode(zlib.crc32(plain).to_bytes(4, "big")).rstrip(b"=")


def hash_key(key: bytes) -> bytes:
    """Return the hash that is stored.

    A key holds 256 random bits, so a plain hash cannot be reversed by search.
    """
    return hashlib.sha256(key).digest()


def key_prefix(text: str) -> str:
    """Return the part of a key that is stored and shown, so that its owner finds it."""
    return text[: len(KEY_PREFIX) + _SHOWN_CHARACTERS]


async def create_key(
    connection: AsyncConnection,
    *,
    new_id: str,
    organisation: OrganisationId,
    name: str,
    scopes: Iterable[Scope],
    text: str,
    restrictions: Mapping[str, Any] | None = None,
) -> ApiKey:
    """Store the hash of a new key. `restrictions` are column values."""
    row = await connection.execute(
        insert(api_keys)
        .values(
            id=new_id,
            organisation_id=organisation,
            name=name,
            key_hash=hash_key(text.encode()),
            prefix=key_prefix(text),
            scopes=sorted(scope.value for scope in scopes),
            **(restrictions or {}),
        )
        .returning(api_keys)
    )
    return key_from_row(row.mappings().one())


async def create_client(
    connection: AsyncConnection,
    *,
    new_id: str,
    organisation: OrganisationId,
    name: str,
    scopes: Iterable[Scope],
    restrictions: Mapping[str, Any],
) -> ApiKey | None:
    """Store a credential without a text. None: the organisation, or its application, has one."""
    row = await connection.execute(
        postgresql.insert(api_keys)
        .values(
            id=new_id,
            organisation_id=organisation,
            name=name,
            kind=KeyKind.CLIENT.value,
            scopes=sorted(scope.value for scope in scopes),
            **restrictions,
        )
        .on_conflict_do_nothing()
        .returning(api_keys)
    )
    created = row.mappings().one_or_none()
    return None if created is None else key_from_row(created)


async def list_keys(
    connection: AsyncConnection,
    organisation: OrganisationId,
    *,
    before: str | None,
    limit: int,
    name: str | None = None,
    prefix: str | None = None,
) -> Sequence[ApiKey]:
    """Return keys, also revoked ones, newest first; `prefix`: the first characters of a text."""
    statement = select(api_keys).where(
        api_keys.c.organisation_id == organisation, api_keys.c.kind.in_(_LISTED)
    )
    if before is not None:
        statement = statement.where(api_keys.c.id < before)
    if name is not None:
        statement = statement.where(api_keys.c.name == name)
    if prefix is not None:
        statement = statement.where(api_keys.c.prefix == key_prefix(prefix))
    rows = await connection.execute(statement.order_by(api_keys.c.id.desc()).limit(limit))
    return [key_from_row(row) for row in rows.mappings()]


async def find_key(
    connection: AsyncConnection, organisation: OrganisationId, identity: str, *, lock: bool = False
) -> ApiKey | None:
    """Return one key; None if the organisation has none of that id. A session is found, too."""
    statement = select(api_keys).where(
        api_keys.c.id == identity, api_keys.c.organisation_id == organisation
    )
    if lock:
        statement = statement.with_for_update()
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else key_from_row(row)


@dataclass(frozen=True, slots=True)
class TextEnd:
    """Say until when a text of a key is valid (None: for good); `is_former`: it was replaced."""

    at: datetime | None
    is_former: bool


async def find_text_end(
    connection: AsyncConnection, identity: KeyId, presented: bytes | None
) -> TextEnd:
    """Return the end of a key by the text of this hash.

    `presented` None: it acts by no text. The text before the last rotation ends with the overlap.
    UnauthenticatedError: the key was revoked or has ended, or the text is none of its own.
    """
    previous_end = func.least(api_keys.c.expires_at, api_keys.c.previous_until)
    is_previous = and_(
        api_keys.c.previous_key_hash == presented, api_keys.c.previous_until > func.now()
    )
    is_present = true() if presented is None else api_keys.c.key_hash == presented
    end = case((is_present, api_keys.c.expires_at), else_=previous_end)
    statement = select(end, not_(is_present)).where(
        api_keys.c.id == identity,
        api_keys.c.revoked_at.is_(None),
        or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > func.now()),
        or_(is_present, is_previous),
    )
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise UnauthenticatedError("this key was revoked, rotated, or has ended")
    return TextEnd(at=row[0], is_former=row[1])


async def update_key(
    connection: AsyncConnection, identity: KeyId, columns: Mapping[str, Any]
) -> ApiKey:
    """Change columns of an existing key, and end the sessions that it began."""
    row = await connection.execute(
        update(api_keys).where(api_keys.c.id == identity).values(**columns).returning(api_keys)
    )
    await end_sessions_of(connection, identity)
    return key_from_row(row.mappings().one())


async def rotate_key(
    connection: AsyncConnection, identity: KeyId, text: str, *, overlap_s: int
) -> ApiKey:
    """Replace a key's text; the one before is valid for `overlap_s` more, 0: no longer."""
    until = func.now() + func.make_interval(0, 0, 0, 0, 0, 0, overlap_s)
    return await update_key(
        connection,
        identity,
        {
            "previous_key_hash": api_keys.c.key_hash if overlap_s else None,
            "previous_until": until if overlap_s else None,
            "key_hash": hash_key(text.encode()),
            "prefix": key_prefix(text),
        },
    )


async def revoke_key(
    connection: AsyncConnection, organisation: OrganisationId, identity: str
) -> bool:
    """Revoke a key for good; every process forgets it within a second.

    Return False if there is no such key. Repeating the call is harmless.
    """
    found = await connection.execute(
        update(api_keys)
        .where(
            api_keys.c.id == identity,
            api_keys.c.organisation_id == organisation,
            api_keys.c.kind.in_(_LISTED),
        )
        .values(revoked_at=func.coalesce(api_keys.c.revoked_at, func.now()))
        .returning(api_keys.c.id)
    )
    if found.first() is None:
        return False
    await end_sessions_of(connection, KeyId(identity))
    return True


async def end_sessions_of(connection: AsyncConnection, key: KeyId) -> None:
    """End the sessions that came from a key, also by its links: what it may do has changed.

    The key's row was changed before, by the same transaction: a session that begins at the same
    time locks this row, so it either exists now or finds the key changed.
    """
    await connection.execute(
        update(api_keys)
        .where(api_keys.c.parent_id == key, api_keys.c.revoked_at.is_(None))
        .values(revoked_at=func.now())
    )


def last_use(row: RowMapping) -> datetime | None:
    """Return when a key was last used: it is stored to the hour, in which the key may be made."""
    used: datetime | None = row["last_used_at"]
    return None if used is None else max(used, row["created_at"])


def key_from_row(row: RowMapping) -> ApiKey:
    """Build a key from a row of the table."""

    def listed(name: str) -> tuple[Any, ...] | None:
        return None if row[name] is None else tuple(row[name])

    return ApiKey(
        id=KeyId(row["id"]),
        organisation_id=OrganisationId(row["organisation_id"]),
        name=row["name"],
        prefix=row["prefix"],
        # A later version may have scopes that this one does not know: they grant nothing here.
        scopes=frozenset(Scope(scope) for scope in row["scopes"] if scope in _SCOPES),
        application=row["application"],
        rooms=listed("rooms"),
        event_types=listed("event_types"),
        subscriptions=listed("subscriptions"),
        networks=listed("networks"),
        expires_at=row["expires_at"],
        last_used_at=last_use(row),
        previous_until=row["previous_until"],
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
        kind=KeyKind(row["kind"]),
        parent_id=row["parent_id"],
    )
