"""The consumers of one queue, and who of them is told when there is work: decisions alone, no I/O, every step O(1).

A consumer stands among all, and in one of four sets:

    NOT_INTERESTED ──interested──► INTERESTED ──notified──► NOTIFIED ──nothing more there──► the end of INTERESTED
          ▲                            │                        │
          └── no credit, no room, left too long without coming ─┘      (a browser: NOT_INTERESTED ◄──► NON_ACQUIRING)

Work is what may be there to take: a message that is new, or free again; more than somebody could take. One piece of
work notifies one consumer: of those with the highest priority, the one who has been interested longest. Who is notified
pulls until there is nothing, or until it is not interested any more; then what is left is another one's. So, after
every step: where there may be work and somebody is interested, somebody is notified; and nobody is told where it is
known that there is nothing.

    what happens                                 who is notified
    work                                         the first who is interested; if all of them are already, it is owed:
                                                 whoever finds nothing in a pull that began before it pulls again
    one becomes interested                       the first who is, unless it is known that nothing is there
    a notified one ceases to be interested,      the next one, which may have a lower priority
      leaves, or lets its time pass
    a notified one finds nothing                 nobody, unless work is owed

Browsers take nothing: all of them are told of all work. Times are the caller's, in seconds.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from enum import StrEnum
from typing import Final, Generic, TypeVar

from rooms.pulling.chain import Chain, Link

PRIORITIES: Final = 10
"""From 0 to 9, and 9 goes first."""

C = TypeVar("C")


class Stand(StrEnum):
    """In which set a consumer stands, beside the set of all."""

    NON_ACQUIRING = "non_acquiring"
    NOT_INTERESTED = "not_interested"
    INTERESTED = "interested"
    NOTIFIED = "notified"


class Member(Link, Generic[C]):
    """A consumer's place. `stand` and `pulling` are to be read alone."""

    __slots__ = ("acquiring", "consumer", "priority", "pulling", "since", "stand", "ticket")

    def __init__(self, consumer: C, *, priority: int, acquiring: bool) -> None:
        super().__init__()
        self.consumer = consumer
        self.priority = priority
        self.acquiring = acquiring
        self.stand = Stand.NOT_INTERESTED
        self.pulling = False
        """It has come to take, since it was notified."""
        self.since = 0.0
        """When it was notified, or got something for the last time."""
        self.ticket = Ticket(self)


class Ticket(Link, Generic[C]):
    """A member's link among all."""

    __slots__ = ("member",)

    def __init__(self, member: Member[C]) -> None:
        super().__init__()
        self.member = member


Woken = Sequence[Member[C]]
"""Who is told now: one at most, and the browsers."""


class Roster(Generic[C]):
    """The consumers of one queue. Each method does what its name says and returns who is to be told because of it."""

    def __init__(self, *, patience_s: float, tally: MutableMapping[Stand, int] | None = None) -> None:
        """Who is notified and does not come for so long is passed over. `tally` counts those of several rosters."""
        self._patience_s = patience_s
        self._tally: MutableMapping[Stand, int] = dict.fromkeys(Stand, 0) if tally is None else tally
        self._sizes = dict.fromkeys(Stand, 0)
        self._all: Chain[Ticket[C]] = Chain()
        self._browsing: Chain[Member[C]] = Chain()
        self._not_interested: Chain[Member[C]] = Chain()
        self._interested: list[Chain[Member[C]]] = [Chain() for _ in range(PRIORITIES)]
        self._called: list[Chain[Member[C]]] = [Chain() for _ in range(PRIORITIES)]
        self._pulling: Chain[Member[C]] = Chain()
        self._dry = False
        self._owed = False

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[C]:
        return (ticket.member.consumer for ticket in self._all)

    @property
    def dry(self) -> bool:
        """Whoever looked last found nothing, and nothing has happened since."""
        return self._dry

    def size(self, stand: Stand) -> int:
        """How many stand in a set."""
        return self._sizes[stand]

    def called(self) -> Iterator[Member[C]]:
        """Who is notified and has not come, the highest priority first."""
        return _down(self._called)

    def waiting(self) -> Iterator[Member[C]]:
        """Who is interested, in the order in which they will be notified."""
        return _down(self._interested)

    def top(self) -> int:
        """The highest priority of those who are notified; -1 where nobody is."""
        found = max((level for level in range(PRIORITIES) if self._called[level].first is not None), default=-1)
        return max(found, self._pulling.first.priority if self._pulling.first is not None else -1)

    def add(self, consumer: C, *, priority: int = 0, acquiring: bool = True) -> Member[C]:
        """A new consumer, not interested yet."""
        member = Member(consumer, priority=priority, acquiring=acquiring)
        self._all.append(member.ticket)
        self._count(Stand.NOT_INTERESTED, 1)
        self._not_interested.append(member)
        return member

    def remove(self, member: Member[C], now: float) -> Woken[C]:
        """It has gone."""
        woken = self.not_interested(member, now)
        self._not_interested.remove(member)
        self._count(Stand.NOT_INTERESTED, -1)
        self._all.remove(member.ticket)
        del member.ticket.member  # or the two would keep each other alive
        return woken

    def insist(self, member: Member[C], now: float) -> Woken[C]:
        """It asks right now, whatever is known; those who have been interested longer are not passed over."""
        woken = self.work(now)
        if member.stand is not Stand.NOTIFIED:
            self._call(member, now)
        return woken

    def interested(self, member: Member[C], now: float) -> Woken[C]:
        """It can take again. A browser is told at once, because there may be what it has not seen."""
        if member.stand is not Stand.NOT_INTERESTED:
            return ()
        if not member.acquiring:
            self._move(member, Stand.NON_ACQUIRING, self._browsing)
            return (member,)
        self._move(member, Stand.INTERESTED, self._interested[member.priority])
        return () if self._dry else self._notify(now)

    def not_interested(self, member: Member[C], now: float) -> Woken[C]:
        """It can take nothing: no credit, or nobody reads what it is sent."""
        notified = member.stand is Stand.NOTIFIED
        if member.stand is not Stand.NOT_INTERESTED:
            self._move(member, Stand.NOT_INTERESTED, self._not_interested)
        return self._notify(now) if notified else ()

    def work(self, now: float) -> Woken[C]:
        """There is something to take, or may be."""
        self._dry = False
        woken = self._notify(now)
        if not woken and self.size(Stand.NOTIFIED):
            self._owed = True
        return (*woken, *self._browsing) if self._browsing.first is not None else woken

    def pulls(self, member: Member[C]) -> None:
        """It takes now, and sees all there is by now."""
        if member.stand is Stand.NOTIFIED and member.pulling:
            return
        self._move(member, Stand.NOTIFIED, self._pulling)
        member.pulling = True
        self._owed = False

    def served(self, member: Member[C], now: float) -> None:
        """It got something, and goes on pulling."""
        self._call(member, now)

    def exhausted(self, member: Member[C], now: float) -> Woken[C]:
        """There was nothing for it: it goes to the end of those who are interested."""
        if member.stand is not Stand.NOTIFIED:
            return ()
        self._move(member, Stand.INTERESTED, self._interested[member.priority])
        if self._owed:
            return self._notify(now)
        self._dry = not self.size(Stand.NOTIFIED)
        return ()

    def overdue(self, now: float) -> Woken[C]:
        """Whose time is up without their coming are not interested before they say so again; others are notified."""
        woken: list[Member[C]] = []
        for level in self._called:
            while (member := level.first) is not None and member.since + self._patience_s <= now:
                woken += self.not_interested(member, now)
        return [member for member in woken if member.stand is Stand.NOTIFIED]

    def next_overdue(self) -> float | None:
        """When to ask for those who are overdue; None: nobody can be."""
        times = [member.since for level in self._called if (member := level.first) is not None]
        return min(times) + self._patience_s if times else None

    def _notify(self, now: float) -> Woken[C]:
        for level in reversed(self._interested):
            if (member := level.first) is not None:
                self._owed = False
                self._call(member, now)
                return (member,)
        return ()

    def _call(self, member: Member[C], now: float) -> None:
        self._move(member, Stand.NOTIFIED, self._called[member.priority])
        member.since = now

    def _move(self, member: Member[C], stand: Stand, to: Chain[Member[C]]) -> None:
        if member.chain is not None:
            member.chain.remove(member)
        self._count(member.stand, -1)
        self._count(stand, 1)
        member.stand = stand
        member.pulling = False
        to.append(member)

    def _count(self, stand: Stand, change: int) -> None:
        self._sizes[stand] += change
        self._tally[stand] += change


def _down(levels: Sequence[Chain[Member[C]]]) -> Iterator[Member[C]]:
    for level in reversed(levels):
        yield from level
