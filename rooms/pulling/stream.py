"""One client's stream: a consumer at each of several queues, all served in turn under one credit."""

import asyncio
from collections.abc import Awaitable, Sequence
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple, Protocol

from rooms.pulling.answer import message_json
from rooms.pulling.line import Consumer
from rooms.pulling.queue import Key, Wish
from rooms.pulling.receipt import Lease
from rooms.pulling.roster import Member, Stand
from rooms.pulling.stream_request import StreamRequest
from rooms.pulling.waiters import Waiters
from rooms.storage.leases import Row

AT_ONCE: Final = 100
"""So many messages are taken at a time, so that consumers of one queue share what comes."""
STALLED_S: Final = 0.05
"""A client that does not read for so long is not interested meanwhile: what there is goes to others."""
GIVEN_UP_S: Final = 60.0
"""And after so long it is taken for gone."""
_GOODBYE_S: Final = 1.0
MOST_CREDIT: Final = 1_000_000

Lines = Waiters[Wish, Row]


class End(StrEnum):
    """Why a stream ended."""

    GONE = "gone"
    """The client has gone."""
    OVER = "over"
    """It has lasted as long as it was to."""
    SHUTDOWN = "shutdown"
    REVOKED = "revoked"
    DELETED = "deleted"
    UNAVAILABLE = "unavailable"


class Batch(NamedTuple):
    """Messages of one queue, each as JSON; `rows`: what they are under a lease, in the same order."""

    key: Key
    messages: Sequence[bytes]
    rows: Sequence[Row] = ()


class Shelf(Protocol):
    """Where a browser looks."""

    async def look(self) -> tuple[Sequence[bytes], bool]:
        """What was not seen yet, as JSON, and whether there may be more right now."""
        ...


class Stream:
    """Serves one client. `start`, then `next` and `send` in turn; `close` gives back what was taken and not sent.

    Who reads it tells of acks by `settled`, and grants credit.
    """

    def __init__(
        self,
        lines: Lines,
        wishes: Sequence[Wish],
        request: StreamRequest,
        *,
        credit: int,
        refills: bool,
        shelves: Sequence[Shelf],
    ) -> None:
        """`refills`: what is settled may be followed by as much. `shelves`: of a browser, one a queue."""
        self.queues = [wish.queue for wish in wishes]
        self.request = request
        self.refills = refills
        self.out: dict[Lease, Key] = {}
        """Leases of messages that were sent, and not settled over this stream or, where it refills, anywhere."""
        self.ended: End | None = None
        self._lines = lines
        self._wishes = wishes
        self._shelves = shelves
        self._credit = MOST_CREDIT if shelves else credit
        self._loop = asyncio.get_running_loop()
        self._members: list[Member[Consumer[Row]]] = []
        self._called: dict[int, None] = {}
        self._wake = asyncio.Event()
        self._stalled = False
        self._limit: asyncio.Timeout | None = None

    @property
    def starved(self) -> bool:
        """It has no credit left, and would get some if what it has sent were settled."""
        return self.refills and self._credit <= 0 and bool(self.out)

    @property
    def gone(self) -> bool:
        """There is nobody who could be told anything."""
        return self.ended is End.GONE

    def start(self) -> None:
        """Stand in the lines."""
        for index, wish in enumerate(self._wishes):
            self._members.append(
                self._lines.attend(
                    wish,
                    lease_ms=self.request.lease_ms,
                    wake=partial(self._called_for, index),
                    priority=self.request.priority,
                    acquiring=not self._shelves,
                )
            )
        self._show()

    def close(self) -> None:
        """Leave the lines."""
        for wish, member in zip(self._wishes, self._members, strict=True):
            self._lines.depart(wish, member)
        self._members = []

    def grant(self, credit: int) -> None:
        """So many messages more may come."""
        self._credit = min(self._credit + credit, MOST_CREDIT)
        self._show()
        self._wake.set()

    def settled(self, leases: Sequence[Lease]) -> None:
        """The client is done with these."""
        done = sum(self.out.pop(lease, None) is not None for lease in leases)
        if done and self.refills:
            self.grant(done)

    def end(self, why: End) -> None:
        """It ends as soon as what is being sent is sent."""
        if self.ended is None:
            self.ended = why
            self._wake.set()
            if self._limit is not None:
                self._limit.reschedule(self._loop.time() + _GOODBYE_S)

    def lose(self) -> None:
        """Its client has gone, or reads no more: there is nobody to tell anything."""
        self.end(End.GONE)
        self.ended = End.GONE

    async def next(self, wait_s: float) -> Batch | None:
        """What comes next; None: nothing did for so long, or it has ended. Errors as for a pull."""
        deadline = self._loop.time() + wait_s
        while self.ended is None:
            self._wake.clear()  # first: whatever comes while it takes is not to be slept through
            while self._called and self._credit > 0 and self.ended is None:
                index = next(iter(self._called))
                del self._called[index]
                if (batch := await self._take(index)) is not None:
                    return batch
            try:
                async with asyncio.timeout_at(deadline):
                    await self._wake.wait()
            except TimeoutError:
                return None
        return None

    async def send(self, sending: Awaitable[None]) -> None:
        """Send something. TimeoutError: nobody reads it."""
        timer = self._loop.call_later(STALLED_S, self._stall)
        try:
            async with asyncio.timeout(GIVEN_UP_S) as self._limit:
                await sending
        finally:
            self._limit = None
            timer.cancel()
            if self._stalled:
                self._stalled = False
                self._show()

    async def _take(self, index: int) -> Batch | None:
        member, wish = self._members[index], self._wishes[index]
        if self._shelves:
            messages, more = await self._shelves[index].look()
            if more:
                self._called[index] = None
            return Batch(wish.queue, messages) if messages else None
        if member.stand is not Stand.NOTIFIED:
            self._show()  # it came too late and was passed over: it is interested again
            return None
        rows = await self._lines.pull(wish, member, min(self._credit, AT_ONCE))
        if member.stand is Stand.NOTIFIED:
            self._called[index] = None  # at the end: the others have their turn
        if not rows:
            return None
        self._credit -= len(rows)
        for row in rows:
            self.out[row[0], row[1]] = wish.queue
        if self._credit <= 0:
            self._show()
        return Batch(wish.queue, [message_json(row) for row in rows], rows)

    def _called_for(self, index: int) -> None:
        self._called[index] = None
        self._wake.set()

    def _stall(self) -> None:
        self._stalled = True
        self._show()

    def _show(self) -> None:
        """Tell the lines whether it can take something."""
        interested = self._credit > 0 and not self._stalled
        for wish, member in zip(self._wishes, self._members, strict=True):
            self._lines.interest(wish, member, interested=interested)
