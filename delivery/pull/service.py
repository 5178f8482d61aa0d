"""Serve PULL: from the bytes of a request to the bytes of its response."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, Self, TypeVar

from delivery.pull.access import AccessMonitor, CheckKeys, Loss
from delivery.pull.broker_source import BrokerSource
from delivery.pull.consumer_limit import MAX_CONSUMERS, ConsumerLimit
from delivery.pull.dispatch import ConsumerState
from delivery.pull.leases import AckResults, LeaseService, LeaseStatus
from delivery.pull.open_queues import MAX_OPEN_QUEUES, OpenQueues
from delivery.pull.postgres_source import LeaseSource, Notify, PostgresSource
from delivery.pull.requests import (
    AckRequest,
    ExtendRequest,
    Lease,
    NackRequest,
    PullRequest,
    decode_ack,
    decode_extend,
    decode_nack,
    decode_pull,
    parse_ack_id,
)
from delivery.pull.responses import EMPTY_RESPONSE, messages_json, results_json
from delivery.pull.selective import SelectiveLeaser, StaleCopyDrain
from delivery.pull.stream import Stream, StreamBatch
from delivery.pull.streams import Streams
from delivery.pull.target import PullSelection, PullTarget, access_error, parse_target
from delivery.pull.wait_queue import LeaseOutcome, LeaseRequest, Poll
from delivery.pull.waiters import Waiters
from rooms.db.leases.acquire import LeasedRow, SubscriptionAccess
from rooms.db.leases.release import LeaseQueries
from rooms.db.notify import Notifier
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode
from rooms.errors import (
    LeaseExpiredError,
    PermanentError,
    RoomsError,
    TransientError,
    UnauthenticatedError,
)
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.ports import Broker

_log = logging.getLogger(__name__)

POLL_INTERVAL_S: Final = 0.5
"""The interval at which all waiting consumers are checked, whatever was notified."""
MAX_POLL_INTERVAL_S: Final = 5.0
"""The longest interval between two checks, however long one takes."""
WATCH_AFTER_S: Final = 0.25
"""A poll that waits longer than this notices that its client has disconnected."""
_POLL_SHARE: Final = 100
_POLL_OUTAGE: Final = "checks of waiting polls failed"
_RETURN_OUTAGE: Final = "messages leased for a disconnected client could not be returned"
_OK: Final = 200
LEASE_WRITERS: Final = 3
"""The number of lease statements that run at a time, so that a long one delays no other."""
LOCK_TIMEOUT_MS: Final = 5_000

T = TypeVar("T")
Response = tuple[int, bytes]
WaitDisconnect = Callable[[], Awaitable[object]]
"""Returns when the client has disconnected."""


class PullService:
    """Serve PULL for one process.

    Leaving the context ends waiting polls with nothing and finishes acks.

    Errors of every call: MalformedError, InvalidError; NotFoundError (no such subscription of this
    organisation), ConflictError (it is PUSH), LeaseExpiredError (every lease of the request has
    ended; carries the results); StorageRefusedError (nothing was done), StorageUnavailableError (in
    doubt; the same request may be sent again).
    """

    def __init__(
        self,
        *,
        make_source: Callable[[Notify], LeaseSource],
        max_in_flight: int,
        lease_service: LeaseService,
        lease_store: LeaseQueries,
        metrics: Metrics,
        on_requeued: Callable[[SubscriptionId], None],
        selective_leaser: SelectiveLeaser,
        query_writer: LogWriter,
        access_writer: LogWriter,
        consumer_limit: ConsumerLimit,
        check_keys: CheckKeys | None = None,
    ) -> None:
        """Call the source at most `max_in_flight` times at a time.

        `on_requeued` gets subscriptions whose messages were queued again. `query_writer` only
        reads, and may be shared. `access_writer`, `check_keys`: see `AccessMonitor`.
        """
        self._lease_service = lease_service
        self._lease_store = lease_store
        self._pull_counter, self._message_counter = metrics.pulls, metrics.pulled
        self._ack_counters = {
            status: metrics.acks.labels(status)
            for status in LeaseStatus
            if status is not LeaseStatus.UNKNOWN
        }
        self._on_requeued = on_requeued
        self._source = make_source(self._notify)
        self._selective_leaser = selective_leaser
        self._consumer_gauges = {
            state: metrics.pull_consumers.labels(state) for state in ConsumerState
        }
        self._waiters: Waiters[PullSelection, LeasedRow] = Waiters(
            self._acquire,
            name=lambda selection: selection.target.subscription,
            give_back=self._give_back,
            on_empty=self._on_no_polls,
            max_in_flight=max_in_flight,
            tenant=lambda selection: selection.target.organisation,
            exclusive=lambda selection: selection.selector is not None,
        )
        self._monitor = AccessMonitor(access_writer, check_keys)
        self.streams = Streams(
            self._waiters,
            lease_service=lease_service,
            lease_store=lease_store,
            query_writer=query_writer,
            consumer_limit=consumer_limit,
            monitor=self._monitor,
        )
        self._consumer_limit = consumer_limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._poll_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._source.__aenter__()
        await self._monitor.__aenter__()
        await self.streams.__aenter__()
        self._poll_task = asyncio.create_task(self._poll_forever())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._poll_task is not None:
            self._poll_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._poll_task
        await self.streams.__aexit__(*exc)
        await self._monitor.__aexit__(*exc)
        await self._waiters.close()
        await self._source.__aexit__(*exc)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def end_polls(self) -> None:
        """Answer waiting and new polls with no messages, and end the streams: the process stops."""
        await self.streams.drain()
        await self._waiters.close()

    def on_notify(self, names: frozenset[str]) -> None:
        """Handle `Channel.PULL`: subscriptions that may have messages, or rooms; empty: any."""
        rooms = frozenset(name for name in names if name.isdecimal())
        if rooms:
            self._waiters.notify_matching(lambda key: str(key.target.room) in rooms)
        if not rooms or names != rooms:
            self._waiters.notify(names - rooms or None)

    def on_config_change(self, names: frozenset[str]) -> None:
        """Handle `Channel.CONFIG`: rooms whose settings have changed; empty: any."""
        rooms = frozenset(RoomId(int(name)) for name in names)
        self._source.on_config_change(rooms)
        self._monitor.on_change(rooms)

    async def pull(
        self,
        principal: Principal,
        subscription_id: str,
        body: bytes,
        wait_disconnect: WaitDisconnect | None = None,
    ) -> Response:
        """Lease what is due, or wait for it.

        A poll that waits ends when `wait_disconnect` returns.
        """
        key = parse_target(principal, subscription_id)
        request = await self._read(key, decode_pull, body)
        self._pull_counter.inc()
        if not request.wait_ms:
            return await self._poll(principal, key, request, None)
        self._consumer_limit.acquire(key.organisation)
        try:
            return await self._poll(principal, key, request, wait_disconnect)
        finally:
            self._consumer_limit.release(key.organisation)

    async def _poll(
        self,
        principal: Principal,
        key: PullTarget,
        request: PullRequest,
        wait_disconnect: WaitDisconnect | None,
    ) -> Response:
        selection = PullSelection(
            key, None if request.selector is None else request.selector.selector()
        )
        poll = self._waiters.add_poll(
            selection,
            max_messages=request.max_messages,
            lease_ms=request.lease_ms,
            wait_s=request.wait_ms / 1000,
            priority=request.priority,
            holder=principal.key_id,
        )
        watched = None
        if request.wait_ms:
            watched = self._monitor.watch(
                principal,
                [key],
                lambda loss: self._waiters.end_poll(selection, poll, _loss_error(loss, key)),
            )
        watch = None
        if wait_disconnect is not None:
            watch = asyncio.get_running_loop().call_later(
                WATCH_AFTER_S, self._watch_client, wait_disconnect, selection, poll
            )
        try:
            rows = await poll.future
        except asyncio.CancelledError:
            self._waiters.remove_poll(selection, poll)
            raise
        finally:
            if watch is not None:
                watch.cancel()
            if watched is not None:
                self._monitor.forget(watched)
        if not rows:
            return _OK, EMPTY_RESPONSE
        self._message_counter.inc(len(rows))
        return _OK, messages_json(rows)

    async def ack(self, principal: Principal, subscription_id: str, body: bytes) -> Response:
        """Ack the messages of these leases."""
        key = parse_target(principal, subscription_id)
        request, leases = await self._read(key, decode_ack, body)
        results = await self._lease_service.ack(key, leases)
        self.streams.on_settled(key, results)
        return self._results(request.ack_ids, leases, results)

    async def nack(self, principal: Principal, subscription_id: str, body: bytes) -> Response:
        """Return the messages of these leases to the queue."""
        key = parse_target(principal, subscription_id)
        request, leases = await self._read(key, decode_nack, body)
        results, queued = await self._lease_service.nack(key, leases, delay_ms=request.delay_ms)
        self.streams.on_settled(key, results)
        if queued and not request.delay_ms:
            self._announce(key.subscription)
        return self._results(request.ack_ids, leases, results)

    async def extend(self, principal: Principal, subscription_id: str, body: bytes) -> Response:
        """Set these leases to end later, or sooner."""
        key = parse_target(principal, subscription_id)
        request, leases = await self._read(key, decode_extend, body)
        results = await self._lease_service.extend(key, leases, lease_ms=request.lease_ms)
        return self._results(request.ack_ids, leases, results)

    async def _read(self, key: PullTarget, read: Callable[[bytes], T], body: bytes) -> T:
        # Only the owner of the queue learns that the body is wrong.
        try:
            return read(body)
        except PermanentError:
            access = await self._lease_store.access(key.room, key.subscription, key.organisation)
            if (error := access_error(access, key)) is not None:
                raise error from None
            raise

    def _results(
        self, ack_ids: Sequence[str], leases: Sequence[Lease], ack_results: AckResults
    ) -> Response:
        statuses = self._count(ack_results)
        results = [(text, ack_results[lease]) for text, lease in zip(ack_ids, leases, strict=True)]
        if statuses.count(LeaseStatus.LATE) == len(statuses):
            raise LeaseExpiredError(
                "these leases are over: the messages come again, or have ended otherwise", results
            )
        return _OK, results_json(results)

    async def handle_stream_ack(
        self, stream: Stream, request: AckRequest | NackRequest | ExtendRequest
    ) -> bytes:
        """Settle the ack ids that a stream's client sent; return all results as JSON."""
        results, queued = await self.streams.settle(stream, request)
        self._count({parse_ack_id(text): status for text, status in results})
        for subscription in queued:
            self._announce(subscription)
        return results_json(results)

    def return_undelivered(self, batch: StreamBatch, *, sent: int, begun: int) -> None:
        """Return messages of a stream to the queue: all but the first `sent`.

        Those behind the first `begun` are untouched. The client may have seen the others, so they
        count as received.
        """
        if doubtful := batch.rows[sent:begun]:
            nack = partial(self._lease_store.nack, delay_ms=0)
            self._spawn(self._return(batch.target, doubtful, nack))
        if untouched := batch.rows[begun:]:
            self._give_back(PullSelection(batch.target), untouched)

    def count_pulled(self, messages: int) -> None:
        """Count messages that went out over a stream."""
        self._message_counter.inc(messages)

    def _count(self, ack_results: AckResults) -> list[LeaseStatus]:
        statuses = list(ack_results.values())
        for status, counter in self._ack_counters.items():
            if count := statuses.count(status):
                counter.inc(count)
        return statuses

    async def _acquire(
        self, requests: Sequence[LeaseRequest[PullSelection]]
    ) -> Sequence[LeaseOutcome[LeasedRow]]:
        if (selector := requests[0].key.selector) is not None:
            return [await self._selective_leaser.acquire(requests[0], selector)]
        return await self._source.acquire(
            [
                LeaseRequest(
                    request.key.target,
                    request.max_messages,
                    request.lease_ms,
                    request.can_wait,
                    request.holder,
                )
                for request in requests
            ]
        )

    def _on_no_polls(self, selection: PullSelection) -> None:
        if selection.selector is None:
            self._source.on_no_polls(selection.target)

    def _notify(self, subscriptions: Iterable[SubscriptionId]) -> None:
        self._waiters.notify(subscriptions)

    def _give_back(self, selection: PullSelection, rows: Sequence[LeasedRow]) -> None:
        self._spawn(self._return(selection.target, rows, self._lease_store.release))

    async def _return(
        self,
        key: PullTarget,
        rows: Sequence[LeasedRow],
        end: Callable[..., Awaitable[object]],
    ) -> None:
        leases = [row[:2] for row in rows]
        try:
            await end(key.room, key.subscription, key.organisation, leases)
        except RoomsError as exc:
            OUTAGES.record_failure(exc, _RETURN_OUTAGE, count=len(leases))
        else:
            OUTAGES.record_success(_RETURN_OUTAGE)
            self._announce(key.subscription)

    def _announce(self, subscription: SubscriptionId) -> None:
        self._waiters.notify((subscription,))
        self._on_requeued(subscription)

    def _watch_client(
        self, wait_disconnect: WaitDisconnect, selection: PullSelection, poll: Poll[LeasedRow]
    ) -> None:
        async def leave() -> None:
            await wait_disconnect()
            self._waiters.remove_poll(selection, poll)

        task = self._spawn(leave())
        poll.future.add_done_callback(lambda _: task.cancel())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _poll_forever(self) -> None:
        loop, next_s = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            for state, count in self._waiters.counts.items():
                self._consumer_gauges[state].set(count)
            begun = loop.time()
            if begun < next_s:
                continue
            try:
                if selections := self._waiters.waiting_keys():
                    self._waiters.notify(
                        await self._source.find_due({selection.target for selection in selections})
                    )
                    OUTAGES.record_success(_POLL_OUTAGE)
            except TransientError as exc:
                OUTAGES.record_failure(exc, _POLL_OUTAGE)
            except Exception as exc:  # noqa: BLE001 - the next check may succeed, and without checks polls starve
                _log.warning("a check of waiting polls failed, retrying: %s", exc)
            next_s = loop.time() + min(MAX_POLL_INTERVAL_S, _POLL_SHARE * (loop.time() - begun))


@asynccontextmanager
async def open_pull_service(
    url: str,
    *,
    signals: Notifier,
    metrics: Metrics,
    broker: Broker | None = None,
    mode: BrokerMode = POSTGRES_MODE,
    max_consumers: int = MAX_CONSUMERS,
    max_open_queues: int = MAX_OPEN_QUEUES,
    check_keys: CheckKeys | None = None,
) -> AsyncIterator[PullService]:
    """Open PULL over one database; its own connections open when they are first needed.

    `broker` carries the copies if `mode` says that it is not PostgreSQL, from `max_open_queues` at
    most. The caller passes notifications of `Channel.PULL` to `on_notify`, and of `Channel.CONFIG`
    to `on_config_change`. `check_keys` finds keys of streams and waiting polls that are over.
    """
    async with AsyncExitStack() as stack:
        lease_writers = [
            LogWriter(url, kind="puller", lock_timeout_ms=LOCK_TIMEOUT_MS)
            for _ in range(LEASE_WRITERS)
        ]
        ack_writer, update_writer, query_writer, access_writer = (
            LogWriter(url, kind="puller", lock_timeout_ms=LOCK_TIMEOUT_MS, broker_mode=mode)
            for _ in range(4)
        )
        for writer in (*lease_writers, ack_writer, update_writer, query_writer, access_writer):
            stack.push_async_callback(writer.close)
        lease_store = LeaseQueries(update_writer)
        stack.push_async_callback(lease_store.close)
        lease_service = await stack.enter_async_context(
            LeaseService(
                ack_writer=ack_writer,
                lease_store=lease_store,
                on_next_released=signals.notify_queued,
            )
        )

        def make_source(notify: Notify) -> LeaseSource:
            if broker is None:
                return PostgresSource(lease_writers, lease_store, notify)
            return BrokerSource(
                broker,
                lease_writers=lease_writers,
                query_writer=update_writer,
                notify=notify,
                on_orphans=metrics.count_orphans,
                open_queues=OpenQueues(max_open_queues),
            )

        drain = None if broker is None else StaleCopyDrain(broker, update_writer)
        if drain is not None:
            stack.push_async_callback(drain.close)
        yield await stack.enter_async_context(
            PullService(
                make_source=make_source,
                max_in_flight=LEASE_WRITERS,
                lease_service=lease_service,
                lease_store=lease_store,
                metrics=metrics,
                on_requeued=signals.notify_queued,
                selective_leaser=SelectiveLeaser(
                    query_writer, on_stale_copies=_no_drain if drain is None else drain.schedule
                ),
                query_writer=query_writer,
                access_writer=access_writer,
                consumer_limit=ConsumerLimit(max_consumers, metrics.consumers_refused.inc),
                check_keys=check_keys,
            )
        )


def _no_drain(_: PullTarget) -> None:
    """Do nothing: PostgreSQL has no copies."""


def _loss_error(loss: Loss, key: PullTarget) -> RoomsError | None:
    """Return what a poll is answered that waited; None: no messages, as while it is paused."""
    match loss:
        case Loss.REVOKED:
            return UnauthenticatedError("this API key is over, or may do less than before")
        case Loss.DELETED:
            return access_error(SubscriptionAccess.NONE, key)
        case Loss.SUSPENDED:
            return None
