"""Limit how often one address tries to sign in, without stopping all clients behind a proxy."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from rooms.api.deps import ApiServices
from rooms.db.authentication import ClientAddress, client_block
from rooms.errors import RateLimitedError
from rooms.token_buckets import TokenBuckets

MAX_WAIT_S: Final = 2.0
"""The longest time for which a try through a trusted proxy waits for others."""


class SignInLimit:
    """Give each address `per_s` tries a second; one that succeeds is refunded.

    A client that a trusted proxy names has its own address. Proxies that name none pay nothing, as
    for unknown keys: one client behind a proxy must not use up the tries of all. Of theirs, `per_s`
    run at a time. Others wait, but not for long: a provider may be slow, and clients many.
    """

    def __init__(self, services: ApiServices, per_s: int, refusal: str) -> None:
        self._services = services
        self._refusal = refusal
        self._buckets: TokenBuckets[str] = TokenBuckets(per_s, services.clock.monotonic)
        self._proxied = asyncio.Semaphore(per_s)

    @asynccontextmanager
    async def attempt(self, client: ClientAddress | None) -> AsyncIterator[Callable[[], None]]:
        """Run one try; it calls what is yielded when it succeeds. RateLimitedError: too many.

        `client`: the source of the request, which is a trusted proxy only if that names none.
        """
        if self._services.callers.is_proxy(client):
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await self._proxied.acquire()
            except TimeoutError as exc:
                raise RateLimitedError(self._refusal) from exc
            try:
                yield lambda: None
            finally:
                self._proxied.release()
            return
        address = client_block(client)
        if not self._buckets.take(address):
            raise RateLimitedError(self._refusal)
        yield lambda: self._buckets.refund(address)
