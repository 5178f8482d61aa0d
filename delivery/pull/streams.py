"""Keep the streams of one process: open and close them, settle their leases, and end them."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Self
from weakref import WeakValueDictionary

from delivery.pull.access import AccessMonitor, WatchedConsumer
from delivery.pull.leases import LeaseService, LeaseStatus
from delivery.pull.quota import ConsumerQuota
from delivery.pull.requests import (
    AckRequest,
    ExtendRequest,
    Lease,
    NackRequest,
    StreamRequest,
    parse_frame_leases,
)
from delivery.pull.stream import EndReason, Peek, Stream, StreamBatch, StreamWaiters
from delivery.pull.target import PullSelection, PullTarget, access_error, parse_target
from rooms.db.leases.release import LeaseQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.principal import Principal

INITIAL_CREDIT: Final = 100
DRAIN_TIMEOUT_S: Final = 2.0


class Streams:
    """Keep all streams. Leaving the context ends them."""

    def __init__(
        self,
        waiters: StreamWaiters,
        *,
        lease_service: LeaseService,
        lease_store: LeaseQueries,
        query_writer: LogWriter,
        quota: ConsumerQuota,
        monitor: AccessMonitor,
    ) -> None:
        """Use `query_writer` only for reading; it may be shared."""
        self._waiters = waiters
        self._lease_service = lease_service
        self._lease_store = lease_store
        self._query_writer = query_writer
        self._quota = quota
        self._loop = asyncio.get_running_loop()
        self._monitor = monitor
        self._open: dict[Stream, WatchedConsumer] = {}
        self._stream_by_lease: dict[Lease, Stream] = {}
        self._browsing_turns: WeakValueDictionary[OrganisationId, asyncio.Lock] = (
            WeakValueDictionary()
        )
        self._closed = asyncio.Event()
        self._closing = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.end_all()

    def end_all(self) -> None:
        """End all streams before the process stops."""
        self._closing = True
        for stream in self._open:
            stream.end(EndReason.SHUTDOWN)

    async def drain(self) -> None:
        """End all streams, and wait until they have notified their clients."""
        self.end_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while self._open:
                    self._closed.clear()
                    await self._closed.wait()

    async def open(
        self,
        principal: Principal,
        subscriptions: Sequence[str],
        request: StreamRequest,
        *,
        renews_credit: bool,
    ) -> Stream:
        """Open a stream over these subscriptions; `close` it. NotFoundError, ConflictError."""
        keys = [parse_target(principal, subscription) for subscription in subscriptions]
        for key in keys:
            access = await self._lease_store.access(key.room, key.subscription, key.organisation)
            if (error := access_error(access, key)) is not None:
                raise error
        selections = [PullSelection(key, request.selector) for key in keys]
        peeks = []
        if request.browse:
            turn = self._browsing_turns.setdefault(principal.organisation_id, asyncio.Lock())
            peeks = [
                Peek(self._query_writer, selection, self._loop.time, turn)
                for selection in selections
            ]
        credit = (
            request.credit if request.credit is not None else INITIAL_CREDIT if renews_credit else 0
        )
        stream = Stream(
            self._waiters,
            selections,
            request,
            credit=credit,
            renews_credit=renews_credit,
            peeks=peeks,
            holder=principal.key_id,
        )
        self._quota.acquire(principal.organisation_id)
        stream.start()
        self._open[stream] = self._monitor.watch(
            principal,
            keys,
            lambda loss: stream.end(EndReason(loss.value)),
            partial(self._settle_if_starved, stream),
        )
        self._monitor.check_now()  # what changed since its key was authenticated
        if self._closing:
            stream.end(EndReason.SHUTDOWN)
        return stream

    def close(self, stream: Stream) -> None:
        """Close a stream.

        Messages that its client did not settle stay leased until their leases end.
        """
        consumer = self._open.pop(stream)
        self._monitor.forget(consumer)
        self._quota.release(consumer.principal.organisation_id)
        self._closed.set()
        stream.close()
        for lease in stream.unsettled:
            self._stream_by_lease.pop(lease, None)

    def on_sent(self, stream: Stream, batch: StreamBatch) -> None:
        """Record that the client has got these messages."""
        if stream.renews_credit:
            self._stream_by_lease.update(dict.fromkeys([row[:2] for row in batch.rows], stream))

    def on_settled(self, leases: Sequence[Lease]) -> None:
        """Record settled leases, from any caller; their streams get credit back."""
        for stream in {
            stream
            for lease in leases
            if (stream := self._stream_by_lease.pop(lease, None)) is not None
        }:
            stream.on_settled(leases)

    async def settle(
        self, stream: Stream, request: AckRequest | NackRequest | ExtendRequest
    ) -> tuple[Sequence[tuple[str, LeaseStatus]], frozenset[SubscriptionId]]:
        """Settle what the client acks; also return the subscriptions that have messages again.

        An ack id of another stream is valid if this one has a single subscription.
        """
        leases = parse_frame_leases(request)
        results: dict[Lease, LeaseStatus] = {}
        queued: set[SubscriptionId] = set()
        by_target: dict[PullTarget, list[Lease]] = {}
        for lease in leases:
            key = stream.unsettled.get(lease) or (
                stream.targets[0] if len(stream.targets) == 1 else None
            )
            if key is None:
                results[lease] = LeaseStatus.UNKNOWN
            else:
                by_target.setdefault(key, []).append(lease)
        for key, own in by_target.items():
            match request:
                case AckRequest():
                    results |= await self._lease_service.ack(key, own)
                case NackRequest():
                    nacked, again = await self._lease_service.nack(
                        key, own, delay_ms=request.delay_ms
                    )
                    results |= nacked
                    if again and not request.delay_ms:
                        queued.add(key.subscription)
                case ExtendRequest():
                    results |= await self._lease_service.extend(key, own, lease_ms=request.lease_ms)
        if not isinstance(request, ExtendRequest):
            stream.on_settled(leases)
        return [
            (text, results[lease]) for text, lease in zip(request.ack_ids, leases, strict=True)
        ], frozenset(queued)

    async def _settle_if_starved(self, stream: Stream) -> None:
        if stream.is_starved:
            await self._settle_ended(stream)

    async def _settle_ended(self, stream: Stream) -> None:
        """Forget leases that ended, or were settled by another process."""
        by_target: dict[PullTarget, list[Lease]] = {}
        for lease, key in stream.unsettled.items():
            by_target.setdefault(key, []).append(lease)
        for key, leases in by_target.items():
            found = await self._lease_store.inspect(
                key.room, key.subscription, [delivery for delivery, _ in leases]
            )
            self.on_settled(
                [
                    lease
                    for index, lease in enumerate(leases)
                    if (delivery := found.get(index)) is None
                    or not delivery.leased
                    or delivery.generation != int.from_bytes(lease[1], "big")
                ]
            )
