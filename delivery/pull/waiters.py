"""Hold consumers that wait for messages, in one wait queue per key.

A notified poll is leased for at once: one statement serves all of them, together with the polls
next in line and with other queues. So a wake-up costs one statement however many polls wait. Only
polls that got something, or whose time is up, end. Readers are notified and come to pull. A queue
that was found empty waits for a notification. While something is on its way to a queue, polls that
cannot wait stay until the source reports how that ended.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Generic, Self

from delivery.pull.dispatch import ConsumerHandle, ConsumerState, Notified
from delivery.pull.lease_batcher import LeaseBatch, LeaseBatcher
from delivery.pull.name_group import IDLE, NameGroup
from delivery.pull.wait_queue import (
    NOTIFY_TIMEOUT_S,
    Acquire,
    Consumer,
    GiveBack,
    Key,
    Message,
    NotifyName,
    Poll,
    StreamReader,
    WaitQueue,
)
from rooms.domain.ids import KeyId

LINGER_S: Final = 0.001
"""The time a statement waits for more consumers when they are likely."""
NO_TAKER_S: Final = 1.0
"""After so long without a consumer that can take something, others get what the source holds.

A stream whose client works on one message at a time is back sooner, as a rule.
"""


class Waiters(Generic[Key, Message]):
    """Serve wait queues through `acquire`, at most `max_in_flight` calls at a time.

    Leaving the context ends every poll and pull with nothing, after the statements under way.
    `give_back` gets messages that were leased for consumers that have gone.
    """

    def __init__(
        self,
        acquire: Acquire[Key, Message],
        *,
        name: Callable[[Key], NotifyName],
        give_back: GiveBack[Key, Message],
        on_empty: Callable[[Key], None],
        max_in_flight: int,
        tenant: Callable[[Key], Hashable] = lambda _: None,
        exclusive: Callable[[Key], bool] = lambda _: False,
    ) -> None:
        """Index queues by `name`, which is what notifications carry; several keys may share one.

        `on_empty` is called when no consumer is left in a queue, and when none could take anything
        for `NO_TAKER_S`: streams without credit, and those that browse. `tenant`, `exclusive`: see
        `LeaseBatcher`.
        """
        self._on_empty = on_empty
        self._name = name
        self._tenant = tenant
        self._exclusive = exclusive
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._queues: dict[Key, WaitQueue[Key, Message]] = {}
        self._groups: dict[NotifyName, NameGroup[WaitQueue[Key, Message]]] = {}
        self._batcher = LeaseBatcher(acquire, max_in_flight=max_in_flight)
        self._start_timer: asyncio.Handle | None = None
        self._running: set[asyncio.Task[None]] = set()
        """Statements."""
        self._closing = False
        self._counts = dict.fromkeys(ConsumerState, 0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every poll and pull: with what is being leased for it, or nothing."""
        self._closing = True
        self._batcher.clear()
        while self._running:
            await asyncio.wait(self._running)
        for queue in list(self._queues.values()):
            if queue.timer is not None:
                queue.timer.cancel()
            for consumer in list(queue.dispatcher):
                if isinstance(consumer, Poll):
                    consumer.end(())
                    queue.remove_poll(consumer, self._loop.time())
                elif consumer.pending_pull is not None:
                    consumer.pending_pull.end(())
            self._remove_if_empty(queue)

    @property
    def counts(self) -> Mapping[ConsumerState, int]:
        """Return how many consumers are in each state, over all queues."""
        return self._counts

    def add_poll(
        self,
        key: Key,
        *,
        max_messages: int,
        lease_ms: int,
        wait_s: float,
        priority: int = 0,
        holder: KeyId | None = None,
    ) -> Poll[Message]:
        """Add a poll of a consumer with the API key `holder`.

        Its `future` gets the messages, none when `wait_s` is over, or the error of the lease
        statement.
        """
        poll: Poll[Message] = Poll(
            max_messages,
            lease_ms,
            self._loop.create_future(),
            expired=wait_s <= 0,
            number=self._batcher.arrive(),
            holder=holder,
        )
        if self._closing:
            poll.end(())
            return poll
        queue = self._queue_for(key)
        handle = poll.handle = queue.dispatcher.add(poll, priority=priority)
        now = self._loop.time()
        self._dispatch(queue, queue.dispatcher.set_interested(handle, now))
        if poll.expired:
            queue.expired_polls[poll] = None
            self._dispatch(queue, queue.dispatcher.force_notify(handle, now))
        else:
            poll.timer = self._loop.call_later(wait_s, self._on_poll_timeout, queue, poll)
        return poll

    def remove_poll(self, key: Key, poll: Poll[Message]) -> None:
        """Remove a poll whose client has disconnected, and give back what it got."""
        self._give_back_pull(key, poll)
        poll.end(())
        queue = self._queues.get(key)
        if queue is not None:
            self._dispatch(queue, queue.remove_poll(poll, self._loop.time()))
            self._remove_if_empty(queue)

    def end_poll(self, key: Key, poll: Poll[Message], error: Exception | None) -> None:
        """Answer a waiting poll with an error, or nothing. One that has its answer keeps it."""
        if poll.future.done():
            return
        if error is None:
            poll.end(())
        else:
            poll.fail(error)
        self.remove_poll(key, poll)

    def add_reader(
        self,
        key: Key,
        *,
        lease_ms: int,
        wake: Callable[[], None],
        priority: int = 0,
        acquiring: bool = True,
        holder: KeyId | None = None,
    ) -> ConsumerHandle[Consumer[Message]]:
        """Add a reader with the API key `holder`.

        It is not interested yet, and stays until it is removed.
        """
        reader: StreamReader[Message] = StreamReader(lease_ms, wake, holder)
        return self._queue_for(key).dispatcher.add(reader, priority=priority, acquiring=acquiring)

    def remove_reader(self, key: Key, handle: ConsumerHandle[Consumer[Message]]) -> None:
        """Remove a reader, and give back what was just leased for it."""
        queue = self._queues[key]
        reader = handle.consumer
        if isinstance(reader, StreamReader) and reader.pending_pull is not None:
            self._give_back_pull(key, reader.pending_pull)
            reader.pending_pull.end(())
            reader.pending_pull = None
        queue.pulling_readers.pop(handle, None)
        self._dispatch(queue, queue.dispatcher.remove(handle, self._loop.time()))
        self._remove_if_empty(queue)

    def set_interest(
        self, key: Key, handle: ConsumerHandle[Consumer[Message]], *, interested: bool
    ) -> None:
        """Record whether the reader can take something."""
        queue, now = self._queues[key], self._loop.time()
        if interested:
            self._dispatch(queue, queue.dispatcher.set_interested(handle, now))
        elif handle not in queue.pulling_readers and not handle.pulling:
            self._dispatch(queue, queue.dispatcher.set_not_interested(handle, now))

    async def pull(
        self, key: Key, handle: ConsumerHandle[Consumer[Message]], max_messages: int
    ) -> Sequence[Message]:
        """Return up to so many messages for the reader; none: wait for a notification.

        One pull at a time.
        """
        queue, reader = self._queues[key], handle.consumer
        if self._closing or not isinstance(reader, StreamReader):
            return ()
        pull = reader.pending_pull = Poll[Message](
            max_messages,
            reader.lease_ms,
            self._loop.create_future(),
            expired=False,
            number=self._batcher.arrive(),
            holder=reader.holder,
        )
        queue.dispatcher.on_served(handle, self._loop.time())
        queue.pulling_readers[handle] = None
        self._dispatch(queue, ())
        messages = await pull.future  # if this is cancelled, `remove_reader` gives back what came
        reader.pending_pull = None
        return messages

    def notify(self, names: Iterable[NotifyName] | None) -> None:
        """Notify the queues of these names (None: all) that there may be messages."""
        now = self._loop.time()
        queues = (
            self._queues.values()
            if names is None
            else [queue for name in names for queue in self._groups.get(name, ())]
        )
        for queue in queues:
            self._dispatch(queue, queue.dispatcher.on_work(now))

    def notify_matching(self, matches: Callable[[Key], bool]) -> None:
        """Notify the queues of these keys that there may be messages."""
        now = self._loop.time()
        for key, queue in self._queues.items():
            if matches(key):
                self._dispatch(queue, queue.dispatcher.on_work(now))

    def waiting_keys(self) -> list[Key]:
        """Return the keys of the queues that wait for a notification."""
        return [queue.key for queue in self._queues.values() if queue.awaits_notify()]

    def _queue_for(self, key: Key) -> WaitQueue[Key, Message]:
        queue = self._queues.get(key)
        if queue is None:
            name = self._name(key)
            group = self._groups.setdefault(name, NameGroup())
            queue = WaitQueue(
                key,
                name,
                group,
                self._counts,
                tenant=self._tenant(key),
                exclusive=self._exclusive(key),
            )
            self._queues[key] = queue
            group.add(queue)
            for member in group if len(group) == 2 else ():  # noqa: PLR2004 - the first one had no other
                self._record_priority(member)
        return queue

    def _dispatch(
        self, queue: WaitQueue[Key, Message], notified: Notified[Consumer[Message]]
    ) -> None:
        for handle in notified:
            if isinstance(handle.consumer, StreamReader):
                handle.consumer.on_work()
                self._start_notify_timer(queue)
        if not queue.busy and not self._closing:
            if queue.needs_lease():
                self._batcher.add(queue)
                self._schedule_start()
            elif self._batcher.discard(queue):
                self._schedule_start()  # another one may have had to wait for it
        if len(queue.group) > 1:
            self._record_priority(queue)
        if queue.has_taker() or not len(queue.dispatcher):
            queue.stop_idle_timer()
        elif queue.idle_timer is None:
            queue.idle_timer = self._loop.call_later(NO_TAKER_S, self._on_no_taker, queue)

    def _on_no_taker(self, queue: WaitQueue[Key, Message]) -> None:
        """Let the source give back what it holds for the queue, until a consumer can take it."""
        if not self._closing:
            # What is given back is not announced again.
            queue.dispatcher.on_work(self._loop.time())
            self._on_empty(queue.key)

    def _record_priority(self, queue: WaitQueue[Key, Message]) -> None:
        leases = queue.busy or self._batcher.is_queued(queue)
        queue.group.record(queue, queue.dispatcher.top_notified_priority() if leases else IDLE)

    def _schedule_start(self) -> None:
        if not self._batcher.should_linger:
            if self._start_timer is not None:
                self._start_timer.cancel()
            # What arrives in the same turn of the loop shares the statement.
            self._start_timer = self._loop.call_soon(self._start)
        elif self._start_timer is None:
            self._start_timer = self._loop.call_later(LINGER_S, self._start)

    def _start(self) -> None:
        self._start_timer = None
        if self._closing:
            return
        for batch in self._batcher.next_batches():
            task = self._loop.create_task(self._lease(batch))
            self._running.add(task)
            task.add_done_callback(partial(self._on_lease_end, batch))

    async def _lease(self, batch: LeaseBatch[Key, Message]) -> None:
        outcomes = await self._batcher.run(batch)
        for queue, outcome in self._batcher.distribute(batch, outcomes):
            if outcome.undelivered:
                self._give_back(queue.key, outcome.undelivered)
            self._dispatch(queue, outcome.notified)
            self._remove_if_empty(queue)

    def _on_lease_end(self, batch: LeaseBatch[Key, Message], task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._batcher.end(batch)
        if self._batcher:
            self._schedule_start()

    def _on_poll_timeout(self, queue: WaitQueue[Key, Message], poll: Poll[Message]) -> None:
        poll.expired = True
        if queue.busy or queue.more_expected or self._batcher.is_queued(queue):
            queue.expired_polls[poll] = None
            return
        self._dispatch(queue, queue.expire(poll, self._loop.time()))
        self._remove_if_empty(queue)

    def _on_notify_timeout(self, queue: WaitQueue[Key, Message]) -> None:
        """Pass over readers that were notified and did not pull, and notify others."""
        queue.timer = None
        if not queue.busy and not queue.needs_lease():
            self._dispatch(queue, queue.dispatcher.drop_overdue(self._loop.time()))
        self._start_notify_timer(queue)

    def _start_notify_timer(self, queue: WaitQueue[Key, Message]) -> None:
        if queue.timer is None and queue.dispatcher.next_overdue() is not None:
            queue.timer = self._loop.call_later(NOTIFY_TIMEOUT_S, self._on_notify_timeout, queue)

    def _give_back_pull(self, key: Key, pull: Poll[Message]) -> None:
        future = pull.future
        if (
            future.done()
            and not future.cancelled()
            and future.exception() is None
            and (messages := future.result())
        ):
            self._give_back(key, messages)

    def _remove_if_empty(self, queue: WaitQueue[Key, Message]) -> None:
        if len(queue.dispatcher) or queue.busy:
            return
        if self._batcher.discard(queue):
            self._schedule_start()
        if queue.timer is not None:
            queue.timer.cancel()
        queue.stop_idle_timer()
        if self._queues.pop(queue.key, None) is not None:
            queue.group.remove(queue)
            if not queue.group:
                del self._groups[queue.name]
            self._on_empty(queue.key)
