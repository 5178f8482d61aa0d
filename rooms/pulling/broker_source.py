"""Leases of copies that another broker hands out: its queues are open while polls wait at them, and hardly longer.

A take that has no copies asks PostgreSQL, which knows better than any broker whether something is due. Where nothing
is, polls that cannot wait end, and for the others the queue stays open. Where something is, it is on its way (with the
relay, or in the broker, or in the hands of another process), and all wait a moment for it. A queue of which no copy was
ever seen is not opened before there is something in it: it may not be there, and asking costs the broker a connection.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rooms.domain.copy import Copy
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.errors import BrokerUnavailableError, RoomsError
from rooms.outages import OUTAGES
from rooms.ports import Broker, Unreadable
from rooms.pulling.line import Ask, Got
from rooms.pulling.queue import Key, refusal
from rooms.pulling.source import Ring
from rooms.pulling.strays import Orphaned, Strays
from rooms.pulling.tap import Tap
from rooms.storage.copy_leases import Handed, Leased, lease, look
from rooms.storage.leases import MAX_BYTES, Row, Standing
from rooms.storage.writer import Writer

_UNSEEN: Final = "looks for queues to be closed failed"
HOPE_S: Final = 1.0
"""How long a poll that cannot wait stays for what is due and has not come."""
FIRST_LOOK_S: Final = 0.02
"""After so long it is looked at again, then after twice as long, and so on."""
LEAST_CREDIT: Final = 64
"""A broker that counts bytes would hand out large messages one by one for less; what is too much goes back at once."""
MOST_KNOWN: Final = 10_000


@dataclass(slots=True)
class _Hope:
    """Something is due at a queue, and its broker has not handed it out yet."""

    until: float
    pause_s: float
    timer: asyncio.TimerHandle | None = None


class BrokerSource:
    """`rooms.pulling.source.Source` on a broker that keeps copies."""

    def __init__(
        self, broker: Broker, *, takers: Sequence[Writer], looker: Writer, ring: Ring, orphaned: Orphaned
    ) -> None:
        """Each of `takers` takes once at a time; `looker` does all else and may be shared. `orphaned`: see Strays."""
        self._broker = broker
        self._takers = list(takers)
        self._looker = looker
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._strays = Strays(looker, orphaned)
        self._taps: dict[Key, Tap] = {}
        self._closing: dict[Key, asyncio.Task[None]] = {}
        self._away: dict[Key, BrokerUnavailableError] = {}
        self._hopes: dict[Key, _Hope] = {}
        self._known: dict[Key, None] = {}
        """Queues that were there, the oldest first."""
        self._looking: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for key in [*self._taps, *self._hopes]:
            self._close(key)
        if ending := {*self._closing.values(), *self._looking}:
            await asyncio.wait(ending)
        await self._strays.finish()

    async def take(self, asked: Sequence[Ask[Key]]) -> list[Got[Row]]:
        """Lease what was handed out, all in one statement, and have the broker forget it."""
        taps = [self._taps.get(ask.key) for ask in asked]
        drawn = [[] if tap is None else tap.draw(ask.most, MAX_BYTES) for ask, tap in zip(asked, taps, strict=True)]
        writer = self._takers.pop()
        try:
            found = await lease(
                writer,
                [
                    Handed(ask.key.packed(), ask.lease_ms, copies, _expected(ask, tap, copies))
                    for ask, tap, copies in zip(asked, taps, drawn, strict=True)
                ],
            )
        except BaseException:
            # What became of them is told by their rows, when they come again.
            for ask, copies in zip(asked, drawn, strict=True):
                if copies:
                    self._close(ask.key)
            raise
        finally:
            self._takers.append(writer)
        return [
            self._got(ask, tap, copies, leased)
            for ask, tap, copies, leased in zip(asked, taps, drawn, found, strict=True)
        ]

    async def look(self, keys: Collection[Key]) -> Collection[SubscriptionId]:
        """Those with something due; what serves nobody any more is closed."""
        wanted = list({*keys, *self._taps})
        serving = await look(self._looker, [(key.room, key.subscription) for key in wanted])
        for index, key in enumerate(wanted):
            if index not in serving and key in self._taps:
                self._close(key)
                self._known.pop(key, None)
                self._ring((key.subscription,))
        return {wanted[index].subscription for index, due in serving.items() if due}

    def left(self, key: Key) -> None:
        """What the queue's tap holds goes back; if it holds nothing it may wait for the next poll."""
        self._end_hope(key)
        self._away.pop(key, None)
        if (tap := self._taps.get(key)) is not None:
            tap.leave()

    def changed(self, rooms: frozenset[RoomId]) -> None:
        """Close at once what was paused or deleted, so that the deletion can go on."""
        if any(not rooms or key.room in rooms for key in self._taps):
            task = asyncio.create_task(self._check())
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    def arrived(self, tap: Tap) -> None:
        """The polls of its queue may take."""
        self._know(tap.key)
        self._ring((tap.key.subscription,))

    def strange(self, tap: Tap, messages: Sequence[Unreadable]) -> None:
        """They are recorded, and then discarded."""
        self._strays.unreadable(tap, messages)

    def ended(self, tap: Tap) -> None:
        """The next take that has a reason opens another one."""
        key = tap.key
        if self._taps.get(key) is tap:
            del self._taps[key]
            self._closing[key] = tap.task
            tap.task.add_done_callback(lambda task: self._closed(key, task))
        if tap.away is not None:
            self._away[key] = tap.away
            self._known.pop(key, None)

    def _got(self, ask: Ask[Key], tap: Tap | None, copies: Sequence[Copy], leased: Leased) -> Got[Row]:
        key = ask.key
        if leased.standing is not Standing.OPEN:
            self._close(key)
            return Got(error=refusal(leased.standing, key))
        if tap is not None and copies:
            self._end_hope(key)
            left = leased.left(copies)
            tap.settle([copies[index] for index in leased.taken] if left else copies)
            if left:
                self._strays.left(tap, left)
            # What is due counts what was just leased. Where that is all, the next copy rings when it comes.
            return Got(leased.rows, more=tap.holds or leased.due > len(leased.taken))
        if not leased.due:
            self._end_hope(key)
            if ask.waits and key in self._known:
                self._open(ask, expected=0)
            return Got()
        if leased.sent or key in self._known:
            self._open(ask, expected=leased.due)
        return self._hope(key)

    def _hope(self, key: Key) -> Got[Row]:
        now = self._loop.time()
        hope = self._hopes.get(key)
        if hope is None:
            hope = self._hopes[key] = _Hope(now + HOPE_S, FIRST_LOOK_S)
        if now >= hope.until:
            return Got(away=self._away.get(key))
        if hope.timer is None:
            hope.timer = self._loop.call_later(hope.pause_s, self._look_again, key, hope)
            hope.pause_s *= 2
        return Got(soon=True)

    def _look_again(self, key: Key, hope: _Hope) -> None:
        hope.timer = None
        self._ring((key.subscription,))

    def _end_hope(self, key: Key) -> None:
        hope = self._hopes.pop(key, None)
        if hope is not None and hope.timer is not None:
            hope.timer.cancel()

    def _know(self, key: Key) -> None:
        self._away.pop(key, None)
        self._known.pop(key, None)
        self._known[key] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _open(self, ask: Ask[Key], *, expected: int) -> None:
        key = ask.key
        tap = self._taps.get(key)
        if tap is not None and tap.credit >= ask.most:
            tap.use()
            return
        if tap is not None:
            tap.close()
            self.ended(tap)
        credit = max(LEAST_CREDIT, 1 << (ask.most - 1).bit_length())  # polls which join one by one seldom outgrow it
        consumer = self._broker.consume(credit=credit, subscription=key.subscription)
        self._taps[key] = Tap(key, consumer, self, credit=credit, expected=expected, after=self._closing.get(key))

    def _close(self, key: Key) -> None:
        self._end_hope(key)
        if (tap := self._taps.get(key)) is not None:
            tap.close()
            self.ended(tap)

    def _closed(self, key: Key, task: "asyncio.Task[None]") -> None:
        if self._closing.get(key) is task:
            del self._closing[key]

    async def _check(self) -> None:
        try:
            await self.look(())
        except RoomsError as exc:
            OUTAGES.failed(exc, _UNSEEN)
        else:
            OUTAGES.succeeded(_UNSEEN)


def _expected(ask: Ask[Key], tap: Tap | None, copies: Sequence[Copy]) -> int:
    """How far what is due is to be counted: not at all where copies are at hand that were not drawn."""
    if not copies:
        return ask.most
    return 0 if tap is not None and tap.holds else len(copies) + 1
