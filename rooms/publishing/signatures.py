"""Verify the signatures of messages before they are published.

The keys of a request are read in one statement, and cached for a second, never beyond it. A request
without signatures comes past here without any.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rooms.db.catalog.signing_keys import SigningKeyRecord
from rooms.domain.ids import OrganisationId, RoomId
from rooms.domain.principal import Principal
from rooms.evidence.jose import EvidenceError, Jws, PublicKey, public_key
from rooms.evidence.message_signature import (
    MessageIdentity,
    payload_hash,
    read_signature,
    read_statement,
)
from rooms.publishing.request import MessageRequest

CACHE_S: Final = 1.0
"""The longest time for which a revoked key may go on working in a process that knew it."""
_MAX_CACHED: Final = 10_000
_TURN_BYTES: Final = 1 << 20
_SIGNATURE_COST: Final = 1 << 17
"""A signature takes about as long as hashing so many bytes, 0.1 to 0.2 ms."""

FindSigningKeys = Callable[
    [OrganisationId, Collection[str]], Awaitable[Mapping[str, SigningKeyRecord]]
]


@dataclass(frozen=True, slots=True)
class _CachedKey:
    public: PublicKey
    revoked: bool
    read_s: float


class SignatureChecker:
    """Verify signatures for one process, in turns that do not keep its event loop for long."""

    def __init__(self, find: FindSigningKeys, monotonic: Callable[[], float]) -> None:
        self._find = find
        self._monotonic = monotonic
        self._cache: dict[tuple[OrganisationId, str], _CachedKey] = {}

    async def refused(
        self,
        principal: Principal,
        room: RoomId,
        messages: Sequence[MessageRequest],
        signed: Sequence[int],
    ) -> Mapping[int, str]:
        """Return why signatures are not accepted, by the index of their message.

        `signed`: the indexes of messages with a signature. StorageUnavailableError,
        StorageRefusedError.
        """
        refused: dict[int, str] = {}
        read: dict[int, Jws] = {}
        for index in signed:
            try:
                read[index] = read_signature(messages[index].signature or "")
            except EvidenceError as exc:
                refused[index] = str(exc)
        keys = await self._keys(
            principal.organisation_id, {jws.header.kid for jws in read.values()}
        )
        spent = 0
        for index, jws in read.items():
            message = messages[index]
            try:
                _check(jws, keys.get(jws.header.kid), principal.organisation_id, room, message)
            except EvidenceError as exc:
                refused[index] = str(exc)
            spent += _SIGNATURE_COST + len(message.payload)
            if spent >= _TURN_BYTES:
                spent = 0
                await asyncio.sleep(0)
        return refused

    async def _keys(
        self, organisation: OrganisationId, kids: Collection[str]
    ) -> Mapping[str, _CachedKey]:
        now_s = self._monotonic()
        known = {
            kid: found
            for kid in kids
            if (found := self._cache.get((organisation, kid))) is not None
            and now_s - found.read_s < CACHE_S
        }
        missing = [kid for kid in kids if kid not in known]
        if not missing:
            return known
        for kid, record in (await self._find(organisation, missing)).items():
            key = _CachedKey(public_key(record.jwk), record.revoked_at is not None, now_s)
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[organisation, kid] = known[kid] = key
        return known


def _check(
    jws: Jws,
    key: _CachedKey | None,
    publisher: OrganisationId,
    room: RoomId,
    message: MessageRequest,
) -> None:
    if key is None:
        raise EvidenceError(
            f"unknown key: {jws.header.kid[:64]!r} is not registered with your organisation"
            " (POST /v1/signing-keys)"
        )
    if key.revoked:
        raise EvidenceError(f"revoked key: {jws.header.kid}; sign with another one")
    statement = read_statement(jws, key.public)
    statement.check_identity(
        MessageIdentity(
            publisher=publisher,
            room=room,
            event_type=message.event_type,
            version=message.version,
            id=message.id,
            ordering_key=message.ordering_key,
        )
    )
    statement.check_payload(payload_hash(message.payload))
