"""Store the keys by which the installation signs receipts.

The private part is encrypted by the installation's secret key, and deleted when the key is retired.
Old public keys stay, with that time.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.db.connection import transaction
from rooms.db.secret_rotation import receipt_key_purpose
from rooms.db.secrets import Cipher
from rooms.db.tables.organisations import receipt_keys
from rooms.errors import StorageRefusedError
from rooms.evidence.jose import (
    PublicKey,
    SigningKey,
    ed25519_key,
    end_of,
    public_key,
)

MAX_PUBLISHED: Final = 100
"""Public keys that are published, the newest first."""
CACHE_S: Final = 1.0
_SEED_BYTES: Final = 32


class ReceiptKeyError(StorageRefusedError):
    """Report that the current key cannot be decrypted by this process's secret key."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Hold the `kid` of the key that was retired (None: there was none), and of the new one."""

    retired: str | None
    created: str


async def current_key(
    connection: AsyncConnection, cipher: Cipher, random: Callable[[int], bytes]
) -> SigningKey:
    """Return the key that signs; the first call of an installation creates it.

    ReceiptKeyError: it was encrypted under another secret key.
    """
    found = await _current(connection)
    if found is None:
        await _create(connection, cipher, random)
        found = await _current(connection)
        assert found is not None  # of this process, or of one that was faster
    kid, encrypted = found
    return _decrypt(kid, encrypted, cipher)


class PublishedKeys:
    """Read the public keys at most once in `CACHE_S`, because reading them needs no API key."""

    def __init__(
        self,
        engine: AsyncEngine,
        monotonic: Callable[[], float],
        cipher: Cipher,
        random: Callable[[int], bytes],
    ) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self._cipher = cipher
        self._random = random
        self._lock = asyncio.Lock()
        self._cached: Sequence[PublicKey] = ()
        self._cached_until = 0.0

    async def current(self) -> Sequence[PublicKey]:
        """Return the keys; the first call of an installation creates one.

        StorageUnavailableError, StorageRefusedError.
        """
        async with self._lock:
            if not self._cached or self._monotonic() >= self._cached_until:
                async with transaction(self._engine) as connection:
                    found = await published_keys(connection)
                    if not found:
                        await current_key(connection, self._cipher, self._random)
                        found = await published_keys(connection)
                self._cached = found
                self._cached_until = self._monotonic() + CACHE_S
            return self._cached

    def forget(self) -> None:
        """Read the keys again at the next call."""
        self._cached = ()


async def published_keys(connection: AsyncConnection) -> Sequence[PublicKey]:
    """Return the newest public keys, also retired ones, with their times."""
    statement = (
        select(receipt_keys.c.jwk, receipt_keys.c.created_at, receipt_keys.c.retired_at)
        .order_by(receipt_keys.c.created_at.desc(), receipt_keys.c.kid)
        .limit(MAX_PUBLISHED)
    )
    return [
        public_key(row.jwk, valid_from=row.created_at, valid_until=end_of(row.retired_at))
        for row in await connection.execute(statement)
    ]


async def rotate_key(
    connection: AsyncConnection,
    cipher: Cipher,
    random: Callable[[int], bytes],
    *,
    replace_lost: bool,
) -> Rotation:
    """Retire the current key and create another.

    ReceiptKeyError: the current key was encrypted under another secret key, so the new one would
    be of no use to the running processes; `replace_lost`: that secret key is lost.
    """
    found = await _current(connection, lock=True)
    if found is not None:
        kid, encrypted = found
        if not replace_lost:
            _decrypt(kid, encrypted, cipher)
        await connection.execute(
            update(receipt_keys)
            .where(receipt_keys.c.kid == kid)
            .values(retired_at=func.clock_timestamp(), encrypted_key=None)
        )
    await _create(connection, cipher, random)
    created = await _current(connection)
    assert created is not None
    return Rotation(None if found is None else found[0], created[0])


async def _current(connection: AsyncConnection, *, lock: bool = False) -> tuple[str, bytes] | None:
    statement = select(receipt_keys.c.kid, receipt_keys.c.encrypted_key).where(
        receipt_keys.c.retired_at.is_(None)
    )
    if lock:
        statement = statement.with_for_update()
    row = (await connection.execute(statement)).one_or_none()
    return None if row is None else (row.kid, row.encrypted_key)


async def _create(
    connection: AsyncConnection, cipher: Cipher, random: Callable[[int], bytes]
) -> None:
    seed = random(_SEED_BYTES)
    public = ed25519_key(seed).public
    values: dict[str, Any] = {
        "kid": public.kid,
        "jwk": dict(public.members),
        "encrypted_key": cipher.encrypt(seed, receipt_key_purpose(public.kid)),
    }
    await connection.execute(insert(receipt_keys).values(**values).on_conflict_do_nothing())


def _decrypt(kid: str, encrypted: bytes, cipher: Cipher) -> SigningKey:
    try:
        return ed25519_key(cipher.decrypt(encrypted, receipt_key_purpose(kid)))
    except ValueError as exc:
        raise ReceiptKeyError(
            "the key of receipts was encrypted under another ROOMS_SECRET_KEY; if that is lost,"
            " run `rooms receipt-key rotate --replace-lost`"
        ) from exc
