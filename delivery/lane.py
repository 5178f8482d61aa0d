"""A lane: one subscription's attempts in one worker, so that a webhook that hangs delays nobody else.

busy        more waits than slots are free: further copies stay in the queue, unclaimed; where the queue cannot keep
            them, what the lane will not get to in the next seconds is held
saturated   copies wait and no slot was freed for a second: what waits is held in PostgreSQL and comes back
            when slots are free again
closed      paused, disabled, its circuit open, or deleted: what waits is held, or cancelled

How many slots it has follows what the endpoint can do (`delivery.concurrency`); where its rate is limited, a slot also needs a
token of the bucket that all workers share (`delivery.allowance`).
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from delivery.breaker import Breaker, Streak
from delivery.concurrency import Concurrency
from delivery.endpoint import Endpoint
from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.domain.states import Reason, SubscriptionStatus

MARGIN_S: Final = 2.0
"""A claim must outlast an attempt's time-out by this much when the attempt starts; else the copy is left to others."""
IDLE_AFTER_S: Final = 60.0
SATURATED_AFTER_S: Final = 1.0
SURPLUS_AFTER_S: Final = 10.0
"""Where the queue cannot keep copies, a lane keeps what it achieves in this time: with 2,000 a second all that a worker
may have in hand. It is short beside a claim, and what waits for another lane waits no longer than this behind it."""
_MEASURE_S: Final = 1.0
_LONGEST_MEASURE_S: Final = 4.0
_EXPECTED_FOR_S: Final = 2.0
_CROWDED_FROM: Final = 8
_LEAST: Final = 16
_MOST: Final = 512


class Lane:
    """The copies that wait and the slots that work on them. Times are monotonic seconds, given by the caller."""

    __slots__ = (
        "_achieved",
        "_brisk",
        "_capacity",
        "_expected",
        "_expected_at",
        "_freed_at",
        "_full",
        "_kept_short",
        "_measured_from",
        "_most_slots",
        "breaker",
        "busy",
        "concurrency",
        "endpoint",
        "failing_from",
        "gone",
        "next_token_at",
        "reported",
        "streak",
        "tokens",
        "tripped",
        "turned_away",
        "waiting",
        "watched",
    )

    def __init__(self, endpoint: Endpoint, *, slots: int, now: float) -> None:
        """`slots`: attempts at a time at most, where the subscription says nothing else."""
        self.endpoint = endpoint
        self._most_slots = slots
        self.waiting: deque[Copy] = deque()
        self.busy = 0
        self.concurrency = Concurrency(endpoint.record.lane.max_concurrency or slots)
        self.reported: int | None = None
        """The concurrency that was reported to the records, if any was."""
        self.gone: int | None = None
        """The version of the subscription at which its endpoint answered 410; the records may not say so yet."""
        self.tripped: int | None = None
        """The version at which this worker found that its circuit is to be opened; likewise."""
        self.breaker = Breaker()
        self.streak = Streak()
        self.tokens: int | None = None
        """Attempts that the rate allows now; None: it is not limited."""
        self.next_token_at = now
        self.turned_away = 0
        """Copies that were held because it was saturated, since it last ran dry by working, or nothing was held any more."""
        self._brisk = True
        self._adopt(now)
        self._capacity = _LEAST
        self._freed_at = now
        self._full = False
        self._kept_short = False
        self._achieved = 0.0
        self._measured_from = now
        self._expected = 0
        self._expected_at = now

    @property
    def identity(self) -> SubscriptionId:
        """Whose lane it is."""
        return self.endpoint.record.subscription_id

    @property
    def slots(self) -> int:
        """Attempts at a time, now."""
        return self.concurrency.limit

    def follow(self, endpoint: Endpoint, now: float) -> None:
        """The subscription has these settings from now on."""
        if endpoint is not self.endpoint:
            self.endpoint = endpoint
            self._adopt(now)

    def _adopt(self, now: float) -> None:
        record = self.endpoint.record
        policy = record.lane
        self.concurrency.allow(policy.max_concurrency or self._most_slots)
        self.tokens = None if policy.rate_per_s is None else (self.tokens or 0)
        self.watched = bool(policy.circuit_failures or policy.disable_after_ms)
        """Whether failures may open its circuit, or disable it."""
        self.failing_from = now - record.failing_s if record.failing else now
        """Since when it only fails, if the record says that it does."""

    def closed(self, now: float) -> Reason | None:
        """Why nothing may wait here: it is to be held for this reason."""
        status = self.endpoint.record.status
        if status is SubscriptionStatus.DISABLED or self.gone == self.endpoint.record.version:
            return Reason.DISABLED
        if status is SubscriptionStatus.PAUSED:
            return Reason.PAUSED
        if self.endpoint.record.circuit_open or self.tripped == self.endpoint.record.version:
            return Reason.CIRCUIT_OPEN
        return Reason.SATURATED if self.saturated(now) else None

    def offer(self, copies: Iterable[Copy], now: float) -> None:
        """Let copies wait."""
        if not self.waiting and self.busy < self.slots:
            self._freed_at = self._measured_from = now
            self._achieved = 0
        before = len(self.waiting)
        self.waiting.extend(copies)
        self._expected = max(0, self._expected - len(self.waiting) + before)

    def startable(self) -> int:
        """How many slots have something to do, may do it, and do nothing."""
        could = self._could_start()
        return could if self.tokens is None else min(could, self.tokens)

    def thirst(self) -> int:
        """How many attempts more could begin now if the rate allowed it."""
        return 0 if self.tokens is None else max(0, self._could_start() - self.tokens)

    def _could_start(self) -> int:
        return max(0, min(len(self.waiting), self.concurrency.limit - self.busy))

    def take(self) -> Copy | None:
        """The next copy for a slot; None where the lane is empty, or has fewer slots by now, or no token is left."""
        if self.waiting:
            if self.busy > self.concurrency.limit:
                return None
            if self.tokens is not None:
                if not self.tokens:
                    return None
                self.tokens -= 1
            return self.waiting.popleft()
        if self._brisk:
            # What hangs runs dry as well when its calls end at last, since nothing may wait for it.
            self.turned_away = 0
        if self._kept_short:
            # It ran dry while copies were kept from it: it is fast, and may have more at hand.
            self._capacity, self._kept_short = min(_MOST, self._capacity * 2), False
        return None

    def freed(self, now: float, *, started: float) -> None:
        """A slot has finished an attempt."""
        self._freed_at = now
        self._achieved += 1
        self._brisk = now - started < SATURATED_AFTER_S

    def nothing_held(self) -> None:
        """What was turned away has come back, all of it."""
        self.turned_away = 0

    def full(self) -> bool:
        """Whether copies of this lane had better stay in the queue. Once full, it stays so until half is gone."""
        self._full = len(self.waiting) > (self._capacity // 2 if self._full else self._capacity)
        self._kept_short = self._kept_short or self._full
        return self._full

    def too_late(self, copy: Copy, now: float) -> bool:
        """Whether the claim on a copy might end before an attempt does."""
        return copy.deadline - now < self.endpoint.timeout_s + MARGIN_S

    def outlived(self, now: float) -> list[Copy]:
        """What waited until it was too late, taken out. A lane that slow starts small again."""
        late = []
        while self.waiting and self.too_late(self.waiting[0], now):
            late.append(self.waiting.popleft())
        if late:
            self._capacity = _LEAST
        return late

    def surplus(self, now: float) -> list[Copy]:
        """What came last and will not be got to soon, taken out, where the queue cannot keep it. In its first second of
        work nobody knows how fast a lane is: it may keep all.
        """
        most = self._most(now)
        surplus: list[Copy] = []
        while most is not None and len(self.waiting) > most:
            surplus.append(self.waiting.pop())
        return surplus

    def _most(self, now: float) -> int | None:
        elapsed = now - self._measured_from
        if elapsed < _MEASURE_S or (not self.waiting and self.busy < self.slots):
            return None
        if elapsed > _LONGEST_MEASURE_S:
            self._achieved, elapsed = self._achieved / 2, elapsed / 2
            self._measured_from = now - elapsed
        return max(_LEAST, round(self._achieved / elapsed * SURPLUS_AFTER_S))

    def expect(self, count: int, now: float) -> None:
        """Copies were queued for this lane, and are on their way to it or to another worker's."""
        self._expected, self._expected_at = self._expected + count, now

    def expect_kept(self, count: int, now: float) -> None:
        """The same where they had been kept from it because the queue could not."""
        self.expect(count, now)
        self._kept_short = True

    def _on_their_way(self, now: float) -> int:
        if now - self._expected_at > _EXPECTED_FOR_S:
            self._expected = 0
        return self._expected

    def idle(self, now: float) -> bool:
        """Whether the lane has had nothing to do for so long that it is not worth keeping."""
        at_rest = not self.busy and not self.waiting and not self._full
        # What it alone knows of failures so far would be forgotten with it.
        remembers = self.watched and self.streak.since is not None and not self.endpoint.record.failing
        return at_rest and not remembers and now - self._freed_at >= IDLE_AFTER_S

    def saturated(self, now: float) -> bool:
        """Whether every slot has been stuck for so long that nothing should wait for them in memory."""
        return self.busy >= self.slots and now - self._freed_at >= SATURATED_AFTER_S

    @property
    def crowded(self) -> bool:
        """Whether it gets so much more than it can do that more had better not come to the queue."""
        return self.turned_away >= _CROWDED_FROM

    def drain(self) -> list[Copy]:
        """Everything that waits, taken out; the lane starts small again."""
        self._capacity, self._full = _LEAST, False
        waiting, self.waiting = list(self.waiting), deque()
        return waiting

    def room(self, now: float) -> int:
        """How many copies more could be kept here: at work, or also waiting where that will not be turned away once more."""
        free = self.slots - self.busy - len(self.waiting)
        return max(0, free - self._on_their_way(now) if self.turned_away else free + self._capacity)

    def room_for_surplus(self, now: float) -> int:
        """The same where the queue cannot keep what it has, less what is on its way."""
        # Half of what may wait: what is brought back must not be turned away again for what comes beside it.
        most = self._most(now)
        capacity = self._capacity if most is None else min(self._capacity, most // 2)
        return max(0, self.slots - self.busy + capacity - len(self.waiting) - self._on_their_way(now))
