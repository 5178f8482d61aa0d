"""Consume delivery tasks, pass each to its subscription's lane, and commit the outcomes.

If this process dies, what follows depends on where a task is:

    claimed, waiting in a lane     the claim ends with the session: another worker has it within 2 s
    attempt in progress            the same; the endpoint may get it twice, with the same webhook-id
    outcome waiting for commit     the same: the outcome is lost, and the attempt is made again
    committed                      the task is done

With an external broker, `delivery.push.broker_intake` claims the tasks first, so the same holds.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from itertools import islice
from typing import Final, cast

from delivery.push.attempt import AttemptExecutor
from delivery.push.endpoint_state import ConcurrencyReporter, EndpointEventQueue
from delivery.push.endpoints import Endpoint, EndpointCache
from delivery.push.lane import Lane
from delivery.push.lanes import Lanes
from delivery.push.outcome_writer import OutcomeWriter
from delivery.push.rate_limit import TokenClient
from delivery.push.release_held import HeldReleaser
from delivery.push.slots import SlotPool
from delivery.push.task_source import ClaimingConsumer, TaskSource
from delivery.push.unsent import SaturationReporter, UnsentHandler
from rooms.db.queue.holds import Holds
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.queue.throttle import SharedLaneState
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId, room_of
from rooms.domain.state_machine import Reason, State
from rooms.errors import BrokerUnavailableError, StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import PUSH_CREDIT, Clock, Consumer

_log = logging.getLogger(__name__)

_NOTIFY_BELOW_MS: Final = 1000
_TICK_S: Final = 0.25
_BROKER_RETRY_S: Final = 0.5
_SETTLE_FIRST_S: Final = 1.0
APPLIED_AT_A_TIME: Final = 400
"""Lanes whose settings one tick loads again; after a change of a room there may be thousands."""
_DRAIN_S: Final = 12.0
"""The longest time from the stop signal to the end; the supervisor kills the process after 15 s."""
_LAST_COMMIT_S: Final = 3.0
_CONSUME_OUTAGE: Final = "attempts to consume failed"
_TICK_OUTAGE: Final = "checks of settings and endpoints failed"
_OUTAGE_ERRORS: Final = (BrokerUnavailableError, StorageUnavailableError, StorageRefusedError)


class PushWorker:
    """Attempt due deliveries; after a stop, finish attempts in progress and release the rest."""

    def __init__(
        self,
        *,
        task_source: TaskSource,
        attempts: AttemptExecutor,
        outcomes: OutcomeQueries,
        holds: Holds,
        shared: SharedLaneState,
        endpoints: EndpointCache,
        clock: Clock,
        events: EndpointEventQueue,
        observe: Callable[[Sequence[DeliveryOutcome]], None],
        on_requeued: Callable[[], None],
        report_slowed: Callable[[int], None],
        report_saturated: Callable[[SubscriptionId], None],
        slots: int,
    ) -> None:
        """Configure the worker.

        `observe` gets each committed batch. `on_requeued` is called when tasks were queued that
        are due before the consumer's next poll. `report_slowed` gets the number of lanes with
        reduced concurrency, `report_saturated` each lane that is saturated again and again.
        `slots`: attempts at a time for subscriptions without a setting of their own.
        """
        self._task_source = task_source
        self._holds = holds
        self._endpoints = endpoints
        self._clock = clock
        self._events = events
        self._observe = observe
        self._on_requeued = on_requeued
        self._lanes = Lanes(slots=slots, on_full_changed=self._set_excluded)
        self._outcome_writer = OutcomeWriter(
            outcomes, on_committed=self._on_settled, on_rejected=self._forget, clock=clock
        )
        self._unsent = UnsentHandler(
            self._lanes, self._outcome_writer, SaturationReporter(self._lanes, report_saturated)
        )
        self._concurrency_reporter = ConcurrencyReporter(
            self._lanes, shared, report_slowed=report_slowed
        )
        self._token_client = TokenClient(shared, clock=clock)
        self._wake = asyncio.Event()
        self._slots = SlotPool(
            attempts,
            lanes=self._lanes,
            outcome_writer=self._outcome_writer,
            unsent=self._unsent,
            events=events,
            token_client=self._token_client,
            clock=clock,
            wake=self._wake,
            forget=self._forget,
        )
        self._consumer: ClaimingConsumer | None = None
        self._changed_rooms: frozenset[str] | None = None
        self._outdated: dict[SubscriptionId, None] = {}
        """Subscriptions with lanes whose settings must be loaded again, oldest change first."""
        self._drain_deadline: float | None = None

    def settings_changed(self, rooms: frozenset[str]) -> None:
        """Load the subscriptions of these rooms again (empty: of all)."""
        self._add_changed_rooms(rooms)
        self._wake.set()

    def _add_changed_rooms(self, rooms: frozenset[str]) -> None:
        self._changed_rooms = (
            rooms
            if self._changed_rooms is None
            else (self._changed_rooms | rooms if rooms and self._changed_rooms else frozenset())
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Attempt deliveries until `stop` is set, then drain."""
        held_releaser = HeldReleaser(
            holds=self._holds,
            endpoints=self._endpoints,
            clock=self._clock,
            capacity=self._capacity_for_held,
            on_released=self._on_held_released,
            on_none_held=self._on_none_held,
        )
        try:
            async with asyncio.TaskGroup() as group:
                loops = [
                    group.create_task(self._outcome_writer.run()),
                    group.create_task(self._tick_loop()),
                    group.create_task(held_releaser.run()),
                    group.create_task(self._rate_limit_loop()),
                ]
                await self._consume_until_stopped(stop)
                for loop in loops:
                    loop.cancel()
            await self._flush_events()
        finally:
            await self._slots.drain(0)

    async def _consume_until_stopped(self, stop: asyncio.Event) -> None:
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                try:
                    async with self._task_source.consume(credit=PUSH_CREDIT) as consumer:
                        await self._run_consumer(consumer, stopping)
                except _OUTAGE_ERRORS as exc:
                    OUTAGES.record_failure(exc, _CONSUME_OUTAGE)
                    self._drop_waiting()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_BROKER_RETRY_S):
                            await stop.wait()
            await self._drain()
        finally:
            stopping.cancel()

    async def _run_consumer(self, consumer: ClaimingConsumer, stopping: asyncio.Task[bool]) -> None:
        OUTAGES.record_success(_CONSUME_OUTAGE)
        # Outcomes of the time without a broker are committed first; else their tasks are attempted
        # again.
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_FIRST_S):
                await self._outcome_writer.drain()
        self._consumer, self._outcome_writer.worker = consumer, consumer.worker_id
        self._unsent.shares = consumer.intake_shares
        consumer.exclude(self._lanes.full)
        consuming = asyncio.create_task(self._consume_batches(consumer))
        try:
            await asyncio.wait({consuming, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            consuming.cancel()
            with suppress(asyncio.CancelledError):
                await consuming
        waiting = self._lanes.drain() + self._unsent.take_to_release()
        if waiting:
            await consumer.release(waiting)
        await self._drain()
        self._consumer = None

    async def _drain(self) -> None:
        now = self._clock.monotonic()
        if self._drain_deadline is None:
            self._drain_deadline = now + _DRAIN_S
        await self._slots.drain(max(0.0, self._drain_deadline - _LAST_COMMIT_S - now))
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._drain_deadline - self._clock.monotonic())):
                await self._outcome_writer.drain()

    async def _flush_events(self) -> None:
        """Write what the last attempts have shown about endpoints, within the drain's time."""
        now = self._clock.monotonic()
        left_s = max(0.0, (self._drain_deadline or now) - now)
        try:
            async with asyncio.timeout(left_s):
                while await self._events.flush():
                    pass
        except TimeoutError:
            _log.warning("events of endpoints were not all written before the stop")
        except _OUTAGE_ERRORS as exc:
            OUTAGES.record_failure(exc, _TICK_OUTAGE)

    def _drop_waiting(self) -> None:
        # The claims ended with the connection, so waiting tasks are delivered again.
        self._consumer = None
        self._unsent.take_to_release()
        self._lanes.drain()

    async def _consume_batches(self, consumer: Consumer) -> None:
        async with aclosing(
            cast("AsyncGenerator[Sequence[DeliveryTask]]", consumer.batches())
        ) as batches:
            late_count = self._outcome_writer.late_count
            async for batch in batches:
                is_late = self._outcome_writer.is_late(self._clock.monotonic())
                if is_late or late_count != self._outcome_writer.late_count:
                    # Other outcomes could not be committed either, and each claim that ended would
                    # make attempts again whose outcomes wait, or waited when this was claimed.
                    self._unsent.release_later(batch)
                    await self._outcome_writer.wait_until_caught_up()
                else:
                    try:
                        await self._dispatch(batch)
                    except asyncio.CancelledError:
                        self._unsent.release_later(batch)  # no lane has any of it yet
                        raise
                late_count = self._outcome_writer.late_count

    async def _dispatch(self, batch: Sequence[DeliveryTask]) -> None:
        endpoints = await self._endpoints.for_tasks(batch, self._clock.monotonic())
        now = self._clock.monotonic()
        by_subscription: defaultdict[SubscriptionId, list[DeliveryTask]] = defaultdict(list)
        for task in batch:
            if task.expires_at <= now:
                self._outcome_writer.add(DeliveryOutcome(task=task, state=State.EXPIRED))
            else:
                by_subscription[task.subscription_id].append(task)
        for subscription_id, tasks in by_subscription.items():
            endpoint = endpoints[subscription_id]
            if not isinstance(endpoint, Endpoint):
                self._unsent.settle_without_endpoint(tasks, endpoint)
                continue
            lane = self._lanes.get_or_create(endpoint, now)
            reason = lane.closed_reason(now)
            if reason is not None:
                self._handle_closed_lane(lane, tasks, reason)
                continue
            lane.enqueue(self._unsent.hold_excess(lane, tasks, now), now)
            self._slots.start(lane)
            self._unsent.hold_overflow(lane, now)
        if self._unsent.supports_exclude:
            self._lanes.exclude_full(by_subscription)

    def _handle_closed_lane(
        self, lane: Lane, tasks: Sequence[DeliveryTask], reason: Reason
    ) -> None:
        for task in tasks:
            if reason is Reason.CIRCUIT_OPEN and lane.endpoint.is_probe(task):
                self._slots.start_probe(lane, task)
            else:
                self._unsent.hold_closed(lane, [task], reason)

    def _set_excluded(self, subscription_ids: frozenset[SubscriptionId]) -> None:
        if self._consumer is not None:
            self._consumer.exclude(subscription_ids)

    async def _on_settled(self, batch: Sequence[DeliveryOutcome]) -> None:
        try:
            self._observe(batch)
        except Exception:  # noqa: BLE001 - the batch is committed, and the other attempts go on
            _log.exception("%d outcomes were not counted", len(batch))
        queued = State.QUEUED  # read once: in Python 3.11 that is a call
        # A list costs less than a generator for each delivery of a batch.
        if [one for one in batch if one.state is queued and one.delay_ms < _NOTIFY_BELOW_MS]:
            self._on_requeued()
        if self._consumer is not None:
            await self._consumer.settle([outcome.task for outcome in batch])

    def _forget(self, task: DeliveryTask) -> None:
        if self._consumer is not None:
            self._consumer.forget([task])

    async def _rate_limit_loop(self) -> None:
        while True:
            for lane in await self._token_client.next_lanes():
                self._slots.start(lane)

    async def _tick_loop(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            self._wake.clear()
            self._unsent.check_lanes(self._clock.monotonic())
            try:
                await self._run_steps()
            except _OUTAGE_ERRORS as exc:
                OUTAGES.record_failure(exc, _TICK_OUTAGE)
            else:
                OUTAGES.record_success(_TICK_OUTAGE)

    async def _run_steps(self) -> None:
        """Run the steps of a tick, and raise the first outage only after the last one.

        Each has a connection of its own. If that of the events cannot be opened, claims must be
        released all the same: else the worker ends up with nothing but claims of no use.
        """
        outage: Exception | None = None
        for step in (
            self._apply_changes,
            self._write_events,
            self._release_unattempted,
            self._report_concurrency,
        ):
            try:
                await step()
            except _OUTAGE_ERRORS as exc:
                outage = outage or exc
        if outage is not None:
            raise outage

    async def _write_events(self) -> None:
        if await self._events.flush():
            self._wake.set()

    async def _report_concurrency(self) -> None:
        await self._concurrency_reporter.report_changes(self._clock.monotonic())

    async def _release_unattempted(self) -> None:
        tasks = self._unsent.take_to_release()
        if tasks and self._consumer is not None:
            await self._consumer.release(tasks)

    async def _apply_changes(self) -> None:
        changed, self._changed_rooms = self._changed_rooms, None
        if changed is not None:
            self._endpoints.invalidate(changed)
            self._outdated |= dict.fromkeys(
                lane.subscription_id
                for lane in self._lanes
                if not changed or str(room_of(lane.subscription_id)) in changed
            )
        if not self._outdated:
            return
        part = list(islice(self._outdated, APPLIED_AT_A_TIME))
        current = await self._endpoints.current(part, self._clock.monotonic())
        for subscription_id in part:
            del self._outdated[subscription_id]
        if self._outdated:
            self._wake.set()
        for subscription_id, endpoint in current.items():
            lane = self._lanes.get(subscription_id)
            if lane is None:
                continue
            if isinstance(endpoint, Endpoint):
                lane.update(endpoint, self._clock.monotonic())
                self._slots.start(lane)
                continue
            self._unsent.settle_without_endpoint(lane.drain(), endpoint)
            self._lanes.on_task_dequeued(lane)
            if not lane.busy:
                self._lanes.remove(lane)
        self._unsent.check_lanes(self._clock.monotonic())

    def _capacity_for_held(self, endpoint: Endpoint) -> int | None:
        now = self._clock.monotonic()
        lane = self._lanes.get_or_create(endpoint, now)
        # A token that is far away is not waited for in memory.
        if lane.closed_reason(now) is not None or lane.startable_by_rate(now) == 0:
            return None
        shares = self._unsent.shares
        if shares is None:
            return lane.free_capacity(now)
        organisation = endpoint.organisation
        capacity = lane.free_capacity_for_released(now, shares.kept_part(organisation))
        room = shares.room_for(organisation, now)
        if room == 0:
            return None  # it may come seconds later
        return capacity if room is None else min(capacity, room)

    def _on_held_released(self, subscription_id: SubscriptionId, count: int) -> None:
        lane = self._lanes.get(subscription_id)
        if lane is not None:
            now, shares = self._clock.monotonic(), self._unsent.shares
            if shares is None:
                lane.expect_tasks(count, now)
            else:
                lane.expect_released(count, now)
                shares.expect(lane.endpoint.organisation, count, now)
        self._on_requeued()

    def _on_none_held(self, subscription_id: SubscriptionId) -> None:
        if (lane := self._lanes.get(subscription_id)) is not None:
            lane.on_none_held()
