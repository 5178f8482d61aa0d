"""The push worker: takes copies from the broker, gives each to its subscription's lane, and has the outcomes committed.

Where a copy is, and what happens if this process dies there:

    claimed, waiting in a lane     its claim dies with the session: another worker has it within 2 s
    attempt under way              the same; the endpoint may see it twice, with the same webhook-id
    outcome waiting for commit     the same: the outcome is lost, the attempt is made again
    committed                      done

With another broker than PostgreSQL its copies come by `delivery.intake`, which claims them first: the same holds.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Final, cast

from delivery.allowance import Allowance
from delivery.attempts import Attempts
from delivery.crowding import Crowding
from delivery.endpoint import Endpoint
from delivery.endpoints import Endpoints
from delivery.health import Notice, Word
from delivery.lane import Lane
from delivery.lanes import Lanes
from delivery.notices import Notices
from delivery.queue import CREDIT, Queue
from delivery.refill import Refill
from delivery.refusals import Refusals
from delivery.reports import Reports
from delivery.settler import Settler
from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId, room_of
from rooms.domain.states import Reason, State
from rooms.errors import BrokerUnavailableError, StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Clock, Consumer
from rooms.storage.holds import Holds
from rooms.storage.lanes import SharedLanes
from rooms.storage.outcomes import Outcome, Outcomes

_SOON_MS: Final = 1000
_TICK_S: Final = 0.25
_BROKER_RETRY_S: Final = 0.5
_SETTLE_FIRST_S: Final = 1.0
_DRAIN_S: Final = 12.0
"""From the stop to the end, whatever hangs: who started this process waits 15 s before it kills."""
_LAST_COMMIT_S: Final = 3.0
_NOT_CONSUMED: Final = "tries to consume failed"
_NOT_TICKED: Final = "looks at settings and endpoints failed"
_AWAY: Final = (BrokerUnavailableError, StorageUnavailableError, StorageRefusedError)


class PushWorker:
    """`run(stop)` works until `stop` is set; then attempts under way end and are committed, the rest goes back."""

    def __init__(
        self,
        *,
        queue: Queue,
        attempts: Attempts,
        outcomes: Outcomes,
        holds: Holds,
        shared: SharedLanes,
        endpoints: Endpoints,
        clock: Clock,
        notices: Notices,
        observe: Callable[[Sequence[Outcome]], None],
        released: Callable[[], None],
        slowed: Callable[[int], None],
        crowded: Callable[[SubscriptionId], None],
        slots: int,
    ) -> None:
        """`notices` is told of endpoints that are gone, fail or are well again, and sends what it was told; `observe` is
        told of every committed batch, `released` of copies that were queued again, held ones and such as come due sooner
        than a consumer looks by itself, `slowed` of how many lanes have fewer slots than they may, `crowded` of lanes that get far
        more than they can do, again and again. `slots`: attempts at a time for each subscription that says nothing else.
        """
        self._queue = queue
        self._attempts = attempts
        self._holds = holds
        self._endpoints = endpoints
        self._clock = clock
        self._notices = notices
        self._observe = observe
        self._released = released
        self._lanes = Lanes(slots=slots, exclude=self._exclude)
        self._settler = Settler(outcomes, settled=self._on_settled)
        self._refusals = Refusals(self._lanes, self._settler, Crowding(self._lanes, crowded))
        self._reports = Reports(self._lanes, shared, slowed=slowed)
        self._allowance = Allowance(shared, clock=clock, start=lambda lane: attempts.start(lane, self))
        self._consumer: Consumer | None = None
        self._untried: list[Copy] = []
        self._changed: frozenset[str] | None = None
        self._hurry = asyncio.Event()
        self._drained_by: float | None = None

    def settings_changed(self, rooms: frozenset[str]) -> None:
        """Subscriptions of these rooms changed (empty: of any)."""
        self._remember(rooms)
        self._hurry.set()

    def _remember(self, rooms: frozenset[str]) -> None:
        self._changed = (
            rooms if self._changed is None else (self._changed | rooms if rooms and self._changed else frozenset())
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set."""
        refill = Refill(
            holds=self._holds,
            endpoints=self._endpoints,
            clock=self._clock,
            room=self._room_for_held,
            released=self._on_refilled,
            emptied=self._on_emptied,
        )
        try:
            async with asyncio.TaskGroup() as group:
                loops = [
                    group.create_task(self._settler.run()),
                    group.create_task(self._tick_for_ever()),
                    group.create_task(refill.run()),
                    group.create_task(self._allowance.run()),
                ]
                await self._consume_until(stop)
                for loop in loops:
                    loop.cancel()
        finally:
            await self._attempts.finish(0)

    async def _consume_until(self, stop: asyncio.Event) -> None:
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                try:
                    async with self._queue.consume(credit=CREDIT) as consumer:
                        await self._serve(consumer, stopping)
                except _AWAY as exc:
                    OUTAGES.failed(exc, _NOT_CONSUMED)
                    self._let_go()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_BROKER_RETRY_S):
                            await stop.wait()
            await self._finish()
        finally:
            stopping.cancel()

    async def _serve(self, consumer: Consumer, stopping: asyncio.Task[bool]) -> None:
        OUTAGES.succeeded(_NOT_CONSUMED)
        # What ended while the broker was away is committed first, or it would be handed out and attempted again.
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_FIRST_S):
                await self._settler.drain()
        self._consumer, self._settler.worker = consumer, consumer.worker
        self._refusals.selective = consumer.selective
        consumer.exclude(self._lanes.full)
        pumping = asyncio.create_task(self._pump(consumer))
        try:
            await asyncio.wait({pumping, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pumping.cancel()
            with suppress(asyncio.CancelledError):
                await pumping
        waiting, self._untried = self._lanes.drain() + self._untried, []
        if waiting:
            await consumer.release(waiting)
        await self._finish()
        self._consumer = None

    async def _finish(self) -> None:
        now = self._clock.monotonic()
        if self._drained_by is None:
            self._drained_by = now + _DRAIN_S
        await self._attempts.finish(max(0.0, self._drained_by - _LAST_COMMIT_S - now))
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._drained_by - self._clock.monotonic())):
                await self._settler.drain()

    def _let_go(self) -> None:
        # The claims died with the connection; what waits here comes again.
        self._consumer = None
        self._untried.clear()
        self._lanes.drain()

    async def _pump(self, consumer: Consumer) -> None:
        async with aclosing(cast("AsyncGenerator[Sequence[Copy]]", consumer.batches())) as batches:
            async for batch in batches:
                try:
                    await self._dispatch(batch)
                except asyncio.CancelledError:
                    self._untried.extend(batch)  # nothing of it was given to a lane yet
                    raise

    async def _dispatch(self, batch: Sequence[Copy]) -> None:
        endpoints = await self._endpoints.for_copies(batch, self._clock.monotonic())
        now, now_ms = self._clock.monotonic(), self._clock.now_ms()
        by_subscription: defaultdict[SubscriptionId, list[Copy]] = defaultdict(list)
        for copy in batch:
            if copy.expires_ms is not None and copy.expires_ms <= now_ms:
                self._settler.add(Outcome(copy=copy, to=State.EXPIRED))
            else:
                by_subscription[copy.subscription_id].append(copy)
        for identity, copies in by_subscription.items():
            endpoint = endpoints[identity]
            if not isinstance(endpoint, Endpoint):
                self._refusals.without_endpoint(copies, endpoint)
                continue
            lane = self._lanes.enter(endpoint, now)
            reason = lane.closed(now)
            if reason is not None:
                self._refuse(lane, copies, reason)
                continue
            lane.offer(copies, now)
            self._attempts.start(lane, self)
            self._refusals.surplus(lane, now)
        if self._refusals.selective:
            self._lanes.pass_over(by_subscription)

    def _refuse(self, lane: Lane, copies: Sequence[Copy], reason: Reason) -> None:
        for copy in copies:
            if reason is Reason.CIRCUIT_OPEN and lane.endpoint.probed_by(copy):
                self._attempts.probe(lane, copy, self)
            else:
                self._refusals.closed(lane, [copy], reason)

    def settle(self, outcome: Outcome) -> None:
        """An attempt has come to its end."""
        self._settler.add(outcome)

    def give_back(self, copy: Copy) -> None:
        """No attempt was made: the claim would not have lasted."""
        self._untried.append(copy)

    def emptier(self, lane: Lane) -> None:
        """A slot of the lane has taken its next copy."""
        self._lanes.emptier(lane)

    def _exclude(self, identities: frozenset[SubscriptionId]) -> None:
        if self._consumer is not None:
            self._consumer.exclude(identities)

    def tell(self, lane: Lane, notice: Notice) -> None:
        """An attempt has shown something about its endpoint, which the records are to know."""
        if notice.word is Word.TRIPPED:
            self._refusals.end(lane.drain(), State.HELD, Reason.CIRCUIT_OPEN)
            self._lanes.emptier(lane)
        self._notices.add(notice)
        self._hurry.set()

    def thirsty(self, lane: Lane) -> None:
        """The lane could do more if its rate allowed it."""
        self._allowance.want(lane)

    async def _on_settled(self, batch: Sequence[Outcome]) -> None:
        self._observe(batch)
        queued = State.QUEUED  # looked up once: in Python 3.11 that is a call
        if any(outcome.to is queued and outcome.delay_ms < _SOON_MS for outcome in batch):
            self._released()
        if self._consumer is not None:
            await self._consumer.settle([outcome.copy for outcome in batch])

    async def _tick_for_ever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._hurry.wait()
            self._hurry.clear()
            self._untried += self._refusals.look(self._clock.monotonic())
            try:
                await self._apply_changes()
                await self._notices.send()
                await self._give_back()
                await self._reports.send(self._clock.monotonic())
            except _AWAY as exc:
                OUTAGES.failed(exc, _NOT_TICKED)
            else:
                OUTAGES.succeeded(_NOT_TICKED)

    async def _give_back(self) -> None:
        untried, self._untried = self._untried, []
        if untried and self._consumer is not None:
            await self._consumer.release(untried)

    async def _apply_changes(self) -> None:
        changed, self._changed = self._changed, None
        if changed is None:
            return
        self._endpoints.forget(changed)
        touched = [lane.identity for lane in self._lanes if not changed or str(room_of(lane.identity)) in changed]
        try:
            current = await self._endpoints.current(touched, self._clock.monotonic())
        except _AWAY:
            self._remember(changed)
            raise
        for identity, known in current.items():
            lane = self._lanes.find(identity)
            if lane is None:
                continue
            if isinstance(known, Endpoint):
                lane.follow(known, self._clock.monotonic())
                self._attempts.start(lane, self)
                continue
            self._refusals.without_endpoint(lane.drain(), known)
            self._lanes.emptier(lane)
            if not lane.busy:
                self._lanes.forget(lane)
        self._untried += self._refusals.look(self._clock.monotonic())

    def _room_for_held(self, endpoint: Endpoint) -> int | None:
        now = self._clock.monotonic()
        lane = self._lanes.enter(endpoint, now)
        if lane.closed(now) is not None:
            return None
        return lane.room(now) if self._refusals.selective else lane.room_for_surplus(now)

    def _on_refilled(self, identity: SubscriptionId, count: int) -> None:
        lane = self._lanes.find(identity)
        if lane is not None:
            expect = lane.expect if self._refusals.selective else lane.expect_kept
            expect(count, self._clock.monotonic())
        self._released()

    def _on_emptied(self, identity: SubscriptionId) -> None:
        if (lane := self._lanes.find(identity)) is not None:
            lane.nothing_held()
