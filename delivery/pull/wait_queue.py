"""Queue the consumers that wait for one key, and share out what a statement leased for them."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from delivery.pull.dispatch import ConsumerHandle, ConsumerState, Dispatcher, Notified
from delivery.pull.name_group import NameGroup
from rooms.domain.ids import KeyId

MAX_BATCH_MESSAGES: Final = 1000
"""The most messages leased for one queue, and by one statement for several queues."""
NOTIFY_TIMEOUT_S: Final = 1.0
"""The time for a notified reader to pull before it is passed over."""

Key = TypeVar("Key", bound=Hashable)
Message = TypeVar("Message")
NotifyName = Hashable


class LeaseRequest(NamedTuple, Generic[Key]):
    """Ask for messages of one queue. `can_wait`: a consumer goes on waiting if there are none.

    `holder`: the API key of the consumers that get the leases.
    """

    key: Key
    max_messages: int
    lease_ms: int
    can_wait: bool
    holder: KeyId | None = None


@dataclass(frozen=True, slots=True)
class LeaseOutcome(Generic[Message]):
    """Hold what a statement leased for one queue.

    `has_more`: there may be more right now. `error`: why its consumers get nothing.
    `more_expected`: something is on its way, and the queue is notified when it comes or is given
    up. `broker_error`: why what is due does not come; polls whose time is up get it.
    """

    messages: Sequence[Message] = ()
    has_more: bool = False
    error: Exception | None = None
    more_expected: bool = False
    broker_error: Exception | None = None


Acquire = Callable[[Sequence[LeaseRequest[Key]]], Awaitable[Sequence[LeaseOutcome[Message]]]]
GiveBack = Callable[[Key, Sequence[Message]], None]


@dataclass(eq=False, slots=True)
class Poll(Generic[Message]):
    """Hold one request that waits; messages are leased for it when its turn comes.

    An `expired` poll ends with whatever the next statement gets.
    """

    max_messages: int
    lease_ms: int
    future: "asyncio.Future[Sequence[Message]]"
    expired: bool
    number: int
    """The order of arrival."""
    holder: KeyId | None = None
    """The API key of its consumer."""
    timer: asyncio.TimerHandle | None = None
    handle: "ConsumerHandle[Consumer[Message]] | None" = None

    def end(self, messages: Sequence[Message]) -> None:
        """Answer it."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.done():
            self.future.set_result(messages)

    def fail(self, error: Exception) -> None:
        """Answer it with an error."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(eq=False, slots=True)
class StreamReader(Generic[Message]):
    """Hold a consumer that stays. When `on_work` is called it pulls until it gets nothing."""

    lease_ms: int
    on_work: Callable[[], None]
    holder: KeyId | None = None
    pending_pull: Poll[Message] | None = None
    """Its current pull."""


Consumer = Poll[Message] | StreamReader[Message]


@dataclass(frozen=True, slots=True)
class BatchOutcome(Generic[Message]):
    """Hold a statement's result: consumers to notify, messages left over, how many were served."""

    notified: Notified[Consumer[Message]]
    undelivered: Sequence[Message]
    served: int


_NOTIFIED_STATES: Final = (ConsumerState.NOTIFIED, ConsumerState.NON_ACQUIRING)


class WaitQueue(Generic[Key, Message]):
    """Hold the consumers of one key, and the statement under way for them."""

    __slots__ = (
        "batch_number",
        "broker_error",
        "busy",
        "dispatcher",
        "exclusive",
        "expired_polls",
        "group",
        "idle_timer",
        "key",
        "more_expected",
        "name",
        "overflow",
        "piggybacked",
        "pulling_readers",
        "served_by_batch",
        "tenant",
        "timer",
    )

    def __init__(
        self,
        key: Key,
        name: NotifyName,
        group: "NameGroup[WaitQueue[Key, Message]]",
        counts: MutableMapping[ConsumerState, int],
        *,
        tenant: Hashable,
        exclusive: bool,
    ) -> None:
        """Open a queue in the group of its name. `tenant`, `exclusive`: see `LeaseBatcher`."""
        self.key = key
        self.name = name
        self.group = group
        self.tenant = tenant
        self.exclusive = exclusive
        self.dispatcher: Dispatcher[Consumer[Message]] = Dispatcher(
            notify_timeout_s=NOTIFY_TIMEOUT_S, total_counts=counts
        )
        self.pulling_readers: dict[ConsumerHandle[Consumer[Message]], None] = {}
        """Readers that pull and are in no statement yet."""
        self.expired_polls: dict[Poll[Message], None] = {}
        """Polls that cannot wait any longer."""
        self.busy = False
        self.served_by_batch: list[ConsumerHandle[Consumer[Message]]] = []
        """Notified consumers that the statement leases for, in their order."""
        self.piggybacked: list[ConsumerHandle[Consumer[Message]]] = []
        """Polls that are next: leasing for them in the same statement costs nothing."""
        self.overflow: list[Poll[Message]] = []
        """Notified polls for which the statement has no room.

        If it finds nothing there is nothing for them.
        """
        self.batch_number = 0
        """Consumers with this number or a higher one came after the statement began."""
        self.more_expected = False
        self.broker_error: Exception | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.idle_timer: asyncio.TimerHandle | None = None
        """Since no consumer can take anything; it may have fired."""

    def has_taker(self) -> bool:
        """Return whether a consumer waits, pulls, or is being served."""
        return bool(
            self.busy
            or self.dispatcher.count(ConsumerState.INTERESTED)
            or self.dispatcher.count(ConsumerState.NOTIFIED)
            or self.pulling_readers
        )

    def stop_idle_timer(self) -> None:
        """Stop it, because a consumer can take something or none is left."""
        if self.idle_timer is not None:
            self.idle_timer.cancel()
            self.idle_timer = None

    def needs_lease(self) -> bool:
        """Return whether a consumer needs a statement."""
        return bool(self.pulling_readers) or next(self._notified_polls(), None) is not None

    def awaits_notify(self) -> bool:
        """Return whether it waits for a notification."""
        waiting = self.dispatcher.count(ConsumerState.INTERESTED) or self.dispatcher.count(
            ConsumerState.NON_ACQUIRING
        )
        return not self.busy and bool(waiting) and not self.needs_lease()

    def select_consumers(self) -> int:
        """Choose the consumers of the next statement; return how many messages they want."""
        notified = [
            *self.pulling_readers,
            *(
                poll.handle
                for poll in itertools.islice(self._notified_polls(), MAX_BATCH_MESSAGES)
                if poll.handle
            ),
        ]
        notified.sort(key=lambda handle: (-handle.priority, pending_poll(handle).number))
        self.served_by_batch, self.piggybacked = notified[:1], []
        first = pending_poll(notified[0])
        total, skipped = first.max_messages, False
        for handle in notified[1:]:
            pull = pending_poll(handle)
            if pull.holder != first.holder and handle.priority == notified[0].priority:
                skipped = True  # the next statement begins with it
                continue
            if (skipped and handle.priority < notified[0].priority) or not _share_a_statement(
                first, pull, total
            ):
                return total
            self.served_by_batch.append(handle)
            total += pull.max_messages
        for handle in () if skipped else self.dispatcher.interested_consumers():
            poll = handle.consumer
            if not isinstance(poll, Poll) or not _share_a_statement(first, poll, total):
                break
            self.piggybacked.append(handle)
            total += poll.max_messages
        return total

    def begin(self, max_messages: int, batch_number: int) -> LeaseRequest[Key]:
        """Begin the chosen statement. Consumers that come later have at least this number."""
        self.busy, self.batch_number = True, batch_number
        for handle in self.served_by_batch:
            self.pulling_readers.pop(handle, None)
            self.dispatcher.on_pull(handle)
        self.overflow = list(self._notified_polls())
        can_wait = self.dispatcher.count(ConsumerState.INTERESTED) + self.dispatcher.count(
            ConsumerState.NOTIFIED
        ) > len(self.expired_polls)
        first = pending_poll(self.served_by_batch[0])
        return LeaseRequest(self.key, max_messages, first.lease_ms, can_wait, first.holder)

    def distribute(self, outcome: LeaseOutcome[Message], now: float) -> "BatchOutcome[Message]":
        """Share out what the statement got, in the order of the consumers."""
        batch = [*self.served_by_batch, *self.piggybacked]
        self.served_by_batch, self.piggybacked = [], []
        self.busy = False
        self.more_expected, self.broker_error = outcome.more_expected, outcome.broker_error
        notified_now: list[ConsumerHandle[Consumer[Message]]] = []
        start = served = 0
        for handle in batch:
            if (pull := _unanswered_poll(handle)) is None:
                continue
            if start < len(outcome.messages):
                notified_now += self._serve(
                    handle, pull, outcome.messages[start : start + pull.max_messages], outcome, now
                )
                start += pull.max_messages
                served += 1
            elif outcome.error is not None:
                notified_now += self._fail(handle, pull, outcome.error, now)
            elif handle.pulling:
                notified_now += self._return_empty(handle, pull, outcome, now)
        notified_now += self._settle_overflow(outcome, now)
        return BatchOutcome(
            [handle for handle in notified_now if handle.state in _NOTIFIED_STATES],
            outcome.messages[start:],
            served,
        )

    def _settle_overflow(
        self, outcome: LeaseOutcome[Message], now: float
    ) -> list[ConsumerHandle[Consumer[Message]]]:
        """Apply the statement's result to the polls for which it had no room."""
        overflow, self.overflow = self.overflow, []
        notified_now: list[ConsumerHandle[Consumer[Message]]] = []
        for poll in overflow:
            if poll.handle is not None and outcome.error is not None:
                notified_now += self._fail(poll.handle, poll, outcome.error, now)
            elif poll.handle is not None and not outcome.has_more:
                notified_now += self.dispatcher.on_nothing_found(poll.handle, now)
        if outcome.has_more:
            notified_now += self.dispatcher.on_work(now)
        elif not outcome.more_expected:
            for poll in [poll for poll in self.expired_polls if poll.number < self.batch_number]:
                notified_now += self.expire(poll, now)
        return notified_now

    def expire(self, poll: Poll[Message], now: float) -> Notified[Consumer[Message]]:
        """End a poll whose time is up, with no messages or the broker's error."""
        if self.broker_error is None:
            poll.end(())
        else:
            poll.fail(self.broker_error)
        return self.remove_poll(poll, now)

    def remove_poll(self, poll: Poll[Message], now: float) -> Notified[Consumer[Message]]:
        """Remove a poll that has its answer or whose client has disconnected."""
        handle, poll.handle = poll.handle, None
        self.expired_polls.pop(poll, None)
        return () if handle is None else self.dispatcher.remove(handle, now)

    def _serve(
        self,
        handle: ConsumerHandle[Consumer[Message]],
        pull: Poll[Message],
        messages: Sequence[Message],
        outcome: LeaseOutcome[Message],
        now: float,
    ) -> Notified[Consumer[Message]]:
        notified_again = handle.state is ConsumerState.NOTIFIED and not handle.pulling
        self.dispatcher.on_served(handle, now)
        # If nothing is left, the work of which it was notified is done.
        notified_now = (
            ()
            if outcome.has_more or notified_again
            else self.dispatcher.on_nothing_found(handle, now)
        )
        pull.end(messages)
        return (
            (*notified_now, *self.remove_poll(pull, now))
            if handle.consumer is pull
            else notified_now
        )

    def _return_empty(
        self,
        handle: ConsumerHandle[Consumer[Message]],
        pull: Poll[Message],
        outcome: LeaseOutcome[Message],
        now: float,
    ) -> Notified[Consumer[Message]]:
        is_poll = handle.consumer is pull
        if outcome.has_more:  # there is something for it that did not fit into the statement
            self.dispatcher.on_served(handle, now)
            if not is_poll:
                self.pulling_readers[handle] = None
            return ()
        if not is_poll:
            pull.end(())
        return self.dispatcher.on_nothing_found(handle, now)

    def _fail(
        self,
        handle: ConsumerHandle[Consumer[Message]],
        pull: Poll[Message],
        error: Exception,
        now: float,
    ) -> Notified[Consumer[Message]]:
        pull.fail(error)
        if handle.consumer is pull:
            return self.remove_poll(pull, now)
        return self.dispatcher.set_not_interested(handle, now)

    def _notified_polls(self) -> Iterator[Poll[Message]]:
        return (
            handle.consumer
            for handle in self.dispatcher.notified_consumers()
            if isinstance(handle.consumer, Poll)
        )


def _share_a_statement(first: Poll[Message], other: Poll[Message], total: int) -> bool:
    """Return whether one statement may lease for both, as its leases are all alike."""
    return (
        first.lease_ms == other.lease_ms
        and first.holder == other.holder
        and total + other.max_messages <= MAX_BATCH_MESSAGES
    )


def pending_poll(handle: ConsumerHandle[Consumer[Message]]) -> Poll[Message]:
    """Return the poll or the reader's current pull."""
    consumer = handle.consumer
    if isinstance(consumer, Poll):
        return consumer
    assert consumer.pending_pull is not None
    return consumer.pending_pull


def _unanswered_poll(handle: ConsumerHandle[Consumer[Message]]) -> Poll[Message] | None:
    """Return the poll or the reader's current pull if it still waits for an answer."""
    consumer = handle.consumer
    pull = consumer if isinstance(consumer, Poll) else consumer.pending_pull
    return None if pull is None or pull.future.done() else pull
