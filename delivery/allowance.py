"""Attempts as a set rate allows them: tokens for the lanes of this worker, drawn from the buckets that all workers share.

A lane draws only what it can begin at once, so that no worker sits on tokens, and whoever has copies gets them: one worker
all of a rate, two that both have work about half each. Together they never begin more than the burst and what the rate
made since, as PostgreSQL's clock counts it; what a worker draws and does not use (it dies, or its lane is closed in that
moment) is lost to the rate.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from delivery.lane import Lane
from rooms.domain.ids import SubscriptionId
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Clock
from rooms.storage.lanes import SharedLanes, Wish

_UNDRAWN: Final = "draws of rate tokens failed"
_LEAST_WAIT_S: Final = 0.01
_RETRY_S: Final = 0.5


class Allowance:
    """`start` is called with each lane that got tokens."""

    def __init__(self, lanes: SharedLanes, *, clock: Clock, start: Callable[[Lane], None]) -> None:
        self._lanes = lanes
        self._clock = clock
        self._start = start
        self._thirsty: dict[SubscriptionId, Lane] = {}
        self._wake = asyncio.Event()

    def want(self, lane: Lane) -> None:
        """The lane has copies and slots, and no token."""
        if lane.identity not in self._thirsty:
            self._thirsty[lane.identity] = lane
            self._wake.set()

    async def run(self) -> None:
        """Draw for ever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._draw()
            except (StorageUnavailableError, StorageRefusedError) as exc:
                OUTAGES.failed(exc, _UNDRAWN)
                await asyncio.sleep(_RETRY_S)
            else:
                OUTAGES.succeeded(_UNDRAWN)

    def _pause_s(self) -> float | None:
        if not self._thirsty:
            return None
        at = min(lane.next_token_at for lane in self._thirsty.values())
        return max(_LEAST_WAIT_S, at - self._clock.monotonic())

    async def _draw(self) -> None:
        now = self._clock.monotonic()
        wishes = []
        for identity, lane in list(self._thirsty.items()):
            policy, thirst = lane.endpoint.record.lane, lane.thirst()
            if not thirst or policy.rate_per_s is None:
                del self._thirsty[identity]
            elif lane.next_token_at <= now:
                wishes.append(Wish(identity, thirst, policy.rate_per_s, policy.rate_burst))
        if not wishes:
            return
        grants = await self._lanes.draw(wishes)
        now = self._clock.monotonic()
        for identity, grant in grants.items():
            lane = self._thirsty[identity]
            lane.next_token_at = now + grant.next_s
            if lane.tokens is not None and grant.count:
                lane.tokens += grant.count
                self._start(lane)
