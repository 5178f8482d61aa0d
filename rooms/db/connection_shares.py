"""Share the connections for everyday queries among organisations, within one process.

Without shares, one organisation's slow queries would hold every connection of the pool, and all
others, readiness and the look-up of keys would wait behind them.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from rooms.domain.ids import OrganisationId
from rooms.errors import RateLimitedError

WAIT_S: Final = 10.0
"""Seconds for which a query waits for a connection of its organisation's share."""
MAX_SHARED: Final = 16
"""Connections for all shares together: readiness, keys and routes keep the others."""
MAX_TRIES: Final = 5
"""Times that a part of an answer is read: less than a minute, after which proxies give up."""

T = TypeVar("T")


class ConnectionShare:
    """Hold one organisation's share: so many transactions at a time, as far as all allow it."""

    def __init__(
        self,
        limit: int,
        wait_s: float,
        on_refusal: Callable[[], None],
        all_shares: asyncio.Semaphore,
    ) -> None:
        self._all_shares = all_shares
        self._limit = limit
        self._wait_s = wait_s
        self._on_refusal = on_refusal
        self._free = asyncio.Semaphore(limit)

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Use a part of the share. RateLimitedError: none became free in time."""
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._wait_s):
                    await stack.enter_async_context(self._free)
                    await stack.enter_async_context(self._all_shares)
            except TimeoutError as exc:
                self._on_refusal()
                raise RateLimitedError(
                    f"this query waited {self._wait_s:g} s for others: an organisation has"
                    f" {self._limit} at a time; send fewer requests at a time, or narrower ones"
                ) from exc
            yield


_current: ContextVar[ConnectionShare | None] = ContextVar("connection_share", default=None)


class ConnectionShares:
    """Give each organisation a share of `limit` connections."""

    def __init__(
        self, limit: int, *, on_refusal: Callable[[], None], wait_s: float = WAIT_S
    ) -> None:
        self._limit = limit
        self._wait_s = wait_s
        self._on_refusal = on_refusal
        self._all_shares = asyncio.Semaphore(MAX_SHARED)
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
            share = ConnectionShare(self._limit, self._wait_s, self._on_refusal, self._all_shares)
            self._shares[organisation] = share
        _current.set(share)


@contextmanager
def without_share() -> Iterator[None]:
    """Count no transaction of the block for an organisation: its result is for all of them."""
    share = _current.get()
    _current.set(None)
    try:
        yield
    finally:
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


async def wait_for_share(
    read: Callable[[], Awaitable[T]], *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> T:
    """Return what `read` returns; where its organisation's share is in use, wait and read again.

    For the later parts of an answer that has begun, and so cannot be refused any more.
    RateLimitedError: the share was in use each time, and the answer must break off.
    """
    for _ in range(MAX_TRIES - 1):
        try:
            return await read()
        except RateLimitedError as exc:
            await sleep(exc.retry_after_s)
    return await read()
