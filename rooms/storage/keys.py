"""API keys and the organisations they belong to. A key's text is never kept, only its SHA-256.

A key reads `rooms_`, 32 random bytes in base64url, and the CRC-32 of all that in base64url: what was mistyped, cut off or
made up by a scanner is refused without a look-up. Keys from before have no checksum and are as valid; an attacker
can compute it too, so that look-ups of keys which this process has never seen valid are limited besides.
"""

import asyncio
import hashlib
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, Final

from sqlalchemy import RowMapping, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql import func

from rooms.buckets import Buckets
from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.principal import Principal
from rooms.domain.states import Scope
from rooms.errors import RateLimitedError, UnauthenticatedError
from rooms.storage.tables.organisations import api_keys, organisations
from rooms.storage.transactions import transaction

Client = tuple[str, int]
"""Address and port, as ASGI has them."""

PREFIX: Final = "rooms_"
DEFAULT_ORGANISATION: Final = "default"
FRESH_S: Final = 1.0
"""How long a revoked key may go on working in a process that knew it."""
_KEY_BYTES: Final = 32
_PLAIN_LENGTH: Final = len(PREFIX) + 43
"""Of a key without a checksum."""
_KEY_LENGTH: Final = _PLAIN_LENGTH + 6
UNKNOWN_FRESH_S: Final = 60.0
"""How long a key that is not known is not looked up again. No key becomes valid whose text was known before."""
_LOOKUPS_AT_A_TIME: Final = 2
"""Connections of the pool that look-ups of keys never seen may have at most: everyday queries keep the others."""
MOST_LOOKUPS: Final = 1000
"""Look-ups that may wait; beyond them the request is refused (429)."""
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
    """Return the text of a new key, from `random(n)` giving n unpredictable bytes."""
    plain = PREFIX.encode() + urlsafe_b64encode(random(_KEY_BYTES)).rstrip(b"=")
    return (plain + checksum(plain)).decode("ascii")


def checksum(plain: bytes) -> bytes:
    """Return the six characters that follow a key's text."""
    return urlsafe_b64encode(zlib.crc32(plain).to_bytes(4, "big")).rstrip(b"=")


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


class Refusal(StrEnum):
    """Why a request's key is refused, as metrics name it."""

    MISSING = "missing"
    MALFORMED = "malformed"
    CHECKSUM = "checksum"
    UNKNOWN = "unknown"
    LIMITED = "limited"


def block_of(client: Client | None) -> str:
    """Return what counts as one address: that of IPv4, 64 bits of IPv6, or nothing (a socket of this machine)."""
    if client is None:
        return ""
    try:
        address = ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0]
    if isinstance(address, IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped is not None else str(IPv6Address(int(address) >> 64 << 64))
    return str(address)


class Keys:
    """Finds the principal of a request; remembers known keys (by their hash) for a second, and unknown ones for longer.

    A key that this process has seen valid is looked up again whenever its second is over. Look-ups of others cost their
    client's address a token each, `unknown_per_s` a second (0: no limit), which it gets back where the key is valid: so
    clients behind one address do not shut each other out. Addresses in `trusted` are proxies' and pay nothing: one client
    behind them must not use up what all have. `failed` is called with why a request was refused.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        monotonic: Callable[[], float],
        *,
        unknown_per_s: int = 0,
        trusted: Sequence[IPv4Network | IPv6Network] = (),
        failed: Callable[[Refusal], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._failed = failed
        self._trusted = tuple(trusted)
        self._known: dict[bytes, tuple[Principal, float]] = {}
        self._unknown: dict[bytes, float] = {}
        self._asked: dict[bytes, asyncio.Task[Principal | None]] = {}
        self._lookups: Buckets[str] = Buckets(unknown_per_s, monotonic)
        self._turn = asyncio.Semaphore(_LOOKUPS_AT_A_TIME)

    async def authenticate(self, header: bytes | None, client: Client | None = None) -> Principal:
        """Return the principal of an Authorization header's value; `client` is the address and port it comes from.

        UnauthenticatedError where it names no living key, RateLimitedError where there are too many of these.
        """
        if header is None:
            raise self._refused(Refusal.MISSING, "send your API key as 'Authorization: Bearer rooms_…'")
        if header[:_SCHEME_LENGTH].lower() != _SCHEME:
            raise self._refused(Refusal.MALFORMED, "the Authorization header must read 'Bearer rooms_…'")
        digest = hashlib.sha256(header[_SCHEME_LENGTH:]).digest()
        known = self._known.get(digest)
        if known is not None and self._monotonic() < known[1]:
            return known[0]
        self._check(header[_SCHEME_LENGTH:])
        if self._monotonic() < self._unknown.get(digest, 0.0):
            raise self._refused(Refusal.UNKNOWN, "this API key is not known")
        # One question at a time about one key, however many requests carry it.
        task = self._asked.get(digest)
        if task is None:
            looking = self._ask(digest) if known is not None else self._ask_anew(digest, self._charge(client))
            task = self._asked[digest] = asyncio.create_task(looking)
            task.add_done_callback(lambda done: self._answered(digest, done))
        principal = await asyncio.shield(task)
        if principal is None:
            raise self._refused(Refusal.UNKNOWN, "this API key is not known")
        return principal

    def _check(self, text: bytes) -> None:
        """Refuse what is no key by its length or checksum."""
        if len(text) not in {_PLAIN_LENGTH, _KEY_LENGTH}:
            raise self._refused(Refusal.MALFORMED, "this is no API key: those of Rooms have another length")
        if len(text) == _KEY_LENGTH and text[_PLAIN_LENGTH:] != checksum(text[:_PLAIN_LENGTH]):
            raise self._refused(Refusal.CHECKSUM, "this is no API key: a character of it is wrong")

    def _charge(self, client: Client | None) -> str | None:
        """Return the address that pays for a look-up; None: a proxy's, which does not. RateLimitedError where it cannot."""
        if len(self._asked) >= MOST_LOOKUPS:
            self._failed(Refusal.LIMITED)
            raise RateLimitedError("too many API keys that were not seen before are being looked up")
        if self._is_trusted(client):
            return None
        address = block_of(client)
        if not self._lookups.take(address):
            self._failed(Refusal.LIMITED)
            raise RateLimitedError("too many unknown API keys came from this address")
        return address

    def _is_trusted(self, client: Client | None) -> bool:
        if client is None or not self._trusted:
            return False
        try:
            address = ip_address(client[0].partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._trusted)

    def _refused(self, why: Refusal, message: str) -> UnauthenticatedError:
        self._failed(why)
        return UnauthenticatedError(message)

    async def _ask_anew(self, digest: bytes, address: str | None) -> Principal | None:
        principal, paid = None, False
        try:
            async with self._turn:
                principal = await self._ask(digest)
            paid = principal is None
            return principal
        finally:
            if not paid and address is not None:
                self._lookups.give_back(address)

    def _answered(self, digest: bytes, task: asyncio.Task[Principal | None]) -> None:
        self._asked.pop(digest, None)
        # The requests may have gone: an error that none of them takes would be logged by asyncio.
        if not task.cancelled():
            task.exception()

    async def _ask(self, digest: bytes) -> Principal | None:
        asked_at = self._monotonic()
        statement = select(api_keys).where(api_keys.c.key_hash == digest, api_keys.c.revoked_at.is_(None))
        async with transaction(self._engine) as connection:
            row: Any = (await connection.execute(statement)).mappings().one_or_none()
        self._known.pop(digest, None)
        if row is None:
            if len(self._unknown) >= _MOST_KNOWN:
                del self._unknown[next(iter(self._unknown))]
            self._unknown[digest] = asked_at + UNKNOWN_FRESH_S
            return None
        key = _key(row)
        principal = Principal(key_id=key.id, organisation_id=key.organisation_id, scopes=key.scopes)
        if len(self._known) >= _MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[digest] = (principal, asked_at + FRESH_S)
        return principal
