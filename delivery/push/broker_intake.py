"""Claim a broker's messages in PostgreSQL before the push worker gets them as tasks.

A task names a delivery and its version. The delivery's row decides what becomes of the task: the
table is in docs/design/external-broker.md.

The broker may disconnect without effect on attempts. Claims are in PostgreSQL, so attempts go on
and are committed. Tasks that arrive again are found to be claimed by this worker, or ended.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Final, Self

from delivery.brokers.credit_shares import CreditShares
from delivery.push.in_flight_tasks import InFlightTasks
from rooms.burst_pacing import BurstPacer
from rooms.db.queue.broker_claims import BrokerClaims, version_of
from rooms.db.queue.claims import Outbox
from rooms.db.queue.orphans import create_orphan_rows, sideline_unreadable
from rooms.db.writer import LogWriter
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.errors import BrokerUnavailableError, StorageRefusedError, StorageUnavailableError
from rooms.outages import OUTAGES
from rooms.ports import WINDOW_BYTES_PER_TASK, Broker, Consumer, MalformedMessage

_log = logging.getLogger(__name__)

_CONSUME_OUTAGE: Final = "attempts to consume failed"
_CLAIM_OUTAGE: Final = "claims of tasks failed"
_CLAIM_BATCH: Final = 500
_TURN_S: Final = 0.004
"""The time of one claim while processors are short and several rooms have tasks.

The tasks that come next wait for it.
"""
_MIN_BATCH: Final = 20
"""A claim takes this many all the same, as it has costs of its own."""
_TASK_BYTES: Final = 1024
"""About what a task has beside its payload, in the window of the broker."""
_POLL_S: Final = 1.0
"""The interval of checking the sessions of workers with awaited claims, and of this worker."""
_RETRY_S: Final = 0.5
_LINGER_S_AT_1000: Final = 0.01
"""The linger at 1,000 tasks a second; shorter at lower rates, where delay shows."""
_MAX_LINGER_S: Final = 0.03
_TURN_LINGER_S: Final = 0.01
"""The longest linger while several organisations have tasks, as in `delivery.brokers.postgres`."""
_STOP_TIMEOUT_S: Final = 5.0


class BrokerIntakeConsumer:
    """Consume the PUSH queue of a broker, with claims that end with the PostgreSQL session."""

    def __init__(
        self,
        broker: Broker,
        url: str,
        *,
        credit: int,
        claim_s: float,
        on_orphans: Callable[[int, int], None],
        pacer: BurstPacer | None = None,
    ) -> None:
        self._broker = broker
        self._credit = credit
        self._claim_s = claim_s
        self._on_orphans = on_orphans
        self._writer = LogWriter(url, kind="worker", durable=False, isolated=False)
        self._claims = BrokerClaims(self._writer)
        self._outbox = Outbox(self._writer)
        self._in_flight = InFlightTasks()
        self.intake_shares = CreditShares(
            credit=credit,
            max_bytes=credit * WINDOW_BYTES_PER_TASK,
            overhead_bytes=_TASK_BYTES,
        )
        self._pacer = pacer or BurstPacer()
        self._rows_of_a_turn = _CLAIM_BATCH
        """As many as the last large claim took in `_TURN_S`."""
        self._broker_consumer: Consumer | None = None
        self._malformed: list[MalformedMessage] = []
        self._reader_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._next_poll = 0.0
        self._next_count = 0.0
        """The organisations are counted then, if it matters whether there are several."""

    @property
    def worker_id(self) -> int:
        """Return the writer id that marks this consumer's claims."""
        return self._writer.id

    @property
    def supports_exclude(self) -> bool:
        """Return False: the broker cannot skip full lanes, so their tasks must be held."""
        return False

    async def __aenter__(self) -> Self:
        try:
            await self._writer.__aenter__()
        except (StorageUnavailableError, StorageRefusedError) as exc:
            raise BrokerUnavailableError(f"no task can be claimed: {exc}") from exc
        self._reader_task = asyncio.create_task(self._read_loop())
        self._reader_task.add_done_callback(lambda _: self._wake.set())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stop_reading()
        await self._writer.close()

    async def batches(self) -> AsyncIterator[Sequence[DeliveryTask]]:
        """Yield batches of claimed tasks. BrokerUnavailableError: the claims are lost.

        Once this is closed, nothing more is claimed and unsettled messages return to the broker.
        Other workers find them claimed as long as the claims last.
        """
        worker, last = self._writer.id, time.monotonic()
        try:
            while True:
                self._wake.clear()
                self._in_flight.arrived_in_front.clear()
                if self._reader_task is not None and self._reader_task.done():
                    self._reader_task.result()
                started = time.monotonic()
                claimed = await self._shield_statement(self._claim_next(started))
                if self._writer.id != worker:
                    lost = StorageUnavailableError(
                        "the connection was lost, and its claims with it"
                    )
                    raise BrokerUnavailableError(str(lost)) from lost
                if not claimed:
                    await self._wait_for_work()
                    continue
                yield claimed
                elapsed, last = max(started - last, 1e-4), started
                await self._linger(claimed, elapsed)
        finally:
            await self._stop_reading()

    async def _linger(self, claimed: Sequence[DeliveryTask], elapsed_s: float) -> None:
        """Wait for more to claim.

        In a backlog, that is only until something comes that is not behind it. A task that is not,
        and that was locked, is tried again in time.
        """
        if len(claimed) >= _CLAIM_BATCH or self._in_flight.has_received:
            return
        # The broker may hand out a backlog one by one, and a claim for each would cost others more.
        if len(claimed) == 1 and not claimed[0].behind:
            return
        rate_per_s = len(claimed) / elapsed_s
        linger_s = min(_MAX_LINGER_S, rate_per_s * _LINGER_S_AT_1000 / 1000)
        now = time.monotonic()
        if not any(task.behind for task in claimed):
            if self._pacer.has_several_organisations:
                linger_s = min(linger_s, _TURN_LINGER_S)
            await asyncio.sleep(self._in_flight.next_front_claim_in_s(now, linger_s))
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._in_flight.next_front_claim_in_s(now, linger_s)):
                await self._in_flight.arrived_in_front.wait()

    def take_malformed(self) -> Sequence[MalformedMessage]:
        """Return nothing: malformed messages are discarded here."""
        return ()

    async def discard(self, messages: Sequence[MalformedMessage]) -> None:
        """Do nothing, because `take_malformed` returned nothing."""

    def exclude(self, subscriptions: frozenset[SubscriptionId]) -> None:
        """Do nothing: the broker cannot skip subscriptions."""

    async def settle(self, tasks: Sequence[DeliveryTask]) -> None:
        """Settle these tasks and all others of their versions."""
        self.intake_shares.discard(tasks)
        await self._settle_at_broker(self._in_flight.remove(map(version_of, tasks)))

    def forget(self, tasks: Sequence[DeliveryTask]) -> None:
        """Keep the messages, and claim them again when the claims end."""
        self.intake_shares.discard(tasks)
        self._in_flight.forget(map(version_of, tasks))

    async def release(self, tasks: Sequence[DeliveryTask]) -> None:
        """Release claims and messages at once."""
        self.intake_shares.discard(tasks)
        # One from before an outage may be claimed again, and an attempt of that be under way.
        tasks = [task for task in tasks if not self._in_flight.has_later_claim(task)]
        try:
            # A claim that has ended may have a new holder, even this worker.
            if claimed := self._in_flight.still_claimed(tasks, time.monotonic()):
                await self._outbox.release(claimed)
        except (StorageUnavailableError, StorageRefusedError) as exc:
            self.forget(tasks)
            raise BrokerUnavailableError(str(exc)) from exc
        released = self._in_flight.remove(map(version_of, tasks))
        if self._broker_consumer is not None and released:
            with suppress(BrokerUnavailableError):  # then the broker delivers them again by itself
                await self._broker_consumer.release(released)

    async def _read_loop(self) -> None:
        failures = 0
        while True:
            try:
                async with self._broker.consume(credit=self._credit) as source:
                    self._broker_consumer = source
                    OUTAGES.record_success(_CONSUME_OUTAGE)
                    failures = 0
                    async for batch in source.batches():
                        self._in_flight.add(batch)
                        self._malformed += source.take_malformed()
                        self._wake.set()
            except BrokerUnavailableError as exc:
                OUTAGES.record_failure(exc, _CONSUME_OUTAGE)
                failures += 1
            finally:
                self._broker_consumer = None
                self._in_flight.on_disconnect()
                self._malformed.clear()
            await asyncio.sleep(reconnect_pause_s(failures))

    async def _stop_reading(self) -> None:
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.wait({self._reader_task})

    async def _claim_next(self, now: float) -> list[DeliveryTask]:
        """Claim the next tasks and return those that this worker got."""
        claimed: list[DeliveryTask] = []
        try:
            if self._malformed:
                await self._discard_malformed(self._malformed[:_CLAIM_BATCH])
            if now >= self._next_poll:
                self._next_poll = now + _POLL_S
                # Also without awaited workers: an idle worker notices here that its own session is
                # gone.
                self._in_flight.retry_soon(
                    now, await self._claims.dead_workers(self._in_flight.awaited_workers())
                )
            if now >= self._next_count and self.intake_shares.is_short(0):
                self._next_count = now + _POLL_S
                self.intake_shares.is_shared = await self._outbox.has_several_organisations()
            if tasks := self._in_flight.next_to_claim(now, self._claim_limit()):
                claimed = await self._claim_or_wait(tasks, now)
        except StorageRefusedError as exc:
            if not self._writer.is_connected:
                raise BrokerUnavailableError(str(exc)) from exc
            OUTAGES.record_failure(exc, _CLAIM_OUTAGE)
            self._in_flight.retry_claim()
            await asyncio.sleep(_RETRY_S)
        except StorageUnavailableError as exc:
            raise BrokerUnavailableError(str(exc)) from exc
        else:
            OUTAGES.record_success(_CLAIM_OUTAGE)
        return claimed

    def _note_claim(self, tasks: Sequence[DeliveryTask], took_s: float) -> None:
        if len(tasks) >= _MIN_BATCH:
            self._rows_of_a_turn = int(len(tasks) * _TURN_S / max(0.001, took_s))
        for room in {task.room_id for task in tasks}:
            self._pacer.note(room)

    def _claim_limit(self) -> int:
        if not self._pacer.is_pacing:
            return _CLAIM_BATCH
        return min(_CLAIM_BATCH, max(_MIN_BATCH, self._rows_of_a_turn))

    async def _discard_malformed(self, malformed: Sequence[MalformedMessage]) -> None:
        for message in malformed:
            _log.error(
                "discarding a message that is no delivery task (%s): %s %r",
                message.reason,
                dict(message.headers),
                message.body,
            )
        sidelined = await sideline_unreadable(self._writer, malformed)
        self._on_orphans(sidelined, len(malformed) - sidelined)
        del self._malformed[: len(malformed)]
        if self._broker_consumer is not None:
            with suppress(BrokerUnavailableError):  # then the broker delivers them again
                await self._broker_consumer.discard(malformed)

    async def _claim_or_wait(self, tasks: Sequence[DeliveryTask], now: float) -> list[DeliveryTask]:
        claimed, others = await self._claim(tasks, now, dead=())
        if not others:
            return claimed
        try:
            statuses = await self._claims.inspect(others)
            if dead := await self._find_dead_workers(
                {at.claimed_by for at in statuses.values() if at.claimed_by is not None}
            ):
                left_behind = [
                    task for task in others if statuses[version_of(task)].claimed_by in dead
                ]
                more, missed = await self._claim(left_behind, now, dead=dead)
                claimed += more
                got = set(map(version_of, more))
                others = [task for task in others if version_of(task) not in got]
                statuses = {**statuses, **(await self._claims.inspect(missed) if missed else {})}
            orphans = [task for task in others if not statuses[version_of(task)].exists]
            if orphans:
                _log.warning(
                    "%d tasks have no delivery, the first is %s",
                    len(orphans),
                    orphans[0].delivery_id,
                )
                self._on_orphans(*await create_orphan_rows(self._writer, orphans))
        except StorageRefusedError as exc:
            OUTAGES.record_failure(exc, _CLAIM_OUTAGE)
            self._in_flight.retry_claim()
            return claimed
        ended = []
        for task in others:
            status = statuses[version_of(task)]
            if status.wait_s is None:
                ended.append(version_of(task))
            else:
                self._in_flight.on_unavailable(
                    version_of(task), now, status.wait_s, status.claimed_by
                )
        await self._settle_at_broker(self._in_flight.remove(ended))
        return claimed

    async def _claim(
        self, tasks: Sequence[DeliveryTask], now: float, *, dead: Sequence[int]
    ) -> tuple[list[DeliveryTask], list[DeliveryTask]]:
        """Return the tasks that this worker has claimed now, and the others."""
        indexes = await self._claims.claim(
            tasks,
            claim_s=self._claim_s,
            deadline=now + self._claim_s,
            dead_workers=dead,
        )
        self._note_claim(tasks, time.monotonic() - now)
        claimed = [tasks[index] for index in indexes]
        self._in_flight.on_claimed(claimed)
        got = set(indexes)
        return claimed, [task for index, task in enumerate(tasks) if index not in got]

    async def _find_dead_workers(self, workers: frozenset[int] | set[int]) -> list[int]:
        return await self._claims.dead_workers(workers) if workers else []

    async def _settle_at_broker(self, tasks: Sequence[DeliveryTask]) -> None:
        if self._broker_consumer is not None and tasks:
            with suppress(BrokerUnavailableError):  # then they come again, and have ended
                await self._broker_consumer.settle(tasks)

    async def _wait_for_work(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._in_flight.next_claim_in_s(time.monotonic(), _POLL_S)):
                await self._wake.wait()

    async def _shield_statement(
        self, statement: Coroutine[None, None, list[DeliveryTask]]
    ) -> list[DeliveryTask]:
        # Cancelling a statement would close the session, and so end the claims of all attempts in
        # progress. So a cancelled consumer waits for its statement to end.
        task = asyncio.ensure_future(statement)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task}, timeout=_STOP_TIMEOUT_S)
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                with suppress(BrokerUnavailableError):
                    await self.release(task.result())
            raise


def reconnect_pause_s(failures: int) -> float:
    """Return the pause before the next connection, after this many failures in a row."""
    return min(_POLL_S, _RETRY_S * float(2 ** (min(failures, 10) - 2)))


class BrokerIntake:
    """Provide a broker's PUSH queue to `PushWorker`, with claims in PostgreSQL."""

    def __init__(
        self, broker: Broker, url: str, *, claim_s: float, on_orphans: Callable[[int, int], None]
    ) -> None:
        """Configure the intake.

        `url`: of PostgreSQL. `claim_s`: how long a frozen worker keeps its claims. `on_orphans`
        gets the number of orphans that were sidelined, and of those whose subscription is gone.
        """
        self._broker = broker
        self._url = url
        self._claim_s = claim_s
        self._on_orphans = on_orphans

    def consume(self, *, credit: int) -> BrokerIntakeConsumer:
        """Consume with at most `credit` unsettled tasks at a time (an async context manager)."""
        return BrokerIntakeConsumer(
            self._broker,
            self._url,
            credit=credit,
            claim_s=self._claim_s,
            on_orphans=self._on_orphans,
        )
