"""Authenticate requests by their API keys.

An attacker can compute a key's checksum, so look-ups of keys that this process has never seen valid
are limited. Known keys are cached for a second, never beyond their end.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from types import TracebackType
from typing import Any, Final, Self

from sqlalchemy import ColumnElement, RowMapping, Select, and_, or_, select, update
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.sql import func

from rooms.db.catalog.api_keys import KEY_PREFIX, KeyKind, checksum, key_from_row
from rooms.db.connection import transaction
from rooms.db.tables.organisations import api_keys, organisations
from rooms.domain.ids import KeyId, room_of
from rooms.domain.principal import Principal
from rooms.domain.quota import Quotas
from rooms.domain.sharing import OrganisationStatus
from rooms.errors import RateLimitedError, RoomsError, UnauthenticatedError
from rooms.token_buckets import TokenBuckets

_log = logging.getLogger(__name__)

ClientAddress = tuple[str, int]
"""Address and port, as ASGI passes them."""
Network = IPv4Network | IPv6Network

CACHE_S: Final = 1.0
"""The longest time for which a revoked key may go on working in a process that knew it."""
RECORD_USE_S: Final = 60.0
"""Seconds between two writes of the hours in which keys were used."""
_LENGTH_WITHOUT_CHECKSUM: Final = len(KEY_PREFIX) + 43
"""The length of a key without a checksum."""
_KEY_LENGTH: Final = _LENGTH_WITHOUT_CHECKSUM + 6
UNKNOWN_CACHE_S: Final = 60.0
"""The time for which an unknown key is not looked up again. No key becomes valid whose text was
known before.
"""
_MAX_CONCURRENT_LOOKUPS: Final = 2
"""The most connections of the pool for look-ups of keys never seen before; everyday queries keep
the others.
"""
MAX_PENDING_LOOKUPS: Final = 1000
"""Look-ups that may wait; beyond them the request is refused (429)."""
_SCHEME: Final = b"bearer "
_SCHEME_LENGTH: Final = len(_SCHEME)
_MAX_CACHED: Final = 10_000
_UNKNOWN: Final = "this API key is not known"
_MAX_USED: Final = 10_000
"""Keys whose use is remembered until it is written; of others the hour may stay older."""


class KeyStanding(StrEnum):
    """Say whether a key that was authenticated before may go on."""

    VALID = "valid"
    SUSPENDED = "suspended"
    """Its organisation is suspended."""
    OVER = "over"
    """It is revoked, has ended, or may do less than it could."""


@dataclass(frozen=True, slots=True)
class KnownKey:
    """Hold a valid key: its principal, the networks that may use it, and its end."""

    principal: Principal
    networks: tuple[Network, ...] | None
    ends_at: datetime | None
    """The end of the key, or of the text that was presented."""

    def is_over(self, now: datetime) -> bool:
        """Return whether the key has ended."""
        return self.ends_at is not None and self.ends_at <= now


def _valid(*columns: ColumnElement[Any]) -> Select[Any]:
    return (
        select(
            api_keys,
            organisations.c.status.label("organisation_status"),
            organisations.c.quotas,
            *columns,
        )
        .join(organisations, organisations.c.id == api_keys.c.organisation_id)
        .where(
            api_keys.c.revoked_at.is_(None),
            organisations.c.status != OrganisationStatus.DELETING.value,
            or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > func.now()),
        )
    )


def _principal(row: RowMapping, text_hash: bytes | None) -> Principal:
    key = key_from_row(row)
    rooms = None if key.rooms is None else frozenset(key.rooms)
    subscriptions = None if key.subscriptions is None else frozenset(key.subscriptions)
    if rooms is None and subscriptions is not None:
        rooms = frozenset(map(room_of, subscriptions))
    return Principal(
        key_id=key.id,
        organisation_id=key.organisation_id,
        scopes=key.scopes,
        key_name=key.name,
        application=key.application,
        rooms=rooms,
        event_types=key.event_types,
        subscriptions=subscriptions,
        networks=key.networks,
        suspended=row["organisation_status"] != OrganisationStatus.ACTIVE.value,
        quotas=Quotas.from_document(row["quotas"]),
        is_session=row["kind"] == KeyKind.SESSION.value,
        text_hash=text_hash,
    )


def _standing(principal: Principal, row: RowMapping | None) -> KeyStanding:
    """Return the standing of a principal whose key has this row now; None: it is not valid."""
    if row is None:
        return KeyStanding.OVER
    text_hash = principal.text_hash
    is_previous = row["previous_is_valid"] and row["previous_key_hash"] == text_hash
    if text_hash is not None and row["key_hash"] != text_hash and not is_previous:
        return KeyStanding.OVER
    current = _principal(row, text_hash)
    if not current.includes(principal):
        return KeyStanding.OVER
    return KeyStanding.SUSPENDED if current.suspended else KeyStanding.VALID


def _known_key(row: RowMapping, digest: bytes) -> KnownKey:
    ends = [row["expires_at"]]
    if row["key_hash"] != digest:
        ends.append(row["previous_until"])
    principal = _principal(row, digest)
    return KnownKey(
        principal=principal,
        networks=None if principal.networks is None else tuple(map(ip_network, principal.networks)),
        ends_at=min((end for end in ends if end is not None), default=None),
    )


class AuthFailure(StrEnum):
    """Say why a request's key is refused, as metrics name it."""

    MISSING = "missing"
    MALFORMED = "malformed"
    CHECKSUM = "checksum"
    UNKNOWN = "unknown"
    NETWORK = "network"
    LIMITED = "limited"


def client_block(client: ClientAddress | None) -> str:
    """Return the part of an address that is limited as one: an IPv4 address, or 64 bits of IPv6.

    It is empty for a socket of this machine.
    """
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


class ApiKeyAuthenticator:
    """Find the principal of a request.

    Known keys are cached (by their hash) for a second, unknown ones for longer.

    A key that this process has seen valid is looked up again once its second is over. A look-up of
    any other key costs its client's address a token, of `unknown_per_s` a second (0: no limit). The
    address gets the token back if the key is valid, so clients behind one address do not shut each
    other out. Addresses in `trusted` are proxies' and pay nothing: one client behind a proxy must
    not use up the tokens of all. `on_failure` is called with the reason of each refusal.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        monotonic: Callable[[], float],
        *,
        unknown_per_s: int = 0,
        trusted: Sequence[IPv4Network | IPv6Network] = (),
        on_failure: Callable[[AuthFailure], None] = lambda _: None,
        record_use_s: float = RECORD_USE_S,
    ) -> None:
        self._record_use_s = record_use_s
        self._record_task: asyncio.Task[None] | None = None
        self._engine = engine
        self._monotonic = monotonic
        self._on_failure = on_failure
        self._trusted = tuple(trusted)
        self._cache: dict[bytes, tuple[KnownKey, float]] = {}
        self._used_hours: dict[KeyId, datetime] = {}
        self._written_hours: dict[KeyId, datetime] = {}
        self._unknown_cache: dict[bytes, float] = {}
        self._pending_lookups: dict[bytes, asyncio.Task[KnownKey | None]] = {}
        self._lookup_limiter: TokenBuckets[str] = TokenBuckets(unknown_per_s, monotonic)
        self._lookup_slots = asyncio.Semaphore(_MAX_CONCURRENT_LOOKUPS)

    async def __aenter__(self) -> Self:
        self._record_task = asyncio.create_task(self._record_use_forever())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._record_task is not None:
            self._record_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._record_task
        await self.record_use()

    async def _record_use_forever(self) -> None:
        while True:
            await asyncio.sleep(self._record_use_s)
            await self.record_use()

    async def authenticate(
        self, header: bytes | None, client: ClientAddress | None = None
    ) -> Principal:
        """Return the principal of an Authorization header's value.

        `client` is the sender's address and port.

        UnauthenticatedError: it names no valid key. RateLimitedError: too many unknown keys were
        tried.
        """
        if header is None:
            raise self._failure(
                AuthFailure.MISSING, "send your API key as 'Authorization: Bearer rooms_…'"
            )
        if header[:_SCHEME_LENGTH].lower() != _SCHEME:
            raise self._failure(
                AuthFailure.MALFORMED, "the Authorization header must read 'Bearer rooms_…'"
            )
        digest = hashlib.sha256(header[_SCHEME_LENGTH:]).digest()
        known = self._cache.get(digest)
        if known is not None and self._monotonic() < known[1]:
            return self._admit(known[0], client)
        self._check_format(header[_SCHEME_LENGTH:])
        if self._monotonic() < self._unknown_cache.get(digest, 0.0):
            raise self._failure(AuthFailure.UNKNOWN, _UNKNOWN)
        # One look-up at a time for a key, however many requests carry it.
        task = self._pending_lookups.get(digest)
        if task is None:
            lookup = (
                self._look_up(digest)
                if known is not None
                else self._look_up_limited(digest, self._take_lookup_token(client))
            )
            task = self._pending_lookups[digest] = asyncio.create_task(lookup)
            task.add_done_callback(lambda done: self._on_lookup_done(digest, done))
        found = await asyncio.shield(task)
        if found is None:
            raise self._failure(AuthFailure.UNKNOWN, _UNKNOWN)
        principal = self._admit(found, client)
        self._note_use(principal.key_id)
        return principal

    def _admit(self, known: KnownKey, client: ClientAddress | None) -> Principal:
        """Return the principal, if the key has not ended and its networks include the client."""
        if known.networks is not None and not _is_within(client, known.networks):
            raise self._failure(AuthFailure.NETWORK, _UNKNOWN)
        if known.ends_at is not None and known.is_over(datetime.now(UTC)):
            raise self._failure(AuthFailure.UNKNOWN, _UNKNOWN)
        return known.principal

    def forget(self) -> None:
        """Look up every key again."""
        self._cache.clear()

    async def check_keys(
        self, principals: Collection[Principal]
    ) -> Mapping[Principal, KeyStanding]:
        """Return whether these may still do all that they could when they were authenticated.

        One statement. StorageUnavailableError, StorageRefusedError.
        """
        statement = _valid(
            (api_keys.c.previous_until > func.now()).label("previous_is_valid")
        ).where(api_keys.c.id.in_(sorted({principal.key_id for principal in principals})))
        async with transaction(self._engine) as connection:
            rows = (await connection.execute(statement)).mappings().all()
        now = {row["id"]: row for row in rows}
        return {
            principal: _standing(principal, now.get(principal.key_id)) for principal in principals
        }

    async def record_use(self) -> None:
        """Write the hours in which keys were used since the last call, a statement an hour."""
        used = {
            key: hour
            for key, hour in self._used_hours.items()
            if self._written_hours.get(key) != hour
        }
        if not used:
            return
        hours = sorted(set(used.values()))
        try:
            async with transaction(self._engine) as connection:
                for hour in hours:
                    keys = sorted(key for key, at in used.items() if at == hour)
                    await connection.execute(
                        update(api_keys)
                        .where(
                            api_keys.c.id.in_(keys),
                            or_(api_keys.c.last_used_at.is_(None), api_keys.c.last_used_at < hour),
                        )
                        .values(last_used_at=hour)
                    )
        except RoomsError as exc:
            _log.info("the last use of %d API keys is written later: %s", len(used), exc)
            return
        self._written_hours |= used
        for key, hour in used.items():
            if self._used_hours.get(key) == hour:
                del self._used_hours[key]
        while len(self._written_hours) > _MAX_USED:
            del self._written_hours[next(iter(self._written_hours))]

    def _check_format(self, text: bytes) -> None:
        """Refuse a text whose length or checksum is not that of a key."""
        if len(text) not in {_LENGTH_WITHOUT_CHECKSUM, _KEY_LENGTH}:
            raise self._failure(
                AuthFailure.MALFORMED, "this is no API key: those of Rooms have another length"
            )
        if len(text) == _KEY_LENGTH and text[_LENGTH_WITHOUT_CHECKSUM:] != checksum(
            text[:_LENGTH_WITHOUT_CHECKSUM]
        ):
            raise self._failure(
                AuthFailure.CHECKSUM, "this is no API key: a character of it is wrong"
            )

    def _take_lookup_token(self, client: ClientAddress | None) -> str | None:
        """Take a token for a look-up, and return the address that paid.

        None: a proxy's, which pays nothing.

        RateLimitedError: the address has no token, or too many look-ups wait.
        """
        if len(self._pending_lookups) >= MAX_PENDING_LOOKUPS:
            self._on_failure(AuthFailure.LIMITED)
            raise RateLimitedError(
                "too many API keys that were not seen before are being looked up"
            )
        if self._is_trusted(client):
            return None
        address = client_block(client)
        if not self._lookup_limiter.take(address):
            self._on_failure(AuthFailure.LIMITED)
            raise RateLimitedError("too many unknown API keys came from this address")
        return address

    def _is_trusted(self, client: ClientAddress | None) -> bool:
        return _is_within(client, self._trusted)

    def _failure(self, reason: AuthFailure, message: str) -> UnauthenticatedError:
        self._on_failure(reason)
        return UnauthenticatedError(message)

    async def _look_up_limited(self, digest: bytes, address: str | None) -> KnownKey | None:
        principal, paid = None, False
        try:
            async with self._lookup_slots:
                principal = await self._look_up(digest)
            paid = principal is None
            return principal
        finally:
            if not paid and address is not None:
                self._lookup_limiter.refund(address)

    def _on_lookup_done(self, digest: bytes, task: asyncio.Task[KnownKey | None]) -> None:
        self._pending_lookups.pop(digest, None)
        # The requests may have gone: asyncio would log an error that none of them takes.
        if not task.cancelled():
            task.exception()

    async def _look_up(self, digest: bytes) -> KnownKey | None:
        asked_at = self._monotonic()
        statement = _valid().where(
            or_(
                api_keys.c.key_hash == digest,
                and_(
                    api_keys.c.previous_key_hash == digest,
                    api_keys.c.previous_until > func.now(),
                ),
            )
        )
        async with transaction(self._engine) as connection:
            row = (await connection.execute(statement)).mappings().one_or_none()
        self._cache.pop(digest, None)
        if row is None:
            if len(self._unknown_cache) >= _MAX_CACHED:
                del self._unknown_cache[next(iter(self._unknown_cache))]
            self._unknown_cache[digest] = asked_at + UNKNOWN_CACHE_S
            return None
        known = _known_key(row, digest)
        if len(self._cache) >= _MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        self._cache[digest] = (known, asked_at + CACHE_S)
        return known

    def _note_use(self, key: KeyId) -> None:
        """Note that a key was used in this hour; what the cache answers is 1 s later at most."""
        if key in self._used_hours or len(self._used_hours) < _MAX_USED:
            self._used_hours[key] = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


def _is_within(client: ClientAddress | None, networks: Sequence[Network]) -> bool:
    address = _address(client)
    return address is not None and any(
        address.version == network.version and address in network for network in networks
    )


def _address(client: ClientAddress | None) -> IPv4Address | IPv6Address | None:
    """Return the address of a client; None: it has none, as at a socket of this machine."""
    if client is None:
        return None
    try:
        address = ip_address(client[0].partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
