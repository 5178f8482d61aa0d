"""Release held deliveries: queue them again as their lanes have room.

Organisations take turns, and of each its subscriptions, at their drain rates if they have one.
While a circuit is open, only its probe is released.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from delivery.push.endpoints import Endpoint, EndpointCache, EndpointLookup
from rooms.db.queue.holds import HeldGroup, Holds
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.state_machine import Reason
from rooms.domain.turns import Turns
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Clock

_HELD_SCAN_OUTAGE: Final = "scans for held deliveries failed"
_SCAN_EVERY_S: Final = 1.0
_SATURATED_SCAN_EVERY_S: Final = 0.2
"""The interval while deliveries are held as saturated; only a release reaches their lanes."""
_ROUND_PAUSE_S: Final = 0.025
_PAUSE_FACTOR: Final = 2.0
"""The pause after each turn, as a multiple of its duration.

Hundreds of lanes that come free at once must not slow down the statements of all others.
"""
_PART_S: Final = 0.1
"""The time of a round that lists only a part of what is held."""
_MAX_CARRIED: Final = 1000
_NO_STATEMENT_S: Final = 0.0002
"""A turn without a statement is shorter than this."""
_DRAIN_EVERY_S: Final = 0.1
"""The interval between two releases at a drain rate; the burst is the rate times twice this."""
_RELEASABLE_REASONS: Final = frozenset(
    {Reason.PAUSED, Reason.SUSPENDED, Reason.DISABLED, Reason.CIRCUIT_OPEN, Reason.SATURATED}
)
"""Reasons that end by themselves, or by a change of the subscription."""


class HeldReleaser:
    """Release held deliveries in rounds until cancelled."""

    def __init__(
        self,
        *,
        holds: Holds,
        endpoints: EndpointCache,
        clock: Clock,
        capacity: Callable[[Endpoint], int | None],
        on_released: Callable[[SubscriptionId, int], None],
        on_none_held: Callable[[SubscriptionId], None],
    ) -> None:
        """Configure the releases.

        `capacity` returns how many tasks a lane can take (None: it is closed). `on_released` is
        called after each commit with the number of queued tasks. `on_none_held` is called once
        nothing is held any more because the lane was saturated.
        """
        self._holds = holds
        self._endpoints = endpoints
        self._clock = clock
        self._capacity = capacity
        self._on_released = on_released
        self._on_none_held = on_none_held
        self._after: tuple[str, str] | None = None
        """Where the next part of all that is held begins; None: at the first one."""
        self._carried: list[HeldGroup] = []
        """Groups that earlier parts have left, in turns of the organisations."""
        self._without_probe: frozenset[SubscriptionId] = frozenset()
        self._drained_at: dict[HeldGroup, float] = {}
        self._last = SubscriptionId("")
        """The subscription whose turn was the last one: a round goes on behind it."""
        self._draining_until = 0.0
        self._any_saturated = False

    async def run(self) -> None:
        """Scan once a second, and more often while something is saturated, drained or left over."""
        while True:
            more = False
            try:
                more = await self._release_round()
            except (StorageUnavailableError, StorageRefusedError) as exc:
                OUTAGES.record_failure(exc, _HELD_SCAN_OUTAGE)
            else:
                OUTAGES.record_success(_HELD_SCAN_OUTAGE)
            draining = self._clock.monotonic() < self._draining_until
            await asyncio.sleep(
                _ROUND_PAUSE_S
                if more
                else _DRAIN_EVERY_S
                if draining
                else _SATURATED_SCAN_EVERY_S
                if self._any_saturated
                else _SCAN_EVERY_S
            )

    async def _release_round(self) -> bool:
        """Release what may be released; return whether the next round should come soon.

        A round lists all that is held, if that is little. Else it lists a part, has less time, and
        goes on with what the last one has left: nothing waits for the listing of all.
        """
        began = self._clock.monotonic()
        page = await self._holds.held(self._after)
        is_whole = self._after is None and page.last is None
        self._after, self._without_probe = page.last, page.without_probe
        listed = [group for group in page.groups if group.reason in _RELEASABLE_REASONS]
        found = list(dict.fromkeys([*([] if is_whole else self._carried), *listed]))
        self._any_saturated = any(group.reason is Reason.SATURATED for group in found)
        self._drained_at = {
            group: at for group, at in self._drained_at.items() if began - at < _DRAIN_EVERY_S
        }
        begin = next((at for at, one in enumerate(found) if one.subscription > self._last), 0)
        held = found[begin:] + found[:begin] if is_whole else found
        until = self._clock.monotonic() + (_SCAN_EVERY_S if is_whole else _PART_S)
        self._carried = []
        while held:
            endpoints = await self._endpoints.current(
                [group.subscription for group in held], self._clock.monotonic()
            )
            held = await self._release_pass(_in_turns(held, endpoints), endpoints, until)
            await asyncio.sleep(_ROUND_PAUSE_S)
            if self._clock.monotonic() >= until:
                self._carried = _in_turns(held, endpoints)[:_MAX_CARRIED]
                break
        if not is_whole:
            await asyncio.sleep((self._clock.monotonic() - began) * _PAUSE_FACTOR)
        return bool(held) or not is_whole

    async def _release_pass(
        self,
        turns: Sequence[HeldGroup],
        endpoints: Mapping[SubscriptionId, EndpointLookup],
        until: float,
    ) -> list[HeldGroup]:
        """Give each group a turn, as far as the time goes; return those that may have more."""
        left: list[HeldGroup] = []
        for at, group in enumerate(turns):
            if at and self._clock.monotonic() >= until:
                return [*turns[at:], *left]
            self._last = group.subscription
            if await self._release_and_pause(group, endpoints[group.subscription]):
                left.append(group)
        return left

    async def _release_and_pause(self, held: HeldGroup, endpoint: EndpointLookup) -> bool:
        began = self._clock.monotonic()
        more = await self._release_one(held, endpoint, began)
        if (took := self._clock.monotonic() - began) > _NO_STATEMENT_S:
            await asyncio.sleep(took * _PAUSE_FACTOR)
        return more

    async def _release_one(self, held: HeldGroup, endpoint: EndpointLookup, now: float) -> bool:
        """Release one portion of a group and return whether there may be more."""
        if not isinstance(endpoint, Endpoint) or not endpoint.is_active:
            return False
        policy = endpoint.record.throttle
        if endpoint.record.circuit_open:
            if held.subscription in self._without_probe:
                return False
            self._notify_released(
                held, await self._holds.probe(held, open_ms=policy.circuit_open_ms)
            )
            return False
        capacity = self._capacity(endpoint)
        if not capacity:
            return capacity is not None
        if policy.drain_per_s is not None and held.reason is not Reason.SATURATED:
            if now - self._drained_at.get(held, 0.0) >= _DRAIN_EVERY_S:
                self._drained_at[held] = now
                burst = max(1, round(policy.drain_per_s * _DRAIN_EVERY_S * 2))
                released = await self._holds.drain(
                    held, limit=capacity, per_s=policy.drain_per_s, burst=burst
                )
                if released:
                    self._draining_until = now + _SCAN_EVERY_S
                self._notify_released(held, released)
            return True
        released = await self._holds.release(held, limit=capacity)
        self._notify_released(held, released)
        if released < capacity and held.reason is Reason.SATURATED:
            self._on_none_held(held.subscription)
        return released == capacity

    def _notify_released(self, held: HeldGroup, count: int) -> None:
        if count:
            self._on_released(held.subscription, count)


def _in_turns(
    held: Sequence[HeldGroup], endpoints: Mapping[SubscriptionId, EndpointLookup]
) -> list[HeldGroup]:
    """Return the first group of each organisation, then the second of each, and so on.

    An organisation with thousands of them, each of which takes a statement, is not in front of all
    others.
    """
    turns: Turns[OrganisationId | None, HeldGroup] = Turns()
    for group in held:
        endpoint = endpoints[group.subscription]
        organisation = endpoint.organisation if isinstance(endpoint, Endpoint) else None
        turns.append(organisation, group)
    return [turns.popleft() for _ in range(len(turns))]
