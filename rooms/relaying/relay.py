"""The loop: claim, send, mark, each under way while the next batches are in the steps before."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId, room_of
from rooms.domain.states import Reason, State, SubscriptionType
from rooms.errors import BrokerUnavailableError, StorageRefusedError, StorageUnavailableError
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.ports import Broker, Clock, Refused
from rooms.relaying.pace import Low, linger_s
from rooms.storage.orphans import sideline
from rooms.storage.relay import Batch, Ending, Outgoing

_log = logging.getLogger(__name__)

CLAIM_S: Final = 30.0
"""How long a relay that stands still keeps what it took."""
BATCH: Final = 500
SENDERS: Final = 3
"""Batches whose receipts are awaited at the same time: a broker that writes for the one reads the next."""
PROBE: Final = 20
"""So many copies are tried on a broker that was away."""
POLL_S: Final = 1.0
FIRST_WAIT_S: Final = 0.25
LONGEST_WAIT_S: Final = 1.0
"""A try costs a claim of a few rows, and everybody waits for it when the broker is back."""
DRAIN_S: Final = 8.0
"""How long the broker may take for what is under way when the process stops."""
_SPARE_S: Final = 2.0
"""What has so little of its claim left is not sent any more."""
_STORAGE_RETRY_S: Final = 0.25
_UNSENT: Final = "sends to the broker failed"
_UNCLAIMED: Final = "claims and marks of the relay failed"
_STORAGE: Final = (StorageUnavailableError, StorageRefusedError)


class Relay:
    """`run(stop)` relays until `stop` is set; then what was claimed is sent and marked, or given back."""

    def __init__(
        self,
        *,
        outgoing: Outgoing,
        broker: Broker,
        clock: Clock,
        metrics: Metrics,
        arrived: Callable[[SubscriptionId], None],
        claim_s: float = CLAIM_S,
        poll_s: float = POLL_S,
        batch: int = BATCH,
    ) -> None:
        """`arrived` is told of each PULL subscription whose queue got something."""
        self._outgoing = outgoing
        self._broker = broker
        self._clock = clock
        self._metrics = metrics
        self._arrived = arrived
        self._claim_s = claim_s
        self._poll_s = poll_s
        self._batch = batch
        self._low = Low()
        self._dead: list[int] = []
        self._next_call_s = 0.0
        self._known: set[SubscriptionId] = set()
        self._native: set[SubscriptionId] = set()
        self._met = False
        self._meeting = asyncio.Lock()
        self._wake = asyncio.Event()
        self._stopping = False
        self._failures = 0
        self._resume_s = 0.0

    def wake(self) -> None:
        """Something may have been queued."""
        self._wake.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Relay until `stop` is set."""
        claimed: asyncio.Queue[Batch | None] = asyncio.Queue(1)
        sent: asyncio.Queue[Sequence[Copy] | None] = asyncio.Queue(1)
        async with asyncio.TaskGroup() as group:
            steps = [
                group.create_task(self._claim_until_stopped(claimed)),
                group.create_task(self._send_and_close(claimed, sent)),
                group.create_task(self._mark_all(sent)),
            ]
            await stop.wait()
            self._stopping = True
            self._wake.set()
            _, late = await asyncio.wait(steps, timeout=DRAIN_S)
            for step in late:
                step.cancel()

    async def _claim_until_stopped(self, claimed: "asyncio.Queue[Batch | None]") -> None:
        last_s = self._clock.monotonic()
        while not self._stopping:
            self._wake.clear()
            begun_s = self._clock.monotonic()
            if begun_s < self._resume_s:
                await self._sleep(self._resume_s - begun_s, whatever_comes=True)
                continue
            limit = PROBE if self._failures else self._batch
            try:
                batch = await self._claim(limit, begun_s)
            except _STORAGE as exc:
                self._tell_storage(exc)
                await self._sleep(_STORAGE_RETRY_S, whatever_comes=True)
                continue
            OUTAGES.succeeded(_UNCLAIMED)
            if not batch.found:
                await self._sleep(self._poll_s)
                continue
            await claimed.put(batch)
            if batch.found < limit:
                await asyncio.sleep(linger_s(batch.found, begun_s - last_s))
            last_s = begun_s
        await claimed.put(None)

    async def _claim(self, limit: int, begun_s: float) -> Batch:
        if begun_s >= self._next_call_s:
            known, self._dead = self._dead, await self._outgoing.dead_relays()
            self._next_call_s = begun_s + self._poll_s
            if not set(self._dead) <= set(known):
                self._low.forget()
        batch = await self._outgoing.claim(
            limit=limit,
            claim_s=self._claim_s,
            deadline=begun_s + self._claim_s,
            now_ms=time.time_ns() // 1_000_000,
            low_us=self._low.begin(begun_s),
            dead=self._dead,
        )
        self._native |= batch.native
        self._low.saw(batch, limit=limit, begun_s=begun_s, ended_s=self._clock.monotonic())
        return batch

    async def _send_and_close(
        self, claimed: "asyncio.Queue[Batch | None]", sent: "asyncio.Queue[Sequence[Copy] | None]"
    ) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(SENDERS):
                group.create_task(self._send_all(claimed, sent))
        await sent.put(None)

    async def _send_all(
        self, claimed: "asyncio.Queue[Batch | None]", sent: "asyncio.Queue[Sequence[Copy] | None]"
    ) -> None:
        while (batch := await claimed.get()) is not None:
            try:
                if done := await self._send(batch):
                    await sent.put(done)
            except _STORAGE as exc:
                self._tell_storage(exc)  # its claims end by themselves
        claimed.put_nowait(None)  # for the next sender

    async def _send(self, batch: Batch) -> Sequence[Copy]:
        """Have a batch carried; the copies whose rows can be marked."""
        if batch.unreadable:
            _log.error("%d deliveries wait for messages that are not there; they are sidelined", len(batch.unreadable))
            await sideline(self._outgoing.writer, [(room_of(identity), identity) for identity in batch.unreadable])
        gone = [copy for copy in batch.copies if copy.subscription_version is None]
        copies = [copy for copy in batch.copies if copy.subscription_version is not None]
        due = {copy.dedup_id: at for copy, at in zip(batch.copies, batch.not_before, strict=True)}
        now_s = self._clock.monotonic()
        if now_s < self._resume_s or now_s > batch.deadline - _SPARE_S:
            await self._give_back(batch.copies)
            return ()
        endings = [_cancelled(copy) for copy in gone]
        try:
            async with asyncio.timeout(batch.deadline - now_s):
                await self._meet()
                await self._ensure(copies)
                refused = await self._broker.send(copies, not_before=[due[copy.dedup_id] for copy in copies])
                if missing := [one.copy for one in refused if one.queue_missing]:
                    refused = [one for one in refused if not one.queue_missing]
                    living = await self._outgoing.living(sorted({copy.subscription_id for copy in missing}))
                    endings += [_cancelled(copy) for copy in missing if copy.subscription_id not in living]
                    missing = [copy for copy in missing if copy.subscription_id in living]
                    self._known -= living
                    await self._ensure(missing)
                    refused += await self._broker.send(missing, not_before=[due[copy.dedup_id] for copy in missing])
        except (BrokerUnavailableError, TimeoutError) as exc:
            self._away(exc if isinstance(exc, BrokerUnavailableError) else BrokerUnavailableError("it does not answer"))
            await self._give_back(batch.copies)
            return ()
        self._back()
        return await self._sort_out(copies, refused, endings)

    async def _sort_out(
        self, copies: Sequence[Copy], refused: Sequence[Refused], endings: list[Ending]
    ) -> Sequence[Copy]:
        waits = {one.copy.dedup_id for one in refused if one.queue_missing}
        if waits:
            _log.warning("%d copies have no queue yet; they are sent again when their claim ends", len(waits))
        endings += [
            Ending(copy=one.copy, to=State.SIDELINED, reason=Reason.UNREADABLE, error=one.reason)
            for one in refused
            if not one.queue_missing
        ]
        if endings:
            for ending in endings:
                self._metrics.relay_refused.labels(ending.reason).inc()
            await self._outgoing.end(endings)
        over = waits | {ending.copy.dedup_id for ending in endings}
        return [copy for copy in copies if copy.dedup_id not in over] if over else copies

    async def _meet(self) -> None:
        # A broker that is new to an installation that has sent nothing has lost nothing: it needs no recovery.
        async with self._meeting:
            if not self._met and not await self._broker.remembers() and await self._outgoing.nothing_sent():
                await self._broker.mark()
            self._met = True

    async def _ensure(self, copies: Sequence[Copy]) -> None:
        unknown = {copy.subscription_id for copy in copies if copy.kind is SubscriptionType.PULL} - self._known
        if unknown:
            await self._broker.ensure(sorted(unknown))
            self._known |= unknown

    async def _mark_all(self, sent: "asyncio.Queue[Sequence[Copy] | None]") -> None:
        while (copies := await sent.get()) is not None:
            until_s = min(copy.deadline for copy in copies)
            while self._clock.monotonic() < until_s:
                try:
                    pulls = await self._mark(copies)
                except StorageRefusedError as exc:
                    self._tell_storage(exc)
                    await asyncio.sleep(_STORAGE_RETRY_S)
                    continue
                except StorageUnavailableError as exc:
                    self._tell_storage(exc)  # the claims died with the connection: what was sent is sent again
                    break
                self._metrics.relayed.inc(len(copies))
                for subscription in pulls:
                    self._arrived(subscription)
                break

    async def _mark(self, copies: Sequence[Copy]) -> Sequence[SubscriptionId]:
        """Tell the rows; the PULL subscriptions whose pollers may want to know."""
        # With the receipt a native subscription's copy is the broker's, and its client's: nothing more is known of it.
        native = [copy for copy in copies if copy.subscription_id in self._native]
        if native:
            await self._outgoing.end([Ending(copy=copy, to=State.HANDED_OVER) for copy in native])
            copies = [copy for copy in copies if copy.subscription_id not in self._native]
        if not copies:
            return ()
        _, pulls = await self._outgoing.mark(copies)
        return pulls

    async def _give_back(self, copies: Sequence[Copy]) -> None:
        with suppress(*_STORAGE):
            await self._outgoing.release(copies)
        self._low.forget()

    def _away(self, exc: BrokerUnavailableError) -> None:
        self._known.clear()
        self._failures += 1
        self._metrics.relay_failures.inc()
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self._failures - 1, 10))
        self._resume_s = self._clock.monotonic() + wait_s
        OUTAGES.failed(exc, _UNSENT)

    def _back(self) -> None:
        if self._failures:
            OUTAGES.succeeded(_UNSENT)
            self._failures = 0

    def _tell_storage(self, exc: Exception) -> None:
        OUTAGES.failed(exc, _UNCLAIMED)
        self._low.forget()

    async def _sleep(self, seconds: float, *, whatever_comes: bool = False) -> None:
        until_s = self._clock.monotonic() + seconds
        while not self._stopping and (rest_s := until_s - self._clock.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._wake.wait()
            if not whatever_comes:
                return
            self._wake.clear()


def _cancelled(copy: Copy) -> Ending:
    return Ending(copy=copy, to=State.CANCELLED, reason=Reason.SUBSCRIPTION_DELETED)
