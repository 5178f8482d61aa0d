"""Use PostgreSQL as broker: the outbox is the queue, so there is no second copy.

A task that is handed out is already claimed. It counts as settled when its outcome is committed:
the outcome itself removes or moves the outbox row. While there is a backlog, organisations take
turns (`delivery.brokers.claim_order`). One that has too many unsettled tasks is skipped
(`delivery.brokers.credit_shares`). Low-water marks keep a claim short. They are hints, so the
whole queue is scanned once a second. If that takes long, it is done for a two-hundredth of the
time, but every ten seconds at least.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Final, Self, TypeVar

from delivery.brokers.claim_order import (
    START_SLACK_US,
    ClaimTurns,
    ClaimWatermarks,
    CommittedUntil,
)
from delivery.brokers.credit_shares import CreditShares
from delivery.brokers.skipped_organisations import SkippedOrganisations
from rooms.batching import AdaptiveLinger
from rooms.burst_pacing import BurstPacer
from rooms.db.notify import Channel, Notifier
from rooms.db.queue.claims import ClaimedBatch, Outbox
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import RoomId, SubscriptionId, room_of
from rooms.errors import BrokerUnavailableError, StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import BrokerUsers, MalformedMessage, RejectedTask

POLL_S: Final = 1.0
_BATCH: Final = 500
_MIN_BATCH: Final = 20
_BACKLOG_REST: Final = 3.0
"""A backlog's claims rest so many times as long as they took, as those of others do not rest."""
_PACED_BATCH: Final = 40
"""The rows of a claim in turn while bulk work rests: the loop has an attempt for each of them."""
_TURN_S: Final = 0.002
"""The time that a claim may take while organisations take turns: the next one waits for it."""
_MAX_UNSETTLED_BYTES: Final = 256 * 1024 * 1024
"""Payloads in memory: with large ones, fewer tasks than the credit allows."""
_FULL_SCAN_SHARE: Final = 200
"""The least time between full scans, as a multiple of how long the last one took.

One passes over the whole backlog, and so does the next turn of each party of it. What comes
meanwhile waits for both.
"""
_MAX_FULL_SCAN_INTERVAL_S: Final = 10.0
_MAX_LINGER_S: Final = 0.03
_FULL_LINGER_RATE_PER_S: Final = 2_000.0
"""The rate from which the linger is at its maximum; at 1,000 a second it is an eighth of that."""
_TURN_LINGER_S: Final = 0.01
"""The longest linger while organisations take turns: one that has little does not gather work."""
_RECLAIM_LINGER_S: Final = 0.005
"""From this linger on, claim again without waiting for a notification."""
_MIN_WAIT_S: Final = 0.005
_CANCEL_GRACE_S: Final = 5.0
_RETRY_S: Final = 0.5
_CLAIM_OUTAGE: Final = "claims of tasks failed"
_LOOK_OUTAGE: Final = "looks for the next due task failed"

_T = TypeVar("_T")


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (StorageUnavailableError, StorageRefusedError) as exc:
        raise BrokerUnavailableError(str(exc)) from exc


class PostgresConsumer:
    """Claim tasks of the PUSH queue."""

    def __init__(
        self,
        url: str,
        *,
        credit: int,
        claim_s: float,
        poll_s: float = POLL_S,
        pacer: BurstPacer | None = None,
    ) -> None:
        self._shares = CreditShares(credit=credit, max_bytes=_MAX_UNSETTLED_BYTES)
        self._claim_s = claim_s
        self._poll_s = poll_s
        self._writer = LogWriter(url, kind="worker", durable=False, isolated=False)
        self._outbox = Outbox(self._writer)
        self._skipped = SkippedOrganisations(self._outbox.have_many_subscriptions)
        self._wake = asyncio.Event()
        self._signals = Notifier(url, listeners={Channel.PUSH: lambda _names: self._wake.set()})
        self._excluded: frozenset[SubscriptionId] = frozenset()
        self._turns = ClaimTurns(
            ClaimWatermarks[ClaimedBatch](CommittedUntil(), slack_us=START_SLACK_US)
        )
        self._rows_of_a_turn = _BATCH
        """As many as the last large claim took in `_TURN_S`."""
        self._pacer = pacer or BurstPacer()
        self._backlog_rests_until = 0.0
        self._is_of_backlog = False
        """The last claim was a backlogged organisation's, or showed that one is backlogged."""
        self._is_last_full = False
        """The last claim was full: what it left is announced by no further wake-up."""
        self._dead_workers: list[int] = []
        self._next_dead_check = 0.0
        self._next_count = 0.0
        """The organisations are counted then, if it matters whether there are several."""
        self._next_full_scan = 0.0

    @property
    def intake_shares(self) -> None:
        """Return None: claims skip an organisation that has its share."""

    @property
    def worker_id(self) -> int:
        """Return the writer id that marks this consumer's claims."""
        return self._writer.id

    @property
    def supports_exclude(self) -> bool:
        """Return True: a claim skips excluded subscriptions."""
        return True

    async def __aenter__(self) -> Self:
        with _translate_errors():
            await self._writer.__aenter__()
        await self._signals.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._signals.__aexit__(*exc)
        await self._writer.close()

    async def batches(self) -> AsyncIterator[Sequence[DeliveryTask]]:
        """Yield batches as they come due, for ever."""
        worker = self._writer.id
        linger = AdaptiveLinger(max_delay_s=_MAX_LINGER_S, saturation_per_s=_FULL_LINGER_RATE_PER_S)
        with _translate_errors():
            while True:
                self._wake.clear()
                started = time.monotonic()
                limit = self._shares.free(_BATCH)
                if limit <= 0:
                    await self._sleep(self._poll_s)
                    continue
                try:
                    claim = await self._run_uncancelled(self._claim(limit, started))
                except StorageRefusedError as exc:
                    # A new session would end the claims of all attempts in progress.
                    if not self._writer.is_connected:
                        raise
                    OUTAGES.record_failure(exc, _CLAIM_OUTAGE)
                    await asyncio.sleep(_RETRY_S)
                    continue
                OUTAGES.record_success(_CLAIM_OUTAGE)
                if self._writer.id != worker:
                    raise BrokerUnavailableError("the connection was lost, and its claims with it")
                if not claim.tasks:
                    if claim.row_count or self._turns.has_backlog:
                        if (rest_s := self._backlog_rest_s(time.monotonic())) > 0:
                            await self._sleep(rest_s)
                        continue
                    await self._sleep(await self._run_uncancelled(self._wait_s(claim)))
                    continue
                self._shares.add(claim.tasks, claim.organisations)
                took_s = time.monotonic() - started
                yield claim.tasks
                await self._pause(claim, linger.next_delay_s(len(claim.tasks), started), took_s)

    async def _pause(self, claim: ClaimedBatch, linger_s: float, took_s: float) -> None:
        """Wait after a claim with tasks, until more are due or worth a claim."""
        has_backlog = self._turns.has_backlog
        if claim.row_count >= _MIN_BATCH:
            if not has_backlog:
                await asyncio.sleep(self._pacer.rest_s(took_s))
            elif self._is_of_backlog:
                # Only its own claims rest: those of others come at once, and whenever they wake.
                # Nor do those extend the rest, or a backlog would wait for as long as they come.
                rest_s = self._pacer.rest_s(took_s * _BACKLOG_REST)
                self._backlog_rests_until = time.monotonic() + rest_s
        several = self._pacer.has_several_organisations
        pause_s = min(_TURN_LINGER_S if several else _MAX_LINGER_S, linger_s)
        if not self._is_last_full and not has_backlog:
            await asyncio.sleep(pause_s)
            # All due tasks are claimed, so the next one notifies.
            if pause_s < _RECLAIM_LINGER_S and not self._wake.is_set():
                await self._sleep(await self._run_uncancelled(self._wait_s(claim)))

    def _backlog_rest_s(self, now_s: float) -> float:
        return self._backlog_rests_until - now_s if self._turns.has_backlog else 0.0

    async def _claim(self, limit: int, now: float) -> ClaimedBatch:
        full_scan = now >= self._next_full_scan
        if now >= self._next_dead_check:
            self._next_dead_check = now + self._poll_s
            known, self._dead_workers = self._dead_workers, await self._outbox.dead_workers()
            full_scan = full_scan or not set(self._dead_workers) <= set(known)
        if now >= self._next_count and (self._turns.has_backlog or self._shares.is_short(limit)):
            self._next_count = now + self._poll_s
            several = await self._outbox.has_several_organisations()
            self._turns.has_several_organisations = self._shares.is_shared = several
        resting = self._turns.resting = self._shares.over_share()
        limit = self._shares.free_for_each(limit)
        if full_scan:
            turn = self._turns.scan_all()
        elif self._backlog_rest_s(now) > 0:
            turn = self._turns.next_of_others()
        else:
            turn = self._turns.next()
        if self._pacer.has_several_organisations:
            limit = min(limit, max(_MIN_BATCH, self._rows_of_a_turn))
            if turn.organisation is not None and self._pacer.is_pacing:
                limit = min(limit, _PACED_BATCH)
        excluded = self._excluded
        resting = resting.difference(turn.excluded)
        skipped = [*turn.excluded, *resting]
        watermarks_us = turn.watermarks.lower_bounds(excluded | resting)
        looks_up_owners = await self._skipped.are_looked_up(
            skipped, now, is_full_scan=turn.watermarks.is_at_start
        )
        claim = await self._outbox.claim(
            limit=limit,
            claim_s=self._claim_s,
            deadline=now + self._claim_s,
            now_ms=time.time_ns() // 1_000_000,
            watermarks_us=watermarks_us,
            dead_workers=self._dead_workers,
            excluded=excluded.union(turn.excluded_subscriptions),
            excluded_organisations=skipped,
            ended=turn.ended,
            looks_up_owners=looks_up_owners,
        )
        if claim.row_count >= _MIN_BATCH:
            took_s = max(0.001, time.monotonic() - now)
            self._rows_of_a_turn = int(claim.row_count * _TURN_S / took_s)
        self._is_last_full = claim.row_count >= limit
        added = self._turns.record(turn, claim, exhausted=not self._is_last_full)
        for organisation in claim.organisations.values():
            backlogged = self._turns.is_backlogged(organisation)
            self._pacer.note(organisation, has_backlog=backlogged)
        self._is_of_backlog = turn.organisation is not None or added is not None
        if full_scan:
            done = time.monotonic()
            self._next_full_scan = done + max(
                self._poll_s, min(_MAX_FULL_SCAN_INTERVAL_S, _FULL_SCAN_SHARE * (done - now))
            )
        return claim

    async def _wait_s(self, claim: ClaimedBatch) -> float:
        try:
            due = await self._outbox.seconds_to_next_due(claim.at_us)
        except StorageRefusedError as exc:
            if not self._writer.is_connected:
                raise
            OUTAGES.record_failure(exc, _LOOK_OUTAGE)
            return self._poll_s
        OUTAGES.record_success(_LOOK_OUTAGE)
        # What comes due next may be skipped: do not claim for each of its tasks.
        least = _MIN_WAIT_S if self._excluded or self._turns.resting else 0.0
        return self._poll_s if due is None else min(max(due, least), self._poll_s)

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    async def _run_uncancelled(self, work: Coroutine[None, None, _T]) -> _T:
        # A cancelled statement would end the session, and with it the claims of all attempts that
        # are under way. So the caller waits for the statement to end.
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task}, timeout=_CANCEL_GRACE_S)
            if not task.done():
                task.cancel()
            elif (
                not task.cancelled()
                and task.exception() is None
                and isinstance(claim := task.result(), ClaimedBatch)
            ):
                with suppress(StorageUnavailableError, StorageRefusedError):
                    await self._outbox.release(claim.tasks)
            raise

    def exclude(self, subscriptions: frozenset[SubscriptionId]) -> None:
        """Leave tasks of these subscriptions in the queue for now."""
        if self._excluded - subscriptions:
            self._wake.set()
        self._excluded = subscriptions

    def take_malformed(self) -> Sequence[MalformedMessage]:
        """Return nothing: rows are always readable."""
        return ()

    async def discard(self, messages: Sequence[MalformedMessage]) -> None:
        """Do nothing: there are no malformed messages."""

    async def settle(self, copies: Sequence[DeliveryTask]) -> None:
        """Return the credit; the outcome has removed the outbox rows."""
        self.forget(copies)

    def forget(self, copies: Sequence[DeliveryTask]) -> None:
        """Return the credit; rows that are still there are claimed again when the claims end."""
        if self._shares.free(_BATCH) <= 0:
            self._wake.set()
        self._shares.discard(copies)
        resting = self._turns.resting
        if resting and resting - self._shares.over_share():
            self._wake.set()

    async def release(self, copies: Sequence[DeliveryTask]) -> None:
        """Release tasks unchanged and at once."""
        # An expired claim may be another worker's by now, or a later one of this worker. One of an
        # earlier session has ended with that.
        now = time.monotonic()
        held = [one for one in copies if one in self._shares and one.deadline > now]
        self.forget(copies)
        with _translate_errors():
            await self._outbox.release(held)
        self._turns.reset()
        self._wake.set()


class PostgresBroker:
    """Serve as broker on the outbox."""

    is_outbox = True
    users: BrokerUsers | None = None

    def __init__(
        self,
        url: str,
        *,
        claim_s: float,
        poll_s: float = POLL_S,
        on_rest: Callable[[float], object] | None = None,
    ) -> None:
        """Keep claims for `claim_s`, and poll every `poll_s` without a notification.

        `on_rest` gets each rest of bulk claims, in seconds.
        """
        self._url = url
        self._on_rest = on_rest
        self._claim_s = claim_s
        self._poll_s = poll_s
        self._writer = LogWriter(url, kind="broker")
        self._outbox = Outbox(self._writer)
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._writer.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closed = True  # or the writer would connect again
        await self._writer.close()

    @contextmanager
    def _while_open(self) -> Iterator[None]:
        if self._closed:
            raise BrokerUnavailableError("this adapter is closed")
        with _translate_errors():
            yield

    async def create_queues(self, subscriptions: Sequence[SubscriptionId]) -> None:
        """Do nothing: a queue is the rows that name it."""

    async def delete_queue(self, subscription: SubscriptionId) -> bool:
        """Purge the queue."""
        await self.purge(room_of(subscription), subscription)
        return True

    async def list_queues(self) -> Sequence[SubscriptionId]:
        """Return nothing: a queue is the rows that name it."""
        return ()

    async def has_sentinel(self) -> bool:
        """Return True: the deliveries and their queue are lost only together."""
        return True

    async def prepare_sentinel(self) -> str:
        """Do nothing: there is no sentinel."""
        return ""

    async def put_sentinel(self, prepared: str) -> bool:  # noqa: ARG002 - of the port
        """Do nothing: no task is lost."""
        return True

    def consume(
        self, *, credit: int, subscription: SubscriptionId | None = None
    ) -> PostgresConsumer:
        """Claim tasks of the PUSH queue. ValueError: PULL leases from the outbox itself."""
        if subscription is not None:
            raise ValueError(
                "with PostgreSQL as broker a PULL subscription is leased from, not consumed"
            )
        return PostgresConsumer(
            self._url,
            credit=credit,
            claim_s=self._claim_s,
            poll_s=self._poll_s,
            pacer=BurstPacer(on_rest=self._on_rest),
        )

    async def send(
        self, copies: Sequence[DeliveryTask], *, not_before: Sequence[datetime]
    ) -> Sequence[RejectedTask]:
        """Queue tasks; one that is outdated or queued already adds nothing."""
        with self._while_open():
            await self._outbox.enqueue(copies, not_before=not_before)
        return ()

    async def depth(self, subscription: SubscriptionId | None) -> int:
        """Return the waiting tasks of a PULL subscription, or (None) of the PUSH queue."""
        with self._while_open():
            return await self._outbox.depth(subscription)

    async def disk_usage(self) -> float | None:
        """Return None: the disk is PostgreSQL's."""
        return None

    async def purge(self, room: RoomId, subscription: SubscriptionId) -> int:
        """Remove the unclaimed tasks of a subscription; return how many there were."""
        with self._while_open():
            return await self._outbox.purge(room, subscription)
