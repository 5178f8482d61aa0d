"""Leases for those who want some of a queue's messages alone.

A queue is looked through in windows, in its order, nothing of it being taken or locked; what a selector takes is then
leased, exactly that. What it does not take stays where it is, for other consumers, here or elsewhere, and is not looked
at again before the next look at the whole queue. Such a look is made once a second at most, and takes up a twentieth of
the time at most: it finds what was committed behind the one before.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.domain.states import SubscriptionType
from rooms.pulling.line import Ask, Got
from rooms.pulling.queue import Key, Wish, refusal
from rooms.pulling.selector import Selector
from rooms.storage.copy_leases import Handed, lease
from rooms.storage.leases import MAX_BYTES, Row, Standing
from rooms.storage.sift import LEVELS, NOBODY, START, Found, Low, Window, sift
from rooms.storage.writer import Writer

WHOLE_EVERY_S: Final = 1.0
BEHIND_US: Final = 100_000
"""What is published now may become visible so much later."""
MOST_CURSORS: Final = 1000
_SHARE: Final = 20


class Cursor:
    """How far a queue has been looked through for one selector. Times are the caller's, in seconds."""

    def __init__(self, *, behind_us: int = BEHIND_US, again: bool = True) -> None:
        """What was found is looked at again for so long; `again`: now and then, all of the queue is."""
        self._behind_us = behind_us
        self._again = again
        self.lows: dict[int, Low] = {}
        self._under_way = False
        self._whole = True
        self._begun_s = 0.0
        self._next_whole_s = 0.0

    def begin(self, now_s: float) -> None:
        """A window is about to be looked at: the next one, or the first one of another look."""
        if self._under_way:
            return
        self._under_way = True
        self._begun_s = now_s
        self._whole = now_s >= self._next_whole_s and (self._again or not self.lows)
        if self._whole:
            self.lows = {}

    def saw(self, found: Sequence[Found], *, whole: bool, at_us: int, now_s: float) -> None:
        """These were considered; `whole`: nothing waits behind them."""
        if whole:
            self.lows = dict.fromkeys(range(LEVELS), (at_us - self._behind_us, NOBODY))
            self._under_way = False
            if self._whole:
                self._next_whole_s = now_s + max(WHOLE_EVERY_S, _SHARE * (now_s - self._begun_s))
        elif found:
            last = found[-1]
            for level in range(last.level + 1, LEVELS):
                self.lows[level] = max(self.lows.get(level, START), (at_us - self._behind_us, NOBODY))
            self.lows[last.level] = (last.due_us, last.delivery)


class Sifter:
    """Takes by selector, one statement at a time."""

    def __init__(self, writer: Writer, *, spent: Callable[[Key], None]) -> None:
        """`spent` is told whose copies another broker still has, though their messages are leased."""
        self._writer = writer
        self._spent = spent
        self._loop = asyncio.get_running_loop()
        self._cursors: dict[Wish, Cursor] = {}

    async def take(self, ask: Ask[Wish], selector: Selector) -> Got[Row]:
        """Lease what the selector takes of one window; `more`: there may be another one."""
        key = ask.key.queue
        cursor = self._cursor(ask.key)
        cursor.begin(self._loop.time())
        queue = (key.room, key.subscription, key.organisation)
        window = await sift(self._writer, queue, selector.event_types, cursor.lows)
        if (error := refusal(window.standing, key)) is not None or window.standing is not Standing.OPEN:
            return Got(error=error)
        chosen, considered = _choose(selector, window, ask.most)
        whole = window.whole and considered == len(window.found)
        cursor.saw(window.found[:considered], whole=whole, at_us=window.at_us, now_s=self._loop.time())
        if not chosen:
            return Got(more=not whole)
        copies = [_copy(key, found) for found in chosen]
        (leased,) = await lease(self._writer, [Handed(key.packed(), ask.lease_ms, copies, 0)])
        if leased.rows and self._writer.shape.relayed:
            self._spent(key)
        return Got(leased.rows, more=not whole, error=refusal(leased.standing, key))

    def _cursor(self, wish: Wish) -> Cursor:
        cursor = self._cursors.pop(wish, None) or Cursor()
        self._cursors[wish] = cursor
        if len(self._cursors) > MOST_CURSORS:
            del self._cursors[next(iter(self._cursors))]
        return cursor


def _choose(selector: Selector, window: Window, most: int) -> tuple[list[Found], int]:
    """What is taken, and how many were considered for it."""
    chosen: list[Found] = []
    size = 0
    for considered, found in enumerate(window.found):
        if found.event_type is None or found.payload is None:
            continue
        if not selector.takes(found.event_type, found.headers, found.payload):
            continue
        size += len(found.payload)
        if len(chosen) == most or (chosen and size > MAX_BYTES):
            return chosen, considered
        chosen.append(found)
    return chosen, len(window.found)


def _copy(key: Key, found: Found) -> Copy:
    # What a lease reads of it is its step and what was published; the rest comes from the rows.
    return Copy(
        room_id=key.room,
        delivery_id=found.delivery,
        message_id=found.message,
        subscription_id=SubscriptionId(key.subscription),
        kind=SubscriptionType.PULL,
        generation=found.generation,
        attempt=found.attempt,
        delay_ms=0,
        priority=found.priority,
        event_type=found.event_type or "",
        event_version=0,
        correlation_id="",
        published_ms=0,
        expires_ms=None,
        subscription_version=None,
        deadline=float("inf"),
        headers=found.headers,
        payload=found.payload or b"",
    )
