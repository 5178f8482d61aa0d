"""The streams of one process: how they begin, what their clients say, and what ends them."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from rooms.domain.ids import SubscriptionId
from rooms.domain.principal import Principal
from rooms.errors import TransientError
from rooms.outages import OUTAGES
from rooms.pulling.browser import Browser
from rooms.pulling.outcomes import Outcomes, Status
from rooms.pulling.queue import Key, Wish, key_of, refusal
from rooms.pulling.quota import ConsumerQuota
from rooms.pulling.receipt import Lease
from rooms.pulling.request import AckRequest, ExtendRequest, NackRequest, leases_of
from rooms.pulling.stream import Batch, End, Lines, Stream
from rooms.pulling.stream_request import StreamRequest
from rooms.storage.lease_ends import LeaseEnds
from rooms.storage.watch import watch
from rooms.storage.writer import Writer

_log = logging.getLogger(__name__)

WATCH_S: Final = 1.0
"""How often it is looked whether a stream's key or subscription still stands, and what was settled elsewhere."""
FIRST_CREDIT: Final = 100
GOODBYE_S: Final = 2.0
_WATCH_SHARE: Final = 50
_UNSEEN: Final = "looks at the keys of streams failed"


class Streams:
    """`async with`; leaving ends all of them."""

    def __init__(
        self, lines: Lines, *, outcomes: Outcomes, ends: LeaseEnds, looker: Writer, quota: ConsumerQuota
    ) -> None:
        """`looker` reads, and may be shared."""
        self._lines = lines
        self._outcomes = outcomes
        self._ends = ends
        self._looker = looker
        self._quota = quota
        self._loop = asyncio.get_running_loop()
        self._open: dict[Stream, Principal] = {}
        self._windows: dict[Lease, Stream] = {}
        self._changed = asyncio.Event()
        self._closed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._closing = False

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch_for_ever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_all()
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    def end_all(self) -> None:
        """The process is about to stop."""
        self._closing = True
        for stream in self._open:
            stream.end(End.SHUTDOWN)

    async def finish(self) -> None:
        """The process is about to stop: let them say so to their clients, as far as those listen."""
        self.end_all()
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                while self._open:
                    self._closed.clear()
                    await self._closed.wait()

    def changed(self) -> None:
        """Settings have changed: subscriptions may be gone."""
        self._changed.set()

    async def open(
        self, principal: Principal, subscriptions: Sequence[str], request: StreamRequest, *, refills: bool
    ) -> Stream:
        """A stream over these subscriptions, standing in their lines; `close` it. NotFoundError, ConflictError."""
        keys = [key_of(principal, subscription) for subscription in subscriptions]
        for key in keys:
            standing = await self._ends.standing(key.room, key.subscription, key.organisation)
            if (error := refusal(standing, key)) is not None:
                raise error
        wishes = [Wish(key, request.selector) for key in keys]
        shelves = [Browser(self._looker, wish, self._loop.time) for wish in wishes] if request.browse else []
        credit = request.credit if request.credit is not None else FIRST_CREDIT if refills else 0
        stream = Stream(self._lines, wishes, request, credit=credit, refills=refills, shelves=shelves)
        self._quota.take(principal.organisation_id)
        stream.start()
        self._open[stream] = principal
        self._changed.set()  # what changed since its key was seen is looked for at once
        if self._closing:
            stream.end(End.SHUTDOWN)
        return stream

    def close(self, stream: Stream) -> None:
        """It is over. What its client has and did not settle stays its own until the leases end."""
        self._quota.release(self._open.pop(stream).organisation_id)
        self._closed.set()
        stream.close()
        for lease in stream.out:
            self._windows.pop(lease, None)

    def sent(self, stream: Stream, batch: Batch) -> None:
        """The client has these now."""
        if stream.refills:
            self._windows.update(dict.fromkeys([row[:2] for row in batch.rows], stream))

    def settled(self, leases: Sequence[Lease]) -> None:
        """These are over, whoever said so: a client that got them over a stream may get others."""
        for stream in {stream for lease in leases if (stream := self._windows.pop(lease, None)) is not None}:
            stream.settled(leases)

    async def settle(
        self, stream: Stream, request: AckRequest | NackRequest | ExtendRequest
    ) -> tuple[Sequence[tuple[str, Status]], frozenset[SubscriptionId]]:
        """What the client says of messages that it got; the subscriptions are those that have messages again.

        What came over another stream is known where this one has one subscription alone.
        """
        leases = leases_of(request)
        told: dict[Lease, Status] = {}
        queued: set[SubscriptionId] = set()
        of_queue: dict[Key, list[Lease]] = {}
        for lease in leases:
            key = stream.out.get(lease) or (stream.queues[0] if len(stream.queues) == 1 else None)
            if key is None:
                told[lease] = Status.UNKNOWN
            else:
                of_queue.setdefault(key, []).append(lease)
        for key, own in of_queue.items():
            match request:
                case AckRequest():
                    told |= await self._outcomes.ack(key, own)
                case NackRequest():
                    nacked, again = await self._outcomes.nack(key, own, delay_ms=request.delay_ms)
                    told |= nacked
                    if again and not request.delay_ms:
                        queued.add(key.subscription)
                case ExtendRequest():
                    told |= await self._outcomes.extend(key, own, lease_ms=request.lease_ms)
        if not isinstance(request, ExtendRequest):
            stream.settled(leases)
        return [(text, told[lease]) for text, lease in zip(request.ack_ids, leases, strict=True)], frozenset(queued)

    async def _watch_for_ever(self) -> None:
        pause_s = WATCH_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s if self._open else None):
                    await self._changed.wait()
            self._changed.clear()
            begun = self._loop.time()
            try:
                await self._look()
            except TransientError as exc:
                OUTAGES.failed(exc, _UNSEEN)
            except Exception as exc:  # noqa: BLE001 - the next look may succeed
                _log.warning("a look at streams failed: %s", exc)
            else:
                OUTAGES.succeeded(_UNSEEN)
            pause_s = max(WATCH_S, _WATCH_SHARE * (self._loop.time() - begun))

    async def _look(self) -> None:
        streams = {stream: principal.key_id for stream, principal in self._open.items()}
        keys = list(dict.fromkeys(streams.values()))
        queues = list({(key.room, key.subscription) for stream in streams for key in stream.queues})
        revoked, gone = await watch(self._looker, keys, queues)
        for stream, key_id in streams.items():
            if key_id in revoked:
                stream.end(End.REVOKED)
            elif any(key.subscription in gone for key in stream.queues):
                stream.end(End.DELETED)
            elif stream.starved:
                await self._refill(stream)

    async def _refill(self, stream: Stream) -> None:
        """Leases that ended, or were settled at another process, are no longer with its client."""
        of_queue: dict[Key, list[Lease]] = {}
        for lease, key in stream.out.items():
            of_queue.setdefault(key, []).append(lease)
        for key, leases in of_queue.items():
            seen = await self._ends.look(key.room, key.subscription, [delivery for delivery, _ in leases])
            self.settled(
                [
                    lease
                    for index, lease in enumerate(leases)
                    if (one := seen.get(index)) is None
                    or not one.live
                    or one.generation != int.from_bytes(lease[1], "big")
                ]
            )
