"""The consumers that wait at one queue, and what is asked and got for it."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from rooms.pulling.roster import Member, Roster, Stand, Woken

MOST_MESSAGES: Final = 1000
"""So many messages are taken for a line, and (one line apart) by a statement."""
PATIENCE_S: Final = 1.0
"""A reader that was told of work and has not come after so long is passed over."""

Key = TypeVar("Key", bound=Hashable)
Message = TypeVar("Message")
Name = Hashable


class Ask(NamedTuple, Generic[Key]):
    """What a line wants: at most so many, for so many ms; `waits`: somebody in it goes on waiting if there is nothing."""

    key: Key
    most: int
    lease_ms: int
    waits: bool


@dataclass(frozen=True, slots=True)
class Got(Generic[Message]):
    """What was taken for a line; `more`: there may be more right now. `error`: why its consumers get nothing.

    `soon`: something is on its way; the line will be rung when it is there, or when it is not to be hoped for any
    longer. `away`: why what is due does not come, which polls are told whose time is up.
    """

    messages: Sequence[Message] = ()
    more: bool = False
    error: Exception | None = None
    soon: bool = False
    away: Exception | None = None


Take = Callable[[Sequence[Ask[Key]]], Awaitable[Sequence[Got[Message]]]]
GiveBack = Callable[[Key, Sequence[Message]], None]


@dataclass(eq=False, slots=True)
class Poll(Generic[Message]):
    """One request that waits, taken for as soon as it is its turn; `over`: its time is up, it ends with whatever the
    next statement gives.
    """

    most: int
    lease_ms: int
    future: "asyncio.Future[Sequence[Message]]"
    over: bool
    number: int
    """The order of arrival."""
    timer: asyncio.TimerHandle | None = None
    member: "Member[Consumer[Message]] | None" = None

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
class Reader(Generic[Message]):
    """A consumer that stays. `wake` is called when there is work for it; then it is to pull, until it gets nothing."""

    lease_ms: int
    wake: Callable[[], None]
    pull: Poll[Message] | None = None
    """What it asks for just now."""


Consumer = Poll[Message] | Reader[Message]


@dataclass(frozen=True, slots=True)
class Shared(Generic[Message]):
    """How a statement ended for a line: who is told of work because of it, what was for nobody, how many got something."""

    woken: Woken[Consumer[Message]]
    left: Sequence[Message]
    served: int


_TOLD: Final = (Stand.NOTIFIED, Stand.NON_ACQUIRING)


class Line(Generic[Key, Message]):
    """The consumers of one key, and the statement that is under way for them."""

    __slots__ = ("asked", "asks", "away", "begun", "busy", "company", "key", "name", "passed", "roster", "soon", "timer", "urgent")  # fmt: skip

    def __init__(self, key: Key, name: Name, tally: MutableMapping[Stand, int]) -> None:
        self.key = key
        self.name = name
        self.roster: Roster[Consumer[Message]] = Roster(patience_s=PATIENCE_S, tally=tally)
        self.asks: dict[Member[Consumer[Message]], None] = {}
        """Readers that pull, and are in no statement yet."""
        self.urgent: dict[Poll[Message], None] = {}
        """Polls that cannot wait any longer."""
        self.busy = False
        self.asked: list[Member[Consumer[Message]]] = []
        """For whom the statement takes because they were notified, in their order."""
        self.company: list[Member[Consumer[Message]]] = []
        """Polls that stand next in line: asking for them too costs nothing."""
        self.passed: list[Poll[Message]] = []
        """Notified polls for which the statement has no room. If it finds nothing there is nothing for them either."""
        self.begun = 0
        """Who came with this number or a later one has come since it began."""
        self.soon = False
        self.away: Exception | None = None
        self.timer: asyncio.TimerHandle | None = None

    def wants(self) -> bool:
        """Whether a statement is to be made for it."""
        return bool(self.asks) or next(self._polls(), None) is not None

    def rests(self) -> bool:
        """Whether it waits to be rung."""
        stands = self.roster.size(Stand.INTERESTED) or self.roster.size(Stand.NON_ACQUIRING)
        return not self.busy and bool(stands) and not self.wants()

    def draw_up(self) -> int:
        """Say whom the next statement is for, the highest priority first; how many messages they want."""
        notified = [
            *self.asks,
            *(poll.member for poll in itertools.islice(self._polls(), MOST_MESSAGES) if poll.member),
        ]
        notified.sort(key=lambda member: (-member.priority, pull_of(member).number))
        self.asked, self.company = notified[:1], []
        lease_ms, most = pull_of(notified[0]).lease_ms, pull_of(notified[0]).most
        for member in notified[1:]:
            pull = pull_of(member)
            if pull.lease_ms != lease_ms or most + pull.most > MOST_MESSAGES:
                return most
            self.asked.append(member)
            most += pull.most
        for member in self.roster.waiting():
            poll = member.consumer
            if not isinstance(poll, Poll) or poll.lease_ms != lease_ms or most + poll.most > MOST_MESSAGES:
                break
            self.company.append(member)
            most += poll.most
        return most

    def begin(self, most: int, number: int) -> Ask[Key]:
        """The statement that was drawn up begins; who comes from now on has at least this number."""
        self.busy, self.begun = True, number
        for member in self.asked:
            self.asks.pop(member, None)
            self.roster.pulls(member)
        self.passed = list(self._polls())
        waits = self.roster.size(Stand.INTERESTED) + self.roster.size(Stand.NOTIFIED) > len(self.urgent)
        return Ask(self.key, most, pull_of(self.asked[0]).lease_ms, waits)

    def share(self, got: Got[Message], now: float) -> "Shared[Message]":
        """What the statement got is theirs for whom it was, in their order."""
        asked, self.asked, self.company = [*self.asked, *self.company], [], []
        self.busy, self.soon, self.away = False, got.soon, got.away
        woken: list[Member[Consumer[Message]]] = []
        start = served = 0
        for member in asked:
            if (pull := _open_pull(member)) is None:
                continue
            if start < len(got.messages):
                woken += self._serve(member, pull, got.messages[start : start + pull.most], got, now)
                start += pull.most
                served += 1
            elif got.error is not None:
                woken += self._fail(member, pull, got.error, now)
            elif member.pulling:
                woken += self._send_away(member, pull, got, now)
        woken += self._conclude(got, now)
        return Shared([one for one in woken if one.stand in _TOLD], got.messages[start:], served)

    def _conclude(self, got: Got[Message], now: float) -> list[Member[Consumer[Message]]]:
        """What the statement found is true of those too for whom it had no room."""
        passed, self.passed = self.passed, []
        woken: list[Member[Consumer[Message]]] = []
        for poll in passed:
            if poll.member is not None and got.error is not None:
                woken += self._fail(poll.member, poll, got.error, now)
            elif poll.member is not None and not got.more:
                woken += self.roster.exhausted(poll.member, now)
        if got.more:
            woken += self.roster.work(now)
        elif not got.soon:
            for poll in [poll for poll in self.urgent if poll.number < self.begun]:
                woken += self.give_up(poll, now)
        return woken

    def give_up(self, poll: Poll[Message], now: float) -> Woken[Consumer[Message]]:
        """Its time is up, and there is nothing for it."""
        if self.away is None:
            poll.end(())
        else:
            poll.fail(self.away)
        return self.drop(poll, now)

    def drop(self, poll: Poll[Message], now: float) -> Woken[Consumer[Message]]:
        """It has its answer, or its client has gone."""
        member, poll.member = poll.member, None
        self.urgent.pop(poll, None)
        return () if member is None else self.roster.remove(member, now)

    def _serve(
        self,
        member: Member[Consumer[Message]],
        pull: Poll[Message],
        messages: Sequence[Message],
        got: Got[Message],
        now: float,
    ) -> Woken[Consumer[Message]]:
        told_since = member.stand is Stand.NOTIFIED and not member.pulling
        self.roster.served(member, now)
        # Where nothing is left, the work it was told of is done.
        woken = () if got.more or told_since else self.roster.exhausted(member, now)
        pull.end(messages)
        return (*woken, *self.drop(pull, now)) if member.consumer is pull else woken

    def _send_away(
        self, member: Member[Consumer[Message]], pull: Poll[Message], got: Got[Message], now: float
    ) -> Woken[Consumer[Message]]:
        is_poll = member.consumer is pull
        if got.more:  # there is something for it, which did not fit into the statement
            self.roster.served(member, now)
            if not is_poll:
                self.asks[member] = None
            return ()
        if not is_poll:
            pull.end(())
        return self.roster.exhausted(member, now)

    def _fail(
        self, member: Member[Consumer[Message]], pull: Poll[Message], error: Exception, now: float
    ) -> Woken[Consumer[Message]]:
        pull.fail(error)
        if member.consumer is pull:
            return self.drop(pull, now)
        return self.roster.not_interested(member, now)

    def _polls(self) -> Iterator[Poll[Message]]:
        return (member.consumer for member in self.roster.called() if isinstance(member.consumer, Poll))


def pull_of(member: Member[Consumer[Message]]) -> Poll[Message]:
    """What a consumer that is asked for wants."""
    consumer = member.consumer
    if isinstance(consumer, Poll):
        return consumer
    assert consumer.pull is not None
    return consumer.pull


def _open_pull(member: Member[Consumer[Message]]) -> Poll[Message] | None:
    """The same, while it waits for an answer."""
    consumer = member.consumer
    pull = consumer if isinstance(consumer, Poll) else consumer.pull
    return None if pull is None or pull.future.done() else pull
