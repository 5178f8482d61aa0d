"""Recovery: a broker that lost what it was sent gets it once more.

Two things tell of it. The broker does not remember its mark: it was emptied, or is new; then every row that was sent is
to be sent again, and the mark is put there when a whole walk is through. Or a queue holds less than PostgreSQL's rows
say, look after look for two minutes; then the rows of that queue are.

Whoever dies in the middle leaves no mark, and the next one begins anew: a delivery that comes up twice moves on by one
generation more, and its older copy is stale.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection
from typing import Final

from rooms.domain.ids import SubscriptionId
from rooms.domain.place import SENT, TO_SEND, Place
from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker, Clock
from rooms.storage.recovery import BATCH, START, Recovery, Row
from rooms.upkeep.duty import GoOn

_log = logging.getLogger(__name__)

PATIENCE_S: Final = 120.0
"""How long a queue may hold less than it should: copies on their way in and out are counted a moment apart."""
COMPARE_S: Final = 10.0
_SPARED_S: Final = 0.5
_TELL_EVERY: Final = 50_000

_EVERYTHING: Final = (*SENT, *TO_SEND)
_PUSH: Final = (Place.PUSH_SENT, Place.PUSH_TO_SEND)
_PULL: Final = (Place.PULL_SENT, Place.PULL_TO_SEND)


class RecoveryOfCopies:
    """Remembers since when which queue holds too little; begin a new one with each turn."""

    name = "recovery"

    def __init__(
        self,
        records: Recovery,
        broker: Broker,
        clock: Clock,
        ring: Callable[[], None],
        *,
        patience_s: float = PATIENCE_S,
        compare_s: float = COMPARE_S,
    ) -> None:
        """`ring` wakes the relay."""
        self._records = records
        self._broker = broker
        self._clock = clock
        self._ring = ring
        self._patience_s = patience_s
        self._compare_s = compare_s
        self._short: dict[SubscriptionId | None, float] = {}
        self._next_compare_s = 0.0

    async def run(self, go_on: GoOn) -> None:
        """Look whether anything was lost, and have it sent again. BrokerUnavailableError where nobody can tell."""
        try:
            if go_on() and not await self._broker.remembers():
                _log.info("the broker has no mark of ours: it is new, or was emptied")
                if await self._restore(_EVERYTHING, None, go_on):
                    await self._broker.mark()
                    self._short.clear()
            if go_on() and self._clock.monotonic() >= self._next_compare_s:
                await self._compare(go_on)
                self._next_compare_s = self._clock.monotonic() + self._compare_s
        except BrokerUnavailableError:
            self._short.clear()  # what it holds, nobody could see: it is not known to be short all the while
            raise

    async def _compare(self, go_on: GoOn) -> None:
        before = await self._records.sent()
        depths = {}
        for queue in before:
            if not go_on():
                return
            depths[queue] = await self._broker.depth(queue)
        after = await self._records.sent()
        now_s = self._clock.monotonic()
        # Rows come and go between the looks: only what was there before and after should be in the queue for certain.
        short = {queue for queue, depth in depths.items() if depth < min(before[queue], after.get(queue, 0))}
        self._short = {queue: self._short.get(queue, now_s) for queue in short}
        for queue, since_s in list(self._short.items()):
            if now_s - since_s < self._patience_s or not go_on():
                continue
            named = "the PUSH queue" if queue is None else f"the queue of subscription {queue}"
            _log.warning(
                "%s holds %d copies of %d for %.0f s: its deliveries are sent again",
                named, depths[queue], before[queue], now_s - since_s,
            )  # fmt: skip
            if await self._restore(_PUSH if queue is None else _PULL, queue, go_on):
                del self._short[queue]

    async def _restore(self, places: Collection[Place], subscription: SubscriptionId | None, go_on: GoOn) -> bool:
        """Walk over everything, and then wait for what somebody holds; whether it came to its end."""
        after, seen, restored = START, 0, 0
        spared: dict[Row, None] = {}
        dead = await self._records.dead()
        while True:
            if not go_on():
                return False
            look = await self._records.restore(after, places=places, subscription=subscription, dead=dead)
            spared.update(dict.fromkeys(look.spared))
            restored += look.restored
            if look.restored:
                self._ring()
            if look.last is None:
                break
            if (seen + look.seen) // _TELL_EVERY > seen // _TELL_EVERY:
                _log.info("recovery: %d rows seen, %d are sent again", seen + look.seen, restored)
            after, seen = look.last, seen + look.seen
        while spared:
            await asyncio.sleep(_SPARED_S)
            dead = await self._records.dead()
            names, spared = iter(list(spared)), {}
            while batch := list(itertools.islice(names, BATCH)):
                if not go_on():
                    return False
                look = await self._records.restore_again(batch, places=places, dead=dead)
                restored += look.restored
                spared.update(dict.fromkeys(look.spared))
            self._ring()
        if restored:
            _log.warning("the broker had lost what it was sent: %d deliveries of %d are sent again", restored, seen)
        return True
