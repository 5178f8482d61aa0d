"""The sender's connections: kept alive between exchanges, capped, and swept when their time is up."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from delivery.connections import Connection, Limits, Origin
from delivery.errors import AttemptFailedError
from rooms.domain.attempt import ErrorClass


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    origin: Origin
    addresses: tuple[str, ...]
    fresh: bool
    given: "asyncio.Future[Connection | None]"


class Pool:
    """Idle connections by origin, the newest on top, and a slot for every connection that is open or being opened."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._slots = 0
        self._open: set[Connection] = set()
        self._idle: dict[Origin, list[Connection]] = {}
        self._waiters: deque[_Waiter] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None
        self.closed = False

    @property
    def size(self) -> int:
        """Connections that are open or being opened."""
        return self._slots

    def take(self, origin: Origin, addresses: tuple[str, ...]) -> Connection | None:
        """An idle connection to one of `addresses`. What leads elsewhere by now is closed on the way."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.reusable and connection.address in addresses:
                return connection
            connection.abort()
        return None

    def put(self, connection: Connection, now: float) -> None:
        """Give a connection back after its exchange, at time `now`."""
        if not connection.rest(now + self._limits.idle_s):
            connection.abort()
        elif self._waiters:
            self._hand_over(connection)
        else:
            idle = self._idle.get(connection.origin)
            if idle is None:
                self._idle[connection.origin] = [connection]
            elif len(idle) < self._limits.max_idle_per_host:
                idle.append(connection)
            else:
                connection.abort()

    async def slot(self, origin: Origin, addresses: tuple[str, ...], *, fresh: bool) -> Connection | None:
        """Leave to open a connection (None), or one that came free meanwhile (never if `fresh`). First come, first served."""
        while True:
            if self.closed:
                raise AttemptFailedError(ErrorClass.CLOSED, "the sender is closed")
            if self._slots < self._limits.max_connections and not self._waiters:
                self._slots += 1
                return None
            self._evict()
            waiter = _Waiter(
                origin=origin, addresses=addresses, fresh=fresh, given=asyncio.get_running_loop().create_future()
            )
            self._waiters.append(waiter)
            try:
                given = await waiter.given
            except asyncio.CancelledError:
                self._take_back(waiter)
                raise
            if given is None or given.reusable:
                return given

    def leave(self) -> None:
        """Give back a slot whose connection is gone, or was never made."""
        waiter = self._next_waiter()
        if waiter is not None:
            waiter.given.set_result(None)
            return
        self._slots -= 1
        if self._slots == 0 and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def add(self, connection: Connection) -> None:
        """A connection was opened in a slot."""
        self._open.add(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._limits.sweep_s, self._swept)

    def lost(self, connection: Connection) -> None:
        """A connection is closed for good. One that never came as far as `add` leaves its slot to who opened it."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)
        self.leave()

    async def close(self) -> None:
        """Close everything; what is under way fails as CLOSED. Returns when the last connection is gone."""
        self.closed = True
        while (waiter := self._next_waiter()) is not None:
            waiter.given.set_exception(AttemptFailedError(ErrorClass.CLOSED, "the sender is closed"))
        for connection in self._open:
            connection.abort()
        if self._slots:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _swept(self) -> None:
        now = self._clock()
        # A copy: a transport may tell at once that it is closed.
        for connection in tuple(self._open):
            if connection.expires <= now:
                connection.expire()
        for origin in [origin for origin, idle in self._idle.items() if not idle]:
            del self._idle[origin]
        self._sweep = None
        if self._open or self._idle:
            self._sweep = asyncio.get_running_loop().call_later(self._limits.sweep_s, self._swept)

    def _evict(self) -> None:
        """Close the longest idle connection of some origin: its slot goes to the first who waits."""
        for idle in self._idle.values():
            if idle:
                idle.pop(0).abort()
                return

    def _next_waiter(self) -> _Waiter | None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.given.done():
                return waiter
        return None

    def _hand_over(self, connection: Connection) -> None:
        waiter = self._next_waiter()
        if waiter is None:
            self.put(connection, self._clock())
        elif waiter.fresh or waiter.origin != connection.origin or connection.address not in waiter.addresses:
            # Once it is closed, its slot goes to the one who waits longest.
            self._waiters.appendleft(waiter)
            connection.abort()
        else:
            waiter.given.set_result(connection)

    def _take_back(self, waiter: _Waiter) -> None:
        """What was given to a waiter who left at the same moment goes to the next one."""
        if not waiter.given.done() or waiter.given.cancelled():
            # Empty-handed; `_next_waiter` passes it over.
            waiter.given.cancel()
        elif waiter.given.exception() is None:
            given = waiter.given.result()
            if given is None:
                self.leave()
            else:
                self.put(given, self._clock())
