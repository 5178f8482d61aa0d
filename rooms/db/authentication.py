"""Authenticate requests by their API keys.

An attacker can compute a key's checksum, so look-ups of keys that this process has never seen valid
are limited. Known keys are cached for a second (`rooms.db.known_keys`), never beyond their end.
Look-ups of keys that were seen valid take turns by organisation, and all others by address.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, Self

from sqlalchemy import and_, or_, update
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.sql import func

from rooms.cache_shares import CacheShares
from rooms.db.catalog.api_keys import KEY_PREFIX, checksum
from rooms.db.connection import autocommit, transaction
from rooms.db.known_keys import CACHE_S, MAX_CACHED, KnownKeys
from rooms.db.principals import (
    KeyStanding,
    KnownKey,
    Network,
    all_keys,
    known_key,
    select_client,
    standing_of,
    valid_keys,
)
from rooms.db.tables.organisations import api_keys
from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.member_identity import MemberIdentity
from rooms.domain.principal import Principal
from rooms.errors import RateLimitedError, RoomsError, UnauthenticatedError
from rooms.fair_slots import FairSlots
from rooms.token_buckets import TokenBuckets

_log = logging.getLogger(__name__)

ClientAddress = tuple[str, int]
"""Address and port, as ASGI passes them."""

RECORD_USE_S: Final = 60.0
"""Seconds between two writes of the hours in which keys were used."""
_LENGTH_WITHOUT_CHECKSUM: Final = len(KEY_PREFIX) + 43
"""The length of a key without a checksum."""
_KEY_LENGTH: Final = _LENGTH_WITHOUT_CHECKSUM + 6
UNKNOWN_CACHE_S: Final = 60.0
"""The time for which an unknown or revoked key is not looked up again: it does not become valid.

One that has ended is looked up again after `CACHE_S`, because its end can be moved.
"""
_MAX_CONCURRENT_LOOKUPS: Final = 2
"""The most connections of the pool for look-ups of keys never seen before; everyday queries keep
the others.
"""
_MAX_CONCURRENT_REPEATS: Final = 4
"""The same for keys that were seen valid."""
MAX_PENDING_LOOKUPS: Final = 1000
"""Look-ups of keys never seen before that may wait; beyond them the request is refused (429)."""
_SCHEME: Final = b"bearer "
_SCHEME_LENGTH: Final = len(_SCHEME)
_UNKNOWN: Final = "this API key is not known"
_MAX_USED: Final = 10_000
"""Keys whose use is remembered until it is written; of others the hour may stay older."""


class AuthFailure(StrEnum):
    """Say why a request's key is refused, as metrics name it."""

    MISSING = "missing"
    MALFORMED = "malformed"
    CHECKSUM = "checksum"
    UNKNOWN = "unknown"
    NETWORK = "network"
    LIMITED = "limited"
    CERTIFICATE = "certificate"
    """It expired, or names no organisation with a credential for clients."""
    FORWARDED = "forwarded"
    """An address that is no trusted proxy named a client in a header."""


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

    A key that this process has seen valid is looked up again once its second is over, or before
    that if it is in use. A look-up of any other key costs its client's address a token, of
    `unknown_per_s` a second (0: no limit). The address gets the token back if the key is valid, so
    clients behind one address do not shut each other out. Addresses in `trusted` are proxies' and
    pay nothing: one client behind a proxy must not use up the tokens of all. `on_failure` is called
    with the reason of each refusal.
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
        self._tasks: list[asyncio.Task[None]] = []
        self._engine = engine
        self._monotonic = monotonic
        self._on_failure = on_failure
        self._trusted = tuple(trusted)
        self._known = KnownKeys(engine, monotonic, on_use=self._note_use)
        self._used_hours: dict[KeyId, datetime] = {}
        self._written_hours: dict[KeyId, datetime] = {}
        self._unknown_cache: dict[bytes, float] = {}
        self._pending_lookups: dict[bytes | MemberIdentity, asyncio.Task[KnownKey | None]] = {}
        self._unknown_lookups: set[bytes | MemberIdentity] = set()
        """Those among the pending ones that are bounded."""
        self._clients: dict[MemberIdentity, tuple[KnownKey | None, float]] = {}
        self._client_shares = CacheShares[MemberIdentity]()
        self._lookup_limiter: TokenBuckets[str] = TokenBuckets(unknown_per_s, monotonic)
        self._lookup_slots = _turns(_MAX_CONCURRENT_LOOKUPS, MAX_PENDING_LOOKUPS)
        self._repeat_slots = _turns(_MAX_CONCURRENT_REPEATS, 2 * MAX_CACHED)

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._record_use_forever()),
            asyncio.create_task(self._known.renew_forever()),
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.record_use()

    async def _record_use_forever(self) -> None:
        while True:
            await asyncio.sleep(self._record_use_s)
            try:
                await self.record_use()
            except Exception:  # noqa: BLE001 - the next one writes it
                _log.exception("the last use of API keys could not be written")

    async def authenticate(
        self, header: bytes | None, client: ClientAddress | None = None
    ) -> Principal:
        """Return the principal of an Authorization header's value.

        `client` is the sender's address and port.

        UnauthenticatedError: it names no valid key. RateLimitedError: too many unknown keys were
        tried.
        """
        if header is None:
            raise self.failure(
                AuthFailure.MISSING, "send your API key as 'Authorization: Bearer rooms_…'"
            )
        if header[:_SCHEME_LENGTH].lower() != _SCHEME:
            raise self.failure(
                AuthFailure.MALFORMED, "the Authorization header must read 'Bearer rooms_…'"
            )
        digest = hashlib.sha256(header[_SCHEME_LENGTH:]).digest()
        known = self._known.get(digest)
        if known is not None and known[1]:
            return self._admit_known(digest, known[0], client)
        self._check_format(header[_SCHEME_LENGTH:])
        if self._monotonic() < self._unknown_cache.get(digest, 0.0):
            raise self.failure(AuthFailure.UNKNOWN, _UNKNOWN)
        # One look-up at a time for a key, however many requests carry it.
        task = self._pending_lookups.get(digest)
        if task is None:
            if known is not None:
                lookup = self._look_up_again(digest, known[0])
            else:
                lookup = self._look_up_limited(digest, client, self._take_lookup_token(client))
                self._unknown_lookups.add(digest)
            task = self._pending_lookups[digest] = asyncio.create_task(lookup)
            task.add_done_callback(lambda done: self._on_lookup_done(digest, done))
        found = await asyncio.shield(task)
        if found is None:
            raise self.failure(AuthFailure.UNKNOWN, _UNKNOWN)
        principal = self._admit_known(digest, found, client)
        self._note_use(principal.key_id)
        return principal

    def find_cached(self, header: bytes, client: ClientAddress | None) -> Principal | None:
        """Return the principal of a key that was looked up lately; None: `authenticate` knows.

        UnauthenticatedError: the key has ended, or the client is outside its networks.
        """
        if header[:_SCHEME_LENGTH].lower() != _SCHEME:
            return None
        digest = hashlib.sha256(header[_SCHEME_LENGTH:]).digest()
        known = self._known.get(digest)
        if known is None or not known[1]:
            return None
        return self._admit_known(digest, known[0], client)

    async def authenticate_member(
        self, identity: MemberIdentity, client: ClientAddress | None
    ) -> Principal:
        """Return the principal of a client that a certificate or a trusted proxy identifies.

        UnauthenticatedError: the member has no credential for clients. RateLimitedError.
        """
        known = self._clients.get(identity)
        if known is None or known[1] <= self._monotonic():
            task = self._pending_lookups.get(identity)
            if task is None:
                former = None if known is None else known[0]
                if former is None:
                    if len(self._unknown_lookups) >= MAX_PENDING_LOOKUPS:
                        self._on_failure(AuthFailure.LIMITED)
                        raise RateLimitedError("too many clients are being looked up")
                    self._unknown_lookups.add(identity)
                task = asyncio.create_task(self._look_up_client(identity, former, client))
                self._pending_lookups[identity] = task
                task.add_done_callback(lambda done: self._on_lookup_done(identity, done))
            found = await asyncio.shield(task)
            if found is not None:
                self._note_use(found.principal.key_id)
        else:
            found = known[0]
        if found is None:
            raise self.failure(
                AuthFailure.CERTIFICATE,
                f"the client is known as {identity.member_id}, but no organisation of that member"
                " id has a credential for it; its administrator creates one by"
                " `rooms key create --client`",
            )
        return self._admit(found, client)

    async def _look_up_client(
        self, identity: MemberIdentity, former: KnownKey | None, client: ClientAddress | None
    ) -> KnownKey | None:
        asked_at = self._monotonic()
        slot = (
            self._lookup_slots.slot(client_block(client))
            if former is None
            else self._repeat_slots.slot(former.principal.organisation_id)
        )
        async with slot, autocommit(self._engine) as connection:
            row = (await connection.execute(select_client(identity))).mappings().one_or_none()
        known = None
        if row is not None and row["is_valid"]:
            known = known_key(row, None)
            if identity.application is not None:
                principal = replace(known.principal, application=identity.application)
                known = replace(known, principal=principal)
        self._clients.pop(identity, None)
        self._client_shares.discard(identity)
        if len(self._clients) >= MAX_CACHED:
            displaced = self._client_shares.displaced()
            self._client_shares.discard(displaced)
            del self._clients[displaced]
        self._clients[identity] = (known, asked_at + CACHE_S)
        self._client_shares.add(identity, identity.member_id)
        return known

    def _admit_known(
        self, digest: bytes, known: KnownKey, client: ClientAddress | None
    ) -> Principal:
        principal = self._admit(known, client)
        self._known.note_use(digest)
        return principal

    def _admit(self, known: KnownKey, client: ClientAddress | None) -> Principal:
        """Return the principal, if the key has not ended and its networks include the client."""
        if known.networks is not None and not _is_within(client, known.networks):
            raise self.failure(AuthFailure.NETWORK, _UNKNOWN)
        if known.ends_at is not None and known.is_over(datetime.now(UTC)):
            raise self.failure(AuthFailure.UNKNOWN, _UNKNOWN)
        return known.principal

    def forget_organisation(self, organisation: OrganisationId) -> None:
        """Look up the keys of an organisation again, because something about it changed."""
        self._known.forget_organisation(organisation)

    def forget(self) -> None:
        """Look up every key again."""
        self._known.clear()
        self._clients.clear()
        self._client_shares.clear()
        self._unknown_cache.clear()

    async def check_keys(
        self, principals: Collection[Principal]
    ) -> Mapping[Principal, KeyStanding]:
        """Return whether these may still do all that they could when they were authenticated.

        One statement. StorageUnavailableError, StorageRefusedError.
        """
        statement = valid_keys(
            (api_keys.c.previous_until > func.now()).label("previous_is_valid")
        ).where(api_keys.c.id.in_(sorted({principal.key_id for principal in principals})))
        async with transaction(self._engine) as connection:
            rows = (await connection.execute(statement)).mappings().all()
        now = {row["id"]: row for row in rows}
        return {
            principal: standing_of(principal, now.get(principal.key_id)) for principal in principals
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
            raise self.failure(
                AuthFailure.MALFORMED, "this is no API key: those of Rooms have another length"
            )
        if len(text) == _KEY_LENGTH and text[_LENGTH_WITHOUT_CHECKSUM:] != checksum(
            text[:_LENGTH_WITHOUT_CHECKSUM]
        ):
            raise self.failure(
                AuthFailure.CHECKSUM, "this is no API key: a character of it is wrong"
            )

    def _take_lookup_token(self, client: ClientAddress | None) -> str | None:
        """Take a token for a look-up, and return the address that paid.

        None: a proxy's, which pays nothing.

        RateLimitedError: the address has no token, or too many look-ups wait.
        """
        if len(self._unknown_lookups) >= MAX_PENDING_LOOKUPS:
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

    def failure(self, reason: AuthFailure, message: str) -> UnauthenticatedError:
        """Return the error of a refusal, which is counted."""
        self._on_failure(reason)
        return UnauthenticatedError(message)

    async def _look_up_again(self, digest: bytes, known: KnownKey) -> KnownKey | None:
        async with self._repeat_slots.slot(known.principal.organisation_id):
            return await self._look_up(digest)

    async def _look_up_limited(
        self, digest: bytes, client: ClientAddress | None, address: str | None
    ) -> KnownKey | None:
        principal, paid = None, False
        try:
            async with self._lookup_slots.slot(client_block(client)):
                principal = await self._look_up(digest)
            paid = principal is None
            return principal
        finally:
            if not paid and address is not None:
                self._lookup_limiter.refund(address)

    def _on_lookup_done(
        self, digest: bytes | MemberIdentity, task: asyncio.Task[KnownKey | None]
    ) -> None:
        self._pending_lookups.pop(digest, None)
        self._unknown_lookups.discard(digest)
        # The requests may have gone: asyncio would log an error that none of them takes.
        if not task.cancelled():
            task.exception()

    async def _look_up(self, digest: bytes) -> KnownKey | None:
        asked_at = self._monotonic()
        statement = all_keys().where(
            or_(
                api_keys.c.key_hash == digest,
                and_(
                    api_keys.c.previous_key_hash == digest,
                    api_keys.c.previous_until > func.now(),
                ),
            )
        )
        async with autocommit(self._engine) as connection:
            row = (await connection.execute(statement)).mappings().one_or_none()
        self._known.discard(digest)
        if row is None or not row["is_valid"]:
            may_be_extended = row is not None and row["revoked_at"] is None
            self._unknown_cache.pop(digest, None)
            if len(self._unknown_cache) >= MAX_CACHED:
                del self._unknown_cache[next(iter(self._unknown_cache))]
            unknown_s = CACHE_S if may_be_extended else UNKNOWN_CACHE_S
            self._unknown_cache[digest] = asked_at + unknown_s
            return None
        known = known_key(row, digest)
        self._known.put(digest, known, asked_at)
        return known

    def _note_use(self, key: KeyId) -> None:
        """Note that a key was used in this hour; what the cache answers is 1 s later at most."""
        if key in self._used_hours or len(self._used_hours) < _MAX_USED:
            self._used_hours[key] = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


def _turns(slots: int, max_waiting: int) -> FairSlots:
    return FairSlots(
        slots,
        max_per_tenant=slots,
        max_waiting=max_waiting,
        refusal="too many API keys are being looked up",
    )


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
