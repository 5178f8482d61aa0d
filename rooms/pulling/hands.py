"""The statements that take for lines: as many at a time as there are hands, each for every line that is ready.

While a statement is under way its lines gather: what arrives meanwhile shares the next one; and where the last one
served several consumers, the next one waits for as many, for a moment.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Generic

from rooms.pulling.line import MOST_MESSAGES, Ask, Got, Key, Line, Message, Shared, Take

LINGER_S: Final = 0.001
"""How long a statement waits for company, when company is likely."""
MOST_LINES: Final = 16
"""So many lines share a statement."""

_Asked = tuple[Line[Key, Message], Ask[Key]]


class Hands(Generic[Key, Message]):
    """Calls `take`, at most `most` at a time, gives each line what it got, and tells `shared` how that ended.

    `apart`: a line that shares no statement; `held`: one that is not to be taken for just now, ready or not; `number`: the
    next in the order of arrival.
    """

    def __init__(
        self,
        take: Take[Key, Message],
        *,
        most: int,
        apart: Callable[[Key], bool],
        held: Callable[[Line[Key, Message]], bool],
        shared: Callable[[Line[Key, Message], Shared[Message]], None],
        number: Callable[[], int],
    ) -> None:
        self._take = take
        self._most = most
        self._apart = apart
        self._held = held
        self._shared = shared
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._ready: dict[Line[Key, Message], None] = {}
        self._working: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Handle | None = None
        self._came = 0
        self._served = 1
        self.closing = False
        """No statement is begun any more."""

    async def close(self) -> None:
        """Begin nothing more; until the statements under way have ended."""
        self.closing = True
        self._ready.clear()
        while self._working:
            await asyncio.wait(self._working)

    def expect(self) -> None:
        """Somebody came, whether or not there is anything to be taken for them."""
        self._came += 1

    def ready(self, line: Line[Key, Message]) -> None:
        """The line wants a statement."""
        self._ready[line] = None
        self._start_soon()

    def is_ready(self, line: Line[Key, Message]) -> bool:
        """Whether it waits for a hand."""
        return line in self._ready

    def forget(self, line: Line[Key, Message]) -> None:
        """The line wants none."""
        self._ready.pop(line, None)

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
        while self._ready and len(self._working) < self._most and not self.closing:
            batch = self._next_batch()
            if not batch:
                return
            self._came = 0
            task = self._loop.create_task(self._serve(batch))
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
            if not line.wants():
                del self._ready[line]
                continue
            alone = self._apart(line.key)
            if (batch and alone) or self._held(line):
                continue
            most = line.draw_up()
            if batch and total + most > MOST_MESSAGES:
                break
            del self._ready[line]
            batch.append((line, line.begin(most, self._number())))
            total += most
            if len(batch) == MOST_LINES or alone:
                break
        return batch

    async def _serve(self, batch: list[_Asked[Key, Message]]) -> None:
        found: Sequence[Got[Message]]
        try:
            found = await self._take([ask for _, ask in batch])
        except Exception as exc:  # noqa: BLE001 - whatever it is, it belongs to those who wait
            found = [Got(error=exc)] * len(batch)
        self._served = 0
        for (line, _), got in zip(batch, found, strict=True):
            shared = line.share(got, self._loop.time())
            self._served += shared.served
            self._shared(line, shared)
