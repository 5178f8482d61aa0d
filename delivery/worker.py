"""The push worker: takes copies from the broker, gives each to its subscription's lane, and has the outcomes committed.

Where a copy is, and what happens if this process dies there:

    claimed, waiting in a lane     its claim dies with the session: another worker has it within 2 s
    attempt under way              the same; the endpoint may see it twice, with the same webhook-id
    outcome waiting for commit     the same: the outcome is lost, the attempt is made again
    committed                      done
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from delivery.attempts import Attempts
from delivery.endpoint import Endpoint
from delivery.endpoints import Endpoints
from delivery.lane import Lane
from delivery.settler import Settler
from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.domain.states import Reason, State, SubscriptionStatus
from rooms.errors import BrokerUnavailableError, StorageRefusedError, StorageUnavailableError
from rooms.ports import Broker, Clock, Consumer
from rooms.storage.outcomes import Outcome, Outcomes

_log = logging.getLogger(__name__)

CREDIT: Final = 20_000
_TICK_S: Final = 0.25
_HELD_EVERY: Final = 4  # ticks
_BROKER_RETRY_S: Final = 0.5
_DRAIN_S: Final = 12.0


class PushWorker:
    """`run(stop)` works until `stop` is set; then attempts under way end and are committed, the rest goes back."""

    def __init__(
        self,
        *,
        broker: Broker,
        attempts: Attempts,
        outcomes: Outcomes,
        endpoints: Endpoints,
        clock: Clock,
        observe: Callable[[Sequence[Outcome]], None],
        released: Callable[[], None],
        slots: int,
    ) -> None:
        """`observe` is told of every committed batch, `released` of held copies that were queued again."""
        self._broker = broker
        self._attempts = attempts
        self._outcomes = outcomes
        self._endpoints = endpoints
        self._clock = clock
        self._observe = observe
        self._released = released
        self._slots = slots
        self._lanes: dict[SubscriptionId, Lane] = {}
        self._full: frozenset[SubscriptionId] = frozenset()
        self._settler = Settler(outcomes, settled=self._on_settled)
        self._consumer: Consumer | None = None
        self._untried: list[Copy] = []
        self._changed: frozenset[str] | None = None

    def settings_changed(self, rooms: frozenset[str]) -> None:
        """Subscriptions of these rooms changed (empty: of any)."""
        self._changed = (
            rooms if self._changed is None else (self._changed | rooms if rooms and self._changed else frozenset())
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set."""
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(self._settler.run()), group.create_task(self._tick_for_ever())]
            consuming = group.create_task(self._consume_until(stop))
            await consuming
            for loop in loops:
                loop.cancel()

    async def _consume_until(self, stop: asyncio.Event) -> None:
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                try:
                    async with self._broker.consume(credit=CREDIT) as consumer:
                        self._consumer, self._settler.worker = consumer, consumer.worker
                        consumer.exclude(self._full)
                        pumping = asyncio.create_task(self._pump(consumer))
                        await asyncio.wait({pumping, stopping}, return_when=asyncio.FIRST_COMPLETED)
                        if not pumping.done():
                            pumping.cancel()
                            with suppress(asyncio.CancelledError):
                                await pumping
                            await self._drain(consumer)
                        else:
                            pumping.result()
                except (BrokerUnavailableError, StorageUnavailableError, StorageRefusedError) as exc:
                    _log.warning("the broker is away, trying again: %s", exc)
                    for lane in self._lanes.values():
                        lane.drain()  # their claims died with the connection; they come again
                    self._consumer = None
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_BROKER_RETRY_S):
                            await stop.wait()
        finally:
            stopping.cancel()

    async def _pump(self, consumer: Consumer) -> None:
        async for batch in consumer.batches():
            await self._dispatch(batch)

    async def _drain(self, consumer: Consumer) -> None:
        waiting = [copy for lane in self._lanes.values() for copy in lane.drain()]
        if waiting:
            await consumer.release(waiting)
        await self._attempts.finish(_DRAIN_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await self._settler.drain()

    async def _dispatch(self, batch: Sequence[Copy]) -> None:
        endpoints = await self._endpoints.for_copies(batch)
        now, now_ms = self._clock.monotonic(), self._clock.now_ms()
        by_subscription: defaultdict[SubscriptionId, list[Copy]] = defaultdict(list)
        for copy in batch:
            if copy.expires_ms is not None and copy.expires_ms <= now_ms:
                self._settler.add(Outcome(copy=copy, to=State.EXPIRED))
            else:
                by_subscription[copy.subscription_id].append(copy)
        for identity, copies in by_subscription.items():
            endpoint = endpoints[identity]
            if endpoint is None:
                self._end(copies, State.CANCELLED, Reason.SUBSCRIPTION_DELETED)
                continue
            lane = self._lane(identity, endpoint, now)
            reason = self._closed(lane, now)
            if reason is not None:
                self._end(copies, State.HELD, reason)
                continue
            lane.offer(copies, now)
            self._attempts.start(lane, self)
        self._pass_over(by_subscription)

    def _lane(self, identity: SubscriptionId, endpoint: Endpoint, now: float) -> Lane:
        lane = self._lanes.get(identity)
        if lane is None:
            lane = self._lanes[identity] = Lane(endpoint, slots=self._slots, now=now)
        elif lane.endpoint is not endpoint:
            lane.endpoint = endpoint
        return lane

    def _closed(self, lane: Lane, now: float) -> Reason | None:
        status = lane.endpoint.record.status
        if lane.disabled or status is SubscriptionStatus.DISABLED:
            return Reason.DISABLED
        if status is SubscriptionStatus.PAUSED:
            return Reason.PAUSED
        return Reason.SATURATED if lane.saturated(now) else None

    def _end(self, copies: Iterable[Copy], to: State, reason: Reason) -> None:
        for copy in copies:
            self._settler.add(Outcome(copy=copy, to=to, reason=reason))

    def settle(self, outcome: Outcome) -> None:
        """An attempt has come to its end."""
        self._settler.add(outcome)

    def give_back(self, copy: Copy) -> None:
        """No attempt was made: the claim would not have lasted."""
        self._untried.append(copy)

    def emptier(self, lane: Lane) -> None:
        """A slot of the lane has taken its next copy: the queue may hand out more of this subscription."""
        identity = lane.endpoint.record.subscription_id
        if identity in self._full and not lane.full():
            self._exclude(self._full - {identity})

    def _pass_over(self, identities: Iterable[SubscriptionId]) -> None:
        full = {identity for identity in identities if identity in self._lanes and self._lanes[identity].full()}
        if full - self._full:
            self._exclude(self._full | full)

    def _exclude(self, identities: frozenset[SubscriptionId]) -> None:
        self._full = identities
        if self._consumer is not None:
            self._consumer.exclude(identities)

    async def _on_settled(self, batch: Sequence[Outcome]) -> None:
        self._observe(batch)
        if self._consumer is not None:
            await self._consumer.settle([outcome.copy for outcome in batch])

    async def _tick_for_ever(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(_TICK_S)
            tick += 1
            try:
                await self._apply_changes()
                await self._give_back()
                self._hold_what_is_closed()
                if tick % _HELD_EVERY == 0:
                    await self._bring_back_held()
            except (BrokerUnavailableError, StorageUnavailableError, StorageRefusedError) as exc:
                _log.warning("held deliveries wait: %s", exc)

    async def _give_back(self) -> None:
        untried, self._untried = self._untried, []
        if untried and self._consumer is not None:
            await self._consumer.release(untried)

    async def _apply_changes(self) -> None:
        changed, self._changed = self._changed, None
        if changed is None:
            return
        self._endpoints.forget(changed)
        for identity, endpoint in (await self._endpoints.current(self._lanes, self._clock.monotonic())).items():
            lane = self._lanes[identity]
            if endpoint is not None:
                lane.endpoint, lane.disabled = endpoint, False
            elif not lane.busy:
                self._end(lane.drain(), State.CANCELLED, Reason.SUBSCRIPTION_DELETED)
                del self._lanes[identity]
                self._exclude(self._full - {identity})

    def _hold_what_is_closed(self) -> None:
        now = self._clock.monotonic()
        for identity, lane in self._lanes.items():
            if lane.waiting or identity in self._full:
                reason = self._closed(lane, now)
                if reason is not None:
                    self._end(lane.drain(), State.HELD, reason)
                    self.emptier(lane)

    async def _bring_back_held(self) -> None:
        held = await self._outcomes.held_subscriptions()
        if not held:
            return
        now = self._clock.monotonic()
        endpoints = await self._endpoints.current(held, now)
        for identity in held:
            endpoint = endpoints[identity]
            if endpoint is None or not endpoint.active:
                continue
            lane = self._lane(identity, endpoint, now)
            room = lane.room()
            while room > 0 and self._closed(lane, self._clock.monotonic()) is None:
                moved = await self._outcomes.release_held(identity, limit=room)
                if moved:
                    self._released()
                if moved < room:
                    break
                await asyncio.sleep(_TICK_S / 10)
                room = lane.room()
