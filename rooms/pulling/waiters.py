"""Polls that wait for messages, a line a subscription, served in the order of their arrival.

A line whose queue may have something is asked for in one statement together with other such lines: for all its polls
at once, so that a wake-up costs one statement however many wait, and only polls that got something (or whose time is
up) end. While a statement is under way its lines gather: what arrives meanwhile shares the next one; and where the last
one served several polls, the next one waits for as many, for a moment. A line that was found empty rests until it is
rung; where something is on its way to it, polls that cannot wait stay in it until the source says how that ended.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Generic, Self

from rooms.pulling.line import MOST_MESSAGES, Ask, GiveBack, Got, Key, Line, Message, Name, Poll, Take

LINGER_S: Final = 0.001
"""How long a statement waits for company, when company is likely."""
MOST_LINES: Final = 16
"""So many lines share a statement."""

_Asked = tuple[Line[Key, Message], list[Poll[Message]], Ask[Key]]


class Waiters(Generic[Key, Message]):
    """Lines of polls over `take`, which is called by at most `hands` at a time. `async with`; leaving ends every poll
    with nothing, after the statements under way.

    `give_back` is told of messages that were taken for polls whose clients have gone.
    """

    def __init__(
        self,
        take: Take[Key, Message],
        *,
        name: Callable[[Key], Name],
        give_back: GiveBack[Key, Message],
        left: Callable[[Key], None],
        hands: int,
    ) -> None:
        """`name` is what a key is rung by; several keys may share one. `left` is told when no poll waits in a line."""
        self._take = take
        self._left = left
        self._name = name
        self._give_back = give_back
        self._hands = hands
        self._loop = asyncio.get_running_loop()
        self._lines: dict[Key, Line[Key, Message]] = {}
        self._named: dict[Name, list[Line[Key, Message]]] = {}
        self._ready: dict[Line[Key, Message], None] = {}
        self._working: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Handle | None = None
        self._came = 0
        self._served = 1
        self._closing = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every poll: with what is being taken for it, or nothing."""
        self._closing = True
        self._ready.clear()
        while self._working:
            await asyncio.wait(self._working)
        for line in list(self._lines.values()):
            for poll in line.polls:
                poll.end(())
            self._forget(line)

    def join(self, key: Key, *, most: int, lease_ms: int, wait_s: float) -> Poll[Message]:
        """Stand in the line. `poll.future` gets the messages: none when `wait_s` is over, or the error of the take."""
        poll: Poll[Message] = Poll(most, lease_ms, self._loop.create_future(), over=wait_s <= 0)
        if self._closing:
            poll.end(())
            return poll
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key, self._name(key))
            self._named.setdefault(line.name, []).append(line)
        # Those ahead of it found nothing and wait for a ring: so does it, unless it cannot wait.
        rests = bool(line.polls) and not line.busy and line not in self._ready
        line.polls.append(poll)
        self._came += 1
        if not poll.over:
            poll.timer = self._loop.call_later(wait_s, self._time_is_up, line, poll)
        if poll.over or not rests:
            self._call(line)
        return poll

    def leave(self, key: Key, poll: Poll[Message]) -> None:
        """Its client has gone: it gets nothing more, and what it got is given back."""
        future = poll.future
        if future.done() and not future.cancelled() and future.exception() is None and future.result():
            self._give_back(key, future.result())
        poll.end(())
        line = self._lines.get(key)
        if line is not None and not line.busy and poll in line.polls:
            self._drop(line, poll)

    def ring(self, names: Iterable[Name] | None) -> None:
        """There may be messages for the lines of these names (None: of any)."""
        if names is None:
            for line in self._lines.values():
                self._call(line)
            return
        for name in names:
            for line in self._named.get(name, ()):
                self._call(line)

    def resting(self) -> list[Key]:
        """The lines that wait for a ring."""
        return [line.key for line in self._lines.values() if not line.busy and line not in self._ready]

    def _call(self, line: Line[Key, Message]) -> None:
        if line.busy:
            line.rung = True
            return
        self._ready[line] = None
        self._start_soon()

    def _start_soon(self) -> None:
        if self._came >= self._served:
            if self._starting is not None:
                self._starting.cancel()
            # What arrives in the same turn of the loop shares the statement.
            self._starting = self._loop.call_soon(self._start)
        elif self._starting is None:
            self._starting = self._loop.call_later(LINGER_S, self._start)

    def _start(self) -> None:
        self._starting = None
        while self._ready and len(self._working) < self._hands and not self._closing:
            self._came = 0
            task = self._loop.create_task(self._serve(self._next_batch()))
            self._working.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._working.discard(task)
        if self._ready:
            self._start_soon()

    def _next_batch(self) -> list[_Asked[Key, Message]]:
        batch: list[_Asked[Key, Message]] = []
        total = 0
        for line in list(self._ready):
            polls, ask = line.first()
            if batch and total + ask.most > MOST_MESSAGES:
                break
            del self._ready[line]
            line.busy, line.rung, line.asked = True, False, len(line.polls)
            batch.append((line, polls, ask))
            total += ask.most
            if len(batch) == MOST_LINES:
                break
        return batch

    async def _serve(self, batch: list[_Asked[Key, Message]]) -> None:
        found: Sequence[Got[Message]]
        try:
            found = await self._take([ask for _, _, ask in batch])
        except Exception as exc:  # noqa: BLE001 - whatever it is, it belongs to those who wait
            found = [Got(error=exc)] * len(batch)
        self._served = 0
        for (line, polls, _), got in zip(batch, found, strict=True):
            line.busy = False
            self._share(line, polls, got)

    def _share(self, line: Line[Key, Message], polls: list[Poll[Message]], got: Got[Message]) -> None:
        messages, start = got.messages, 0
        line.soon, line.away = got.soon, got.away
        for poll in polls:
            if start < len(messages) and not poll.future.done():
                poll.end(messages[start : start + poll.most])
                start += poll.most
                self._served += 1
        if start < len(messages):
            self._give_back(line.key, messages[start:])
        came = len(line.polls) > line.asked
        for poll in itertools.islice(line.polls, line.asked):
            if got.error is not None:
                poll.fail(got.error)
            elif poll.over and not got.more and not got.soon:
                line.give_up(poll)
        line.polls = deque(poll for poll in line.polls if not poll.future.done())
        if not line.polls:
            self._forget(line)
        elif (came or line.rung or got.more) and not self._closing:
            self._call(line)

    def _time_is_up(self, line: Line[Key, Message], poll: Poll[Message]) -> None:
        poll.over = True
        if not line.busy and not line.soon and line not in self._ready:
            line.give_up(poll)
            self._drop(line, poll)

    def _drop(self, line: Line[Key, Message], poll: Poll[Message]) -> None:
        line.polls.remove(poll)
        if not line.polls:
            self._forget(line)

    def _forget(self, line: Line[Key, Message]) -> None:
        self._ready.pop(line, None)
        if self._lines.pop(line.key, None) is not None:
            namesakes = self._named[line.name]
            namesakes.remove(line)
            if not namesakes:
                del self._named[line.name]
            self._left(line.key)
