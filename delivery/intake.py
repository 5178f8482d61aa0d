"""The intake: copies of a broker that does not claim them, claimed in PostgreSQL before the push worker sees them.

What becomes of a copy, by the row of its step:

    free                            claimed, handed to the worker; settled after the commit of its decision
    over (decided, moved, held)     settled without an attempt
    claimed by somebody who lives   kept and asked again: the broker may have handed us the only copy there is
    claimed by somebody dead        claimed at once
    claimed by ourselves            kept beside the first, and settled together with it
    not due, or locked              asked again then, or in a moment
    no delivery at all              sidelined as an orphan, with the message it carries, then settled
    (not to be read)                its delivery is sidelined, if it can be told; then discarded

The broker may go away and come back without the worker noticing: claims live in PostgreSQL, so attempts go on, are
committed, and the copies that come again are found to be ours, or over.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from delivery.custody import Custody
from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.errors import BrokerUnavailableError, StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import Broker, Consumer, Unreadable
from rooms.storage.claims import Claims, step_of
from rooms.storage.orphans import adopt, sideline_unreadable
from rooms.storage.outbox import Outbox
from rooms.storage.writer import Writer

_log = logging.getLogger(__name__)

_NOT_CONSUMED: Final = "tries to consume failed"
_NOT_CLAIMED: Final = "claims of copies failed"
_BATCH: Final = 500
_POLL_S: Final = 1.0
"""How often it is looked at whether those live whose claims are waited for, and whether we do."""
_RETRY_S: Final = 0.5
_LINGER_S_AT_1000: Final = 0.01
"""How long to let copies gather at 1,000 of them a second; less at less, where a claim costs little and delay shows."""
_LONGEST_LINGER_S: Final = 0.03
_PATIENCE_S: Final = 5.0


class IntakeConsumer:
    """`rooms.ports.Consumer` for the PUSH queue. Its own claims are lost with its session in PostgreSQL alone."""

    def __init__(
        self, broker: Broker, url: str, *, credit: int, claim_s: float, orphaned: Callable[[int, int], None]
    ) -> None:
        self._broker = broker
        self._credit = credit
        self._claim_s = claim_s
        self._orphaned = orphaned
        self._writer = Writer(url, kind="worker", durable=False, isolated=False)
        self._claims = Claims(self._writer)
        self._outbox = Outbox(self._writer)
        self._custody = Custody()
        self._source: Consumer | None = None
        self._strange: list[Unreadable] = []
        self._reading: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._next_poll = 0.0

    @property
    def worker(self) -> int:
        """The writer id that marks this consumer's claims."""
        return self._writer.id

    @property
    def selective(self) -> bool:
        """Nothing is passed over: what a lane cannot keep must be held."""
        return False

    async def __aenter__(self) -> Self:
        try:
            await self._writer.__aenter__()
        except (StorageUnavailableError, StorageRefusedError) as exc:
            raise BrokerUnavailableError(f"no copy can be claimed: {exc}") from exc
        self._reading = asyncio.create_task(self._read_for_ever())
        self._reading.add_done_callback(lambda _: self._wake.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_reading()
        await self._writer.close()

    async def batches(self) -> AsyncIterator[Sequence[Copy]]:
        """Batches as they are claimed, for ever. BrokerUnavailableError: our claims are lost.

        Once this is closed nothing more is taken, and what the broker has not seen settled goes back to it: others
        find it claimed by us, as long as it is.
        """
        worker, last = self._writer.id, time.monotonic()
        try:
            while True:
                self._wake.clear()
                if self._reading is not None and self._reading.done():
                    self._reading.result()
                started = time.monotonic()
                claimed = await self._undisturbed(self._ask(started))
                if self._writer.id != worker:
                    lost = StorageUnavailableError("the connection was lost, and its claims with it")
                    raise BrokerUnavailableError(str(lost)) from lost
                if not claimed:
                    await self._rest()
                    continue
                yield claimed
                elapsed, last = max(started - last, 1e-4), started
                number = len(claimed)
                if 1 < number < _BATCH:
                    await asyncio.sleep(min(_LONGEST_LINGER_S, number / elapsed * _LINGER_S_AT_1000 / 1000))
        finally:
            await self._stop_reading()

    def unreadable(self) -> Sequence[Unreadable]:
        """Nothing: what came with the copies is dealt with here."""
        return ()

    async def discard(self, messages: Sequence[Unreadable]) -> None:
        """Nothing, as nothing was told."""

    def exclude(self, subscriptions: frozenset[SubscriptionId]) -> None:
        """Nothing: their copies come all the same."""

    async def settle(self, copies: Sequence[Copy]) -> None:
        """Settle these and whatever other copies of their steps came."""
        await self._settle_at_broker(self._custody.forget(map(step_of, copies)))

    async def release(self, copies: Sequence[Copy]) -> None:
        """Give claims and copies back untouched, at once."""
        try:
            # A claim that has run out may be somebody's again, even ours.
            if held := self._custody.held(copies, time.monotonic()):
                await self._outbox.release(held)
        except (StorageUnavailableError, StorageRefusedError) as exc:
            raise BrokerUnavailableError(str(exc)) from exc
        given_back = self._custody.forget(map(step_of, copies))
        if self._source is not None and given_back:
            with suppress(BrokerUnavailableError):  # then they come again by themselves
                await self._source.release(given_back)

    async def _read_for_ever(self) -> None:
        failures = 0
        while True:
            try:
                async with self._broker.consume(credit=self._credit) as source:
                    self._source = source
                    OUTAGES.succeeded(_NOT_CONSUMED)
                    failures = 0
                    async for batch in source.batches():
                        self._custody.arrive(batch)
                        self._strange += source.unreadable()
                        self._wake.set()
            except BrokerUnavailableError as exc:
                OUTAGES.failed(exc, _NOT_CONSUMED)
                failures += 1
            finally:
                self._source = None
                self._custody.lose()
                self._strange.clear()
            await asyncio.sleep(pause_s(failures))

    async def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    async def _ask(self, now: float) -> list[Copy]:
        """What is ours from now on of all that is to be asked about."""
        claimed: list[Copy] = []
        try:
            if self._strange:
                await self._part_with(self._strange[:_BATCH])
            if now >= self._next_poll:
                self._next_poll = now + _POLL_S
                # Also when nobody is waited for: an idle worker learns by it that its own session, its proof of life, is gone.
                self._custody.hurry(now, await self._claims.dead(self._custody.workers()))
            if copies := self._custody.next(now, _BATCH):
                claimed = await self._take(copies, now)
        except StorageRefusedError as exc:
            OUTAGES.failed(exc, _NOT_CLAIMED)
            self._custody.ask_again()
            await asyncio.sleep(_RETRY_S)
        except StorageUnavailableError as exc:
            raise BrokerUnavailableError(str(exc)) from exc
        else:
            OUTAGES.succeeded(_NOT_CLAIMED)
        return claimed

    async def _part_with(self, strange: Sequence[Unreadable]) -> None:
        for message in strange:
            _log.error(
                "a message is no copy (%s), it is discarded: %s %r", message.reason, dict(message.headers), message.body
            )
        sidelined = await sideline_unreadable(self._writer, strange)
        self._orphaned(sidelined, len(strange) - sidelined)
        del self._strange[: len(strange)]
        if self._source is not None:
            with suppress(BrokerUnavailableError):  # then they come again
                await self._source.discard(strange)

    async def _take(self, copies: Sequence[Copy], now: float) -> list[Copy]:
        claimed, others = await self._claim(copies, now, dead=())
        if not others:
            return claimed
        try:
            standings = await self._claims.look(others)
            if dead := await self._dead({at.worker for at in standings.values() if at.worker is not None}):
                late = [copy for copy in others if standings[step_of(copy)].worker in dead]
                more, missed = await self._claim(late, now, dead=dead)
                claimed += more
                others = [copy for copy in others if step_of(copy) not in set(map(step_of, more))]
                standings = {**standings, **(await self._claims.look(missed) if missed else {})}
            orphans = [copy for copy in others if not standings[step_of(copy)].known]
            if orphans:
                _log.warning("%d copies have no delivery, the first is %s", len(orphans), orphans[0].delivery_id)
                self._orphaned(*await adopt(self._writer, orphans))
        except StorageRefusedError as exc:
            OUTAGES.failed(exc, _NOT_CLAIMED)
            self._custody.ask_again()
            return claimed
        over = []
        for copy in others:
            standing = standings[step_of(copy)]
            if standing.wait_s is None:
                over.append(step_of(copy))
            else:
                self._custody.wait(step_of(copy), now, standing.wait_s, standing.worker)
        await self._settle_at_broker(self._custody.forget(over))
        return claimed

    async def _claim(self, copies: Sequence[Copy], now: float, *, dead: Sequence[int]) -> tuple[list[Copy], list[Copy]]:
        """Those that are ours now, and the others."""
        ours = await self._claims.take(
            copies,
            claim_s=self._claim_s,
            deadline=now + self._claim_s,
            now_ms=time.time_ns() // 1_000_000,
            dead=dead,
        )
        taken = [copies[index] for index in ours]
        self._custody.take(taken)
        known = set(ours)
        return taken, [copy for index, copy in enumerate(copies) if index not in known]

    async def _dead(self, workers: frozenset[int] | set[int]) -> list[int]:
        return await self._claims.dead(workers) if workers else []

    async def _settle_at_broker(self, copies: Sequence[Copy]) -> None:
        if self._source is not None and copies:
            with suppress(BrokerUnavailableError):  # they come again, and are over
                await self._source.settle(copies)

    async def _rest(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._custody.next_s(time.monotonic(), _POLL_S)):
                await self._wake.wait()

    async def _undisturbed(self, work: Coroutine[None, None, list[Copy]]) -> list[Copy]:
        # A statement broken off would take the session with it, and with the session the claims of every attempt
        # that is still under way: whoever stops this consumer waits for the statement to end.
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task}, timeout=_PATIENCE_S)
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                with suppress(BrokerUnavailableError):
                    await self.release(task.result())
            raise


def pause_s(failures: int) -> float:
    """How long to let a broker be that was away so many times running."""
    return min(_POLL_S, _RETRY_S * float(2 ** (min(failures, 10) - 2)))


class Intake:
    """The PUSH queue of a broker that does not claim, for `delivery.worker.PushWorker`."""

    def __init__(self, broker: Broker, url: str, *, claim_s: float, orphaned: Callable[[int, int], None]) -> None:
        """`url`: of PostgreSQL; `claim_s`: how long a frozen worker keeps what it took; `orphaned` is told how many orphans
        were sidelined, and how many belong to no subscription any more.
        """
        self._broker = broker
        self._url = url
        self._claim_s = claim_s
        self._orphaned = orphaned

    def consume(self, *, credit: int) -> IntakeConsumer:
        """Take copies, at most `credit` unsettled ones at a time (an async context manager)."""
        return IntakeConsumer(self._broker, self._url, credit=credit, claim_s=self._claim_s, orphaned=self._orphaned)
