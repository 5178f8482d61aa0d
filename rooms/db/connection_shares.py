"""Share the connections for everyday queries among organisations, within one process.

Without shares, one organisation's slow queries would hold every connection of the pool, and all
others, readiness and the look-up of keys would wait behind them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Final
from weakref import WeakValueDictionary

from rooms.domain.ids import OrganisationId
from rooms.errors import RateLimitedError

WAIT_S: Final = 10.0
"""Seconds for which a query waits for a connection of its organisation's share."""


class ConnectionShare:
    """Hold one organisation's share: so many transactions at a time."""

    def __init__(self, limit: int, wait_s: float, on_refusal: Callable[[], None]) -> None:
        self._limit = limit
        self._wait_s = wait_s
        self._on_refusal = on_refusal
        self._free = asyncio.Semaphore(limit)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Use a part of the share. RateLimitedError: none became free in time."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._free.acquire()
        except TimeoutError as exc:
            self._on_refusal()
            raise RateLimitedError(
                f"{self._limit} queries of your organisation are at work, and this one waited"
                f" {self._wait_s:g} s: send fewer requests at a time, or narrower ones"
            ) from exc
        try:
            yield
        finally:
            self._free.release()


_current: ContextVar[ConnectionShare | None] = ContextVar("connection_share", default=None)


class ConnectionShares:
    """Give each organisation a share of `limit` connections."""

    def __init__(
        self, limit: int, *, on_refusal: Callable[[], None], wait_s: float = WAIT_S
    ) -> None:
        self._limit = limit
        self._wait_s = wait_s
        self._on_refusal = on_refusal
        self._shares: WeakValueDictionary[OrganisationId, ConnectionShare] = WeakValueDictionary()

    def leave(self) -> None:
        """Count the transactions of this task for no organisation from now on.

        A task begins with what the one that made it had.
        """
        _current.set(None)

    def enter(self, organisation: OrganisationId) -> None:
        """Count the transactions of this task as those of an organisation from now on."""
        share = self._shares.get(organisation)
        if share is None:
            share = ConnectionShare(self._limit, self._wait_s, self._on_refusal)
            self._shares[organisation] = share
        _current.set(share)


@asynccontextmanager
async def hold_share() -> AsyncIterator[None]:
    """Use a part of the share of this task's organisation, if it has one. RateLimitedError.

    A transaction within another one uses no further part, or the two could wait for each other.
    """
    share = _current.get()
    if share is None:
        yield
        return
    async with share.hold():
        _current.set(None)
        try:
            yield
        finally:
            # A generator may be closed in another context, where a token would not be valid.
            _current.set(share)
