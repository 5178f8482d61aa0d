"""PostgreSQL as broker: the outbox is the queue, so a copy handed out is already claimed and there is no second copy.

Differs from the port in nothing; two facts about it: a copy counts as settled when the decision about it is
committed (the decision itself removes or moves the outbox row), and the low-water marks that keep a claim short
are a hint: once a second, or at a twentieth of the time where that look is long, the whole queue is looked at.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Self

from rooms.domain.copy import Copy
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.errors import BrokerUnavailableError, StorageRefusedError, StorageUnavailableError
from rooms.storage.outbox import PRIORITIES, Outbox
from rooms.storage.signals import Channel, Signals
from rooms.storage.writer import Writer

_BATCH: Final = 500
_POLL_S: Final = 1.0
_LOOK_SHARE: Final = 20
_COMMIT_WINDOW_US: Final = 50_000
"""A publish may become visible this long after the due time it carries; later ones wait for the next whole look."""
_LINGER_ROWS: Final = 20
_LONGEST_LINGER_S: Final = 0.01
_PAUSE_AFTER_EMPTY: Final = 10
_BEGINNING: Final = "-infinity"


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (StorageUnavailableError, StorageRefusedError) as exc:
        raise BrokerUnavailableError(str(exc)) from exc


def _literal(epoch_us: int) -> str:
    return datetime.fromtimestamp(epoch_us / 1e6, UTC).isoformat().replace("+00:00", "Z")


class PostgresConsumer:
    """One taker of the PUSH queue."""

    def __init__(self, url: str, *, credit: int, claim_s: float, poll_s: float = _POLL_S) -> None:
        self._url = url
        self._credit = credit
        self._claim_s = claim_s
        self._poll_s = poll_s
        self._writer = Writer(url, kind="worker")
        self._outbox = Outbox(self._writer)
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._signals = Signals(url, hear={Channel.PUSH: lambda _names: self._wake.set()})
        self._unsettled = 0
        self._excluded: frozenset[SubscriptionId] = frozenset()
        self._low = [_BEGINNING] * PRIORITIES
        self._dead: list[int] = []
        self._next_look = 0.0

    @property
    def worker(self) -> int:
        """The writer id that marks this consumer's claims."""
        return self._writer.id

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
        worker, last = self._writer.id, time.monotonic()
        with _translated():
            while True:
                self._wake.clear()
                self._room.clear()
                limit = min(_BATCH, self._credit - self._unsettled)
                if limit <= 0:
                    await self._sleep(self._poll_s, self._room)
                    continue
                started = time.monotonic()
                copies = await self._claim(limit, started)
                if self._writer.id != worker:
                    raise BrokerUnavailableError("the claims of the lost connection are others' now")
                if not copies:
                    if self._excluded:
                        # The look walked over the rows of busy lanes: not again for every publish, only for room.
                        await self._sleep((time.monotonic() - started) * _PAUSE_AFTER_EMPTY, self._room)
                    await self._sleep(await self._wait_s(), self._wake)
                    continue
                self._unsettled += len(copies)
                yield copies
                elapsed, last = max(started - last, 1e-4), started
                if len(copies) < limit:
                    await asyncio.sleep(
                        min(_LONGEST_LINGER_S, _LINGER_ROWS * elapsed / len(copies)) if len(copies) > 1 else 0
                    )

    async def _claim(self, limit: int, now: float) -> list[Copy]:
        if now >= self._next_look:
            self._dead = await self._outbox.dead_workers()
            self._low = [_BEGINNING] * PRIORITIES
        excluded, whole = self._excluded, _BEGINNING in self._low
        at_us, taken = await self._outbox.claim(
            limit=limit,
            claim_s=self._claim_s,
            deadline=now + self._claim_s,
            now_ms=time.time_ns() // 1_000_000,
            low=self._low,
            dead=self._dead,
            excluded=excluded,
        )
        if whole:
            done = time.monotonic()
            self._next_look = done + max(self._poll_s, _LOOK_SHARE * (done - now))
        if not excluded:
            self._raise_marks(at_us, taken, everything=len(taken) < limit)
        return [copy for _, copy in taken]

    def _raise_marks(self, at_us: int, taken: Sequence[tuple[int, Copy]], *, everything: bool) -> None:
        if everything:
            self._low = [_literal(at_us - _COMMIT_WINDOW_US)] * PRIORITIES
            return
        highest: dict[int, int] = {}
        for due_us, copy in taken:
            highest[copy.priority] = max(due_us, highest.get(copy.priority, 0))
        for priority, due_us in highest.items():
            self._low[PRIORITIES - 1 - priority] = _literal(due_us - _COMMIT_WINDOW_US)

    async def _wait_s(self) -> float:
        due = await self._outbox.next_due_s()
        return self._poll_s if due is None else min(max(due, 0.0), self._poll_s)

    @staticmethod
    async def _sleep(seconds: float, event: asyncio.Event) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()

    def exclude(self, subscriptions: frozenset[SubscriptionId]) -> None:
        """Leave copies of these subscriptions where they are for now."""
        if self._excluded - subscriptions:
            self._room.set()
            self._wake.set()
        self._excluded = subscriptions

    async def settle(self, copies: Sequence[Copy]) -> None:
        """The decision removed the outbox rows; this gives the credit back."""
        if self._unsettled >= self._credit:
            self._room.set()
            self._wake.set()
        self._unsettled = max(0, self._unsettled - len(copies))

    async def release(self, copies: Sequence[Copy]) -> None:
        """Give copies back untouched, at once."""
        await self.settle(copies)
        with _translated():
            await self._outbox.release(copies)
        self._low = [_BEGINNING] * PRIORITIES


class PostgresBroker:
    """`rooms.ports.Broker` on the outbox."""

    claims = True

    def __init__(self, url: str, *, claim_s: float) -> None:
        self._url = url
        self._claim_s = claim_s
        self._writer = Writer(url, kind="broker")
        self._outbox = Outbox(self._writer)

    async def __aenter__(self) -> Self:
        await self._writer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._writer.close()

    def consume(self, *, credit: int) -> PostgresConsumer:
        """Take copies of the PUSH queue."""
        return PostgresConsumer(self._url, credit=credit, claim_s=self._claim_s)

    async def send(self, copies: Sequence[Copy], *, not_before: Sequence[datetime]) -> None:
        """Queue copies; one whose step is not its row's, or which is queued already, adds nothing."""
        with _translated():
            await self._outbox.send(copies, not_before=not_before)

    async def depth(self, subscription: SubscriptionId | None) -> int:
        """Copies that wait: of a PULL subscription, or (None) of the PUSH queue."""
        with _translated():
            return await self._outbox.depth(subscription)

    async def purge(self, room: RoomId, subscription: SubscriptionId) -> int:
        """Forget the unclaimed copies of a subscription."""
        with _translated():
            return await self._outbox.purge(room, subscription)
