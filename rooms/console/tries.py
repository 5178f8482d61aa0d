"""Limit how often one address tries to sign in, without stopping all clients behind a proxy."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rooms.api.deps import ApiServices
from rooms.db.authentication import ClientAddress, client_block
from rooms.errors import RateLimitedError
from rooms.token_buckets import TokenBuckets


class Tries:
    """Give each address `per_s` tries a second; one that succeeds is refunded.

    Trusted proxies pay nothing, as for unknown keys: one client behind a proxy must not use up the
    tries of all. Of theirs, `per_s` run at a time, and others wait.
    """

    def __init__(self, services: ApiServices, per_s: int, refusal: str) -> None:
        self._services = services
        self._refusal = refusal
        self._buckets: TokenBuckets[str] = TokenBuckets(per_s, services.clock.monotonic)
        self._proxied = asyncio.Semaphore(per_s)

    @asynccontextmanager
    async def attempt(self, client: ClientAddress | None) -> AsyncIterator[Callable[[], None]]:
        """Run one try; it calls what is yielded when it succeeds. RateLimitedError: too many."""
        if self._services.callers.is_proxy(client):
            async with self._proxied:
                yield lambda: None
            return
        address = client_block(client)
        if not self._buckets.take(address):
            raise RateLimitedError(self._refusal)
        yield lambda: self._buckets.refund(address)
