"""Recovery: a broker that lost what it was sent gets it once more.

Two things tell of it. The broker does not remember its mark: it was emptied, or is new; then every row that was sent is
to be sent again, and the mark is put there when a whole walk is through. Or a queue holds less than PostgreSQL's rows
say, look after look for two minutes; then the rows of that queue are.

What changed after it was seen that the mark is missing was sent after that, so it is left out: nothing is sent twice for
what is published meanwhile, or for what this walk had sent. Somebody may also ask for it, by a job: whoever has this duty
does both, one after the other, so that no two walk at once.

Whoever dies in the middle leaves no mark, and the next one begins anew: a delivery that comes up twice moves on by one
generation more, and its older copy is stale.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rooms.domain.ids import SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.place import SENT, TO_SEND, Place
from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker, Clock
from rooms.storage.recovery import BATCH, START, Recovery, Row
from rooms.storage.worklist import Task, Worklist
from rooms.upkeep.duty import GoOn
from rooms.upkeep.jobs import Jobs, Work

_log = logging.getLogger(__name__)

PATIENCE_S: Final = 120.0
"""How long a queue may hold less than it should: copies on their way in and out are counted a moment apart."""
COMPARE_S: Final = 10.0
_COMPARE_SHARE: Final = 100
_SPARED_S: Final = 0.5
_AGAIN: Final = "sent_again"
_TELL_EVERY: Final = 50_000

EVERYTHING: Final = (*SENT, *TO_SEND)
_PUSH: Final = (Place.PUSH_SENT, Place.PUSH_TO_SEND)
_PULL: Final = (Place.PULL_SENT, Place.PULL_TO_SEND)

Told = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """What is to be sent again: rows in these places, of one subscription or (None) of all; with `before` only deliveries
    that nothing has changed since.
    """

    places: Collection[Place] = EVERYTHING
    subscription: SubscriptionId | None = None
    before: datetime | None = None


class Resending:
    """Walks over everything that is lost, and then waits for what somebody holds."""

    def __init__(self, records: Recovery, ring: Callable[[], None], *, batch: int = BATCH) -> None:
        """`ring` wakes the relay."""
        self._records = records
        self._ring = ring
        self._batch = batch

    async def run(self, lost: Lost, go_on: GoOn, told: Told) -> bool:
        """Have it sent again; `told` hears of every page how many those were. Whether it came to its end."""
        after, seen = START, 0
        spared: dict[Row, None] = {}
        dead = await self._records.dead()
        while True:
            if not go_on():
                return False
            look = await self._records.restore(
                after,
                places=lost.places,
                subscription=lost.subscription,
                dead=dead,
                before=lost.before,
                limit=self._batch,
            )
            spared.update(dict.fromkeys(look.spared))
            if look.restored:
                self._ring()
                await told(look.restored)
            # A page that is not full ends the walk, or it would go on for as long as others publish.
            if look.last is None or look.seen < self._batch:
                break
            if (seen + look.seen) // _TELL_EVERY > seen // _TELL_EVERY:
                _log.info("recovery: %d rows seen", seen + look.seen)
            after, seen = look.last, seen + look.seen
        while spared:
            await asyncio.sleep(_SPARED_S)
            dead = await self._records.dead()
            names, spared = iter(list(spared)), {}
            while batch := list(itertools.islice(names, self._batch)):
                if not go_on():
                    return False
                look = await self._records.restore_again(batch, places=lost.places, dead=dead, before=lost.before)
                spared.update(dict.fromkeys(look.spared))
                if look.restored:
                    await told(look.restored)
            self._ring()
        return True


class Loss:
    """Whether a broker has lost what it was sent, and since when that is known, by PostgreSQL's clock."""

    def __init__(self, records: Recovery, broker: Broker) -> None:
        self._records = records
        self._broker = broker
        self._since: datetime | None = None

    async def since(self) -> datetime | None:
        """When it was first seen; None: it remembers. BrokerUnavailableError: it may come back emptied once more."""
        try:
            if await self._broker.remembers():
                self._since = None
            elif self._since is None:
                self._since = await self._records.now()
        except BrokerUnavailableError:
            self._since = None
            raise
        return self._since

    async def mended(self) -> None:
        """Everything is on its way: put the mark there. BrokerUnavailableError."""
        self._since = None
        await self._broker.mark()


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
        worklist: Worklist | None = None,
        patience_s: float = PATIENCE_S,
        compare_s: float = COMPARE_S,
        batch: int = BATCH,
    ) -> None:
        """`ring` wakes the relay; with a `worklist`, what somebody asked for is done first."""
        self._records = records
        self._resending = Resending(records, ring, batch=batch)
        self._loss = Loss(records, broker)
        self._asked = None
        if worklist is not None:
            works = Recovering(worklist, records, self._loss, ring, batch=batch).works()
            self._asked = Jobs(worklist, works, name=self.name)
        self._broker = broker
        self._clock = clock
        self._patience_s = patience_s
        self._compare_s = compare_s
        self._short: dict[SubscriptionId | None, float] = {}
        self._next_compare_s = 0.0

    async def run(self, go_on: GoOn) -> None:
        """Do what was asked for; look whether anything was lost, and have it sent again. BrokerUnavailableError where
        nobody can tell.
        """
        if self._asked is not None:
            await self._asked.run(go_on)
        try:
            if go_on() and (since := await self._loss.since()) is not None:
                _log.info("the broker has no mark of ours: it is new, or was emptied")
                if await self._resend(Lost(before=since), go_on):
                    await self._loss.mended()
                    self._short.clear()
            if go_on() and self._clock.monotonic() >= self._next_compare_s:
                begun_s = self._clock.monotonic()
                await self._compare(go_on)
                now_s = self._clock.monotonic()
                # What waits for next week is counted over, too: a hundredth of the time at most.
                self._next_compare_s = now_s + max(self._compare_s, _COMPARE_SHARE * (now_s - begun_s))
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
            if await self._resend(Lost(places=_PUSH if queue is None else _PULL, subscription=queue), go_on):
                del self._short[queue]

    async def _resend(self, lost: Lost, go_on: GoOn) -> bool:
        counts: Counter[str] = Counter()

        async def told(count: int) -> None:
            counts["again"] += count

        whole = await self._resending.run(lost, go_on, told)
        if counts["again"]:
            _log.warning("the broker had lost what it was sent: %d deliveries are sent again", counts["again"])
        return whole


NOTHING_TO_DO: Final = "PostgreSQL is the broker: what waits is in its tables, and there is no other copy to be lost"


class Recovering:
    """The same as a job, when somebody asks for it: all that was in the broker then, whatever the broker says it has."""

    def __init__(
        self,
        worklist: Worklist,
        records: Recovery,
        loss: Loss | None,
        ring: Callable[[], None],
        *,
        batch: int = BATCH,
    ) -> None:
        """`loss`: what is known of the broker that carries the copies, where it is not PostgreSQL; `ring` wakes the relay."""
        self._worklist = worklist
        self._records = records
        self._loss = loss
        self._resending = Resending(records, ring, batch=batch)

    def works(self) -> Mapping[JobKind, Work]:
        """What each kind of job does."""
        return {JobKind.RECOVER: self._recover}

    async def _recover(self, task: Task, go_on: GoOn) -> bool:
        again = int(task.result.get(_AGAIN, 0))
        if self._loss is None:
            await self._worklist.progress(task, total=0, result={_AGAIN: 0, "told": NOTHING_TO_DO})
            return True
        since = await self._loss.since()
        if task.total is None and go_on():
            await self._worklist.progress(task, total=sum((await self._records.sent()).values()), result={_AGAIN: 0})

        async def told(count: int) -> None:
            nonlocal again
            again += count
            await self._worklist.progress(task, done=again, result={_AGAIN: again})

        # What has changed since the job was asked for was sent since; but where the broker has no mark, it may have been
        # emptied after that, and only what has changed since that was seen is certainly with it.
        if not await self._resending.run(Lost(before=since or task.created_at), go_on, told):
            return False
        if since is not None:
            await self._loss.mended()
        return True
