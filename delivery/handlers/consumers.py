"""Run the consumers of a queue in one process; their number follows the queue's setting.

A handler that is a plain function runs on a thread, one for each busy consumer. The threads are
daemons: a handler that never returns must not keep its process from ending.
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

from delivery.handlers.api import Handler, Message, to_message
from delivery.handlers.magazines import QueueMagazines
from delivery.handlers.outcome import (
    HandlerOutcome,
    HandlerResult,
    MessageSettler,
    SidelineReason,
    outcome_of_error,
    outcomes_of_return,
    timeout_outcome,
)
from rooms.domain.handler_queue import HandlerQueue
from rooms.domain.magazine import MAX_BATCH, Slot, StoredEntry
from rooms.errors import MagazineMissingError, MagazineUnavailableError
from rooms.metrics import Metrics
from rooms.outages import OUTAGES
from rooms.ports import Clock
from rooms.queue_series import M

_log = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""Poll interval: a notification may be lost."""
HUNG_AFTER_S: Final = 20.0
"""Time for which a pool that ends waits for handlers that it has given up."""


class WorkerThread:
    """Run one call at a time on a thread."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[asyncio.Future[object], Callable[[], object]] | None] = (
            SimpleQueue()
        )
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], object]) -> "asyncio.Future[object]":
        """Return a future of the call's result. Cancelling it does not stop the call."""
        future: asyncio.Future[object] = self._loop.create_future()
        self._calls.put((future, call))
        return future

    def stop(self) -> None:
        """End the thread after the calls submitted so far."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            result: object = None
            error: BaseException | None = None
            try:
                result = call()
            except BaseException as exc:  # noqa: BLE001 - the caller gets whatever a handler raises
                error = exc
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_complete_call, future, result, error)


def _complete_call(
    future: "asyncio.Future[object]", result: object, error: BaseException | None
) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:
        future.set_exception(RuntimeError(f"the handler ended with {error!r}"))


class ConsumerPool:
    """Fire no more messages than its free consumers can take, so that none waits in the process.

    `run` lasts until `stop`; then handlers under way end, and a batch that is not full is handled.
    It does not wait for handlers that hang: those that it has given up long ago.
    """

    def __init__(
        self,
        queue: HandlerQueue,
        handler: Handler,
        queue_magazines: QueueMagazines,
        clock: Clock,
        metrics: Metrics,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        self.queue = queue
        self._handler = handler
        self._queue_magazines = queue_magazines
        self._clock = clock
        self._metrics = metrics
        self._poll_s = poll_s
        self._settler = MessageSettler(queue_magazines)
        self._idle_threads: list[WorkerThread] = []
        self._fired: list[StoredEntry] = []
        self._batch_started_at = 0.0
        self._consuming: set[asyncio.Task[None]] = set()
        self._given_up: dict[asyncio.Future[object], float] = {}
        """Calls that took too long and have not ended, and since when: by the clock."""
        self._wake = asyncio.Event()
        self._stopping = False
        self._missing = False
        self._fire_outage = f"reads of the queue {queue.store_name} failed"

    def update(self, queue: HandlerQueue) -> None:
        """Apply changed settings: more consumers start at once, fewer as soon as messages end."""
        self.queue = queue
        self._wake.set()

    def wake(self) -> None:
        """Look for messages now."""
        self._wake.set()

    def stop(self) -> None:
        """Fire no more messages."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Run until stopped and drained. Cancelled, it leaves fired messages to the sweeper.

        MagazineMissingError.
        """
        try:
            while not (self._stopping or self._missing):
                self._wake.clear()
                found = await self._fire_messages()
                idle_s = self._dispatch()
                self._update_metrics()
                if not found and idle_s > 0:
                    await self._wait_for_wake(idle_s)
            while self._consuming or (self._fired and not self._missing):
                self._dispatch()
                if self._consuming:
                    await asyncio.wait(
                        self._consuming,
                        timeout=self._poll_s,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                if self._has_only_hung():
                    _log.warning("handlers of %s do not return", self.queue.store_name)
                    break
            if self._missing:
                raise MagazineMissingError(f"the magazines of {self.queue.store_name} do not exist")
        finally:
            for task in self._consuming:
                task.cancel()
            await asyncio.gather(*self._consuming, return_exceptions=True)
            for thread in self._idle_threads:
                thread.stop()
            self._series(self._metrics.queue_busy_consumers).set(0)
            self._series(self._metrics.queue_consumers).set(0)

    def _has_only_hung(self) -> bool:
        """Return whether each consumer waits for a handler that was given up long ago.

        A thread cannot be ended, and the next pool of the queue waits for the end of this one.
        """
        if not self._consuming or len(self._given_up) < len(self._consuming):
            return False
        return max(self._given_up.values()) <= self._clock.monotonic() - HUNG_AFTER_S

    def _series(self, metric: M, *labels: str) -> M:
        return self._metrics.queue_series.of(metric, self.queue.store_name, *labels)

    @property
    def _batch_size(self) -> int:
        batching = self.queue.settings.batching
        return batching.max_size if self._handler.batch and batching is not None else 1

    @property
    def _free_consumers(self) -> int:
        return self.queue.settings.concurrency - len(self._consuming)

    async def _fire_messages(self) -> bool:
        """Fire as many messages as can be taken; return whether there were any."""
        wanted = min(MAX_BATCH, self._free_consumers * self._batch_size - len(self._fired))
        if wanted <= 0:
            return False
        try:
            fired = await self._queue_magazines.main.fire(wanted)
        except MagazineUnavailableError as exc:
            OUTAGES.record_failure(exc, self._fire_outage)
            return False
        except MagazineMissingError:
            self._missing = True
            return False
        OUTAGES.record_success(self._fire_outage)
        if fired and not self._fired:
            self._batch_started_at = self._clock.monotonic()
        self._fired += fired
        return bool(fired)

    def _dispatch(self) -> float:
        """Start consumers; return the seconds until there may be more to do."""
        size, batching = self._batch_size, self.queue.settings.batching
        now_s = self._clock.monotonic()
        full_by = self._batch_started_at + (
            0.0 if batching is None or size == 1 else batching.max_wait_ms / 1000
        )
        while self._fired and self._free_consumers > 0:
            if len(self._fired) < size and now_s < full_by and not self._stopping:
                return min(self._poll_s, full_by - now_s)
            group, self._fired = self._fired[:size], self._fired[size:]
            self._batch_started_at = now_s
            task = asyncio.create_task(self._consume(group, self._clock.monotonic()))
            self._consuming.add(task)
            task.add_done_callback(self._on_consumer_done)
        return self._poll_s

    def _on_consumer_done(self, task: asyncio.Task[None]) -> None:
        self._consuming.discard(task)
        self._wake.set()
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, MagazineMissingError):
            self._missing = True
        elif error is not None:
            _log.error(
                "a consumer of %s failed; its messages are left to the sweeper",
                self.queue.store_name,
                exc_info=error,
            )

    async def _wait_for_wake(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _consume(self, stored: Sequence[StoredEntry], fired_at: float) -> None:
        readable, unreadable = self._decode_messages(stored)
        thread = None if inspect.iscoroutinefunction(self._handler.call) else self._take_thread()
        try:
            if unreadable:
                outcome = HandlerOutcome(
                    result=HandlerResult.SIDELINED,
                    reason=SidelineReason.UNREADABLE,
                    detail="the body is not JSON",
                )
                await self._settle(
                    [one for one, _ in unreadable], [outcome] * len(unreadable), fired_at
                )
            if readable:
                await self._call_handler(
                    [one for one, _ in readable],
                    [message for _, message in readable],
                    thread,
                    fired_at,
                )
        finally:
            if thread is not None:
                self._idle_threads.append(thread)

    def _take_thread(self) -> WorkerThread:
        return (
            self._idle_threads.pop()
            if self._idle_threads
            else WorkerThread(f"handler {self.queue.store_name}")
        )

    def _decode_messages(
        self, stored: Sequence[StoredEntry]
    ) -> tuple[list[tuple[StoredEntry, Message]], list[tuple[StoredEntry, None]]]:
        readable: list[tuple[StoredEntry, Message]] = []
        unreadable: list[tuple[StoredEntry, None]] = []
        for one in stored:
            try:
                readable.append((one, to_message(self.queue.name, one)))
            except (ValueError, RecursionError):
                unreadable.append((one, None))
        return readable, unreadable

    async def _call_handler(
        self,
        stored: Sequence[StoredEntry],
        messages: Sequence[Message],
        thread: WorkerThread | None,
        fired_at: float,
    ) -> None:
        argument = messages if self._handler.batch else messages[0]
        call = self._handler.call
        work: asyncio.Future[object] = (
            asyncio.ensure_future(call(argument))
            if thread is None
            else thread.submit(lambda: call(argument))
        )
        # A handler must time out before the sweeper takes its message for stuck.
        limit_s = min(self._handler.timeout_s, self.queue.stuck_after_s / 2)
        try:
            await asyncio.wait({work}, timeout=limit_s)
            if work.done():
                await self._settle(stored, self._to_outcomes(work, len(stored)), fired_at)
                return
            slots = await self._settle(stored, [timeout_outcome(limit_s)] * len(stored), fired_at)
            if thread is None:
                work.cancel()
            # A thread cannot be ended: its consumer is busy until it returns.
            self._given_up[work] = self._clock.monotonic()
            await asyncio.wait({work})
            del self._given_up[work]
            await self._handle_late_result(work, slots)
        finally:
            self._given_up.pop(work, None)
            work.cancel()

    def _to_outcomes(self, call: "asyncio.Future[object]", count: int) -> Sequence[HandlerOutcome]:
        if call.cancelled():
            return [
                HandlerOutcome(
                    result=HandlerResult.SIDELINED, reason=SidelineReason.RAISED, detail="cancelled"
                )
            ] * count
        error = call.exception()
        if error is not None:
            return [outcome_of_error(error, self._handler.ignorable)] * count
        return outcomes_of_return(call.result(), count)

    async def _handle_late_result(
        self, call: "asyncio.Future[object]", slots: Sequence[Slot | None]
    ) -> None:
        """Remove messages from the sideline that were handled after their timeout."""
        if call.cancelled():
            return
        outcomes = self._to_outcomes(call, len(slots))
        done = [
            slot
            for slot, outcome in zip(slots, outcomes, strict=True)
            if slot is not None and outcome.result is not HandlerResult.SIDELINED
        ]
        if done and (count := await self._settler.remove_from_sideline(done)):
            self._series(self._metrics.queue_handled, "late").inc(count)

    async def _settle(
        self, stored: Sequence[StoredEntry], outcomes: Sequence[HandlerOutcome], fired_at: float
    ) -> Sequence[Slot | None]:
        held_s = self._clock.monotonic() - fired_at
        _, slots = await self._settler.settle(
            stored, outcomes, held_for_s=held_s, stuck_s=self.queue.stuck_after_s
        )
        for outcome in outcomes:
            self._series(self._metrics.queue_handled, outcome.result.value).inc()
        return slots

    def _update_metrics(self) -> None:
        self._series(self._metrics.queue_busy_consumers).set(len(self._consuming))
        self._series(self._metrics.queue_consumers).set(self.queue.settings.concurrency)
