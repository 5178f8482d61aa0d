"""Cache routing tables by room, within bounds on their number and memory.

A cached table may be old: each publish checks the version in the statement that commits it.
"""

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final
from weakref import WeakValueDictionary

from rooms.db.publish.routing import RoutingRecord
from rooms.domain.ids import OrganisationId, RoomId
from rooms.errors import StorageRefusedError
from rooms.publishing.json_schema import MAX_SCHEMA_BYTES
from rooms.publishing.routing import RoutingTable, room_not_found

_MAX_ROOMS: Final = 10_000
MAX_CACHED_BYTES: Final = 256 * 1024 * 1024
"""About so many bytes of routing tables are cached, with the routes that were built from them."""
MAX_LOADS: Final = 2
MAX_VERSION_READS: Final = 1
"""So many reads at a time: one connection that the shares of organisations leave stays free."""
WAIT_S: Final = 10.0
"""Longest wait for a turn to read a room, as for a connection of an organisation's share."""

LoadRouting = Callable[[RoomId], Awaitable[RoutingRecord | None]]
FindPlanVersion = Callable[[RoomId], Awaitable[int | None]]
"""Returns the current version of a room's routing; None: there is no such room."""


class RoutingCache:
    """Cache routing tables by room. Concurrent callers share one load of a room.

    A table that is read again is loaded only if its version has changed. Few rooms are read at a
    time: `StorageRefusedError` after a wait of `wait_s`.

    Where they are too many or too large, the organisation whose tables are the largest loses its
    oldest one, so that it displaces no other's.
    """

    def __init__(
        self,
        load: LoadRouting,
        find_plan_version: FindPlanVersion,
        *,
        max_schema_bytes: int = MAX_SCHEMA_BYTES,
        max_bytes: int = MAX_CACHED_BYTES,
        wait_s: float = WAIT_S,
    ) -> None:
        self._load = load
        self._find_plan_version = find_plan_version
        self._loads = asyncio.Semaphore(MAX_LOADS)
        self._version_reads = asyncio.Semaphore(MAX_VERSION_READS)
        self._wait_s = wait_s
        self._max_schema_bytes = max_schema_bytes
        self._max_bytes = max_bytes
        self._weights: Counter[OrganisationId] = Counter()
        self._total_weight = 0
        self._sequence = itertools.count(1)
        self._tables: dict[RoomId, tuple[int, RoutingTable]] = {}
        self._load_locks: WeakValueDictionary[RoomId, asyncio.Lock] = WeakValueDictionary()

    def cached(self, room: RoomId) -> RoutingTable | None:
        """Return a room's table if it is cached, possibly old, without waiting."""
        known = self._tables.get(room)
        return known[1] if known is not None else None

    async def get(self, room: RoomId) -> RoutingTable:
        """Return a room's table, possibly old. NotFoundError: there is no such room."""
        known = self._tables.get(room)
        return known[1] if known is not None else _existing(await self._load_once(room, since=0))

    async def reload(self, room: RoomId) -> RoutingTable:
        """Return a room's table, read after this call began. NotFoundError: there is none."""
        return _existing(await self._load_once(room, since=next(self._sequence)))

    def invalidate(self, rooms: Iterable[RoomId] | None = None) -> None:
        """Forget the tables of these rooms (None: of all), because they changed."""
        for room in list(self._tables) if rooms is None else rooms:
            self._drop(room)

    async def _load_once(self, room: RoomId, *, since: int) -> RoutingTable | None:
        lock = self._load_locks.get(room)
        if lock is None:
            lock = self._load_locks[room] = asyncio.Lock()
        async with lock:
            # A table that was read while this caller waited is new enough; an older one is not.
            known = self._tables.get(room)
            if known is not None and known[0] > since:
                return known[1]
            begun = next(self._sequence)
            table = await self._read(room, None if known is None else known[1])
            self._drop(room)
            if table is not None:
                self._add(table, begun)
            return table

    async def _read(self, room: RoomId, previous: RoutingTable | None) -> RoutingTable | None:
        """Return a room's table as of now; `previous`, if that still is it."""
        if previous is not None:
            async with self._turn(self._version_reads):
                version = await self._find_plan_version(room)
            if version is None:
                return None
            if version == previous.plan_version:
                return previous
        async with self._turn(self._loads):
            record = await self._load(room)
        if record is None:
            return None
        return RoutingTable(record, previous=previous, max_schema_bytes=self._max_schema_bytes)

    @asynccontextmanager
    async def _turn(self, turns: asyncio.Semaphore) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._wait_s):
                await turns.acquire()
        except TimeoutError as exc:
            raise StorageRefusedError(
                f"the routes of too many rooms were read for {self._wait_s:g} s"
            ) from exc
        try:
            yield
        finally:
            turns.release()

    def _add(self, table: RoutingTable, begun: int) -> None:
        if len(self._tables) >= _MAX_ROOMS:
            self._drop(self._find_displaced())
        self._displace(self._max_bytes - table.weight.bytes)
        self._tables[table.room_id] = (begun, table)
        table.weight.on_growth = functools.partial(self._count, table.organisation_id)
        self._weights[table.organisation_id] += table.weight.bytes
        self._total_weight += table.weight.bytes

    def _count(self, organisation: OrganisationId, count: int) -> None:
        """Count the growth of a cached table, which may displace others, or itself."""
        self._weights[organisation] += count
        self._total_weight += count
        self._displace(self._max_bytes)

    def _displace(self, max_bytes: int) -> None:
        while self._tables and self._total_weight > max_bytes:
            self._drop(self._find_displaced())

    def _drop(self, room: RoomId) -> None:
        known = self._tables.pop(room, None)
        if known is not None:
            table = known[1]
            table.weight.on_growth = None
            self._total_weight -= table.weight.bytes
            self._weights[table.organisation_id] -= table.weight.bytes
            if not self._weights[table.organisation_id]:
                del self._weights[table.organisation_id]

    def _find_displaced(self) -> RoomId:
        """Return the oldest room of the organisation whose tables are the largest."""
        ((heaviest, _),) = self._weights.most_common(1)
        return next(
            room for room, (_, table) in self._tables.items() if table.organisation_id == heaviest
        )


def _existing(table: RoutingTable | None) -> RoutingTable:
    if table is None:
        raise room_not_found()
    return table
