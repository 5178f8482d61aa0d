"""Decide which consumer of a queue is notified of work: pure decisions, no I/O, all steps O(1).

A consumer is in the set of all consumers, and in one of four others:

    NOT_INTERESTED ──interested──► INTERESTED ──notified──► NOTIFIED ──nothing found──► INTERESTED
          ▲                            │                        │                      (at the end)
          └── no credit, no room, notified and did not pull ────┘

    NOT_INTERESTED ◄──► NON_ACQUIRING, for a browser

Work is anything that may be there to take: a new message, one that is free again, or more than one
consumer could take. One piece of work notifies one consumer: of the highest priority that is
interested, the one that has waited longest. A notified consumer pulls until it finds nothing or is
not interested any more; then the rest is left to the next one. After every step, if there may be
work and a consumer is interested, a consumer is notified. No consumer is notified of a queue that
is known to be empty.

    event                            notified
    work                             the first interested consumer; if all are notified already,
                                     the work is pending: a consumer whose pull began earlier
                                     and finds nothing pulls again
    a consumer becomes interested    the first interested one, unless the queue is known to be
                                     empty
    a notified consumer stops being  the next one, which may have a lower priority
      interested, leaves, or does
      not pull in time
    a notified consumer finds        none, unless work is pending
      nothing

Browsers take nothing: all of them are notified of all work. The caller passes the time, in seconds.
"""

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping, Sequence
from enum import StrEnum
from typing import Final, Generic, TypeVar

CONSUMER_PRIORITIES: Final = 10
"""From 0 to 9; 9 goes first."""

C = TypeVar("C")


class ConsumerState(StrEnum):
    """Name the set a consumer is in, beside the set of all."""

    NON_ACQUIRING = "non_acquiring"
    NOT_INTERESTED = "not_interested"
    INTERESTED = "interested"
    NOTIFIED = "notified"


class ConsumerHandle(Generic[C]):
    """Hold the state of one consumer. Only the dispatcher writes to it."""

    __slots__ = ("acquiring", "consumer", "group", "priority", "pulling", "since", "state")

    def __init__(self, consumer: C, *, priority: int, acquiring: bool) -> None:
        self.consumer = consumer
        self.priority = priority
        self.acquiring = acquiring
        self.state = ConsumerState.NOT_INTERESTED
        self.pulling = False
        """It has begun to pull since it was notified."""
        self.since = 0.0
        """The time at which it was notified, or last got something."""
        self.group: _Group[C] | None = None
        """The ordered set it is in, beside the set of all."""


_Group = OrderedDict[ConsumerHandle[C], None]
"""An ordered set in which the first consumer is found, and any is removed, in O(1)."""

Notified = Sequence[ConsumerHandle[C]]
"""The consumers to notify now: at most one, and the browsers."""


class Dispatcher(Generic[C]):
    """Keep the consumers of one queue. Each event returns the consumers to notify because of it."""

    def __init__(
        self,
        *,
        notify_timeout_s: float,
        total_counts: MutableMapping[ConsumerState, int] | None = None,
    ) -> None:
        """Pass over a notified consumer that does not pull within `notify_timeout_s`.

        `total_counts` counts the consumers of several dispatchers.
        """
        self._notify_timeout_s = notify_timeout_s
        self._total_counts: MutableMapping[ConsumerState, int] = (
            dict.fromkeys(ConsumerState, 0) if total_counts is None else total_counts
        )
        self._counts = dict.fromkeys(ConsumerState, 0)
        self._all: _Group[C] = OrderedDict()
        self._browsing: _Group[C] = OrderedDict()
        self._not_interested: _Group[C] = OrderedDict()
        self._interested: list[_Group[C]] = [OrderedDict() for _ in range(CONSUMER_PRIORITIES)]
        self._notified: list[_Group[C]] = [OrderedDict() for _ in range(CONSUMER_PRIORITIES)]
        self._pulling: _Group[C] = OrderedDict()
        self._is_empty = False
        self._work_pending = False

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[C]:
        return (handle.consumer for handle in self._all)

    @property
    def is_empty(self) -> bool:
        """Return whether the last pull found nothing and no work has come since."""
        return self._is_empty

    def count(self, state: ConsumerState) -> int:
        """Return the number of consumers in a set."""
        return self._counts[state]

    def notified_consumers(self) -> Iterator[ConsumerHandle[C]]:
        """Yield notified consumers that have not begun to pull, the highest priority first."""
        return _by_priority(self._notified)

    def interested_consumers(self) -> Iterator[ConsumerHandle[C]]:
        """Yield interested consumers in the order in which they will be notified."""
        return _by_priority(self._interested)

    def top_notified_priority(self) -> int:
        """Return the highest priority among notified consumers; -1 if there are none."""
        found = max(
            (level for level in range(CONSUMER_PRIORITIES) if self._notified[level]), default=-1
        )
        return max(found, next(iter(self._pulling)).priority) if self._pulling else found

    def add(self, consumer: C, *, priority: int = 0, acquiring: bool = True) -> ConsumerHandle[C]:
        """Add a consumer, which is not interested yet."""
        handle = ConsumerHandle(consumer, priority=priority, acquiring=acquiring)
        self._all[handle] = None
        self._add_to_count(ConsumerState.NOT_INTERESTED, 1)
        self._not_interested[handle] = None
        handle.group = self._not_interested
        return handle

    def remove(self, handle: ConsumerHandle[C], now: float) -> Notified[C]:
        """Remove a consumer."""
        notified = self.set_not_interested(handle, now)
        del self._not_interested[handle]
        handle.group = None
        self._add_to_count(ConsumerState.NOT_INTERESTED, -1)
        del self._all[handle]
        return notified

    def force_notify(self, handle: ConsumerHandle[C], now: float) -> Notified[C]:
        """Notify a consumer even of an empty queue; those interested for longer go first."""
        notified = self.on_work(now)
        if handle.state is not ConsumerState.NOTIFIED:
            self._notify_consumer(handle, now)
        return notified

    def set_interested(self, handle: ConsumerHandle[C], now: float) -> Notified[C]:
        """Record that a consumer can take again.

        A browser is notified at once: there may be messages that it has not seen.
        """
        if handle.state is not ConsumerState.NOT_INTERESTED:
            return ()
        if not handle.acquiring:
            self._set_state(handle, ConsumerState.NON_ACQUIRING, self._browsing)
            return (handle,)
        self._set_state(handle, ConsumerState.INTERESTED, self._interested[handle.priority])
        return () if self._is_empty else self._notify(now)

    def set_not_interested(self, handle: ConsumerHandle[C], now: float) -> Notified[C]:
        """Record that a consumer can take nothing: no credit, or its client does not read."""
        was_notified = handle.state is ConsumerState.NOTIFIED
        if handle.state is not ConsumerState.NOT_INTERESTED:
            self._set_state(handle, ConsumerState.NOT_INTERESTED, self._not_interested)
        return self._notify(now) if was_notified else ()

    def on_work(self, now: float) -> Notified[C]:
        """Record that there is, or may be, something to take."""
        self._is_empty = False
        notified = self._notify(now)
        if not notified and self.count(ConsumerState.NOTIFIED):
            self._work_pending = True
        return (*notified, *self._browsing) if self._browsing else notified

    def on_pull(self, handle: ConsumerHandle[C]) -> None:
        """Record that a consumer begins to pull; it sees all work so far."""
        if handle.state is ConsumerState.NOTIFIED and handle.pulling:
            return
        self._set_state(handle, ConsumerState.NOTIFIED, self._pulling)
        handle.pulling = True
        self._work_pending = False

    def on_served(self, handle: ConsumerHandle[C], now: float) -> None:
        """Record that a consumer got something and will pull again."""
        self._notify_consumer(handle, now)

    def on_nothing_found(self, handle: ConsumerHandle[C], now: float) -> Notified[C]:
        """Move a consumer whose pull found nothing to the end of the interested ones."""
        if handle.state is not ConsumerState.NOTIFIED:
            return ()
        self._set_state(handle, ConsumerState.INTERESTED, self._interested[handle.priority])
        if self._work_pending:
            return self._notify(now)
        self._is_empty = not self.count(ConsumerState.NOTIFIED)
        return ()

    def drop_overdue(self, now: float) -> Notified[C]:
        """Set consumers that did not pull in time to not interested, and notify others."""
        notified: list[ConsumerHandle[C]] = []
        for level in self._notified:
            while level and (handle := next(iter(level))).since + self._notify_timeout_s <= now:
                notified += self.set_not_interested(handle, now)
        return [handle for handle in notified if handle.state is ConsumerState.NOTIFIED]

    def next_overdue(self) -> float | None:
        """Return when to call `drop_overdue` next; None if no consumer can become overdue."""
        times = [next(iter(level)).since for level in self._notified if level]
        return min(times) + self._notify_timeout_s if times else None

    def _notify(self, now: float) -> Notified[C]:
        for level in reversed(self._interested):
            if level:
                handle = next(iter(level))
                self._work_pending = False
                self._notify_consumer(handle, now)
                return (handle,)
        return ()

    def _notify_consumer(self, handle: ConsumerHandle[C], now: float) -> None:
        self._set_state(handle, ConsumerState.NOTIFIED, self._notified[handle.priority])
        handle.since = now

    def _set_state(self, handle: ConsumerHandle[C], state: ConsumerState, to: _Group[C]) -> None:
        if handle.group is not None:
            del handle.group[handle]
        self._add_to_count(handle.state, -1)
        self._add_to_count(state, 1)
        handle.state = state
        handle.pulling = False
        handle.group = to
        to[handle] = None

    def _add_to_count(self, state: ConsumerState, change: int) -> None:
        self._counts[state] += change
        self._total_counts[state] += change


def _by_priority(levels: Sequence[_Group[C]]) -> Iterator[ConsumerHandle[C]]:
    for level in reversed(levels):
        yield from level
