"""Bound connections by organisation and endpoint, and choose the next waiter fairly.

Turns rotate between organisations, within one between its endpoints, and within one by arrival. A
waiter that is held up by a limit of its own does not hold up others.
"""

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from delivery.push.http.connection import HttpConnection, PoolKey
from rooms.domain.ids import OrganisationId


class LimitScope(StrEnum):
    """Name the limit that is exhausted."""

    ALL = "all"
    ORGANISATION = "organisation"
    ENDPOINT = "endpoint"


@dataclass(slots=True, kw_only=True, eq=False)
class ConnectionWaiter:
    """Represent a request that waits for a connection.

    `granted` gets a connection that came free, or None: a new one may be opened. `fresh`: only a
    new one will do.
    """

    key: PoolKey
    addresses: tuple[str, ...]
    fresh: bool
    granted: asyncio.Future[HttpConnection | None]


class Bulkhead:
    """Count the slots that are taken, and choose the next waiter."""

    def __init__(self, *, total: int, per_organisation: int, per_endpoint: int) -> None:
        self._limits = {
            LimitScope.ALL: total,
            LimitScope.ORGANISATION: per_organisation,
            LimitScope.ENDPOINT: per_endpoint,
        }
        self._total = total
        self._per_organisation = per_organisation
        self._per_endpoint = per_endpoint
        self._by_organisation: dict[OrganisationId, int] = {}
        self._by_endpoint: dict[PoolKey, int] = {}
        self.waiters: dict[OrganisationId, dict[PoolKey, dict[ConnectionWaiter, None]]] = {}
        """Requests that wait, in the order of turns. Only this class changes it."""
        self.size = 0
        """Slots that are taken."""

    def limit(self, scope: LimitScope) -> int:
        """Return the number of slots in a scope."""
        return self._limits[scope]

    def exhausted_scope(self, key: PoolKey) -> LimitScope | None:
        """Return the limit that prevents another slot; None: `acquire` may be called."""
        if self.size >= self._total:
            return LimitScope.ALL
        if self._by_organisation.get(key[0], 0) >= self._per_organisation:
            return LimitScope.ORGANISATION
        return LimitScope.ENDPOINT if self._by_endpoint.get(key, 0) >= self._per_endpoint else None

    def acquire(self, key: PoolKey) -> None:
        """Take a slot."""
        self.size += 1
        self._by_organisation[key[0]] = self._by_organisation.get(key[0], 0) + 1
        self._by_endpoint[key] = self._by_endpoint.get(key, 0) + 1

    def release(self, key: PoolKey) -> None:
        """Give a slot back."""
        self.size -= 1
        if (left := self._by_organisation[key[0]] - 1) > 0:
            self._by_organisation[key[0]] = left
        else:
            del self._by_organisation[key[0]]
        if (left := self._by_endpoint[key] - 1) > 0:
            self._by_endpoint[key] = left
        else:
            del self._by_endpoint[key]

    def add_waiter(self, waiter: ConnectionWaiter) -> None:
        """Add a waiter at the end of its endpoint's queue."""
        self.waiters.setdefault(waiter.key[0], {}).setdefault(waiter.key, {})[waiter] = None

    def remove_waiter(self, waiter: ConnectionWaiter) -> None:
        """Remove a waiter. A second call has no effect."""
        endpoints = self.waiters.get(waiter.key[0], {})
        waiters = endpoints.get(waiter.key, {})
        if waiters.pop(waiter, waiter) is None:
            if not waiters:
                del endpoints[waiter.key]
            if not endpoints:
                del self.waiters[waiter.key[0]]

    def next_waiter(self, *, freed: PoolKey | None = None) -> ConnectionWaiter | None:
        """Return the next waiter for which there is a slot; it waits on until `admit`.

        `freed`: a slot that is counted as if it were released already.
        """
        if freed is not None:
            self.release(freed)
        try:
            if self.size < self._total:
                for organisation, endpoints in self.waiters.items():
                    if self._by_organisation.get(organisation, 0) < self._per_organisation:
                        for key, waiters in endpoints.items():
                            if self._by_endpoint.get(key, 0) < self._per_endpoint:
                                return next(iter(waiters))
            return None
        finally:
            if freed is not None:
                self.acquire(freed)

    def admit(self, waiter: ConnectionWaiter) -> None:
        """Remove the next waiter, and move its organisation and endpoint to the end."""
        self.remove_waiter(waiter)
        organisation, key = waiter.key[0], waiter.key
        if (endpoints := self.waiters.pop(organisation, None)) is not None:
            self.waiters[organisation] = endpoints
            if (waiters := endpoints.pop(key, None)) is not None:
                endpoints[key] = waiters

    def remove_all_waiters(self) -> list[ConnectionWaiter]:
        """Remove and return all waiters."""
        removed = [
            waiter
            for endpoints in self.waiters.values()
            for waiters in endpoints.values()
            for waiter in waiters
        ]
        self.waiters.clear()
        return removed
