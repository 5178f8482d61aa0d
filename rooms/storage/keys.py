"""API keys and the organisations they belong to. A key's text is never kept, only its SHA-256."""

import asyncio
import hashlib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import RowMapping, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql import func

from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.errors import UnauthenticatedError
from rooms.storage.tables.organisations import api_keys, organisations
from rooms.storage.transactions import transaction

PREFIX: Final = "rooms_"
DEFAULT_ORGANISATION: Final = "default"
FRESH_S: Final = 1.0
"""How long a revoked key may go on working in a process that knew it."""
_KEY_BYTES: Final = 32
_KEY_LENGTH: Final = len(PREFIX) + 43
_SCHEME: Final = b"bearer "
_SCHEME_LENGTH: Final = len(_SCHEME)
_MOST_KNOWN: Final = 10_000
_SCOPES: Final = frozenset(Scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as it may be shown: everything but its text."""

    id: KeyId
    organisation_id: OrganisationId
    name: str
    scopes: frozenset[Scope]
    created_at: datetime
    revoked_at: datetime | None


def new_key(random: Callable[[int], bytes]) -> str:
    """The text of a new key, from `random(n)` giving n unpredictable bytes."""
    return PREFIX + urlsafe_b64encode(random(_KEY_BYTES)).rstrip(b"=").decode("ascii")


def hash_key(key: bytes) -> bytes:
    """What is kept of a key. It holds 256 random bits, so that a plain hash cannot be searched backwards."""
    return hashlib.sha256(key).digest()


async def ensure_organisation(connection: AsyncConnection, name: str, new_id: str) -> OrganisationId:
    """The organisation of that name, made with `new_id` where there is none yet."""
    statement = upsert(organisations).values(id=new_id, name=name)
    # The update changes nothing; it makes the statement return the row in both cases.
    found = await connection.scalar(
        statement.on_conflict_do_update(
            index_elements=[organisations.c.name], set_={"name": statement.excluded.name}
        ).returning(organisations.c.id)
    )
    return OrganisationId(str(found))


async def create_key(
    connection: AsyncConnection,
    *,
    new_id: str,
    organisation: OrganisationId,
    name: str,
    scopes: Iterable[Scope],
    text: str,
) -> ApiKey:
    """Keep a new key (its hash)."""
    row = await connection.execute(
        insert(api_keys)
        .values(
            id=new_id,
            organisation_id=organisation,
            name=name,
            key_hash=hash_key(text.encode()),
            scopes=sorted(scope.value for scope in scopes),
        )
        .returning(api_keys)
    )
    return _key(row.mappings().one())


async def list_keys(
    connection: AsyncConnection, organisation: OrganisationId, *, before: str | None, limit: int
) -> Sequence[ApiKey]:
    """Keys, revoked ones included, newest first."""
    statement = select(api_keys).where(api_keys.c.organisation_id == organisation)
    if before is not None:
        statement = statement.where(api_keys.c.id < before)
    rows = await connection.execute(statement.order_by(api_keys.c.id.desc()).limit(limit))
    return [_key(row) for row in rows.mappings()]


async def find_key(connection: AsyncConnection, organisation: OrganisationId, identity: str) -> ApiKey | None:
    """One key; None where the organisation has none of that id."""
    statement = select(api_keys).where(api_keys.c.id == identity, api_keys.c.organisation_id == organisation)
    row = (await connection.execute(statement)).mappings().one_or_none()
    return None if row is None else _key(row)


async def revoke_key(connection: AsyncConnection, organisation: OrganisationId, identity: str) -> bool:
    """End a key for good; every process forgets it within a second. False where there is none. Twice is harmless."""
    found = await connection.execute(
        update(api_keys)
        .where(api_keys.c.id == identity, api_keys.c.organisation_id == organisation)
        .values(revoked_at=func.coalesce(api_keys.c.revoked_at, func.now()))
        .returning(api_keys.c.id)
    )
    return found.first() is not None


def _key(row: RowMapping) -> ApiKey:
    return ApiKey(
        id=KeyId(row["id"]),
        organisation_id=OrganisationId(row["organisation_id"]),
        name=row["name"],
        # A later version may have scopes that this one does not know: they open nothing here.
        scopes=frozenset(Scope(scope) for scope in row["scopes"] if scope in _SCOPES),
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
    )


class Keys:
    """Tells who a request comes from; remembers known keys (by their hash) for a second."""

    def __init__(self, engine: AsyncEngine, monotonic: Callable[[], float]) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._known: dict[bytes, tuple[Principal, float]] = {}
        self._asked: dict[bytes, asyncio.Task[Principal | None]] = {}

    async def authenticate(self, header: bytes | None) -> Principal:
        """The principal of an Authorization header's value. UnauthenticatedError where it names no living key."""
        if header is None:
            raise UnauthenticatedError("send your API key as 'Authorization: Bearer rooms_…'")
        if header[:_SCHEME_LENGTH].lower() != _SCHEME:
            raise UnauthenticatedError("the Authorization header must read 'Bearer rooms_…'")
        digest = hashlib.sha256(header[_SCHEME_LENGTH:]).digest()
        known = self._known.get(digest)
        if known is not None and self._monotonic() < known[1]:
            return known[0]
        if len(header) != _SCHEME_LENGTH + _KEY_LENGTH:
            raise UnauthenticatedError("this API key is not known")
        # One question at a time about one key, however many requests carry it.
        task = self._asked.get(digest)
        if task is None:
            task = self._asked[digest] = asyncio.create_task(self._ask(digest))
            task.add_done_callback(lambda done: self._answered(digest, done))
        principal = await asyncio.shield(task)
        if principal is None:
            raise UnauthenticatedError("this API key is not known")
        return principal

    def _answered(self, digest: bytes, task: asyncio.Task[Principal | None]) -> None:
        self._asked.pop(digest, None)
        # Whoever waited may have gone: an error that nobody takes would be complained about.
        if not task.cancelled():
            task.exception()

    async def _ask(self, digest: bytes) -> Principal | None:
        asked_at = self._monotonic()
        statement = select(api_keys).where(api_keys.c.key_hash == digest, api_keys.c.revoked_at.is_(None))
        async with transaction(self._engine) as connection:
            row: Any = (await connection.execute(statement)).mappings().one_or_none()
        self._known.pop(digest, None)
        if row is None:
            return None
        key = _key(row)
        principal = Principal(key_id=key.id, organisation_id=key.organisation_id, scopes=key.scopes)
        if len(self._known) >= _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[digest] = (principal, asked_at + FRESH_S)
        return principal
