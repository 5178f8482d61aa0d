"""Cache routing tables by room, within bounds on their number and memory.

A cached table may be old: each publish checks the version in the statement that commits it.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final
from weakref import WeakValueDictionary

from rooms.db.publish.routing import RoutingRecord
from rooms.domain.ids import OrganisationId, RoomId
from rooms.publishing.json_schema import MAX_SCHEMA_BYTES
from rooms.publishing.routing import RoutingTable, room_not_found

_MAX_ROOMS: Final = 10_000
MAX_CACHED_BYTES: Final = 256 * 1024 * 1024
"""About so many bytes of routing tables are cached."""

LoadRouting = Callable[[RoomId], Awaitable[RoutingRecord | None]]


class RoutingCache:
    """Cache routing tables by room. Concurrent callers share one load of a room.

    Where they are too many or too large, the organisation whose tables are the largest loses its
    oldest one, so that it displaces no other's.
    """

    def __init__(
        self,
        load: LoadRouting,
        *,
        max_schema_bytes: int = MAX_SCHEMA_BYTES,
        max_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        self._load = load
        self._max_schema_bytes = max_schema_bytes
        self._max_bytes = max_bytes
        self._weights: Counter[OrganisationId] = Counter()
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
            record = await self._load(room)
            if record is None:
                self._drop(room)
                return None
            previous = known[1] if known is not None else None
            if previous is not None and previous.plan_version == record.plan_version:
                table = previous
            else:
                table = RoutingTable(
                    record, previous=previous, max_schema_bytes=self._max_schema_bytes
                )
            self._drop(room)
            while self._tables and (
                len(self._tables) >= _MAX_ROOMS
                or self._weights.total() + table.weight > self._max_bytes
            ):
                self._drop(self._find_displaced())
            self._tables[room] = (begun, table)
            self._weights[table.organisation_id] += table.weight
            return table

    def _drop(self, room: RoomId) -> None:
        known = self._tables.pop(room, None)
        if known is not None:
            owner = known[1].organisation_id
            self._weights[owner] -= known[1].weight
            if not self._weights[owner]:
                del self._weights[owner]

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
