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
from rooms.fair_slots import FairSlots
from rooms.publishing.json_schema import MAX_SCHEMA_BYTES
from rooms.publishing.routing import CompiledFilters, RoutingTable, room_not_found

_MAX_ROOMS: Final = 10_000
MAX_CACHED_BYTES: Final = 256 * 1024 * 1024
"""About so many bytes of routing tables are cached, with the routes that were built from them."""
MAX_KEPT_CHARACTERS: Final = 512 * 1024
"""Compiled filters of so many characters are kept of forgotten tables.

Each character takes about half a KiB.
"""
MAX_LOADS: Final = 2
"""So many rooms are loaded at a time, and one of them for an organisation."""
MAX_VERSION_READS: Final = 1
"""So many reads at a time: one connection that the shares of organisations leave stays free."""
MAX_WAITING: Final = 1000
"""Most publishes of one organisation that wait for a read, each of another room."""
WAIT_S: Final = 10.0
"""Longest wait for a turn to read a room, as for a connection of an organisation's share."""

LoadRouting = Callable[[RoomId], Awaitable[RoutingRecord | None]]
FindPlanVersion = Callable[[RoomId], Awaitable[int | None]]
"""Returns the current version of a room's routing; None: there is no such room."""


class RoutingCache:
    """Cache routing tables by room. Concurrent callers share one load of a room.

    A table that is read again is loaded only if its version has changed. Few rooms are read at a
    time, in turns of the organisations that ask, so that none waits behind the large rooms of
    another. `StorageRefusedError` after a wait of `wait_s`; `RateLimitedError`: too many wait.

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
        self._loads = _slots(MAX_LOADS)
        self._version_reads = _slots(MAX_VERSION_READS)
        self._wait_s = wait_s
        self._max_schema_bytes = max_schema_bytes
        self._max_bytes = max_bytes
        self._weights: Counter[OrganisationId] = Counter()
        self._total_weight = 0
        self._sequence = itertools.count(1)
        self._tables: dict[RoomId, tuple[int, RoutingTable]] = {}
        self._filters: dict[RoomId, tuple[CompiledFilters, int]] = {}
        """Those of tables that were forgotten, until the room is loaded again; oldest first.

        With their characters at that time: a request that is under way may compile more of them.
        """
        self._kept_characters = 0
        # By organisation, too: what waits for its own turn must not hold up others at this room.
        self._locks: WeakValueDictionary[tuple[RoomId, OrganisationId], asyncio.Lock] = (
            WeakValueDictionary()
        )

    def cached(self, room: RoomId) -> RoutingTable | None:
        """Return a room's table if it is cached, possibly old, without waiting."""
        known = self._tables.get(room)
        return known[1] if known is not None else None

    async def get(self, room: RoomId, asker: OrganisationId) -> RoutingTable:
        """Return a room's table, possibly old. NotFoundError: there is no such room."""
        known = self._tables.get(room)
        return known[1] if known is not None else _existing(await self._read(room, asker, since=0))

    async def reload(self, room: RoomId, asker: OrganisationId) -> RoutingTable:
        """Return a room's table, read after this call began. NotFoundError: there is none."""
        return _existing(await self._read(room, asker, since=next(self._sequence)))

    def invalidate(self, rooms: Iterable[RoomId] | None = None) -> None:
        """Forget the tables of these rooms (None: of all), because they changed.

        Their filters are kept for the next ones: most are the same, and take long to compile.
        """
        for room in list(self._tables) if rooms is None else rooms:
            known = self._tables.get(room)
            if known is not None and known[1].filters:
                self._keep_filters(room, known[1].filters)
            self._drop(room)

    def _keep_filters(self, room: RoomId, filters: CompiledFilters) -> None:
        self._take_filters(room)
        characters = sum(len(one.expression) for one in filters.values())
        self._filters[room] = filters, characters
        self._kept_characters += characters
        while self._kept_characters > MAX_KEPT_CHARACTERS:
            self._take_filters(next(iter(self._filters)))

    def _take_filters(self, room: RoomId) -> CompiledFilters | None:
        filters, characters = self._filters.pop(room, (None, 0))
        self._kept_characters -= characters
        return filters

    async def _read(
        self, room: RoomId, asker: OrganisationId, *, since: int
    ) -> RoutingTable | None:
        key = (room, asker)
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        async with lock:
            if room in self._tables:
                async with self._turn(self._version_reads, asker):
                    found, is_known = await self._check_version(room, since)
                if is_known:
                    return found
            async with self._turn(self._loads, asker):
                return self._newer(room, since) or await self._load_table(room)

    def _newer(self, room: RoomId, since: int) -> RoutingTable | None:
        """Return a table that was read while its caller waited; an older one is no answer."""
        known = self._tables.get(room)
        return known[1] if known is not None and known[0] > since else None

    async def _check_version(self, room: RoomId, since: int) -> tuple[RoutingTable | None, bool]:
        """Return the cached table and True, if it is as of now; None and True: there is no room."""
        known = self._tables.get(room)
        if known is None or known[0] > since:
            return (None, False) if known is None else (known[1], True)
        begun = next(self._sequence)
        version = await self._find_plan_version(room)
        if version is None:
            self._replace(room, begun, None)
            return None, True
        if version != known[1].plan_version:
            return None, False
        self._replace(room, begun, known[1])
        return known[1], True

    async def _load_table(self, room: RoomId) -> RoutingTable | None:
        begun = next(self._sequence)
        record = await self._load(room)
        table = None
        if record is not None:
            known, kept = self._tables.get(room), self._take_filters(room)
            table = RoutingTable(
                record,
                compiled=kept if known is None else known[1].filters,
                max_schema_bytes=self._max_schema_bytes,
            )
        self._replace(room, begun, table)
        return table

    @asynccontextmanager
    async def _turn(self, slots: FairSlots, asker: OrganisationId) -> AsyncIterator[None]:
        patience = asyncio.timeout(self._wait_s)
        try:
            async with patience, slots.slot(asker):
                patience.reschedule(None)
                yield
        except TimeoutError as exc:
            if not patience.expired():
                raise
            raise StorageRefusedError(
                f"the routes of too many rooms were read for {self._wait_s:g} s"
            ) from exc

    def _replace(self, room: RoomId, begun: int, table: RoutingTable | None) -> None:
        """Cache what was read of a room, unless what is cached was read later."""
        known = self._tables.get(room)
        if known is not None and known[0] > begun:
            return
        self._drop(room)
        if table is not None:
            self._add(table, begun)

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


def _slots(number: int) -> FairSlots:
    return FairSlots(
        number,
        max_per_tenant=1,
        max_waiting=MAX_WAITING,
        refusal="too many publishes of the organisation wait for the routes of their rooms",
    )


def _existing(table: RoutingTable | None) -> RoutingTable:
    if table is None:
        raise room_not_found()
    return table
