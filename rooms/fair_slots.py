"""Share what only few may use at a time fairly between organisations."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rooms.errors import RateLimitedError


class FairSlots:
    """Share a process's slots between tenants: each has a limit, and they take turns."""

    def __init__(
        self, slots: int, *, max_per_tenant: int, max_waiting: int | None = None, refusal: str = ""
    ) -> None:
        """Set the slots, and for each tenant the most slots and waiting requests.

        `max_waiting`: None where the callers bound them. `refusal`: the error's text where more
        requests of a tenant would wait.
        """
        self._free = slots
        self._max_per_tenant = max_per_tenant
        self._max_waiting = max_waiting
        self._refusal = refusal
        self._used: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot. RateLimitedError: too many requests of the tenant wait."""
        if self._free and self._used[tenant] < self._max_per_tenant and tenant not in self._queues:
            self._take(tenant)
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._release(tenant)

    async def _wait(self, tenant: str) -> None:
        queue = self._queues.setdefault(tenant, deque())
        if self._max_waiting is not None and len(queue) >= self._max_waiting:
            raise RateLimitedError(self._refusal)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(tenant)
            else:
                with suppress(ValueError):  # `_grant` may have removed it since the cancellation.
                    queue.remove(turn)
                self._drop_if_empty(tenant)
            raise

    def _take(self, tenant: str) -> None:
        self._free -= 1
        self._used[tenant] += 1

    def _release(self, tenant: str) -> None:
        self._free += 1
        self._used[tenant] -= 1
        if not self._used[tenant]:
            del self._used[tenant]
        self._grant()

    def _grant(self) -> None:
        for tenant in list(self._queues):
            if not self._free:
                return
            queue = self._queues[tenant]
            while queue and queue[0].done():
                queue.popleft()
            if queue and self._used[tenant] < self._max_per_tenant:
                self._take(tenant)
                queue.popleft().set_result(None)
                self._queues.move_to_end(tenant)
            self._drop_if_empty(tenant)

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._queues.get(tenant, True):
            del self._queues[tenant]
        if not self._used.get(tenant, 1):
            del self._used[tenant]
