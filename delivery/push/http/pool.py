"""Keep the sender's connections alive between exchanges, bound them, and sweep expired ones."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import chain
from typing import assert_never

from delivery.push.errors import AttemptFailedError
from delivery.push.http.bulkhead import Bulkhead, ConnectionWaiter, LimitScope
from delivery.push.http.connection import HttpConnection, HttpLimits, PoolKey
from rooms.domain.attempt import ErrorClass
from rooms.domain.ids import OrganisationId


class ConnectionPool:
    """Pool connections by organisation and origin, the newest first, with a slot for each."""

    def __init__(
        self, limits: HttpLimits, clock: Callable[[], float], on_wait: Callable[[LimitScope], None]
    ) -> None:
        """Configure the pool. `on_wait` gets the limit at which a request waits."""
        self._limits = limits
        self._clock = clock
        self._on_wait = on_wait
        self._bulkhead = Bulkhead(
            total=limits.max_connections,
            per_organisation=limits.max_per_organisation or limits.max_connections,
            per_endpoint=limits.max_per_endpoint or limits.max_connections,
        )
        self._open: set[HttpConnection] = set()
        self._idle: dict[PoolKey, list[HttpConnection]] = {}
        self._idle_by_organisation: dict[OrganisationId, dict[PoolKey, list[HttpConnection]]] = {}
        """The lists of `_idle`, by organisation."""
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._all_closed: asyncio.Future[None] | None = None
        self.closed = False

    @property
    def size(self) -> int:
        """Return how many connections are open or being opened."""
        return self._bulkhead.size

    def take_idle(self, key: PoolKey, addresses: tuple[str, ...]) -> HttpConnection | None:
        """Take an idle connection to one of `addresses`, and close those to other addresses."""
        idle = self._idle.get(key)
        while idle:
            connection = idle.pop()
            if connection.reusable and connection.address in addresses:
                return connection
            connection.abort()
        return None

    def release(self, connection: HttpConnection, now: float) -> None:
        """Put a connection back after its exchange. `now`: seconds of the pool's clock."""
        if not connection.make_idle(now):
            connection.abort()
        elif self._bulkhead.waiters:
            self._give_to_waiter(connection)
        elif (idle := self._idle.get(connection.key)) is not None and len(
            idle
        ) < self._limits.max_idle_per_host:
            # The usual case of `_add_idle`, inlined because each delivery takes this path.
            idle.append(connection)
        else:
            self._add_idle(connection)

    def describe_limit(self, key: PoolKey) -> str:
        """Describe, for an error text, the limit at which another connection would wait."""
        scope = self._bulkhead.exhausted_scope(key) or LimitScope.ALL
        owner = {
            LimitScope.ALL: "",
            LimitScope.ORGANISATION: " of its organisation",
            LimitScope.ENDPOINT: " of its endpoint",
        }
        return f"{self._bulkhead.limit(scope)} connections{owner[scope]}"

    async def acquire_slot(
        self, key: PoolKey, addresses: tuple[str, ...], *, fresh: bool
    ) -> HttpConnection | None:
        """Wait until a connection may be opened (None), or one comes free (never if `fresh`)."""
        while True:
            if self.closed:
                raise AttemptFailedError(ErrorClass.CLOSED, "the sender is closed")
            scope = self._bulkhead.exhausted_scope(key)
            if scope is None:
                self._bulkhead.acquire(key)
                return None
            self._on_wait(scope)
            granted: asyncio.Future[HttpConnection | None] = (
                asyncio.get_running_loop().create_future()
            )
            waiter = ConnectionWaiter(key=key, addresses=addresses, fresh=fresh, granted=granted)
            self._bulkhead.add_waiter(waiter)
            self._evict(key, scope)
            try:
                connection = await granted
            except asyncio.CancelledError:
                self._return_from_cancelled(waiter)
                raise
            if connection is None or connection.reusable:
                return connection

    def release_slot(self, key: PoolKey) -> None:
        """Release a slot whose connection is closed, or was never opened."""
        self._bulkhead.release(key)
        while (waiter := self._bulkhead.next_waiter()) is not None:
            self._bulkhead.admit(waiter)
            if not waiter.granted.done():
                self._bulkhead.acquire(waiter.key)
                waiter.granted.set_result(None)
        if self.size == 0 and self._all_closed is not None and not self._all_closed.done():
            self._all_closed.set_result(None)

    def add(self, connection: HttpConnection) -> None:
        """Add a connection that was opened in a slot."""
        self._open.add(connection)
        connection.retire_at = self._clock() + self._limits.max_age_s
        if self._sweep_timer is None:
            self._sweep_timer = asyncio.get_running_loop().call_later(
                self._limits.sweep_s, self._on_sweep
            )

    def on_closed(self, connection: HttpConnection) -> None:
        """Release the slot of a closed connection; if it was never added, its opener does."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        idle = self._idle.get(connection.key)
        if idle is not None and connection in idle:
            idle.remove(connection)
        self.release_slot(connection.key)

    async def close(self) -> None:
        """Close all connections and wait for it; requests in progress fail as CLOSED."""
        self.closed = True
        for waiter in self._bulkhead.remove_all_waiters():
            if not waiter.granted.done():
                waiter.granted.set_exception(
                    AttemptFailedError(ErrorClass.CLOSED, "the sender is closed")
                )
        for connection in tuple(self._open):
            connection.abort()
        if self.size:
            self._all_closed = asyncio.get_running_loop().create_future()
            await self._all_closed
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None

    def _on_sweep(self) -> None:
        now = self._clock()
        # A copy, because a transport may report at once that it is closed.
        for connection in tuple(self._open):
            if connection.expires_at <= now:
                connection.on_expired()
        for key in [key for key, idle in self._idle.items() if not idle]:
            del self._idle[key]
            del self._idle_by_organisation[key[0]][key]
            if not self._idle_by_organisation[key[0]]:
                del self._idle_by_organisation[key[0]]
        self._sweep_timer = None
        if self._open or self._idle:
            self._sweep_timer = asyncio.get_running_loop().call_later(
                self._limits.sweep_s, self._on_sweep
            )

    def _add_idle(self, connection: HttpConnection) -> None:
        key = connection.key
        idle = self._idle.get(key)
        if idle is None:
            self._idle[key] = idle = [connection]
            self._idle_by_organisation.setdefault(key[0], {})[key] = idle
        elif len(idle) < self._limits.max_idle_per_host:
            idle.append(connection)
        else:
            connection.abort()

    def _evict(self, key: PoolKey, scope: LimitScope) -> None:
        """Close an idle connection within the full scope; its slot goes to a waiter at once."""
        own: Iterable[list[HttpConnection]] = self._idle_by_organisation.get(key[0], {}).values()
        candidates: Iterable[list[HttpConnection]]
        match scope:
            case LimitScope.ENDPOINT:
                candidates = (self._idle.get(key, []),)
            case LimitScope.ORGANISATION:
                candidates = own
            case LimitScope.ALL:
                candidates = chain(own, self._idle.values())
            case _:
                assert_never(scope)
        for idle in candidates:
            if idle:
                self._discard(idle.pop(0))
                return

    def _discard(self, connection: HttpConnection) -> None:
        self._open.discard(connection)
        connection.abort()
        self.release_slot(connection.key)

    def _give_to_waiter(self, connection: HttpConnection) -> None:
        waiter = self._bulkhead.next_waiter(freed=connection.key)
        while waiter is not None and waiter.granted.done():
            self._bulkhead.remove_waiter(waiter)
            waiter = self._bulkhead.next_waiter(freed=connection.key)
        if waiter is None:
            self._add_idle(connection)
        elif (
            waiter.fresh
            or waiter.key != connection.key
            or connection.address not in waiter.addresses
        ):
            self._discard(connection)
        else:
            self._bulkhead.admit(waiter)
            waiter.granted.set_result(connection)

    def _return_from_cancelled(self, waiter: ConnectionWaiter) -> None:
        """Pass on the slot or connection of a waiter that was cancelled just when it got it."""
        self._bulkhead.remove_waiter(waiter)
        if not waiter.granted.done() or waiter.granted.cancelled():
            waiter.granted.cancel()
        elif waiter.granted.exception() is None:
            connection = waiter.granted.result()
            if connection is None:
                self.release_slot(waiter.key)
            else:
                self.release(connection, self._clock())
