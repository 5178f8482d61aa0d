"""The service: from the bytes of a request to the bytes of its answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.errors import LateError, PermanentError, RoomsError, TransientError
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.pulling.answer import EMPTY, messages_json, results_json
from rooms.pulling.line import Ask, Got, Poll
from rooms.pulling.outcomes import Outcomes, Status, Told
from rooms.pulling.queue import Key, Wish, key_of, refusal
from rooms.pulling.quota import ConsumerQuota
from rooms.pulling.receipt import Lease, read_ack_id
from rooms.pulling.request import (
    AckRequest,
    ExtendRequest,
    NackRequest,
    PullRequest,
    read_ack,
    read_extend,
    read_nack,
    read_pull,
)
from rooms.pulling.roster import Stand
from rooms.pulling.sifter import Sifter
from rooms.pulling.source import Ring, Source
from rooms.pulling.stream import Batch, Stream
from rooms.pulling.streams import Streams
from rooms.pulling.waiters import Waiters
from rooms.storage.lease_ends import LeaseEnds
from rooms.storage.leases import Row
from rooms.storage.writer import Writer

_log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
"""How often all who wait are looked after, whatever was rung."""
MOST_PAUSE_S: Final = 5.0
"""They are looked after that often at least, however long a look takes."""
WATCH_AFTER_S: Final = 0.25
"""A poll that waits longer than this notices when its client goes away."""
_LOOK_SHARE: Final = 100
_UNSEEN: Final = "looks for polls that wait failed"
_UNRETURNED: Final = "messages taken for a client that had gone wait for the end of their lease"
_OK: Final = 200

T = TypeVar("T")
Answer = tuple[int, bytes]
Gone = Callable[[], Awaitable[object]]
"""Returns when the client has gone away."""


class Puller:
    """PULL for one process. `async with`; leaving ends polls that wait with nothing and finishes what was handed over.

    Errors of every call: MalformedError, InvalidError; NotFoundError (no such subscription of this organisation),
    ConflictError (it is PUSH), LateError (every lease of the request is over; carries the results);
    StorageRefusedError (nothing was done), StorageUnavailableError (in doubt; the same request may be sent again).
    """

    def __init__(
        self,
        *,
        make_source: Callable[[Ring], Source],
        hands: int,
        outcomes: Outcomes,
        ends: LeaseEnds,
        metrics: Metrics,
        queued: Callable[[SubscriptionId], None],
        sifter: Sifter,
        looker: Writer,
        quota: ConsumerQuota,
    ) -> None:
        """The source takes for `hands` at a time. `queued` is told whose messages were queued again. `looker` reads, and
        may be shared.
        """
        self._outcomes = outcomes
        self._ends = ends
        self._pulls, self._pulled = metrics.pulls, metrics.pulled
        self._counts = {status: metrics.acks.labels(status) for status in Status if status is not Status.UNKNOWN}
        self._queued = queued
        self._source = make_source(self._ring)
        self._sifter = sifter
        self._waiting = {stand: metrics.pull_consumers.labels(stand) for stand in Stand}
        self._waiters: Waiters[Wish, Row] = Waiters(
            self._take,
            name=lambda wish: wish.queue.subscription,
            give_back=self._give_back,
            left=self._left,
            hands=hands,
            apart=lambda wish: wish.selector is not None,
        )
        self.streams = Streams(self._waiters, outcomes=outcomes, ends=ends, looker=looker, quota=quota)
        self._quota = quota
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._source.__aenter__()
        await self.streams.__aenter__()
        self._looking = asyncio.create_task(self._look_for_ever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking
        await self.streams.__aexit__(kind, error, trace)
        await self._waiters.close()
        await self._source.__aexit__(kind, error, trace)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def end_polls(self) -> None:
        """The process is about to stop: who waits gets an empty answer now, and so does who comes still; streams end."""
        await self.streams.finish()
        await self._waiters.close()

    def heard(self, names: frozenset[str]) -> None:
        """The callback for `Channel.PULL`: subscriptions that may have messages; empty: any."""
        self._waiters.ring(names or None)

    def changed(self, names: frozenset[str]) -> None:
        """The callback for `Channel.CONFIG`: rooms whose settings have changed; empty: any."""
        self._source.changed(frozenset(RoomId(int(name)) for name in names))
        self.streams.changed()

    async def pull(self, principal: Principal, subscription_id: str, body: bytes, gone: Gone | None = None) -> Answer:
        """Lease what is due; wait for it, where nothing is. With `gone` a poll that waits ends with its client."""
        key = key_of(principal, subscription_id)
        request = await self._read(key, read_pull, body)
        self._pulls.inc()
        if not request.wait_ms:
            return await self._poll(key, request, None)
        self._quota.take(key.organisation)
        try:
            return await self._poll(key, request, gone)
        finally:
            self._quota.release(key.organisation)

    async def _poll(self, key: Key, request: PullRequest, gone: Gone | None) -> Answer:
        wish = Wish(key, None if request.selector is None else request.selector.selector())
        poll = self._waiters.join(
            wish,
            most=request.max_messages,
            lease_ms=request.lease_ms,
            wait_s=request.wait_ms / 1000,
            priority=request.priority,
        )
        watch = None
        if gone is not None:
            watch = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._watch, gone, wish, poll)
        try:
            rows = await poll.future
        except asyncio.CancelledError:
            self._waiters.leave(wish, poll)
            raise
        finally:
            if watch is not None:
                watch.cancel()
        if not rows:
            return _OK, EMPTY
        self._pulled.inc(len(rows))
        return _OK, messages_json(rows)

    async def ack(self, principal: Principal, subscription_id: str, body: bytes) -> Answer:
        """The messages of these leases are done."""
        key = key_of(principal, subscription_id)
        request, leases = await self._read(key, read_ack, body)
        told = await self._outcomes.ack(key, leases)
        self.streams.settled(leases)
        return self._results(request.ack_ids, leases, told)

    async def nack(self, principal: Principal, subscription_id: str, body: bytes) -> Answer:
        """The messages of these leases are to come again."""
        key = key_of(principal, subscription_id)
        request, leases = await self._read(key, read_nack, body)
        told, queued = await self._outcomes.nack(key, leases, delay_ms=request.delay_ms)
        self.streams.settled(leases)
        if queued and not request.delay_ms:
            self._tell(key.subscription)
        return self._results(request.ack_ids, leases, told)

    async def extend(self, principal: Principal, subscription_id: str, body: bytes) -> Answer:
        """These leases end later, or sooner."""
        key = key_of(principal, subscription_id)
        request, leases = await self._read(key, read_extend, body)
        told = await self._outcomes.extend(key, leases, lease_ms=request.lease_ms)
        return self._results(request.ack_ids, leases, told)

    async def _read(self, key: Key, read: Callable[[bytes], T], body: bytes) -> T:
        # Whose queue it is not learns that, whatever is wrong with the body.
        try:
            return read(body)
        except PermanentError:
            standing = await self._ends.standing(key.room, key.subscription, key.organisation)
            if (error := refusal(standing, key)) is not None:
                raise error from None
            raise

    def _results(self, ack_ids: Sequence[str], leases: Sequence[Lease], told: Told) -> Answer:
        statuses = self._count(told)
        results = [(text, told[lease]) for text, lease in zip(ack_ids, leases, strict=True)]
        if statuses.count(Status.LATE) == len(statuses):
            raise LateError("these leases are over: the messages come again, or have ended otherwise", results)
        return _OK, results_json(results)

    async def hear(self, stream: Stream, request: AckRequest | NackRequest | ExtendRequest) -> bytes:
        """What the client of a stream says of messages that it got; the results as JSON, all of them late or not."""
        results, queued = await self.streams.settle(stream, request)
        self._count({read_ack_id(text): status for text, status in results})
        for subscription in queued:
            self._tell(subscription)
        return results_json(results)

    def undelivered(self, batch: Batch) -> None:
        """A stream's client has gone before it got these: they go back."""
        if batch.rows:
            self._give_back(Wish(batch.key), batch.rows)

    def count_pulled(self, messages: int) -> None:
        """So many went out over a stream."""
        self._pulled.inc(messages)

    def _count(self, told: Told) -> list[Status]:
        statuses = list(told.values())
        for status, count in self._counts.items():
            if number := statuses.count(status):
                count.inc(number)
        return statuses

    async def _take(self, asked: Sequence[Ask[Wish]]) -> Sequence[Got[Row]]:
        if (selector := asked[0].key.selector) is not None:
            return [await self._sifter.take(asked[0], selector)]
        return await self._source.take([Ask(ask.key.queue, ask.most, ask.lease_ms, ask.waits) for ask in asked])

    def _left(self, wish: Wish) -> None:
        if wish.selector is None:
            self._source.left(wish.queue)

    def _ring(self, subscriptions: Iterable[SubscriptionId]) -> None:
        self._waiters.ring(subscriptions)

    def _give_back(self, wish: Wish, rows: Sequence[Row]) -> None:
        self._spawn(self._return(wish.queue, [row[:2] for row in rows]))

    async def _return(self, key: Key, leases: Sequence[Lease]) -> None:
        try:
            await self._ends.nack(key.room, key.subscription, key.organisation, leases, delay_ms=0)
        except RoomsError as exc:
            OUTAGES.failed(exc, _UNRETURNED, count=len(leases))
        else:
            OUTAGES.succeeded(_UNRETURNED)
            self._tell(key.subscription)

    def _tell(self, subscription: SubscriptionId) -> None:
        self._waiters.ring((subscription,))
        self._queued(subscription)

    def _watch(self, gone: Gone, wish: Wish, poll: Poll[Row]) -> None:
        async def leave() -> None:
            await gone()
            self._waiters.leave(wish, poll)

        task = self._spawn(leave())
        poll.future.add_done_callback(lambda _: task.cancel())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _look_for_ever(self) -> None:
        loop, next_s = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            for stand, number in self._waiters.tally.items():
                self._waiting[stand].set(number)
            begun = loop.time()
            if begun < next_s:
                continue
            try:
                if wishes := self._waiters.resting():
                    self._waiters.ring(await self._source.look({wish.queue for wish in wishes}))
                    OUTAGES.succeeded(_UNSEEN)
            except TransientError as exc:
                OUTAGES.failed(exc, _UNSEEN)
            except Exception as exc:  # noqa: BLE001 - the next look may succeed, and without looks polls starve
                _log.warning("a look at polls that wait failed: %s", exc)
            next_s = loop.time() + min(MOST_PAUSE_S, _LOOK_SHARE * (loop.time() - begun))
