"""Leases of copies that another broker hands out: its queues are open while polls wait at them, and no longer.

A take that has no copies asks PostgreSQL, which knows better than any broker whether something is due. Where nothing
is, polls that cannot wait end, and for the others the queue stays open. Where something is, it is on its way (with the
relay, or in the broker, or in the hands of another process), and all wait a moment for it.
"""

import asyncio
import functools
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rooms.domain.copy import Copy
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.errors import RoomsError
from rooms.ports import Broker
from rooms.pulling.line import Ask, Got
from rooms.pulling.queue import Key, refusal
from rooms.pulling.source import Ring
from rooms.pulling.tap import Tap
from rooms.storage.copy_leases import Handed, Leased, lease, look
from rooms.storage.leases import MAX_BYTES, Row, Standing
from rooms.storage.writer import Writer

_log = logging.getLogger(__name__)

HOPE_S: Final = 1.0
"""How long a poll that cannot wait stays for what is due and has not come."""
FIRST_LOOK_S: Final = 0.02
"""After so long it is looked at again, then after twice as long, and so on."""


@dataclass(slots=True)
class _Hope:
    """Something is due at a queue, and its broker has not handed it out yet."""

    until: float
    pause_s: float
    timer: asyncio.TimerHandle | None = None


class BrokerSource:
    """`rooms.pulling.source.Source` on a broker that keeps copies."""

    def __init__(self, broker: Broker, *, takers: Sequence[Writer], looker: Writer, ring: Ring) -> None:
        """Each of `takers` takes once at a time; `looker` looks after queues and may be shared."""
        self._broker = broker
        self._takers = list(takers)
        self._looker = looker
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._taps: dict[Key, Tap] = {}
        self._closing: dict[Key, asyncio.Task[None]] = {}
        self._hopes: dict[Key, _Hope] = {}
        self._looking: set[asyncio.Task[object]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for key in list(self._taps):
            self._close(key)
        if ending := {*self._closing.values(), *self._looking}:
            await asyncio.wait(ending)

    async def take(self, asked: Sequence[Ask[Key]]) -> list[Got[Row]]:
        """Lease what was handed out, all in one statement, and have the broker forget it."""
        taps = [self._taps.get(ask.key) for ask in asked]
        drawn = [[] if tap is None else tap.draw(ask.most, MAX_BYTES) for ask, tap in zip(asked, taps, strict=True)]
        writer = self._takers.pop()
        try:
            found = await lease(
                writer,
                [
                    Handed(ask.key.packed(), ask.lease_ms, copies, 0 if copies else ask.most)
                    for ask, copies in zip(asked, drawn, strict=True)
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
        return await self._look({*keys, *self._taps})

    def left(self, key: Key) -> None:
        """Close the queue: what it holds goes back."""
        self._close(key)

    def changed(self, rooms: frozenset[RoomId]) -> None:
        """Close at once what was paused or deleted, so that the deletion can go on."""
        if keys := {key for key in self._taps if not rooms or key.room in rooms}:
            task = asyncio.create_task(self._check(keys))
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)

    def _got(self, ask: Ask[Key], tap: Tap | None, copies: Sequence[Copy], leased: Leased) -> Got[Row]:
        key = ask.key
        if leased.standing is not Standing.OPEN:
            self._close(key)
            return Got(error=refusal(leased.standing, key))
        if tap is not None and copies:
            tap.settle(copies)
            self._end_hope(key)
            return Got(leased.rows, more=True)
        if not leased.due:
            self._end_hope(key)
            if ask.waits:
                self._open(ask, expected=0)
            return Got()
        return self._hope(key, self._open(ask, expected=leased.due))

    def _hope(self, key: Key, tap: Tap) -> Got[Row]:
        now = self._loop.time()
        hope = self._hopes.get(key)
        if hope is None:
            hope = self._hopes[key] = _Hope(now + HOPE_S, FIRST_LOOK_S)
            tap.poke()
        if now >= hope.until:
            tap.poke()
            return Got(away=tap.away)
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

    def _open(self, ask: Ask[Key], *, expected: int) -> Tap:
        tap = self._taps.get(ask.key)
        if tap is not None and tap.credit >= ask.most:
            return tap
        self._close(ask.key, ends_hope=False)
        credit = 1 << (ask.most - 1).bit_length()  # so that polls which join one by one reopen it a few times only
        tap = self._taps[ask.key] = Tap(
            functools.partial(self._broker.consume, credit=credit, subscription=ask.key.subscription),
            credit=credit,
            expected=expected,
            arrived=functools.partial(self._ring, (ask.key.subscription,)),
            after=self._closing.get(ask.key),
        )
        return tap

    def _close(self, key: Key, *, ends_hope: bool = True) -> None:
        if ends_hope:
            self._end_hope(key)
        tap = self._taps.pop(key, None)
        if tap is None:
            return
        task = self._closing[key] = tap.close()

        def closed(task: "asyncio.Task[None]") -> None:
            if self._closing.get(key) is task:
                del self._closing[key]

        task.add_done_callback(closed)

    async def _look(self, keys: Collection[Key]) -> Collection[SubscriptionId]:
        wanted = list(keys)
        serving = await look(self._looker, [(key.room, key.subscription) for key in wanted])
        for index, key in enumerate(wanted):
            if index not in serving and key in self._taps:
                self._close(key)
                self._ring((key.subscription,))
        return {wanted[index].subscription for index, due in serving.items() if due}

    async def _check(self, keys: Collection[Key]) -> None:
        try:
            await self._look(keys)
        except RoomsError as exc:
            _log.warning("cannot see which queues are to be closed, the next look will: %s", exc)
