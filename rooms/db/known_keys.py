"""Keep the API keys that a process has seen valid, and look those in use up again in time.

A key is trusted for a second. Were it only looked up when a request finds that second over, each
request of a client that sends one a second would wait for a look-up of its own. So one statement
renews all keys that were used lately, before their second is over. What it cannot renew is looked
up by the next request.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

from sqlalchemy import ARRAY, LargeBinary, and_, any_, literal, or_
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.sql import func

from rooms.cache_shares import CacheShares
from rooms.db.connection import autocommit
from rooms.db.principals import KnownKey, all_keys, known_key
from rooms.db.tables.organisations import api_keys
from rooms.domain.ids import KeyId, OrganisationId
from rooms.errors import RoomsError

_log = logging.getLogger(__name__)

CACHE_S: Final = 1.0
"""The longest time for which a revoked key may go on working in a process that knew it."""
MAX_CACHED: Final = 10_000
RENEW_S: Final = 0.7
"""Seconds between two renewals: they have the rest of the second to end."""
_RENEWED_ROUNDS: Final = 15
"""A key is renewed for ten seconds after its last use."""
MAX_RENEWED: Final = 1_000
"""The most keys of one renewal, in turns of organisations."""


class KnownKeys:
    """Hold principals by the hash of their key's text, and which of them are in use.

    If it is full, the organisation with the most keys loses its oldest.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        monotonic: Callable[[], float],
        *,
        on_use: Callable[[KeyId], None],
    ) -> None:
        """`on_use` is called at a renewal, for each key that was used since the last one."""
        self._engine = engine
        self._monotonic = monotonic
        self._on_use = on_use
        self._entries: dict[bytes, tuple[KnownKey, float]] = {}
        self._shares = CacheShares[bytes]()
        self._used: set[bytes] = set()
        self._rounds_left: dict[bytes, int] = {}
        """Of the keys in use, those that were used last at the end."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: bytes) -> tuple[KnownKey, bool] | None:
        """Return a key that was valid, and whether that still counts; None: it is not known."""
        found = self._entries.get(digest)
        return None if found is None else (found[0], self._monotonic() < found[1])

    def note_use(self, digest: bytes) -> None:
        """Note that a request came in with this key."""
        self._used.add(digest)

    def put(self, digest: bytes, known: KnownKey, asked_at: float) -> None:
        """Trust a key for `CACHE_S` after `asked_at`, when its row was asked for."""
        self.discard(digest)
        if len(self._entries) >= MAX_CACHED:
            self.discard(self._shares.displaced())
        self._entries[digest] = (known, asked_at + CACHE_S)
        self._shares.add(digest, known.principal.organisation_id)

    def discard(self, digest: bytes) -> None:
        """Forget a key, if it is known."""
        self._entries.pop(digest, None)
        self._shares.discard(digest)

    def forget_organisation(self, organisation: OrganisationId) -> None:
        """Forget its keys: what this process changed about them counts at once."""
        for digest in self._shares.keys_of(organisation):
            self.discard(digest)

    def clear(self) -> None:
        """Forget every key."""
        self._entries.clear()
        self._shares.clear()

    async def renew_forever(self) -> None:
        """Renew the keys in use again and again."""
        while True:
            await asyncio.sleep(RENEW_S)
            # Requests look up what this could not, and answer with the error.
            try:
                await self.renew()
            except RoomsError:
                pass
            except Exception:  # noqa: BLE001 - the next renewal may succeed
                _log.exception("keys in use could not be renewed")

    async def renew(self) -> None:
        """Look up the keys in use. One that is not valid any more is forgotten.

        So is one whose organisation is suspended: it counts at once when that ends. What is
        forgotten or looked up meanwhile stays as it is.

        StorageUnavailableError, StorageRefusedError: nothing was renewed.
        """
        digests = self._take_in_use()
        if not digests:
            return
        asked_at = self._monotonic()
        before = [(digest, self._entries.get(digest)) for digest in digests]
        hashes = literal(digests, ARRAY(LargeBinary))
        previous_is_valid = api_keys.c.previous_until > func.now()
        statement = all_keys(previous_is_valid.label("previous_is_valid")).where(
            or_(
                api_keys.c.key_hash == any_(hashes),
                and_(api_keys.c.previous_key_hash == any_(hashes), previous_is_valid),
            )
        )
        async with autocommit(self._engine) as connection:
            rows = (await connection.execute(statement)).mappings().all()
        by_hash = {row["previous_key_hash"]: row for row in rows if row["previous_is_valid"]}
        by_hash |= {row["key_hash"]: row for row in rows}
        for digest, entry in before:
            if entry is None or self._entries.get(digest) is not entry:
                continue
            row = by_hash.get(digest)
            known = None if row is None or not row["is_valid"] else known_key(row, digest)
            if known is None or known.principal.suspended:
                self.discard(digest)
            else:
                self.put(digest, known, asked_at)

    def _take_in_use(self) -> list[bytes]:
        """Return the keys to renew, and count the round."""
        used, self._used = self._used, set()
        for digest in used:
            if (entry := self._entries.get(digest)) is not None:
                self._on_use(entry[0].principal.key_id)
                self._rounds_left.pop(digest, None)
                self._rounds_left[digest] = _RENEWED_ROUNDS
        turns: list[tuple[int, bytes]] = []
        taken: Counter[str] = Counter()
        for digest, left in reversed(list(self._rounds_left.items())):
            entry = self._entries.get(digest)
            if entry is None or not left:
                del self._rounds_left[digest]
                continue
            self._rounds_left[digest] = left - 1
            organisation = entry[0].principal.organisation_id
            turns.append((taken[organisation], digest))
            taken[organisation] += 1
        if len(turns) > MAX_RENEWED:
            turns.sort(key=lambda turn: turn[0])
        return [digest for _, digest in turns[:MAX_RENEWED]]
