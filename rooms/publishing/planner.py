"""Keeps the plans of rooms at hand. What it holds is a cache: every publish checks its plan's version when it commits."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from typing import Final
from weakref import WeakValueDictionary

from rooms.domain.ids import OrganisationId, RoomId
from rooms.errors import NotFoundError
from rooms.publishing.plan import RoomPlan
from rooms.publishing.schemas import MAX_SCHEMA_BYTES
from rooms.storage.plans import PlanRecord

_MOST_ROOMS: Final = 10_000

Load = Callable[[RoomId], Awaitable[PlanRecord | None]]


class Planner:
    """Plans by room, loaded one at a time a room, however many ask."""

    def __init__(self, load: Load, *, max_schema_bytes: int = MAX_SCHEMA_BYTES) -> None:
        self._load = load
        self._max_schema_bytes = max_schema_bytes
        self._ticks = itertools.count(1)
        self._known: dict[RoomId, tuple[int, RoomPlan]] = {}
        self._turns: WeakValueDictionary[RoomId, asyncio.Lock] = WeakValueDictionary()

    async def plan(self, room: RoomId, organisation: OrganisationId) -> RoomPlan:
        """The room's plan, maybe an old one. NotFoundError: no such room in the organisation."""
        known = self._known.get(room)
        found = known[1] if known is not None else await self._fresh(room, since=0)
        return _theirs(found, organisation)

    def known(self, room: RoomId, organisation: OrganisationId) -> RoomPlan | None:
        """`plan`, as far as it can be told without waiting; None where it cannot."""
        known = self._known.get(room)
        return known[1] if known is not None and known[1].organisation_id == organisation else None

    async def fresh(self, room: RoomId, organisation: OrganisationId) -> RoomPlan:
        """The room's plan as it was after this call began. NotFoundError: no such room in the organisation."""
        return _theirs(await self._fresh(room, since=next(self._ticks)), organisation)

    def forget(self, rooms: Iterable[RoomId] | None = None) -> None:
        """Drop what is known of these rooms (None: of all), for example when told that they changed."""
        if rooms is None:
            self._known.clear()
        else:
            for room in rooms:
                self._known.pop(room, None)

    async def _fresh(self, room: RoomId, *, since: int) -> RoomPlan | None:
        turn = self._turns.get(room)
        if turn is None:
            turn = self._turns[room] = asyncio.Lock()
        async with turn:
            # Whoever waited here may find a plan that was read while it waited; one read before will not do.
            known = self._known.get(room)
            if known is not None and known[0] > since:
                return known[1]
            begun = next(self._ticks)
            record = await self._load(room)
            if record is None:
                self._known.pop(room, None)
                return None
            before = known[1] if known is not None else None
            if before is not None and before.plan_version == record.plan_version:
                plan = before
            else:
                plan = RoomPlan(record, before=before, max_schema_bytes=self._max_schema_bytes)
            if room not in self._known and len(self._known) >= _MOST_ROOMS:
                del self._known[next(iter(self._known))]
            self._known[room] = (begun, plan)
            return plan


def _theirs(plan: RoomPlan | None, organisation: OrganisationId) -> RoomPlan:
    if plan is None or plan.organisation_id != organisation:
        raise NotFoundError("there is no such room")
    return plan
