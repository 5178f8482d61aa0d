"""Claim, send and mark; each step is under way while the next batches are in the steps before."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, TypeVar

from delivery.relay.claims import RelayClaims, RelayTurn
from rooms.db.notify import Channel, Notifier
from rooms.db.queue.orphans import sideline_without_message
from rooms.db.queue.relay import RELAY_WRITER_KIND, EndedTask, RelayBatch, RelayOutbox
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId, room_of
from rooms.domain.state_machine import Reason, State, SubscriptionType
from rooms.errors import BrokerUnavailableError, StorageRefusedError, StorageUnavailableError
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.ports import Broker, Clock, RejectedTask

_log = logging.getLogger(__name__)

LINGER_S_AT_1000: Final = 0.01
"""The linger at 1,000 tasks a second; shorter at lower rates, where delay shows."""
MAX_LINGER_S: Final = 0.03
MIN_PAUSE_S: Final = 0.01
"""The pause after a claim that leaves nothing of a backlog, for which no wake-up comes."""
SCAN_PAUSE_S: Final = 0.025
"""The pause in a backlog after a claim that left nothing, if no wake-up ends it.

The next claim may scan the whole outbox, and what the last one took needs the processors more.
"""
CLAIM_TTL_S: Final = 30.0
"""The time for which a frozen relay keeps its claims."""
BATCH: Final = 200
"""Most rows of a claim. The first one of a burst goes before its organisation has a backlog.

Broker and workers take all its messages before what others send next.
"""
SENDERS: Final = 3
"""Batches that await their receipts at the same time: the broker writes one and reads the next."""
BACKLOG_SENDERS: Final = 2
"""The same for organisations with a backlog."""
PROBE_BATCH: Final = 20
"""The number of tasks that are tried on a broker that was unavailable."""
POLL_S: Final = 1.0
MIN_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 1.0
"""A try costs a claim of a few rows, and every delivery waits for it when the broker is back."""
DRAIN_S: Final = 8.0
"""The time for the broker to take what is under way when the process stops."""
_MIN_CLAIM_LEFT_S: Final = 2.0
"""A batch with less than this left of its claim is not sent."""
_STORAGE_RETRY_S: Final = 0.25
_SEND_OUTAGE: Final = "sends to the broker failed"
_STORAGE_OUTAGE: Final = "claims and marks of the relay failed"
_T = TypeVar("_T")
_STORAGE_ERRORS: Final = (StorageUnavailableError, StorageRefusedError)


def linger_s(found: int, elapsed_s: float) -> float:
    """Return the linger before the next claim.

    The last claim found `found` tasks, `elapsed_s` after the claim before it.
    """
    if found <= 1:
        return 0.0
    return min(MAX_LINGER_S, found / max(elapsed_s, 1e-4) * LINGER_S_AT_1000 / 1000)


class Relay:
    """Relay until `stop` is set; then send and mark, or release, what was claimed."""

    def __init__(
        self,
        *,
        outgoing: RelayOutbox,
        broker: Broker,
        clock: Clock,
        metrics: Metrics,
        on_pull_queued: Callable[[SubscriptionId], None],
        claim_s: float = CLAIM_TTL_S,
        poll_s: float = POLL_S,
        batch: int = BATCH,
    ) -> None:
        """Call `on_pull_queued` for each PULL subscription whose queue got something."""
        self._outgoing = outgoing
        self._broker = broker
        self._clock = clock
        self._metrics = metrics
        self._on_pull_queued = on_pull_queued
        self._poll_s = poll_s
        self._batch = batch
        self._claims = RelayClaims(
            outgoing,
            clock=clock,
            claim_s=claim_s,
            poll_s=poll_s,
            on_backlog_ended=self.wake,
            on_rest=metrics.bulk_rests.labels("relay").inc,
        )
        self._known_queues: set[SubscriptionId] = set()
        self._sentinel_checked = False
        self._sentinel_lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._has_backlog = asyncio.Event()
        self._stopping = False
        self._failures = 0
        self._retry_at_s = 0.0

    def wake(self) -> None:
        """Claim now, because something may have been queued."""
        self._wake.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Relay until `stop` is set."""
        claimed: asyncio.Queue[RelayBatch | None] = asyncio.Queue(1)
        backlog: asyncio.Queue[RelayBatch | None] = asyncio.Queue(1)
        sent: asyncio.Queue[Sequence[DeliveryTask] | None] = asyncio.Queue(1)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._claim_until_stopped(claimed)),
                group.create_task(self._claim_backlog_until_stopped(backlog)),
                group.create_task(self._send_and_close(claimed, backlog, sent)),
                group.create_task(self._mark_all(sent)),
            ]
            await stop.wait()
            self._stopping = True
            self._wake.set()
            self._has_backlog.set()
            _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
            for task in late:
                task.cancel()

    async def _claim_until_stopped(self, claimed: "asyncio.Queue[RelayBatch | None]") -> None:
        last_s = self._clock.monotonic()
        while not self._stopping:
            is_woken = self._wake.is_set()
            self._wake.clear()
            begun_s = self._clock.monotonic()
            if begun_s < self._retry_at_s:
                await self._sleep(self._retry_at_s - begun_s, ignore_wakeups=True)
                continue
            limit = PROBE_BATCH if self._failures else self._batch
            batch = await self._try_claim(limit, is_woken=is_woken)
            if batch is None:
                await self._sleep(_STORAGE_RETRY_S, ignore_wakeups=True)
                continue
            if not batch.row_count:
                await self._sleep(self._poll_s)
                continue
            await claimed.put(batch)
            if batch.row_count < limit:
                await asyncio.sleep(linger_s(batch.row_count, begun_s - last_s))
                if self._claims.has_backlog:
                    await self._sleep(SCAN_PAUSE_S)
            last_s = begun_s
        await claimed.put(None)

    async def _claim_backlog_until_stopped(
        self, claimed: "asyncio.Queue[RelayBatch | None]"
    ) -> None:
        """Claim for backlogged organisations, beside the claims for all others."""
        last_s = self._clock.monotonic()
        while not self._stopping:
            turn = self._claims.next_turn()
            if turn is None:
                self._has_backlog.clear()
                await self._has_backlog.wait()
                continue
            begun_s = self._clock.monotonic()
            # Its pauses are short and take no wake-up, which is for the other claims.
            if begun_s < self._retry_at_s:
                await asyncio.sleep(self._retry_at_s - begun_s)
                continue
            most = PROBE_BATCH if self._failures else self._batch
            limit = min(most, self._claims.backlog_batch)
            batch = await self._try_claim(limit, turn)
            if batch is None:
                await asyncio.sleep(_STORAGE_RETRY_S)
                continue
            if batch.row_count:
                await claimed.put(batch)
            pause_s = self._claims.rest_s(self._clock.monotonic() - begun_s)
            if batch.row_count < limit:
                pause_s = max(pause_s, MIN_PAUSE_S, linger_s(batch.row_count, begun_s - last_s))
            last_s = begun_s
            await asyncio.sleep(pause_s)
        await claimed.put(None)

    async def _try_claim(
        self, limit: int, turn: RelayTurn | None = None, *, is_woken: bool = False
    ) -> RelayBatch | None:
        """Claim in a turn (None: for all others); return None after an error."""
        try:
            batch = await self._claims.claim(limit, turn, is_woken=is_woken)
        except _STORAGE_ERRORS as exc:
            self._on_storage_error(exc)
            return None
        OUTAGES.record_success(_STORAGE_OUTAGE)
        if self._claims.has_backlog:
            self._has_backlog.set()
        return batch

    async def _send_and_close(
        self,
        claimed: "asyncio.Queue[RelayBatch | None]",
        backlog: "asyncio.Queue[RelayBatch | None]",
        sent: "asyncio.Queue[Sequence[DeliveryTask] | None]",
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for queue, count in ((claimed, SENDERS), (backlog, BACKLOG_SENDERS)):
                for _ in range(count):
                    group.create_task(self._send_all(queue, sent))
        await sent.put(None)

    async def _send_all(
        self,
        claimed: "asyncio.Queue[RelayBatch | None]",
        sent: "asyncio.Queue[Sequence[DeliveryTask] | None]",
    ) -> None:
        while (batch := await claimed.get()) is not None:
            try:
                if done := await self._send(batch):
                    await sent.put(done)
            except _STORAGE_ERRORS as exc:
                self._on_storage_error(exc)  # its claims expire
        claimed.put_nowait(None)  # for the next sender

    async def _send(self, batch: RelayBatch) -> Sequence[DeliveryTask]:
        """Send a batch; return the tasks whose rows can be marked as sent."""
        if batch.without_message:
            _log.error(
                "%d deliveries have no message; they are sidelined",
                len(batch.without_message),
            )
            await sideline_without_message(
                self._outgoing.writer,
                [(room_of(identity), identity) for identity in batch.without_message],
            )
        deleted = [copy for copy in batch.tasks if copy.subscription_version is None]
        copies = [copy for copy in batch.tasks if copy.subscription_version is not None]
        due = {copy.dedup_id: at for copy, at in zip(batch.tasks, batch.not_before, strict=True)}
        now_s = self._clock.monotonic()
        if now_s < self._retry_at_s or now_s > batch.deadline - _MIN_CLAIM_LEFT_S:
            await self._release(batch.tasks)
            return ()
        endings = [_cancelled_ending(copy) for copy in deleted]
        try:
            async with asyncio.timeout(batch.deadline - now_s):
                await self._ensure_sentinel()
                await self._create_missing_queues(copies)
                rejected = await self._broker.send(
                    copies, not_before=[due[copy.dedup_id] for copy in copies]
                )
                if missing := [rejection.task for rejection in rejected if rejection.queue_missing]:
                    rejected = [rejection for rejection in rejected if not rejection.queue_missing]
                    existing = await self._uncancelled(
                        self._outgoing.existing_subscriptions(
                            sorted({copy.subscription_id for copy in missing})
                        )
                    )
                    endings += [
                        _cancelled_ending(copy)
                        for copy in missing
                        if copy.subscription_id not in existing
                    ]
                    missing = [copy for copy in missing if copy.subscription_id in existing]
                    self._known_queues -= existing
                    await self._create_missing_queues(missing)
                    rejected += await self._broker.send(
                        missing, not_before=[due[copy.dedup_id] for copy in missing]
                    )
        except (BrokerUnavailableError, TimeoutError) as exc:
            self._on_broker_down(
                exc
                if isinstance(exc, BrokerUnavailableError)
                else BrokerUnavailableError("the broker does not answer")
            )
            await self._release(batch.tasks)
            return ()
        self._on_broker_up()
        return await self._end_rejected(copies, rejected, endings)

    async def _end_rejected(
        self,
        copies: Sequence[DeliveryTask],
        rejected: Sequence[RejectedTask],
        endings: list[EndedTask],
    ) -> Sequence[DeliveryTask]:
        without_queue = {
            rejection.task.dedup_id for rejection in rejected if rejection.queue_missing
        }
        if without_queue:
            _log.warning(
                "%d copies have no queue yet; they are sent again when their claim ends",
                len(without_queue),
            )
        endings += [
            EndedTask(
                task=rejection.task,
                state=State.SIDELINED,
                reason=Reason.UNREADABLE,
                error=rejection.reason,
            )
            for rejection in rejected
            if not rejection.queue_missing
        ]
        if endings:
            for ending in endings:
                self._metrics.relay_refused.labels(ending.reason).inc()
            await self._outgoing.end_deliveries(endings)
        ended = without_queue | {ending.task.dedup_id for ending in endings}
        return [copy for copy in copies if copy.dedup_id not in ended] if ended else copies

    async def _ensure_sentinel(self) -> None:
        # An installation that has sent nothing needs no recovery: a new broker has lost nothing.
        async with self._sentinel_lock:
            if not self._sentinel_checked and not await self._broker.has_sentinel():
                prepared = await self._broker.prepare_sentinel()
                if await self._uncancelled(self._outgoing.is_nothing_sent()):
                    await self._broker.put_sentinel(prepared)
            self._sentinel_checked = True

    async def _uncancelled(self, statement: Coroutine[Any, Any, _T]) -> _T:
        # A cancelled statement would end the session, and with it the claims of all batches that
        # are being sent.
        return await asyncio.shield(asyncio.ensure_future(statement))

    async def _create_missing_queues(self, copies: Sequence[DeliveryTask]) -> None:
        unknown = {
            copy.subscription_id for copy in copies if copy.kind is SubscriptionType.PULL
        } - self._known_queues
        if unknown:
            await self._broker.create_queues(sorted(unknown))
            self._known_queues |= unknown

    async def _mark_all(self, sent: "asyncio.Queue[Sequence[DeliveryTask] | None]") -> None:
        while (copies := await sent.get()) is not None:
            until_s = min(copy.deadline for copy in copies)
            while self._clock.monotonic() < until_s:
                try:
                    pulls = await self._mark(copies)
                except StorageRefusedError as exc:
                    self._on_storage_error(exc)
                    await asyncio.sleep(_STORAGE_RETRY_S)
                    continue
                except StorageUnavailableError as exc:
                    self._on_storage_error(
                        exc
                    )  # the claims ended with the connection: what was sent is sent again
                    break
                self._metrics.relayed.inc(len(copies))
                for subscription in pulls:
                    self._on_pull_queued(subscription)
                break

    async def _mark(self, copies: Sequence[DeliveryTask]) -> Sequence[SubscriptionId]:
        """Mark the rows as sent; return PULL subscriptions whose consumers must be notified."""
        # With the receipt a native subscription's copy is the broker's and its client's.
        native = [copy for copy in copies if copy.native]
        if native:
            await self._outgoing.end_deliveries(
                [EndedTask(task=copy, state=State.HANDED_OVER) for copy in native]
            )
            copies = [copy for copy in copies if not copy.native]
        if not copies:
            return ()
        _, pulls = await self._outgoing.mark_sent(copies)
        return pulls

    async def _release(self, copies: Sequence[DeliveryTask]) -> None:
        with suppress(*_STORAGE_ERRORS):
            await self._outgoing.release(copies)
        self._claims.scan_all_next()

    def _on_broker_down(self, exc: BrokerUnavailableError) -> None:
        self._known_queues.clear()
        self._failures += 1
        self._metrics.relay_failures.inc()
        wait_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** min(self._failures - 1, 10))
        self._retry_at_s = self._clock.monotonic() + wait_s
        OUTAGES.record_failure(exc, _SEND_OUTAGE)

    def _on_broker_up(self) -> None:
        if self._failures:
            OUTAGES.record_success(_SEND_OUTAGE)
            self._failures = 0

    def _on_storage_error(self, exc: Exception) -> None:
        OUTAGES.record_failure(exc, _STORAGE_OUTAGE)
        self._claims.scan_all_next()

    async def _sleep(self, seconds: float, *, ignore_wakeups: bool = False) -> None:
        until_s = self._clock.monotonic() + seconds
        while not self._stopping and (rest_s := until_s - self._clock.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._wake.wait()
            if not ignore_wakeups:
                return
            self._wake.clear()


def _cancelled_ending(copy: DeliveryTask) -> EndedTask:
    return EndedTask(task=copy, state=State.CANCELLED, reason=Reason.SUBSCRIPTION_DELETED)


async def relay_until_stopped(
    *,
    database_url: str,
    broker: Broker,
    clock: Clock,
    metrics: Metrics,
    stop: asyncio.Event,
    claim_ttl_s: float = CLAIM_TTL_S,
    poll_s: float = POLL_S,
) -> None:
    """Relay until `stop` is set. PostgreSQL and the broker may be unavailable meanwhile.

    A frozen relay keeps its claims for `claim_ttl_s`; the outbox is polled every `poll_s` without
    notifications. StorageUnavailableError: PostgreSQL is unavailable at the start.
    """
    async with AsyncExitStack() as stack:
        # If a crash undoes a claim or a mark, the copy is sent again, which is harmless.
        writer = await stack.enter_async_context(
            LogWriter(database_url, kind=RELAY_WRITER_KIND, durable=False)
        )
        working: Relay
        signals = await stack.enter_async_context(
            Notifier(database_url, listeners={Channel.RELAY: lambda _names: working.wake()})
        )
        working = Relay(
            outgoing=RelayOutbox(writer),
            broker=broker,
            clock=clock,
            metrics=metrics,
            on_pull_queued=lambda subscription: signals.notify(Channel.PULL, subscription),
            claim_s=claim_ttl_s,
            poll_s=poll_s,
        )
        await working.run(stop)
