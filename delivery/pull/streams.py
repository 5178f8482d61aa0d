"""Keep the streams of one process: open and close them, settle their leases, and end them."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Self
from uuid import UUID
from weakref import WeakValueDictionary

from delivery.pull.access import AccessMonitor, WatchedConsumer
from delivery.pull.consumer_limit import ConsumerLimit, stream_weight
from delivery.pull.lease_inspection import LeaseInspection
from delivery.pull.lease_quota import LeaseQuota
from delivery.pull.leases import AckResults, LeaseService, LeaseStatus
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
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of
from rooms.domain.principal import Principal

INITIAL_CREDIT: Final = 100
DRAIN_TIMEOUT_S: Final = 2.0
MAX_FORGOTTEN: Final = 1000
"""The most leases of closed streams that are removed in one turn of the loop."""


class Streams:
    """Keep all streams. Leaving the context ends them."""

    def __init__(
        self,
        waiters: StreamWaiters,
        *,
        lease_service: LeaseService,
        lease_store: LeaseQueries,
        query_writer: LogWriter,
        consumer_limit: ConsumerLimit,
        monitor: AccessMonitor,
    ) -> None:
        """Use `query_writer` only for reading; it may be shared."""
        self._waiters = waiters
        self._lease_service = lease_service
        self._lease_store = lease_store
        self._query_writer = query_writer
        self._consumer_limit = consumer_limit
        self._loop = asyncio.get_running_loop()
        self._monitor = monitor
        self._open: dict[Stream, WatchedConsumer] = {}
        self._stream_by_lease: dict[Lease, Stream] = {}
        self._browsing_turns: WeakValueDictionary[OrganisationId, asyncio.Lock] = (
            WeakValueDictionary()
        )
        self._quotas: WeakValueDictionary[OrganisationId, LeaseQuota] = WeakValueDictionary()
        self._closed_streams: deque[Stream] = deque()
        """Streams whose leases are still to be removed."""
        self._removal: asyncio.Task[None] | None = None
        self._has_streams = asyncio.Event()
        self._inspection: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._closing = False

    async def __aenter__(self) -> Self:
        inspection = LeaseInspection(self._lease_store, self._open, self._forget)
        self._inspection = asyncio.create_task(inspection.run_forever(self._has_streams))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.end_all()
        for task in (self._inspection, self._removal):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

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
        """Open a stream over these subscriptions; `close` it.

        RateLimitedError, NotFoundError, ConflictError.
        """
        keys = [parse_target(principal, subscription) for subscription in subscriptions]
        organisation, weight = principal.organisation_id, stream_weight(keys)
        self._consumer_limit.acquire(
            organisation, weight
        )  # first: what is refused costs no look-up
        try:
            for key in keys:
                access = await self._lease_store.access(
                    key.room, key.subscription, key.organisation
                )
                if (error := access_error(access, key)) is not None:
                    raise error
        except BaseException:
            self._consumer_limit.release(organisation, weight)
            raise
        selections = [PullSelection(key, request.selector) for key in keys]
        peeks = []
        if request.browse:
            turn = self._browsing_turns.setdefault(organisation, asyncio.Lock())
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
            quota=self._quotas.setdefault(organisation, LeaseQuota()),
            holder=principal.key_id,
        )
        stream.start()
        watched = self._open[stream] = self._monitor.watch(
            principal,
            keys,
            lambda loss: stream.end(EndReason(loss.value)),
        )
        self._has_streams.set()
        self._monitor.check_soon(watched)  # what changed since its key was authenticated
        if self._closing:
            stream.end(EndReason.SHUTDOWN)
        return stream

    def close(self, stream: Stream) -> None:
        """Close a stream.

        Messages that its client did not settle stay leased until their leases end.
        """
        consumer = self._open.pop(stream)
        if not self._open:
            self._has_streams.clear()
        self._monitor.forget(consumer)
        self._consumer_limit.release(
            consumer.principal.organisation_id, stream_weight(consumer.targets)
        )
        self._closed.set()
        stream.close()
        self._remove_leases(stream)
        if stream.unsettled:
            self._closed_streams.append(stream)
            if self._removal is None:
                self._removal = asyncio.create_task(self._remove_remaining_leases())

    def _remove_leases(self, stream: Stream) -> None:
        for lease in stream.remove_leases(MAX_FORGOTTEN):
            if self._stream_by_lease.get(lease) is stream:
                del self._stream_by_lease[lease]

    async def _remove_remaining_leases(self) -> None:
        """Remove the leases of closed streams, some at a time: others use the loop in between."""
        while self._closed_streams:
            await asyncio.sleep(0)
            stream = self._closed_streams[0]
            self._remove_leases(stream)
            if not stream.unsettled:
                self._closed_streams.popleft()
        self._removal = None

    def on_sent(self, stream: Stream, batch: StreamBatch) -> None:
        """Record that the client has got these messages."""
        if stream.tracks_leases:
            self._stream_by_lease.update(dict.fromkeys([row[:2] for row in batch.rows], stream))

    def take_back(self, stream: Stream, leases: Sequence[Lease]) -> None:
        """Take leases back of which the client was not sent the messages."""
        for lease in leases:
            if self._stream_by_lease.get(lease) is stream:
                del self._stream_by_lease[lease]
        stream.on_unsent(leases)

    def on_settled(self, key: PullTarget, results: AckResults) -> None:
        """Record what became of leases, from any caller; their streams get credit back.

        Only what was a lease of this subscription counts: ack ids can be guessed.
        """
        if self._stream_by_lease:
            self._forget(
                key,
                [lease for lease, status in results.items() if status is not LeaseStatus.UNKNOWN],
            )

    def _forget(self, key: PullTarget, leases: Sequence[Lease]) -> None:
        by_stream: dict[Stream, list[Lease]] = {}
        for lease in leases:
            stream = self._stream_by_lease.get(lease)
            if stream is not None and stream.unsettled.get(lease) == key:
                del self._stream_by_lease[lease]
                by_stream.setdefault(stream, []).append(lease)
        for stream, own in by_stream.items():
            stream.on_settled(own)

    async def settle(
        self, stream: Stream, request: AckRequest | NackRequest | ExtendRequest
    ) -> tuple[Sequence[tuple[str, LeaseStatus]], frozenset[SubscriptionId]]:
        """Settle what the client acks; also return the subscriptions that have messages again.

        An ack id of another stream over one of its subscriptions is valid, as it is by HTTP.
        """
        leases = parse_frame_leases(request)
        results: dict[Lease, LeaseStatus] = dict.fromkeys(leases, LeaseStatus.UNKNOWN)
        queued: set[SubscriptionId] = set()
        by_target: dict[PullTarget, list[Lease]] = {}
        for lease, key in (await self._find_targets(stream, leases)).items():
            by_target.setdefault(key, []).append(lease)
        for key, own in by_target.items():
            found, is_queued = await self._settle(key, own, request)
            results |= found
            if not isinstance(request, ExtendRequest):
                self.on_settled(key, found)
            if is_queued:
                queued.add(key.subscription)
        return [
            (text, results[lease]) for text, lease in zip(request.ack_ids, leases, strict=True)
        ], frozenset(queued)

    async def _find_targets(
        self, stream: Stream, leases: Sequence[Lease]
    ) -> Mapping[Lease, PullTarget]:
        """Return to which of a stream's queues leases belong; others are of none of these.

        Those that it has forgotten, because they are over, are looked up.
        """
        if len(stream.targets) == 1:
            return dict.fromkeys(leases, stream.targets[0])
        found: dict[Lease, PullTarget] = {}
        forgotten: dict[Lease, RoomId] = {}
        for lease in leases:
            if (key := stream.unsettled.get(lease)) is not None:
                found[lease] = key
            else:
                forgotten[lease] = room_of(str(UUID(bytes=lease[0])))
        if forgotten:
            own = {(key.room, key.subscription): key for key in stream.targets}
            asked = [(room, delivery) for (delivery, _), room in forgotten.items()]
            subscriptions = await self._lease_store.find_subscriptions(
                asked, organisation=stream.targets[0].organisation
            )
            for index, (lease, room) in enumerate(forgotten.items()):
                subscription = subscriptions.get(index)
                if subscription is not None and (room, subscription) in own:
                    found[lease] = own[room, subscription]
        return found

    async def _settle(
        self,
        key: PullTarget,
        leases: Sequence[Lease],
        request: AckRequest | NackRequest | ExtendRequest,
    ) -> tuple[AckResults, bool]:
        """Settle leases of one queue; also return whether it has messages again now."""
        match request:
            case AckRequest():
                return await self._lease_service.ack(key, leases), False
            case NackRequest():
                results, queued = await self._lease_service.nack(
                    key, leases, delay_ms=request.delay_ms
                )
                return results, queued and not request.delay_ms
            case ExtendRequest():
                return await self._lease_service.extend(
                    key, leases, lease_ms=request.lease_ms
                ), False
