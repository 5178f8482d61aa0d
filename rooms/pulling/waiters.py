"""Consumers that wait for messages, a line a queue, told of work as their line's roster says.

Polls are taken for as soon as they are notified: one statement for all of them, together with those next in line and
with other such lines, so that a wake-up costs one statement however many wait, and only polls that got something (or
whose time is up) end. Readers are told, and come to pull. A line that was found empty rests until it is rung; where
something is on its way to it, polls that cannot wait stay in it until the source says how that ended.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Generic, Self

from rooms.pulling.hands import Hands
from rooms.pulling.line import (
    PATIENCE_S,
    Consumer,
    GiveBack,
    Key,
    Line,
    Message,
    Name,
    Poll,
    Reader,
    Shared,
    Take,
)
from rooms.pulling.roster import Member, Stand, Woken


class Waiters(Generic[Key, Message]):
    """Lines of consumers over `take`, which is called by at most `hands` at a time. `async with`; leaving ends every
    poll and pull with nothing, after the statements under way.

    `give_back` is told of messages that were taken for consumers that have gone.
    """

    def __init__(
        self,
        take: Take[Key, Message],
        *,
        name: Callable[[Key], Name],
        give_back: GiveBack[Key, Message],
        left: Callable[[Key], None],
        hands: int,
        apart: Callable[[Key], bool] = lambda _: False,
    ) -> None:
        """`name` is what a key is rung by; several keys may share one. `left` is told when nobody waits in a line; a line
        that is `apart` shares no statement.
        """
        self._left = left
        self._name = name
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._lines: dict[Key, Line[Key, Message]] = {}
        self._named: dict[Name, list[Line[Key, Message]]] = {}
        self._numbers = itertools.count()
        self._hands = Hands(
            take, most=hands, apart=apart, held=self._gives_way, shared=self._shared, number=self._numbers.__next__
        )
        self._tally = dict.fromkeys(Stand, 0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every poll and pull: with what is being taken for it, or nothing."""
        await self._hands.close()
        for line in list(self._lines.values()):
            if line.timer is not None:
                line.timer.cancel()
            for consumer in list(line.roster):
                if isinstance(consumer, Poll):
                    consumer.end(())
                    line.drop(consumer, self._loop.time())
                elif consumer.pull is not None:
                    consumer.pull.end(())
            self._forget_empty(line)

    @property
    def tally(self) -> Mapping[Stand, int]:
        """How many consumers stand in each set, over all lines."""
        return self._tally

    def join(self, key: Key, *, most: int, lease_ms: int, wait_s: float, priority: int = 0) -> Poll[Message]:
        """Stand in the line. `poll.future` gets the messages: none when `wait_s` is over, or the error of the take."""
        poll: Poll[Message] = Poll(
            most, lease_ms, self._loop.create_future(), over=wait_s <= 0, number=next(self._numbers)
        )
        if self._hands.closing:
            poll.end(())
            return poll
        line = self._line(key)
        member = poll.member = line.roster.add(poll, priority=priority)
        self._hands.expect()
        now = self._loop.time()
        self._tell(line, line.roster.interested(member, now))
        if poll.over:
            line.urgent[poll] = None
            self._tell(line, line.roster.insist(member, now))
        else:
            poll.timer = self._loop.call_later(wait_s, self._time_is_up, line, poll)
        return poll

    def leave(self, key: Key, poll: Poll[Message]) -> None:
        """Its client has gone: it gets nothing more, and what it got is given back."""
        self._return(key, poll)
        poll.end(())
        line = self._lines.get(key)
        if line is not None:
            self._tell(line, line.drop(poll, self._loop.time()))
            self._forget_empty(line)

    def attend(
        self, key: Key, *, lease_ms: int, wake: Callable[[], None], priority: int = 0, acquiring: bool = True
    ) -> Member[Consumer[Message]]:
        """A reader in the line, not interested yet. It stays until it departs."""
        reader: Reader[Message] = Reader(lease_ms, wake)
        return self._line(key).roster.add(reader, priority=priority, acquiring=acquiring)

    def depart(self, key: Key, member: Member[Consumer[Message]]) -> None:
        """The reader has gone; what was just taken for it is given back."""
        line = self._lines[key]
        reader = member.consumer
        if isinstance(reader, Reader) and reader.pull is not None:
            self._return(key, reader.pull)
            reader.pull.end(())
            reader.pull = None
        line.asks.pop(member, None)
        self._tell(line, line.roster.remove(member, self._loop.time()))
        self._forget_empty(line)

    def interest(self, key: Key, member: Member[Consumer[Message]], *, interested: bool) -> None:
        """The reader can take something, or cannot."""
        line, now = self._lines[key], self._loop.time()
        if interested:
            self._tell(line, line.roster.interested(member, now))
        elif member not in line.asks and not member.pulling:
            self._tell(line, line.roster.not_interested(member, now))

    async def pull(self, key: Key, member: Member[Consumer[Message]], most: int) -> Sequence[Message]:
        """What is there for the reader, at most so many; none: it waits to be told again. One pull at a time."""
        line, reader = self._lines[key], member.consumer
        if self._hands.closing or not isinstance(reader, Reader):
            return ()
        pull = reader.pull = Poll[Message](
            most, reader.lease_ms, self._loop.create_future(), over=False, number=next(self._numbers)
        )
        line.roster.served(member, self._loop.time())
        line.asks[member] = None
        self._hands.expect()
        self._tell(line, ())
        messages = await pull.future  # where this is cancelled, its departure gives back what came
        reader.pull = None
        return messages

    def ring(self, names: Iterable[Name] | None) -> None:
        """There may be messages for the lines of these names (None: of any)."""
        now = self._loop.time()
        lines = (
            self._lines.values() if names is None else [line for name in names for line in self._named.get(name, ())]
        )
        for line in lines:
            self._tell(line, line.roster.work(now))

    def resting(self) -> list[Key]:
        """The lines that wait for a ring."""
        return [line.key for line in self._lines.values() if line.rests()]

    def _line(self, key: Key) -> Line[Key, Message]:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key, self._name(key), self._tally)
            self._named.setdefault(line.name, []).append(line)
        return line

    def _tell(self, line: Line[Key, Message], woken: Woken[Consumer[Message]]) -> None:
        for member in woken:
            if isinstance(member.consumer, Reader):
                member.consumer.wake()
                self._watch(line)
        if not line.busy and not self._hands.closing and line.wants():
            self._hands.ready(line)

    def _gives_way(self, line: Line[Key, Message]) -> bool:
        """Whether consumers of a higher priority take from the same queue just now, with another selector."""
        others = self._named[line.name]
        if len(others) == 1:
            return False
        top = line.roster.top()
        return any(
            (other.busy or self._hands.is_ready(other)) and other.roster.top() > top
            for other in others
            if other is not line
        )

    def _shared(self, line: Line[Key, Message], shared: Shared[Message]) -> None:
        if shared.left:
            self._give_back(line.key, shared.left)
        self._tell(line, shared.woken)
        self._forget_empty(line)

    def _time_is_up(self, line: Line[Key, Message], poll: Poll[Message]) -> None:
        poll.over = True
        if line.busy or line.soon or self._hands.is_ready(line):
            line.urgent[poll] = None
            return
        self._tell(line, line.give_up(poll, self._loop.time()))
        self._forget_empty(line)

    def _pass_over(self, line: Line[Key, Message]) -> None:
        """Readers that were told and have not come: others are told."""
        line.timer = None
        if not line.busy and not line.wants():
            self._tell(line, line.roster.overdue(self._loop.time()))
        self._watch(line)

    def _watch(self, line: Line[Key, Message]) -> None:
        if line.timer is None and line.roster.next_overdue() is not None:
            line.timer = self._loop.call_later(PATIENCE_S, self._pass_over, line)

    def _return(self, key: Key, pull: Poll[Message]) -> None:
        future = pull.future
        if future.done() and not future.cancelled() and future.exception() is None and (messages := future.result()):
            self._give_back(key, messages)

    def _forget_empty(self, line: Line[Key, Message]) -> None:
        if len(line.roster) or line.busy:
            return
        self._hands.forget(line)
        if line.timer is not None:
            line.timer.cancel()
        if self._lines.pop(line.key, None) is not None:
            namesakes = self._named[line.name]
            namesakes.remove(line)
            if not namesakes:
                del self._named[line.name]
            self._left(line.key)
