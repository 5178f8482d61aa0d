"""Lease copies that an external broker hands out.

Its queues are open while polls wait, and hardly longer.

A lease request that has no copies asks PostgreSQL whether something is due, because PostgreSQL
knows it better than any broker. If nothing is due, polls that cannot wait end, and for the others
the queue stays open. If something is due, it is on its way: in the relay, in the broker or in
another process. All polls wait a moment for it. A queue of which no copy was ever seen is not
opened before it holds something: it may not exist, and asking costs the broker a connection.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from delivery.pull.broker_consumer import BrokerConsumer
from delivery.pull.open_queues import OpenQueues
from delivery.pull.postgres_source import Notify
from delivery.pull.target import PullTarget, access_error
from delivery.pull.wait_queue import LeaseOutcome, LeaseRequest
from rooms.db.leases.acquire import MAX_BYTES, LeasedRow, SubscriptionAccess
from rooms.db.leases.acquire_copies import (
    CopyLeaseRequest,
    CopyLeaseResult,
    due_by_queue,
    lease_copies,
    pending_copies,
)
from rooms.db.queue.broker_claims import BrokerClaims, version_of
from rooms.db.queue.orphans import create_orphan_rows, sideline_unreadable, sideline_without_message
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.errors import BrokerUnavailableError, RoomsError
from rooms.outages import OUTAGES
from rooms.ports import Broker, MalformedMessage

_log = logging.getLogger(__name__)

_SETTLE_OUTAGE: Final = "tries to settle copies that cannot be leased failed"
MIN_RETRY_S: Final = 0.02
"""The least time to wait for copies that may have become leasable just now."""
_CHECK_OUTAGE: Final = "checks for queues to close failed"
_PAUSE_SHARE: Final = 4
"""After such a check there is a pause of so many times its length,"""
_MAX_PAUSE_S: Final = 1.0
"""or of this, if that is shorter."""
EXPECT_TIMEOUT_S: Final = 1.0
"""The time for which a poll that cannot wait stays for a copy that is due and has not come."""
FIRST_POLL_S: Final = 0.02
"""The pause before the first check; each further pause is twice as long."""
MIN_CREDIT: Final = 64
"""With less credit, a broker that counts bytes would hand out large messages one by one."""
MAX_KNOWN_QUEUES: Final = 10_000

OnOrphans = Callable[[int, int], None]
"""Called with how many orphans were sidelined, and how many could not be."""


class UnleasableHandler:
    """Settle copies that cannot be leased, after recording them.

    What fails comes again, because its consumer is closed then.
    """

    def __init__(self, writer: LogWriter, on_orphans: OnOrphans) -> None:
        self._writer = writer
        self._claims = BrokerClaims(writer)
        self._on_orphans = on_orphans
        self._tasks: set[asyncio.Task[None]] = set()

    def handle_unleased(self, consumer: BrokerConsumer, copies: Sequence[DeliveryTask]) -> None:
        """Settle copies that no lease statement took.

        An outdated copy is only settled. A copy without a delivery becomes a sidelined delivery. A
        delivery whose message is missing is sidelined. A copy that is not due yet by PostgreSQL's
        clock is offered again when it is due.
        """
        self._spawn(consumer, self._settle_unleased(consumer, copies))

    def handle_malformed(
        self, consumer: BrokerConsumer, messages: Sequence[MalformedMessage]
    ) -> None:
        """Sideline the deliveries that wait for these messages, where they can be identified."""
        self._spawn(consumer, self._sideline_malformed(consumer, messages))

    async def close(self) -> None:
        """Wait until the work under way has ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _settle_unleased(
        self, consumer: BrokerConsumer, copies: Sequence[DeliveryTask]
    ) -> None:
        task_states = await self._claims.inspect(copies)
        if orphans := [copy for copy in copies if not task_states[version_of(copy)].exists]:
            _log.warning(
                "%d copies have no delivery, the first is %s", len(orphans), orphans[0].delivery_id
            )
            self._on_orphans(*await create_orphan_rows(self._writer, orphans))
        pending = await pending_copies(self._writer, copies)
        # What is due and was not leased became due in between, or can never be leased.
        due = [
            (copies[index].room_id, copies[index].delivery_id)
            for index, wait_s in pending.items()
            if not wait_s
        ]
        if due and (sidelined := await sideline_without_message(self._writer, due)):
            _log.error("%d deliveries have no message; they are sidelined", sidelined)
            pending = await pending_copies(self._writer, copies)
        if pending:
            consumer.release_later(
                [copies[index] for index in pending],
                after_s=max(MIN_RETRY_S, min(pending.values())),
            )
        consumer.settle([copy for index, copy in enumerate(copies) if index not in pending])

    async def _sideline_malformed(
        self, consumer: BrokerConsumer, messages: Sequence[MalformedMessage]
    ) -> None:
        sidelined = await sideline_unreadable(self._writer, messages)
        self._on_orphans(sidelined, len(messages) - sidelined)
        consumer.discard(messages)

    def _spawn(self, consumer: BrokerConsumer, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except RoomsError as exc:
                OUTAGES.record_failure(exc, _SETTLE_OUTAGE)
                consumer.give_back()  # polls that never end would keep it open, and these copies
            else:
                OUTAGES.record_success(_SETTLE_OUTAGE)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(slots=True)
class _ExpectedDelivery:
    """Hold the wait for a delivery that is due and that the broker has not handed out yet."""

    until: float
    pause_s: float
    timer: asyncio.TimerHandle | None = None


class BrokerSource:
    """Lease the copies that an external broker hands out; a `LeaseSource`."""

    def __init__(
        self,
        broker: Broker,
        *,
        lease_writers: Sequence[LogWriter],
        query_writer: LogWriter,
        notify: Notify,
        on_orphans: OnOrphans,
        open_queues: OpenQueues,
    ) -> None:
        """Use each of `lease_writers` for one lease statement at a time.

        `query_writer` does the rest, and may be shared.
        """
        self._broker = broker
        self._lease_writers = list(lease_writers)
        self._query_writer = query_writer
        self._notify = notify
        self._loop = asyncio.get_running_loop()
        self._unleasable = UnleasableHandler(query_writer, on_orphans)
        self._consumers = open_queues
        self._closing: dict[PullTarget, asyncio.Task[None]] = {}
        self._broker_errors: dict[PullTarget, BrokerUnavailableError] = {}
        self._expected_deliveries: dict[PullTarget, _ExpectedDelivery] = {}
        self._known_queues: dict[PullTarget, None] = {}
        """The queues that are known to exist, the oldest first."""
        self._unchecked: dict[PullTarget, None] = {}
        """Open queues of rooms that have changed."""
        self._check: asyncio.Task[None] | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._next_check_s = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for key in [*self._consumers, *self._expected_deliveries]:
            self._close_consumer(key)
        self._unchecked.clear()
        if self._check_timer is not None:
            self._check_timer.cancel()
        if ending := {*self._closing.values(), *([] if self._check is None else [self._check])}:
            await asyncio.wait(ending)
        await self._unleasable.close()

    async def acquire(
        self, requests: Sequence[LeaseRequest[PullTarget]]
    ) -> list[LeaseOutcome[LeasedRow]]:
        """Lease the copies that were handed out, in one statement, and settle them."""
        consumers = [self._consumers.get(request.key) for request in requests]
        taken = [
            [] if consumer is None else consumer.take(request.max_messages, MAX_BYTES)
            for request, consumer in zip(requests, consumers, strict=True)
        ]
        writer = self._lease_writers.pop()
        try:
            found = await lease_copies(
                writer,
                [
                    CopyLeaseRequest(
                        request.key.to_row(),
                        request.lease_ms,
                        copies,
                        _count_limit(request, consumer, copies),
                        request.holder,
                    )
                    for request, consumer, copies in zip(requests, consumers, taken, strict=True)
                ],
            )
        except BaseException:
            # When the copies come again their rows show what became of them.
            for request, copies in zip(requests, taken, strict=True):
                if copies:
                    self._close_consumer(request.key)
            raise
        finally:
            self._lease_writers.append(writer)
        return [
            self._to_outcome(request, consumer, copies, leased)
            for request, consumer, copies, leased in zip(
                requests, consumers, taken, found, strict=True
            )
        ]

    async def find_due(self, keys: Collection[PullTarget]) -> Collection[SubscriptionId]:
        """Return the subscriptions with something due, and close queues that are not served."""
        return await self._look_up(list({*keys, *self._consumers}))

    async def _look_up(self, wanted: Sequence[PullTarget]) -> Collection[SubscriptionId]:
        """Do so for these queues."""
        serving = await due_by_queue(
            self._query_writer, [(key.room, key.subscription) for key in wanted]
        )
        for index, key in enumerate(wanted):
            if index not in serving and key in self._consumers:
                self._close_consumer(key)
                self._known_queues.pop(key, None)
                self._notify((key.subscription,))
        return {wanted[index].subscription for index, due in serving.items() if due}

    def on_no_polls(self, key: PullTarget) -> None:
        """Give back what the queue's consumer holds; an empty one waits for the next poll."""
        self._stop_expecting(key)
        self._broker_errors.pop(key, None)
        if (consumer := self._consumers.get(key)) is not None:
            consumer.on_no_polls()

    def on_config_change(self, rooms: frozenset[RoomId]) -> None:
        """Close paused and deleted queues at once, so that a deletion can go on."""
        self._unchecked |= dict.fromkeys(
            key for key in self._consumers if not rooms or key.room in rooms
        )
        self._check_soon()

    def on_copies(self, consumer: BrokerConsumer) -> None:
        """Notify the polls of its queue."""
        self._consumers.on_copies(consumer.key)
        self._remember_queue(consumer.key)
        self._notify((consumer.key.subscription,))

    def on_malformed(self, consumer: BrokerConsumer, messages: Sequence[MalformedMessage]) -> None:
        """Record the messages, then discard them."""
        self._unleasable.handle_malformed(consumer, messages)

    def on_end(self, consumer: BrokerConsumer) -> None:
        """Forget the consumer; the next lease request that needs one opens another."""
        key = consumer.key
        if self._consumers.remove(consumer):
            self._closing[key] = consumer.task
            consumer.task.add_done_callback(lambda task: self._on_closed(key, task))
        if consumer.broker_error is not None:
            self._broker_errors[key] = consumer.broker_error
            self._known_queues.pop(key, None)

    def _to_outcome(
        self,
        request: LeaseRequest[PullTarget],
        consumer: BrokerConsumer | None,
        copies: Sequence[DeliveryTask],
        leased: CopyLeaseResult,
    ) -> LeaseOutcome[LeasedRow]:
        key = request.key
        if leased.access is not SubscriptionAccess.OPEN:
            self._close_consumer(key)
            return LeaseOutcome(error=access_error(leased.access, key))
        if consumer is not None and copies:
            self._stop_expecting(key)
            unleased_copies = leased.unleased(copies)
            consumer.settle(
                [copies[index] for index in leased.leased_indexes] if unleased_copies else copies
            )
            if unleased_copies:
                self._unleasable.handle_unleased(consumer, unleased_copies)
            # `due` includes what was just leased. If that is all, the next copy notifies.
            return LeaseOutcome(
                leased.rows, has_more=consumer.has_copies or leased.due > len(leased.leased_indexes)
            )
        if not leased.due:
            self._stop_expecting(key)
            if request.can_wait and key in self._known_queues:
                self._open_consumer(request, expected=0)
            return LeaseOutcome()
        if leased.sent or key in self._known_queues:
            self._open_consumer(request, expected=leased.due)
        return self._expect_delivery(key)

    def _expect_delivery(self, key: PullTarget) -> LeaseOutcome[LeasedRow]:
        now = self._loop.time()
        expected_delivery = self._expected_deliveries.get(key)
        if expected_delivery is None:
            expected_delivery = self._expected_deliveries[key] = _ExpectedDelivery(
                now + EXPECT_TIMEOUT_S, FIRST_POLL_S
            )
        if now >= expected_delivery.until:
            return LeaseOutcome(broker_error=self._broker_errors.get(key))
        if expected_delivery.timer is None:
            expected_delivery.timer = self._loop.call_later(
                expected_delivery.pause_s, self._poll_again, key, expected_delivery
            )
            expected_delivery.pause_s *= 2
        return LeaseOutcome(more_expected=True)

    def _poll_again(self, key: PullTarget, expected_delivery: _ExpectedDelivery) -> None:
        expected_delivery.timer = None
        self._notify((key.subscription,))

    def _stop_expecting(self, key: PullTarget) -> None:
        expected_delivery = self._expected_deliveries.pop(key, None)
        if expected_delivery is not None and expected_delivery.timer is not None:
            expected_delivery.timer.cancel()

    def _remember_queue(self, key: PullTarget) -> None:
        self._broker_errors.pop(key, None)
        self._known_queues.pop(key, None)
        self._known_queues[key] = None
        if len(self._known_queues) > MAX_KNOWN_QUEUES:
            del self._known_queues[next(iter(self._known_queues))]

    def _open_consumer(self, request: LeaseRequest[PullTarget], *, expected: int) -> None:
        key = request.key
        current = self._consumers.get(key)
        if current is not None and current.credit >= request.max_messages:
            current.on_poll()
            return
        if current is not None:
            current.close()
            self.on_end(current)
        ending = [self._closing[key]] if key in self._closing else []
        if self._consumers.is_full(key.organisation):
            # Where nothing is due there is nothing to receive: it is opened when something is.
            idle = self._consumers.find_idle(key.organisation) if expected else None
            if idle is None:
                return
            idle.give_back()  # what its polls expect goes on, or they would not be notified
            ending.append(idle.task)
        credit = max(
            MIN_CREDIT, 1 << (request.max_messages - 1).bit_length()
        )  # polls that join one by one seldom outgrow it
        consumer = self._broker.consume(credit=credit, subscription=key.subscription)
        self._consumers.add(
            BrokerConsumer(key, consumer, self, credit=credit, expected=expected, after=ending)
        )

    def _close_consumer(self, key: PullTarget) -> None:
        self._stop_expecting(key)
        if (consumer := self._consumers.get(key)) is not None:
            consumer.close()
            self.on_end(consumer)

    def _on_closed(self, key: PullTarget, task: "asyncio.Task[None]") -> None:
        if self._closing.get(key) is task:
            del self._closing[key]

    def _check_soon(self) -> None:
        if self._unchecked and self._check is None and self._check_timer is None:
            self._check_timer = self._loop.call_at(
                max(self._next_check_s, self._loop.time()), self._begin_check
            )

    def _begin_check(self) -> None:
        self._check_timer = None
        self._check = asyncio.create_task(self._close_unserved())

    async def _close_unserved(self) -> None:
        """Look up the open queues of rooms that have changed."""
        begun_s = self._loop.time()
        keys, self._unchecked = list(self._unchecked), {}
        try:
            await self._look_up(keys)
        except RoomsError as exc:
            OUTAGES.record_failure(exc, _CHECK_OUTAGE)
        else:
            OUTAGES.record_success(_CHECK_OUTAGE)
        finally:
            # Rooms that change all the time are not looked up all the time.
            now_s = self._loop.time()
            self._next_check_s = now_s + min(_MAX_PAUSE_S, _PAUSE_SHARE * (now_s - begun_s))
            self._check = None
            self._check_soon()


def _count_limit(
    request: LeaseRequest[PullTarget],
    consumer: BrokerConsumer | None,
    copies: Sequence[DeliveryTask],
) -> int:
    """Return up to how many due deliveries to count: none while untaken copies are at hand."""
    if not copies:
        return request.max_messages
    return 0 if consumer is not None and consumer.has_copies else len(copies) + 1
