"""Run the statements that return, extend and look up leases, which all share one connection.

The connection serves its callers in order, and one request may name a thousand leases. So each
organisation has one statement there at a time, and no other waits for all that it has asked for.

A caller may be cancelled, as when a stream ends. A statement that has begun is not: that would end
the connection, for all.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from delivery.pull.requests import Lease
from delivery.pull.target import PullTarget
from rooms.db.leases.acquire import SubscriptionAccess
from rooms.db.leases.release import LeaseQueries, UnsettledDelivery
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId

_T = TypeVar("_T")


class LeaseStatements:
    """Run the statements of `LeaseQueries`, those of one organisation one after another."""

    def __init__(self, queries: LeaseQueries) -> None:
        self._queries = queries
        self._turns: WeakValueDictionary[OrganisationId | None, asyncio.Lock] = (
            WeakValueDictionary()
        )
        self._running: set[asyncio.Future[Any]] = set()

    async def close(self) -> None:
        """Wait until the statements under way have ended, before their connection is closed."""
        if self._running:
            await asyncio.wait(self._running)

    async def access(self, key: PullTarget) -> SubscriptionAccess:
        """Return how the organisation may use the subscription."""
        return await self._run(
            key.organisation,
            lambda: self._queries.access(key.room, key.subscription, key.organisation),
        )

    async def nack(
        self, key: PullTarget, leases: Sequence[Lease], *, delay_ms: int
    ) -> tuple[SubscriptionAccess, frozenset[int], bool]:
        """Give leases back: `LeaseQueries.nack`."""
        return await self._run(
            key.organisation,
            lambda: self._queries.nack(
                key.room, key.subscription, key.organisation, leases, delay_ms=delay_ms
            ),
        )

    async def release(self, key: PullTarget, leases: Sequence[Lease]) -> None:
        """Give leases back whose messages no consumer was given."""
        await self._run(
            key.organisation,
            lambda: self._queries.release(key.room, key.subscription, key.organisation, leases),
        )

    async def extend(
        self, key: PullTarget, leases: Sequence[Lease], *, lease_ms: int
    ) -> tuple[SubscriptionAccess, frozenset[int]]:
        """Let leases end `lease_ms` from now: `LeaseQueries.extend`."""
        return await self._run(
            key.organisation,
            lambda: self._queries.extend(
                key.room, key.subscription, key.organisation, leases, lease_ms=lease_ms
            ),
        )

    async def inspect(
        self,
        deliveries: Sequence[tuple[RoomId, SubscriptionId, bytes]],
        *,
        organisation: OrganisationId | None = None,
    ) -> Mapping[int, UnsettledDelivery]:
        """Return the states of deliveries: `LeaseQueries.inspect`. None: of several ones."""
        return await self._run(organisation, lambda: self._queries.inspect(deliveries))

    async def find_subscriptions(
        self, deliveries: Sequence[tuple[RoomId, bytes]], *, organisation: OrganisationId
    ) -> Mapping[int, SubscriptionId]:
        """Return the subscriptions of deliveries: `LeaseQueries.find_subscriptions`."""
        return await self._run(organisation, lambda: self._queries.find_subscriptions(deliveries))

    async def _run(
        self, organisation: OrganisationId | None, statement: Callable[[], Awaitable[_T]]
    ) -> _T:
        turn = self._turns.setdefault(organisation, asyncio.Lock())
        await turn.acquire()
        running = asyncio.ensure_future(statement())
        self._running.add(running)

        def on_end(ended: "asyncio.Future[_T]") -> None:
            self._running.discard(ended)
            turn.release()
            if not ended.cancelled():
                ended.exception()  # or it would be logged where its caller was cancelled

        running.add_done_callback(on_end)
        return await asyncio.shield(running)
