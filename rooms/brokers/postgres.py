"""PostgreSQL as broker: the outbox is the queue, so a copy handed out is already claimed and there is no second copy.

Differs from the port in nothing; two facts about it: a copy counts as settled when the decision about it is
committed (the decision itself removes or moves the outbox row), and the low-water marks that keep a claim short
are a hint: once a second, or, where that look is long, for a twentieth of the time, the whole queue is looked at.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from types import TracebackType
from typing import Final, Self, TypeVar

from rooms.brokers.marks import Marks
from rooms.domain.copy import Copy
from rooms.domain.ids import RoomId, SubscriptionId, room_of
from rooms.errors import BrokerUnavailableError, StorageRefusedError, StorageUnavailableError
from rooms.gathering import Gathering
from rooms.ports import Gate, Refused, Unreadable
from rooms.storage.outbox import Claim, Outbox
from rooms.storage.signals import Channel, Signals
from rooms.storage.writer import Writer

POLL_S: Final = 1.0
_BATCH: Final = 500
_MOST_BYTES: Final = 256 * 1024 * 1024
"""Payloads in memory: with large ones, fewer copies than the credit allows."""
_LOOK_SHARE: Final = 20
_LONGEST_BETWEEN_LOOKS_S: Final = 10.0
_LONGEST_LINGER_S: Final = 0.03
_LINGER_FULLY_PER_S: Final = 2_000.0
"""From so many copies a second on they gather for so long; at 1,000 a second for an eighth of it."""
_SURE_S: Final = 0.005
"""Who lingers for so long claims again without being rung for."""
_LEAST_WAIT_S: Final = 0.005
_PATIENCE_S: Final = 5.0

_T = TypeVar("_T")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (StorageUnavailableError, StorageRefusedError) as exc:
        raise BrokerUnavailableError(str(exc)) from exc


class PostgresConsumer:
    """One taker of the PUSH queue."""

    def __init__(self, url: str, *, credit: int, claim_s: float, poll_s: float = POLL_S) -> None:
        self._credit = credit
        self._claim_s = claim_s
        self._poll_s = poll_s
        self._writer = Writer(url, kind="worker", durable=False, isolated=False)
        self._outbox = Outbox(self._writer)
        self._wake = asyncio.Event()
        self._signals = Signals(url, hear={Channel.PUSH: lambda _names: self._wake.set()})
        self._unsettled: dict[int, Copy] = {}
        """By `id`: whoever settles has the very objects that it was handed, and a key made of the step costs twice as much."""
        self._bytes = 0
        self._excluded: frozenset[SubscriptionId] = frozenset()
        self._marks = Marks()
        self._dead: list[int] = []
        self._next_call = 0.0
        self._next_look = 0.0

    @property
    def worker(self) -> int:
        """The writer id that marks this consumer's claims."""
        return self._writer.id

    @property
    def selective(self) -> bool:
        """The claim passes excluded subscriptions over."""
        return True

    async def __aenter__(self) -> Self:
        with _translated():
            await self._writer.__aenter__()
        await self._signals.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._signals.__aexit__(kind, error, trace)
        await self._writer.close()

    async def batches(self) -> AsyncIterator[Sequence[Copy]]:
        """Batches as they come due, for ever."""
        worker = self._writer.id
        gathering = Gathering(longest_s=_LONGEST_LINGER_S, full_per_s=_LINGER_FULLY_PER_S)
        with _translated():
            while True:
                self._wake.clear()
                limit = self._limit()
                if limit <= 0:
                    await self._sleep(self._poll_s)
                    continue
                started = time.monotonic()
                claim = await self._undisturbed(self._claim(limit, started))
                if self._writer.id != worker:
                    raise BrokerUnavailableError("the claims of the lost connection are others' now")
                if not claim.copies:
                    if claim.found:
                        continue
                    await self._sleep(await self._undisturbed(self._wait_s(claim)))
                    continue
                self._take(claim.copies)
                yield claim.copies
                pause_s = gathering.pause_s(len(claim.copies), started)
                if claim.found < limit:
                    await asyncio.sleep(pause_s)
                    # All that there was is ours, so somebody rings when there is more. Where much comes all the time, more is there.
                    if pause_s < _SURE_S and not self._wake.is_set():
                        await self._sleep(await self._undisturbed(self._wait_s(claim)))

    def _limit(self) -> int:
        limit = min(_BATCH, self._credit - len(self._unsettled))
        if self._unsettled:
            limit = min(limit, (_MOST_BYTES - self._bytes) * len(self._unsettled) // max(1, self._bytes))
        return limit

    async def _claim(self, limit: int, now: float) -> Claim:
        look = now >= self._next_look
        if now >= self._next_call:
            self._next_call = now + self._poll_s
            known, self._dead = self._dead, await self._outbox.dead_workers()
            look = look or not set(self._dead) <= set(known)
        if look:
            self._marks.forget()
        excluded = self._excluded
        claim = await self._outbox.claim(
            limit=limit,
            claim_s=self._claim_s,
            deadline=now + self._claim_s,
            now_ms=time.time_ns() // 1_000_000,
            low=self._marks.low(excluded),
            dead=self._dead,
            excluded=excluded,
        )
        self._marks.saw(claim, everything=claim.found < limit)
        if look:
            done = time.monotonic()
            self._next_look = done + max(self._poll_s, min(_LONGEST_BETWEEN_LOOKS_S, _LOOK_SHARE * (done - now)))
        return claim

    async def _wait_s(self, claim: Claim) -> float:
        due = await self._outbox.next_due_s(claim.at_us)
        # What comes due next may belong to a busy lane: not a claim for each of its copies.
        least = _LEAST_WAIT_S if self._excluded else 0.0
        return self._poll_s if due is None else min(max(due, least), self._poll_s)

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _undisturbed(self, work: Coroutine[None, None, _T]) -> _T:
        # A statement broken off would take the session with it, and with the session the claims of every attempt
        # that is still under way: whoever stops this consumer waits for the statement to end.
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task}, timeout=_PATIENCE_S)
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None and isinstance(claim := task.result(), Claim):
                with suppress(StorageUnavailableError, StorageRefusedError):
                    await self._outbox.release(claim.copies)
            raise

    def exclude(self, subscriptions: frozenset[SubscriptionId]) -> None:
        """Leave copies of these subscriptions where they are for now."""
        if self._excluded - subscriptions:
            self._wake.set()
        self._excluded = subscriptions

    def unreadable(self) -> Sequence[Unreadable]:
        """Nothing: rows are always readable."""
        return ()

    async def discard(self, messages: Sequence[Unreadable]) -> None:
        """Nothing to discard."""

    def _take(self, copies: Sequence[Copy]) -> None:
        unsettled = self._unsettled
        for copy in copies:
            unsettled[id(copy)] = copy
            self._bytes += len(copy.payload)

    async def settle(self, copies: Sequence[Copy]) -> None:
        """The decision removed the outbox rows; this gives the credit back."""
        if self._limit() <= 0:
            self._wake.set()
        unsettled = self._unsettled
        for copy in copies:
            if unsettled.pop(id(copy), None) is not None:
                self._bytes -= len(copy.payload)

    async def release(self, copies: Sequence[Copy]) -> None:
        """Give copies back untouched, at once."""
        await self.settle(copies)
        # A claim that has run out may be somebody's again, even ours.
        now = time.monotonic()
        ours = [copy for copy in copies if copy.deadline > now]
        with _translated():
            await self._outbox.release(ours)
        self._marks.forget()
        self._wake.set()


class PostgresBroker:
    """`rooms.ports.Broker` on the outbox."""

    claims = True
    gate: Gate | None = None

    def __init__(self, url: str, *, claim_s: float, poll_s: float = POLL_S) -> None:
        """`claim_s`: how long a copy is ours; `poll_s`: how often the queue is looked at when nobody rings."""
        self._url = url
        self._claim_s = claim_s
        self._poll_s = poll_s
        self._writer = Writer(url, kind="broker")
        self._outbox = Outbox(self._writer)
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._writer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True  # the writer would connect anew
        await self._writer.close()

    @contextmanager
    def _asked(self) -> Iterator[None]:
        if self._closed:
            raise BrokerUnavailableError("this adapter is closed")
        with _translated():
            yield

    async def ensure(self, subscriptions: Sequence[SubscriptionId]) -> None:
        """Nothing: a queue is the rows that name it."""

    async def delete(self, subscription: SubscriptionId) -> bool:
        """The same as `purge`."""
        await self.purge(room_of(subscription), subscription)
        return True

    async def queues(self) -> Sequence[SubscriptionId]:
        """None: a queue is the rows that name it."""
        return ()

    async def remembers(self) -> bool:
        """Always: what holds the deliveries holds their queue."""
        return True

    async def mark(self) -> None:
        """Nothing to mark."""

    def consume(self, *, credit: int, subscription: SubscriptionId | None = None) -> PostgresConsumer:
        """Take copies of the PUSH queue. PULL is served by leases on the outbox itself: ValueError."""
        if subscription is not None:
            raise ValueError("with PostgreSQL as broker a PULL subscription is leased from, not consumed")
        return PostgresConsumer(self._url, credit=credit, claim_s=self._claim_s, poll_s=self._poll_s)

    async def send(self, copies: Sequence[Copy], *, not_before: Sequence[datetime]) -> Sequence[Refused]:
        """Queue copies; one whose step is not its row's, or which is queued already, adds nothing."""
        with self._asked():
            await self._outbox.send(copies, not_before=not_before)
        return ()

    async def depth(self, subscription: SubscriptionId | None) -> int:
        """Copies that wait: of a PULL subscription, or (None) of the PUSH queue."""
        with self._asked():
            return await self._outbox.depth(subscription)

    async def disk_usage(self) -> float | None:
        """Return nothing: the disk is PostgreSQL's."""
        return None

    async def purge(self, room: RoomId, subscription: SubscriptionId) -> int:
        """Forget the unclaimed copies of a subscription."""
        with self._asked():
            return await self._outbox.purge(room, subscription)
