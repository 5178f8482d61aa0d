"""Look-ups under way: bounded in time, for each organisation and in all."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from delivery.bulkhead import Bound
from delivery.errors import LookupsBusyError
from delivery.resolver import Resolver
from rooms.domain.ids import OrganisationId

ORGANISATION_LOOKUPS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupLimits:
    """Bound look-ups, in number and seconds.

    `deadline_s`: of one look-up. `wait_s`: how long one may wait for its turn, of its organisation and then of all.
    """

    in_all: int = 256
    per_organisation: int = ORGANISATION_LOOKUPS
    deadline_s: float = 5.0
    wait_s: float = 5.0


class _Share:
    __slots__ = ("semaphore", "users")

    def __init__(self, limit: int) -> None:
        self.semaphore = asyncio.Semaphore(limit)
        self.users = 0


class Lookups:
    """Run look-ups. What waits for its organisation's turn takes nothing of what all share."""

    def __init__(self, resolver: Resolver, limits: LookupLimits, waited: Callable[[Bound], None]) -> None:
        self._resolver = resolver
        self._limits = limits
        self._waited = waited
        self._all = asyncio.Semaphore(limits.in_all)
        self._shares: dict[OrganisationId, _Share] = {}

    @property
    def organisations(self) -> int:
        """How many organisations have a look-up under way, or waiting."""
        return len(self._shares)

    async def run(self, host: str, organisation: OrganisationId) -> Sequence[str]:
        """Return what the resolver does. OSError: no answer (TimeoutError: in time). LookupsBusyError: it was not asked."""
        with self._share(organisation) as share:
            async with self._turn(share, Bound.ORGANISATION), self._turn(self._all, Bound.ALL):
                async with asyncio.timeout(self._limits.deadline_s):
                    return await self._resolver(host)

    @contextmanager
    def _share(self, organisation: OrganisationId) -> Iterator[asyncio.Semaphore]:
        share = self._shares.get(organisation)
        if share is None:
            share = self._shares[organisation] = _Share(self._limits.per_organisation)
        share.users += 1
        try:
            yield share.semaphore
        finally:
            share.users -= 1
            if not share.users:
                del self._shares[organisation]

    @asynccontextmanager
    async def _turn(self, semaphore: asyncio.Semaphore, bound: Bound) -> AsyncIterator[None]:
        if semaphore.locked():
            self._waited(bound)
        try:
            async with asyncio.timeout(self._limits.wait_s):
                await semaphore.acquire()
        except TimeoutError as exc:
            raise LookupsBusyError(f"too many names are looked up at a time ({bound})") from exc
        try:
            yield
        finally:
            semaphore.release()
