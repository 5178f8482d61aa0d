"""A push worker at work in a test: on a real PostgreSQL, with endpoints that answer what the test says."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from delivery.brokers.postgres import PostgresBroker
from delivery.push.attempt import AttemptExecutor
from delivery.push.broker_intake import BrokerIntake
from delivery.push.endpoint_state import (
    LOCK_TIMEOUT_MS,
    EndpointEventQueue,
    EndpointSignal,
    EndpointStateWriter,
)
from delivery.push.endpoints import EndpointCache
from delivery.push.task_source import TaskSource
from delivery.push.worker import PushWorker
from rooms.clock import SystemClock
from rooms.db.connection import PersistentConnection
from rooms.db.notify import Channel, Notifier
from rooms.db.queue.holds import Holds
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.queue.throttle import SharedLaneState
from rooms.db.writer import LogWriter
from rooms.domain.attempt import AttemptResult, ErrorClass
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.push_url import PushUrl
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode, relayed_mode
from rooms.ports import Broker, Clock
from tests.support.fake_broker import MemoryBroker
from tests.support.in_process_relay import Carrier
from tests.support.installation import CLAIM_S, PATIENCE_S, SEAL, Installation, host_of

SHAPES: Final[Mapping[str, BrokerMode]] = {
    "embedded": POSTGRES_MODE,
    "relayed": relayed_mode(lookahead_ms=3_600_000),
}
OK: Final = AttemptResult(
    status=204, error=None, detail="", body_head=b"", retry_after=None, latency_ms=1.5
)
TIMED_OUT: Final = AttemptResult(
    status=None,
    error=ErrorClass.TIMEOUT,
    detail="no answer in time",
    body_head=b"",
    retry_after=None,
    latency_ms=9.0,
)


def answered(status: int, *, retry_after: str | None = None, body: bytes = b"no") -> AttemptResult:
    """An answer that is no success."""
    return AttemptResult(
        status=status,
        error=ErrorClass.STATUS,
        detail=f"answered {status}",
        body_head=body,
        retry_after=retry_after,
        latency_ms=2.5,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One attempt as the endpoint saw it."""

    host: str
    headers: dict[str, str]
    body: bytes
    organisation: OrganisationId
    at: float

    @property
    def delivery(self) -> str:
        return self.headers["webhook-id"]

    @property
    def attempt(self) -> int:
        return int(self.headers["Rooms-Delivery-Attempt"])


Script = AttemptResult | Exception | Callable[[Call], AttemptResult]


@dataclass
class ScriptedSender:
    """Answers each endpoint from its script, in turn, then with success; hosts that hang answer nothing at all."""

    calls: list[Call] = field(default_factory=list)
    scripts: defaultdict[str, list[Script]] = field(default_factory=lambda: defaultdict(list))
    _hanging: dict[str, asyncio.Event] = field(default_factory=dict)
    _usual: dict[str, AttemptResult] = field(default_factory=dict)
    _called: asyncio.Condition = field(default_factory=asyncio.Condition)
    under_way: int = 0

    def plan(self, subscription: SubscriptionId, *scripts: Script) -> None:
        self.scripts[host_of(subscription)].extend(scripts)

    def always(self, subscription: SubscriptionId, answer: AttemptResult) -> None:
        """The answer after the end of the script."""
        self._usual[host_of(subscription)] = answer

    def hang(self, *subscriptions: SubscriptionId) -> None:
        for subscription in subscriptions:
            self._hanging[host_of(subscription)] = asyncio.Event()

    def recover(self, *subscriptions: SubscriptionId) -> None:
        """Those that hang answer: what is under way, too, with success."""
        for subscription in subscriptions:
            self._hanging.pop(host_of(subscription)).set()

    def of(self, subscription: SubscriptionId) -> list[Call]:
        return [call for call in self.calls if call.host == host_of(subscription)]

    async def called(self, condition: Callable[[], bool], what: str) -> None:
        """Until the calls fulfil the condition."""
        try:
            async with asyncio.timeout(PATIENCE_S), self._called:
                await self._called.wait_for(condition)
        except TimeoutError:
            raise AssertionError(
                f"waited in vain for {what}; {len(self.calls)} calls came"
            ) from None

    async def send(
        self,
        target: PushUrl,
        headers: bytes,
        body: bytes,
        *,
        organisation: OrganisationId,
        timeout_s: float,
    ) -> AttemptResult:
        lines = headers.decode("latin-1").split("\r\n")
        assert lines.pop() == ""
        call = Call(
            host=target.host,
            headers=dict(line.split(": ", 1) for line in lines),
            body=body,
            organisation=organisation,
            at=time.monotonic(),
        )
        self.under_way += 1
        try:
            async with self._called:
                self.calls.append(call)
                self._called.notify_all()
            if (answering := self._hanging.get(target.host)) is not None:
                try:
                    async with asyncio.timeout(timeout_s):
                        await answering.wait()
                except TimeoutError:
                    return TIMED_OUT
            script = self.scripts[target.host]
            step = script.pop(0) if script else self._usual.get(target.host, OK)
        finally:
            self.under_way -= 1
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, AttemptResult) else step(call)


class ShiftedClock(SystemClock):
    """The system's clock, some seconds ahead."""

    ahead_s: float = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


class StoppedClock(SystemClock):
    """Provide a clock that advances only on request; in whole seconds it is exact."""

    ahead_s: float = 0.0

    def monotonic(self) -> float:
        return 1000.0 + self.ahead_s


class CallsClock(SystemClock):
    """It goes on by `call_s` with every call and hardly otherwise: whatever a lane's pace decides is not this machine's."""

    def __init__(self, sender: ScriptedSender, *, call_s: float) -> None:
        self.call_s = call_s
        self._sender = sender
        self._began = super().monotonic()
        self._seen, self._called_s = 0, 0.0

    def monotonic(self) -> float:
        calls = len(self._sender.calls)
        self._called_s += (calls - self._seen) * self.call_s
        self._seen = calls
        # Or nothing would ever be over while no call is made.
        return self._began + self._called_s + (super().monotonic() - self._began) / 20


@dataclass
class Work:
    """Run a worker and record its reports."""

    worker: PushWorker
    signals: Notifier
    stop: asyncio.Event
    observed: list[DeliveryOutcome] = field(default_factory=list)
    changes: list[EndpointSignal] = field(default_factory=list)
    """Endpoint states that the worker found and the records did not know."""
    releases: int = 0
    orphans: list[tuple[int, int]] = field(default_factory=list)
    """(sidelined, discarded) for each batch that had any."""


@asynccontextmanager
async def working(
    installation: Installation,
    sender: ScriptedSender,
    *,
    slots: int = 4,
    claim_s: float = CLAIM_S,
    poll_s: float = 1.0,
    clock: Clock | None = None,
    endpoints: EndpointCache | None = None,
    broker: Broker | None = None,
) -> AsyncIterator[Work]:
    """A push worker wired as in the service. At the end it is stopped, and drains.

    In the relayed shape it takes the copies of `broker`, or of one in memory to which they are
    carried.
    """
    clock = clock or SystemClock()
    url, shape = installation.url, installation.shape
    reading = PersistentConnection(url, name="rooms endpoints")
    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(LogWriter(url, kind="settler", broker_mode=shape))
        queue: TaskSource
        if not shape.is_relayed:
            queue = await stack.enter_async_context(
                PostgresBroker(url, claim_s=claim_s, poll_s=poll_s)
            )
        else:
            carries: Broker = broker or MemoryBroker()
            if broker is None:
                await stack.enter_async_context(Carrier(url, carries))
            queue = BrokerIntake(
                carries,
                url,
                claim_s=claim_s,
                on_orphans=lambda kept, dropped: work.orphans.append((kept, dropped)),
            )
        signals = await stack.enter_async_context(
            Notifier(
                url,
                listeners={Channel.CONFIG: lambda rooms: work.worker.settings_changed(rooms)},  # noqa: PLW0108 - bound below
                broker_mode=shape,
            )
        )

        def observe(batch: Sequence[DeliveryOutcome]) -> None:
            work.observed.extend(batch)

        def released() -> None:
            work.releases += 1
            signals.notify_queued()

        changes = list[EndpointSignal]()
        states = LogWriter(url, kind="states", lock_timeout_ms=LOCK_TIMEOUT_MS, broker_mode=shape)
        stack.push_async_callback(states.close)
        limits = LogWriter(url, kind="limits", durable=False)
        stack.push_async_callback(limits.close)
        records = EndpointStateWriter(
            SharedLaneState(states),
            signals,
            observe=changes.append,
        )
        notices = EndpointEventQueue(
            write_event=records.write,
            write_status_reason=records.set_status_reason,
            monotonic=clock.monotonic,
        )
        work = Work(
            PushWorker(
                task_source=queue,
                attempts=AttemptExecutor(sender=sender, clock=clock, random=random.random),
                outcomes=OutcomeQueries(writer),
                holds=Holds(writer),
                shared=SharedLaneState(limits),
                endpoints=endpoints
                or EndpointCache(reading, SEAL, set_status_reason=notices.set_status_reason),
                clock=clock,
                events=notices,
                observe=observe,
                on_requeued=released,
                report_slowed=lambda _count: None,
                report_saturated=lambda identity: signals.notify(Channel.SATURATED, identity),
                slots=slots,
            ),
            signals,
            asyncio.Event(),
            changes=changes,
        )
        running = asyncio.create_task(work.worker.run(work.stop))
        try:
            yield work
        finally:
            work.stop.set()
            try:
                async with asyncio.timeout(PATIENCE_S * 2):
                    await running
            finally:
                await reading.close()


async def deliver(
    installation: Installation,
    *subscriptions: SubscriptionId,
    due: datetime | None = None,
    **message: object,
) -> list[DeliveryTask]:
    """One message, queued and due."""
    copies = await installation.publish(*subscriptions, **message)  # type: ignore[arg-type]
    await installation.queue(*copies, due=due or await installation.value("SELECT now()"))
    return copies
