"""The sender's connections: kept alive between exchanges, bounded, and swept when their time is up."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain
from typing import assert_never

from delivery.bulkhead import Bound, Bulkhead, PoolKey, Waiter
from delivery.connections import Connection, Limits
from delivery.errors import AttemptFailedError
from rooms.domain.attempt import ErrorClass
from rooms.domain.ids import OrganisationId


class Pool:
    """Idle connections by organisation and origin, the newest on top, and a slot for each that is open or being opened."""

    def __init__(self, limits: Limits, clock: Callable[[], float], waited: Callable[[Bound], None]) -> None:
        """`waited` is called with the bound for which a request has to wait."""
        self._limits = limits
        self._clock = clock
        self._waited = waited
        self._bulkhead = Bulkhead(
            in_all=limits.max_connections,
            per_organisation=limits.max_per_organisation or limits.max_connections,
            per_endpoint=limits.max_per_endpoint or limits.max_connections,
        )
        self._open: set[Connection] = set()
        self._idle: dict[PoolKey, list[Connection]] = {}
        self._idle_of: dict[OrganisationId, dict[PoolKey, list[Connection]]] = {}
        """The same lists, by organisation."""
        self._sweep: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None
        self.closed = False

    @property
    def size(self) -> int:
        """Connections that are open or being opened."""
        return self._bulkhead.size

    def take(self, key: PoolKey, addresses: tuple[str, ...]) -> Connection | None:
        """Take an idle connection to one of `addresses`. What leads elsewhere by now is closed on the way."""
        idle = self._idle.get(key)
        while idle:
            connection = idle.pop()
            if connection.reusable and connection.address in addresses:
                return connection
            connection.abort()
        return None

    def put(self, connection: Connection, now: float) -> None:
        """Give a connection back after its exchange, at time `now`."""
        if not connection.rest(now):
            connection.abort()
        elif self._bulkhead.waiting:
            self._hand_over(connection)
        elif (idle := self._idle.get(connection.key)) is not None and len(idle) < self._limits.max_idle_per_host:
            # What `_keep` does nearly always: each delivery comes by here.
            idle.append(connection)
        else:
            self._keep(connection)

    def reached(self, key: PoolKey) -> str:
        """Describe, for an error, the bound that another connection would have to wait for."""
        bound = self._bulkhead.reached(key) or Bound.ALL
        whose = {Bound.ALL: "", Bound.ORGANISATION: " of its organisation", Bound.ENDPOINT: " of its endpoint"}
        return f"{self._bulkhead.limit(bound)} connections{whose[bound]}"

    async def slot(self, key: PoolKey, addresses: tuple[str, ...], *, fresh: bool) -> Connection | None:
        """Return None once a connection may be opened, or one that came free meanwhile (never if `fresh`)."""
        while True:
            if self.closed:
                raise AttemptFailedError(ErrorClass.CLOSED, "the sender is closed")
            bound = self._bulkhead.reached(key)
            if bound is None:
                self._bulkhead.enter(key)
                return None
            self._waited(bound)
            given: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
            waiter = Waiter(key=key, addresses=addresses, fresh=fresh, given=given)
            self._bulkhead.join(waiter)
            self._evict(key, bound)
            try:
                connection = await given
            except asyncio.CancelledError:
                self._take_back(waiter)
                raise
            if connection is None or connection.reusable:
                return connection

    def leave(self, key: PoolKey) -> None:
        """Give back a slot whose connection is gone, or was never made."""
        self._bulkhead.leave(key)
        while (waiter := self._bulkhead.next()) is not None:
            self._bulkhead.admit(waiter)
            if not waiter.given.done():
                self._bulkhead.enter(waiter.key)
                waiter.given.set_result(None)
        if self.size == 0 and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def add(self, connection: Connection) -> None:
        """Count a connection that was opened in a slot."""
        self._open.add(connection)
        connection.retires = self._clock() + self._limits.max_age_s
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._limits.sweep_s, self._swept)

    def lost(self, connection: Connection) -> None:
        """Free the slot of a closed connection. One that never came as far as `add` leaves its slot to who opened it."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        idle = self._idle.get(connection.key)
        if idle is not None and connection in idle:
            idle.remove(connection)
        self.leave(connection.key)

    async def close(self) -> None:
        """Close everything; what is under way fails as CLOSED. Returns when the last connection is gone."""
        self.closed = True
        for waiter in self._bulkhead.dismiss():
            if not waiter.given.done():
                waiter.given.set_exception(AttemptFailedError(ErrorClass.CLOSED, "the sender is closed"))
        for connection in tuple(self._open):
            connection.abort()
        if self.size:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _swept(self) -> None:
        now = self._clock()
        # A copy: a transport may say at once that it is closed.
        for connection in tuple(self._open):
            if connection.expires <= now:
                connection.expire()
        for key in [key for key, idle in self._idle.items() if not idle]:
            del self._idle[key]
            del self._idle_of[key[0]][key]
            if not self._idle_of[key[0]]:
                del self._idle_of[key[0]]
        self._sweep = None
        if self._open or self._idle:
            self._sweep = asyncio.get_running_loop().call_later(self._limits.sweep_s, self._swept)

    def _keep(self, connection: Connection) -> None:
        key = connection.key
        idle = self._idle.get(key)
        if idle is None:
            self._idle[key] = idle = [connection]
            self._idle_of.setdefault(key[0], {})[key] = idle
        elif len(idle) < self._limits.max_idle_per_host:
            idle.append(connection)
        else:
            connection.abort()

    def _evict(self, key: PoolKey, bound: Bound) -> None:
        """Close an idle connection within the bound that was reached: its slot goes to a waiter, now."""
        own: Iterable[list[Connection]] = self._idle_of.get(key[0], {}).values()
        candidates: Iterable[list[Connection]]
        match bound:
            case Bound.ENDPOINT:
                candidates = (self._idle.get(key, []),)
            case Bound.ORGANISATION:
                candidates = own
            case Bound.ALL:
                candidates = chain(own, self._idle.values())
            case _:
                assert_never(bound)
        for idle in candidates:
            if idle:
                self._discard(idle.pop(0))
                return

    def _discard(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.abort()
        self.leave(connection.key)

    def _hand_over(self, connection: Connection) -> None:
        waiter = self._bulkhead.next(freed=connection.key)
        while waiter is not None and waiter.given.done():
            self._bulkhead.withdraw(waiter)
            waiter = self._bulkhead.next(freed=connection.key)
        if waiter is None:
            self._keep(connection)
        elif waiter.fresh or waiter.key != connection.key or connection.address not in waiter.addresses:
            self._discard(connection)
        else:
            self._bulkhead.admit(waiter)
            waiter.given.set_result(connection)

    def _take_back(self, waiter: Waiter) -> None:
        """Pass on what was given to a waiter that was cancelled at the same moment."""
        self._bulkhead.withdraw(waiter)
        if not waiter.given.done() or waiter.given.cancelled():
            waiter.given.cancel()
        elif waiter.given.exception() is None:
            given = waiter.given.result()
            if given is None:
                self.leave(waiter.key)
            else:
                self.put(given, self._clock())
