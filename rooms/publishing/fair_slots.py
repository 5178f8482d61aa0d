"""A bounded number of slots, shared fairly between tenants: no tenant has more than its share, and turns go round."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rooms.errors import RateLimitedError


class FairSlots:
    """Slots of one process."""

    def __init__(self, slots: int, *, share: int, waiting: int) -> None:
        """`share`: slots that one tenant may have at once; `waiting`: those of its requests that may wait."""
        self._free = slots
        self._share = share
        self._waiting = waiting
        self._held: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot. RateLimitedError: too many of the tenant's requests wait already."""
        if self._free and self._held[tenant] < self._share and tenant not in self._queues:
            self._take(tenant)
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._release(tenant)

    async def _wait(self, tenant: str) -> None:
        queue = self._queues.setdefault(tenant, deque())
        if len(queue) >= self._waiting:
            raise RateLimitedError("too many of the organisation's requests wait for long validations")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(tenant)
            else:
                with suppress(ValueError):  # `_grant` may have passed by since it was cancelled
                    queue.remove(turn)
                self._forget(tenant)
            raise

    def _take(self, tenant: str) -> None:
        self._free -= 1
        self._held[tenant] += 1

    def _release(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant()

    def _grant(self) -> None:
        for tenant in list(self._queues):
            if not self._free:
                return
            queue = self._queues[tenant]
            while queue and queue[0].done():
                queue.popleft()
            if queue and self._held[tenant] < self._share:
                self._take(tenant)
                queue.popleft().set_result(None)
                self._queues.move_to_end(tenant)
            self._forget(tenant)

    def _forget(self, tenant: str) -> None:
        if not self._queues.get(tenant, True):
            del self._queues[tenant]
        if not self._held.get(tenant, 1):
            del self._held[tenant]
