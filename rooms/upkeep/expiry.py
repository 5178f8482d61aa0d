"""Expires deliveries by the time at which their lifetime ends.

A look goes over the index from where the last one ended. Two things may lie behind it: rows whose publish took longer
to commit than their lifetime is long, for which every look begins a little earlier and one in a while a whole minute;
and rows that were spared, which are remembered by name until they have ended. The mark that a successor begins from
never passes one of these.
"""

import itertools
from datetime import UTC, datetime, timedelta
from typing import Final

from rooms.domain.ids import DeliveryId
from rooms.ports import Clock
from rooms.storage.expiry import Expiry, Look
from rooms.upkeep.duty import GoOn

BATCH: Final = 1000
OVERLAP: Final = timedelta(seconds=2)
LONG_OVERLAP: Final = timedelta(minutes=1)
LONG_LOOK_S: Final = 15.0
KEEP_MARK_S: Final = 10.0
_BEGINNING: Final = datetime(2000, 1, 1, tzinfo=UTC)


class ExpiryOfDeliveries:
    """Remembers where it has come to; begin a new one with each term."""

    name = "expiry"

    def __init__(self, expiry: Expiry, clock: Clock) -> None:
        self._expiry = expiry
        self._clock = clock
        self._seen: datetime | None = None
        self._spared: dict[DeliveryId, datetime] = {}
        self._next_long_look = 0.0
        self._next_mark = 0.0

    async def run(self, go_on: GoOn) -> None:
        """Expire everything whose time has come, and may be taken, since the last run."""
        now = self._clock.monotonic()
        await self._again(go_on)
        long_look = self._seen is None or now >= self._next_long_look
        if self._seen is None:
            self._seen = await self._expiry.mark() or _BEGINNING
        low = self._seen - (LONG_OVERLAP if long_look else OVERLAP)
        while go_on():
            look = await self._expiry.expire(low, limit=BATCH + len(self._spared))
            more = look.found >= BATCH + len(self._spared)
            self._spared |= look.spared
            if not more or look.latest is None:
                self._seen = look.at
                if long_look:
                    self._next_long_look = now + LONG_LOOK_S
                break
            low = look.latest
        if go_on() and now >= self._next_mark:
            await self._expiry.keep_mark(min([self._seen, *self._spared.values()]))
            self._next_mark = now + KEEP_MARK_S

    async def _again(self, go_on: GoOn) -> None:
        names = iter(list(self._spared))
        while go_on() and (batch := list(itertools.islice(names, BATCH))):
            look: Look = await self._expiry.expire_again(batch)
            for name in batch:
                del self._spared[name]
            self._spared |= look.spared
