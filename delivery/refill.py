"""Queues held deliveries again, by turns, as far as the lanes of their subscriptions have room."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from delivery.endpoint import Endpoint
from delivery.endpoints import Endpoints, Known
from rooms.domain.ids import SubscriptionId
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.ports import Clock
from rooms.storage.outcomes import Outcomes

_log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_TURN_S: Final = 0.025


class Refill:
    """`room` says how many copies a lane can take (None: it is closed); `released` is told after each turn's commit whose
    copies were queued, and how many.
    """

    def __init__(
        self,
        *,
        outcomes: Outcomes,
        endpoints: Endpoints,
        clock: Clock,
        room: Callable[[Endpoint], int | None],
        released: Callable[[SubscriptionId, int], None],
    ) -> None:
        self._outcomes = outcomes
        self._endpoints = endpoints
        self._clock = clock
        self._room = room
        self._released = released

    async def run(self) -> None:
        """Look once a second, and as long as there is more."""
        while True:
            more = False
            try:
                more = await self._turns()
            except (StorageUnavailableError, StorageRefusedError) as exc:
                _log.warning("held deliveries wait: %s", exc)
            await asyncio.sleep(_TURN_S if more else _LOOK_S)

    async def _turns(self) -> bool:
        held = await self._outcomes.held_subscriptions()
        until = self._clock.monotonic() + _LOOK_S
        while held and (now := self._clock.monotonic()) < until:
            endpoints = await self._endpoints.current(held, now)
            held = [identity for identity in held if await self._turn(identity, endpoints[identity])]
            await asyncio.sleep(_TURN_S)
        return bool(held)

    async def _turn(self, identity: SubscriptionId, known: Known) -> bool:
        """One turn of a subscription; whether it may have more."""
        if not isinstance(known, Endpoint) or not known.active:
            return False
        room = self._room(known)
        if not room:
            return room is not None
        moved = await self._outcomes.release_held(identity, limit=room)
        if moved:
            self._released(identity, moved)
        return moved == room
