"""Bulkheads between tenants: how many connections there are, by organisation and endpoint, and the turns of those that wait.

Turns go round: from organisation to organisation, within one from endpoint to endpoint, within one in the order of arrival.
What waits at a bound of its own holds up no other.
"""

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rooms.domain.ids import OrganisationId

if TYPE_CHECKING:
    from delivery.connections import Connection

Origin = tuple[str, str, int]
"""Scheme, host and port as the target names them."""
PoolKey = tuple[OrganisationId, Origin]
"""Connections are shared by requests of one organisation to one origin, and by no others."""


class Bound(StrEnum):
    """What is exhausted."""

    ALL = "all"
    ORGANISATION = "organisation"
    ENDPOINT = "endpoint"


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """A request without a connection. `given` gets one that came free, or None: a new one may be opened.

    `fresh`: it must be a new one.
    """

    key: PoolKey
    addresses: tuple[str, ...]
    fresh: bool
    given: "asyncio.Future[Connection | None]"


class Bulkhead:
    """Count the slots that are taken, and find the waiter whose turn it is."""

    def __init__(self, *, in_all: int, per_organisation: int, per_endpoint: int) -> None:
        self._limits = {Bound.ALL: in_all, Bound.ORGANISATION: per_organisation, Bound.ENDPOINT: per_endpoint}
        self._in_all = in_all
        self._per_organisation = per_organisation
        self._per_endpoint = per_endpoint
        self._by_organisation: dict[OrganisationId, int] = {}
        self._by_endpoint: dict[PoolKey, int] = {}
        self.waiting: dict[OrganisationId, dict[PoolKey, dict[Waiter, None]]] = {}
        """Requests that wait, in the order of turns. For `join` and its like to change."""
        self.size = 0
        """Slots that are taken."""

    def limit(self, bound: Bound) -> int:
        """Return how many slots there are within it."""
        return self._limits[bound]

    def reached(self, key: PoolKey) -> Bound | None:
        """Return the bound that stands in the way of another slot; None: `enter` may be called."""
        if self.size >= self._in_all:
            return Bound.ALL
        if self._by_organisation.get(key[0], 0) >= self._per_organisation:
            return Bound.ORGANISATION
        return Bound.ENDPOINT if self._by_endpoint.get(key, 0) >= self._per_endpoint else None

    def enter(self, key: PoolKey) -> None:
        """Take a slot."""
        self.size += 1
        self._by_organisation[key[0]] = self._by_organisation.get(key[0], 0) + 1
        self._by_endpoint[key] = self._by_endpoint.get(key, 0) + 1

    def leave(self, key: PoolKey) -> None:
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

    def join(self, waiter: Waiter) -> None:
        """Wait for a turn."""
        self.waiting.setdefault(waiter.key[0], {}).setdefault(waiter.key, {})[waiter] = None

    def withdraw(self, waiter: Waiter) -> None:
        """Wait no longer. Again is harmless."""
        endpoints = self.waiting.get(waiter.key[0], {})
        waiters = endpoints.get(waiter.key, {})
        if waiters.pop(waiter, waiter) is None:
            if not waiters:
                del endpoints[waiter.key]
            if not endpoints:
                del self.waiting[waiter.key[0]]

    def next(self, *, freed: PoolKey | None = None) -> Waiter | None:
        """Return the waiter whose turn it is, if there is a slot for it; `freed`: as if this one were given back already.

        It waits on until `admit`.
        """
        if freed is not None:
            self.leave(freed)
        try:
            if self.size < self._in_all:
                for organisation, endpoints in self.waiting.items():
                    if self._by_organisation.get(organisation, 0) < self._per_organisation:
                        for key, waiters in endpoints.items():
                            if self._by_endpoint.get(key, 0) < self._per_endpoint:
                                return next(iter(waiters))
            return None
        finally:
            if freed is not None:
                self.enter(freed)

    def admit(self, waiter: Waiter) -> None:
        """Take a waiter out whose turn has come, and let the others of its organisation and endpoint go to the end."""
        self.withdraw(waiter)
        organisation, key = waiter.key[0], waiter.key
        if (endpoints := self.waiting.pop(organisation, None)) is not None:
            self.waiting[organisation] = endpoints
            if (waiters := endpoints.pop(key, None)) is not None:
                endpoints[key] = waiters

    def dismiss(self) -> list[Waiter]:
        """Take out all that wait."""
        left = [waiter for endpoints in self.waiting.values() for waiters in endpoints.values() for waiter in waiters]
        self.waiting.clear()
        return left
