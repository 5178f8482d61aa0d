"""A line of polls at one queue, and what is asked and got for it."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

MOST_MESSAGES: Final = 1000
"""So many messages are taken for a line, and (one line apart) by a statement."""

Key = TypeVar("Key", bound=Hashable)
Message = TypeVar("Message")
Name = Hashable


class Ask(NamedTuple, Generic[Key]):
    """What a line wants: at most so many, for so many ms; `waits`: a poll of it goes on waiting if there is nothing."""

    key: Key
    most: int
    lease_ms: int
    waits: bool


@dataclass(frozen=True, slots=True)
class Got(Generic[Message]):
    """What was taken for a line; `more`: there may be more right now. `error`: why its polls get nothing.

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
    """One request that waits; `over`: its time is up, it ends with whatever the next statement gives."""

    most: int
    lease_ms: int
    future: "asyncio.Future[Sequence[Message]]"
    over: bool
    timer: asyncio.TimerHandle | None = None

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
class Line(Generic[Key, Message]):
    """The polls that wait for one key, first come, first served."""

    key: Key
    name: Name
    polls: deque[Poll[Message]] = field(default_factory=deque)
    busy: bool = False
    rung: bool = False
    asked: int = 0
    """How many polls stood here when the statement began: what it finds is true for all of them."""
    soon: bool = False
    away: Exception | None = None

    def give_up(self, poll: Poll[Message]) -> None:
        """Its time is up, and there is nothing for it."""
        if self.away is None:
            poll.end(())
        else:
            poll.fail(self.away)

    def first(self) -> tuple[list[Poll[Message]], Ask[Key]]:
        """The polls at its head that one take can serve, and what they want."""
        first: list[Poll[Message]] = []
        most = 0
        for poll in self.polls:
            if first and (poll.lease_ms != first[0].lease_ms or most + poll.most > MOST_MESSAGES):
                break
            first.append(poll)
            most += poll.most
        return first, Ask(self.key, most, first[0].lease_ms, not all(poll.over for poll in self.polls))
