"""Queues held deliveries again, by turns, as far as the lanes of their subscriptions have room, at the rate that is set for
it; of those whose circuit is open only the probe.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from delivery.endpoint import Endpoint
from delivery.endpoints import Endpoints, Known
from rooms.domain.ids import SubscriptionId
from rooms.domain.states import Reason
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Clock
from rooms.storage.holds import Held, Holds

_UNSEEN: Final = "looks for held deliveries failed"
_LOOK_S: Final = 1.0
_SOON_S: Final = 0.2
"""Until the next look where lanes may come free at any moment that nothing else is sent to: what is published to a crowded
lane comes to it by here alone.
"""
_TURN_S: Final = 0.025
_REST: Final = 2.0
"""After each turn, so many times as long as it took: hundreds of lanes that come free at once do not get theirs at the expense
of everybody else's.
"""
_NOTHING_S: Final = 0.0002
"""A turn without a statement is over sooner."""
_DRAIN_S: Final = 0.1
"""Between two draws of what is drained at a set rate; as much as comes together in twice that time is moved at once."""
_REASONS: Final = frozenset({Reason.PAUSED, Reason.DISABLED, Reason.CIRCUIT_OPEN, Reason.SATURATED})
"""What ends by itself, or by what somebody does to the subscription."""


class Refill:
    """`room` says how many copies a lane can take (None: it is closed); `released` is told after each turn's commit whose
    copies were queued, and how many, `emptied` of whose lane nothing is held any more because it was saturated.
    """

    def __init__(
        self,
        *,
        holds: Holds,
        endpoints: Endpoints,
        clock: Clock,
        room: Callable[[Endpoint], int | None],
        released: Callable[[SubscriptionId, int], None],
        emptied: Callable[[SubscriptionId], None],
    ) -> None:
        self._holds = holds
        self._endpoints = endpoints
        self._clock = clock
        self._room = room
        self._released = released
        self._emptied = emptied
        self._drained_at: dict[Held, float] = {}
        self._draining_until = 0.0
        self._saturated = False

    async def run(self) -> None:
        """Look once a second, where something is held because its lane was saturated five times, and as long as there is more;
        while something is drained, for the next of each key, too.
        """
        while True:
            more = False
            try:
                more = await self._turns()
            except (StorageUnavailableError, StorageRefusedError) as exc:
                OUTAGES.failed(exc, _UNSEEN)
            else:
                OUTAGES.succeeded(_UNSEEN)
            drains = self._clock.monotonic() < self._draining_until
            await asyncio.sleep(_TURN_S if more else _DRAIN_S if drains else _SOON_S if self._saturated else _LOOK_S)

    async def _turns(self) -> bool:
        held = [one for one in await self._holds.held() if one.reason in _REASONS]
        self._saturated = any(one.reason is Reason.SATURATED for one in held)
        self._drained_at = {one: at for one, at in self._drained_at.items() if one in held}
        until = self._clock.monotonic() + _LOOK_S
        while held and (now := self._clock.monotonic()) < until:
            endpoints = await self._endpoints.current([one.subscription for one in held], now)
            held = [one for one in held if await self._turn_and_rest(one, endpoints[one.subscription])]
            await asyncio.sleep(_TURN_S)
        return bool(held)

    async def _turn_and_rest(self, held: Held, known: Known) -> bool:
        began = self._clock.monotonic()
        more = await self._turn(held, known, began)
        if (took := self._clock.monotonic() - began) > _NOTHING_S:
            await asyncio.sleep(took * _REST)
        return more

    async def _turn(self, held: Held, known: Known, now: float) -> bool:
        """One turn of what a subscription has held; whether there may be more."""
        if not isinstance(known, Endpoint) or not known.active:
            return False
        policy = known.record.lane
        if known.record.circuit_open:
            self._tell(held, await self._holds.probe(held, open_ms=policy.circuit_open_ms))
            return False
        room = self._room(known)
        if not room:
            return room is not None
        if policy.drain_per_s is not None and held.reason is not Reason.SATURATED:
            if now - self._drained_at.get(held, 0.0) >= _DRAIN_S:
                self._drained_at[held] = now
                burst = max(1, round(policy.drain_per_s * _DRAIN_S * 2))
                moved = await self._holds.drain(held, limit=room, per_s=policy.drain_per_s, burst=burst)
                if moved:
                    self._draining_until = now + _LOOK_S
                self._tell(held, moved)
            return True
        moved = await self._holds.release(held, limit=room)
        self._tell(held, moved)
        if moved < room and held.reason is Reason.SATURATED:
            self._emptied(held.subscription)
        return moved == room

    def _tell(self, held: Held, moved: int) -> None:
        if moved:
            self._released(held.subscription, moved)
