"""Magazines for tests: every adapter, on a store of the test's own."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import Final

from delivery.magazines import open_magazines
from rooms.domain.magazine import Entry, MagazineName, Slot, StoredEntry
from rooms.ports import Magazine, Magazines
from tests.support.polling import PATIENCE_S

NAME: Final = MagazineName("orders")
ALL_STUCK_S: Final = -3600.0
"""Every entry handed out is older than this."""
NONE_STUCK_S: Final = 3600.0
EPOCH: Final = 7

_RUN: Final = secrets.token_hex(4)
_clients = count(1)


def quick(url: str) -> str:
    """The address with little patience: faults are part of the test."""
    if not url.startswith("aerospike"):
        return url
    return f"{url}?retries=12&sleep_ms=5&socket_timeout_ms=1000&total_timeout_ms=1000"


def opened(url: str, *, client: str | None = None) -> AbstractAsyncContextManager[Magazines]:
    """Open the magazines of a new installation, on a server with older data."""
    return open_magazines(
        quick(url), farm="farm", client=client or f"client-{_RUN}-{next(_clients)}"
    )


@asynccontextmanager
async def magazine_of(
    url: str, *, shards: int = 4, expires: bool = False
) -> AsyncIterator[Magazine]:
    async with opened(url) as magazines:
        yield await magazines.create(NAME, shards=shards, expires=expires)


def entries(*ids: str) -> list[Entry]:
    return [Entry(id=identity, body=identity.encode()) for identity in ids]


def ids(found: Sequence[StoredEntry]) -> list[str]:
    return [one.entry.id for one in found]


def slots(found: Sequence[StoredEntry]) -> list[Slot]:
    return [one.slot for one in found]


async def sweep_all(
    magazine: Magazine, *, epoch: int = EPOCH, older_than_s: float = ALL_STUCK_S, limit: int = 1000
) -> list[StoredEntry]:
    """Delete the stuck entries of every shard, as a sweeper does."""
    taken: list[StoredEntry] = []
    for shard in range(magazine.shards):
        for _ in range(int(PATIENCE_S * 100)):
            sweep = await magazine.sweep(shard, epoch=epoch, older_than_s=older_than_s, limit=limit)
            taken += sweep.entries
            await magazine.delete(slots(sweep.entries), swept=True)
            if not sweep.entries and not sweep.is_full:
                break
        else:
            raise AssertionError("the sweep has no end")
    return taken


async def drained(magazine: Magazine, *, limit: int = 1000) -> list[StoredEntry]:
    """Everything that waits, fired."""
    found: list[StoredEntry] = []
    while some := await magazine.fire(limit):
        found += some
    return found
