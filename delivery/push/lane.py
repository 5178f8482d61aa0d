"""Queue one subscription's tasks in one worker, so that a webhook that hangs delays only itself.

busy        more tasks wait than slots are free: further tasks stay in the queue, unclaimed; if the
            queue cannot keep them, those that the lane will not start in the next seconds are held
saturated   tasks wait and no slot was freed for a second: they are held in PostgreSQL, and released
            when slots are free again
limited     more tasks wait than the rate lets start in the next seconds: the rest is held as
            saturated, and released as its tokens come
closed      paused, disabled, its circuit open, or deleted: waiting tasks are held, or cancelled

The number of slots adapts to the endpoint (`delivery.push.concurrency`). With a rate limit, a slot
also needs a token of the bucket that all workers share (`delivery.push.rate_limit`).

`delivery.push.lanes` holds the lanes of a worker.
"""

from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from delivery.push.circuit import CircuitBreaker, FailureStreak
from delivery.push.concurrency import AdaptiveConcurrency
from delivery.push.endpoints import Endpoint
from delivery.push.failure_cache import UnrecordedFailures
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import Reason, SubscriptionStatus

CLAIM_MARGIN_S: Final = 2.0
"""No attempt is made unless the claim outlasts the time-out by this much."""
IDLE_AFTER_S: Final = 60.0
KEEP_STREAK_S: Final = 86_400.0
"""Failures that are not recorded yet count for so long.

Also for as long as failures must last to disable the endpoint, or count for its circuit.
"""
SATURATED_AFTER_S: Final = 1.0
OVERFLOW_AFTER_S: Final = 10.0
"""If the queue cannot keep tasks, a lane keeps as many as it completes in this time.

With a rate limit it keeps as many as the rate lets start in this time, whatever the queue can do.
At 2,000 a second that is a worker's whole credit. The time is short compared with a claim, and
tasks of other lanes wait no longer than this behind the lane's own.
"""
_KEEP_NEWER_S: Final = 60.0
_MIN_MEASURE_S: Final = 1.0
_MAX_MEASURE_S: Final = 4.0
_EXPECTED_TTL_S: Final = 2.0
_SATURATED_SHED_COUNT: Final = 8
_MIN_CAPACITY: Final = 16
_MAX_CAPACITY: Final = 512
_priority: Final = attrgetter("priority")


class Lane:
    """Hold a subscription's waiting tasks, and count its slots. Times are monotonic seconds."""

    __slots__ = (
        "_capacity",
        "_done_count",
        "_expected",
        "_expected_at",
        "_fast",
        "_last_done_at",
        "_max_slots",
        "_measured_from",
        "_rate",
        "_starved",
        "_updated_at",
        "_was_full",
        "breaker",
        "busy",
        "concurrency",
        "endpoint",
        "failing_since",
        "failure_streak",
        "gone_version",
        "next_token_at",
        "reported_concurrency",
        "reported_failing",
        "shed_count",
        "tokens",
        "tracks_failures",
        "tripped_version",
        "waiting",
    )

    def __init__(self, endpoint: Endpoint, *, slots: int, now: float) -> None:
        """Create an empty lane. `slots`: its maximum if the subscription does not set one."""
        self.endpoint = endpoint
        self._updated_at = now
        self._max_slots = slots
        self.waiting: deque[DeliveryTask] = deque()
        self.busy = 0
        self.concurrency = AdaptiveConcurrency(endpoint.record.throttle.max_concurrency or slots)
        self.reported_concurrency: int | None = None
        """The reduced concurrency that was last written to the database; None: none."""
        self.gone_version: int | None = None
        """The subscription's version at which the endpoint answered 410; perhaps not written."""
        self.tripped_version: int | None = None
        """The version at which this worker opened its circuit; perhaps not written."""
        self.breaker = CircuitBreaker()
        self.failure_streak = FailureStreak()
        self.reported_failing = False
        """This worker reported failures since its last success; the record may not show it yet."""
        self.tokens: int | None = None
        """Attempts that the rate allows now; None: there is no rate limit."""
        self.next_token_at = now
        self.shed_count = 0
        """Tasks held as saturated since the lane last ran empty, or nothing was held any more.

        With a rate limit only the latter counts: between two tokens a lane is often empty.
        """
        self._fast = True
        self._rate: tuple[float | None, int] = (None, 0)
        self._apply_settings(now)
        self._capacity = _MIN_CAPACITY
        self._last_done_at = now
        self._was_full = False
        self._starved = False
        self._done_count = 0.0
        self._measured_from = now
        self._expected = 0
        self._expected_at = now

    @property
    def subscription_id(self) -> SubscriptionId:
        """Return the subscription of this lane."""
        return self.endpoint.record.subscription_id

    @property
    def slots(self) -> int:
        """Return the current limit of concurrent attempts."""
        return self.concurrency.limit

    def update(self, endpoint: Endpoint, now: float) -> None:
        """Apply the subscription's settings, unless they are older than those of the lane.

        Older ones were read before a change and come after it. If they still come a minute later,
        the database was restored to an earlier time.
        """
        if endpoint is not self.endpoint:
            former, record = self.endpoint.record, endpoint.record
            if record.version < former.version and now - self._updated_at < _KEEP_NEWER_S:
                return
            self.endpoint, self._updated_at = endpoint, now
            if former.failing and not record.failing and record.version > former.version:
                self.failure_streak.forget()
                self.reported_failing = False
            if not record.has_same_target(former):
                self.breaker.reset()
                self.failure_streak.forget()
                self.reported_failing = False
            self._apply_settings(now)

    def _apply_settings(self, now: float) -> None:
        record = self.endpoint.record
        policy = record.throttle
        self.concurrency.set_maximum(policy.max_concurrency or self._max_slots)
        self.tokens = None if policy.rate_per_s is None else (self.tokens or 0)
        if (rate := (policy.rate_per_s, policy.rate_burst)) != self._rate:
            # The next token by the former rate may be a quarter of an hour away.
            self._rate, self.next_token_at = rate, now
        self.tracks_failures = bool(policy.circuit_failures or policy.disable_after_ms)
        """True if failures may open its circuit, or disable it."""
        self.failing_since = now - record.failing_s if record.failing else now
        """The start of the recorded streak of failures, if one is recorded."""

    def closed_reason(self, now: float) -> Reason | None:
        """Return the reason for which tasks must be held; None if they may wait here."""
        status = self.endpoint.record.status
        if (
            status is SubscriptionStatus.DISABLED
            or self.gone_version == self.endpoint.record.version
        ):
            return Reason.DISABLED
        if status is SubscriptionStatus.PAUSED:
            return Reason.PAUSED
        if status is not SubscriptionStatus.ACTIVE:
            return Reason.SUSPENDED
        if (
            self.endpoint.record.circuit_open
            or self.tripped_version == self.endpoint.record.version
        ):
            return Reason.CIRCUIT_OPEN
        return Reason.SATURATED if self.is_saturated(now) else None

    def enqueue(self, tasks: Iterable[DeliveryTask], now: float) -> None:
        """Append tasks to those that wait."""
        if not self.waiting and self.busy < self.slots:
            self._last_done_at = self._measured_from = now
            self._done_count = 0
        before = len(self.waiting)
        self.waiting.extend(tasks)
        self._expected = max(0, self._expected - len(self.waiting) + before)

    def free_slots(self) -> int:
        """Return how many more attempts can begin now."""
        free = self._slots_without_rate()
        return free if self.tokens is None else min(free, self.tokens)

    def missing_tokens(self) -> int:
        """Return how many more attempts could begin now without the rate limit."""
        return 0 if self.tokens is None else max(0, self._slots_without_rate() - self.tokens)

    def _slots_without_rate(self) -> int:
        return max(0, min(len(self.waiting), self.concurrency.limit - self.busy))

    def dequeue(self) -> DeliveryTask | None:
        """Return the next task for a slot; None if the slot must stop.

        That is so if no task waits, the limit was reduced, or no token is left.
        """
        if self.waiting:
            if self.busy > self.concurrency.limit:
                return None
            if self.tokens is not None:
                if not self.tokens:
                    return None
                self.tokens -= 1
            return self.waiting.popleft()
        if self._fast and self.tokens is None:
            # A hanging lane runs empty too when its attempts end, because no task may wait for it.
            self.shed_count = 0
        if self._starved:
            # It ran empty while its tasks were kept in the queue: it is fast, and may keep more.
            self._capacity, self._starved = min(_MAX_CAPACITY, self._capacity * 2), False
        return None

    def on_attempt_done(self, now: float, *, started: float) -> None:
        """Record the end of an attempt."""
        self._last_done_at = now
        self._done_count += 1
        self._fast = now - started < SATURATED_AFTER_S

    def on_none_held(self) -> None:
        """Record that no task is held as saturated any more."""
        self.shed_count = 0

    def is_flowing(self, now: float) -> bool:
        """Return whether an attempt ended within the last second, and took less."""
        return self._fast and self._done_count > 0 and now - self._last_done_at < SATURATED_AFTER_S

    def is_full(self) -> bool:
        """Return whether more tasks should stay in the queue, until half is left."""
        self._was_full = len(self.waiting) > (
            self._capacity // 2 if self._was_full else self._capacity
        )
        self._starved = self._starved or self._was_full
        return self._was_full

    def claim_too_short(self, task: DeliveryTask, now: float) -> bool:
        """Return whether the claim on a task might end before an attempt does."""
        return task.deadline - now < self.endpoint.timeout_s + CLAIM_MARGIN_S

    def pop_expired(self, now: float) -> list[DeliveryTask]:
        """Remove and return tasks whose claims are too short; then start with a small queue."""
        expired = []
        while self.waiting and self.claim_too_short(self.waiting[0], now):
            expired.append(self.waiting.popleft())
        if expired:
            self._capacity = _MIN_CAPACITY
        return expired

    def pop_overflow(self, now: float, kept_part: float = 1.0) -> list[DeliveryTask]:
        """Remove and return the last tasks, as many as will not start soon.

        In its first second a lane keeps all that its rate allows: its speed is not known yet.
        `kept_part`: of the usual time, if it must leave room to others of its organisation. Then
        its first second counts by what was completed in it.
        """
        limit = self._overflow_limit(now, kept_part)
        if limit is None and kept_part < 1:
            done_soon = round(self._done_count / _MIN_MEASURE_S * OVERFLOW_AFTER_S * kept_part)
            limit = max(self._part_of_capacity(kept_part), done_soon)
        limits = limit, self._rate_keep_limit(now)
        return self._pop_beyond(min((one for one in limits if one is not None), default=None))

    def pop_beyond_rate(self, now: float) -> list[DeliveryTask]:
        """Remove and return the last tasks, as many as the rate will not let start soon.

        If some were held, the lane keeps no more than its capacity. So those that are still in the
        queue are held, too, and are released in their order.
        """
        limit = self._rate_keep_limit(now)
        if limit is not None and self.shed_count:
            limit = min(limit, self._capacity)
        found = self._pop_beyond(limit)
        if found:
            self._was_full = False
        return found

    def pop_unstartable(self, now: float) -> list[DeliveryTask]:
        """Remove and return the last tasks, as many as will not start before their claims end.

        If there are some, the lane keeps no more than the rest from now on.
        """
        if not self.waiting:
            return []
        left_s = self.waiting[-1].deadline - now - self.endpoint.timeout_s - CLAIM_MARGIN_S
        found = self._pop_beyond(self._keep_limit(now, max(0.0, left_s)))
        if found:
            # Else it would not be full now, and what it returned would be claimed at once.
            self._capacity = max(_MIN_CAPACITY, min(self._capacity, len(self.waiting)))
        return found

    def _pop_beyond(self, limit: int | None) -> list[DeliveryTask]:
        """Remove and return all but so many: of the lowest priority, the last ones first."""
        if limit is None or len(self.waiting) <= limit:
            return []
        by_priority = sorted(self.waiting, key=_priority, reverse=True)
        found = by_priority[limit:]
        found.reverse()
        removed = set(map(id, found))
        self.waiting = deque(task for task in self.waiting if id(task) not in removed)
        return found

    def _keep_limit(self, now: float, within_s: float, least: int = _MIN_CAPACITY) -> int | None:
        """Return how many tasks the lane completes in this time; None: that is not known yet."""
        elapsed = now - self._measured_from
        if elapsed < _MIN_MEASURE_S or (not self.waiting and self.busy < self.slots):
            return None
        if elapsed > _MAX_MEASURE_S:
            self._done_count, elapsed = self._done_count / 2, elapsed / 2
            self._measured_from = now - elapsed
        return max(least, round(self._done_count / elapsed * within_s))

    def _overflow_limit(self, now: float, kept_part: float) -> int | None:
        least = _MIN_CAPACITY if kept_part == 1 else self._least_kept()
        return self._keep_limit(now, OVERFLOW_AFTER_S * kept_part, least)

    def _least_kept(self) -> int:
        return min(_MIN_CAPACITY, self.slots)

    def _part_of_capacity(self, kept_part: float) -> int:
        # A lane that runs empty again and again has a large one, and would take all the room.
        return max(self._least_kept(), int(self._capacity * kept_part))

    def startable_by_rate(self, now: float) -> int | None:
        """Return how many tasks the rate lets start in the next seconds; None: it has no limit."""
        rate_per_s = self._rate[0]
        if self.tokens is None or rate_per_s is None:
            return None
        left_s = OVERFLOW_AFTER_S - max(0.0, self.next_token_at - now)
        return self.tokens + (int(left_s * rate_per_s) + 1 if left_s >= 0 else 0)

    def _rate_keep_limit(self, now: float) -> int | None:
        # If no token is awaited, the bucket may be full, and a burst may start at once.
        return None if self.next_token_at <= now else self.startable_by_rate(now)

    def expect_tasks(self, count: int, now: float) -> None:
        """Record that tasks were queued, which this or another worker will claim."""
        self._expected, self._expected_at = self._expected + count, now

    def expect_released(self, count: int, now: float) -> None:
        """Record that held tasks were queued, if the queue cannot keep tasks of full lanes."""
        self.expect_tasks(count, now)
        self._starved = True

    def _expected_now(self, now: float) -> int:
        if now - self._expected_at > _EXPECTED_TTL_S:
            self._expected = 0
        return self._expected

    def is_idle(self, now: float) -> bool:
        """Return whether the lane has been empty for so long that it can be removed."""
        empty = not self.busy and not self.waiting and not self._was_full
        # Without it, the time of the next token would have to be found out again.
        awaits_token = self.tokens is not None and self.next_token_at > now
        return empty and not awaits_token and now - self._last_done_at >= IDLE_AFTER_S

    def unrecorded_failures(self) -> UnrecordedFailures | None:
        """Return the failures that are not recorded yet, and would be lost with the lane."""
        record, since = self.endpoint.record, self.failure_streak.since
        if since is None or record.failing or not self.tracks_failures:
            return None
        longest_ms = max(record.throttle.disable_after_ms or 0, record.throttle.circuit_window_ms)
        return UnrecordedFailures(
            version=record.version,
            valid_until=self._last_done_at + max(KEEP_STREAK_S, longest_ms / 1000),
            since=since,
            is_reported=self.reported_failing,
            failed_at=self.breaker.failed_at(),
        )

    def restore_failures(self, failures: UnrecordedFailures, now: float) -> None:
        """Go on with the failures of a lane that was removed, unless the subscription changed."""
        record = self.endpoint.record
        if now < failures.valid_until and (record.version, record.failing) == (
            failures.version,
            False,
        ):
            self.failure_streak.since = failures.since
            self.reported_failing = failures.is_reported
            self.breaker.restore(failures.failed_at)

    def is_saturated(self, now: float) -> bool:
        """Return whether every slot is busy and none was freed for a second."""
        return self.busy >= self.slots and now - self._last_done_at >= SATURATED_AFTER_S

    @property
    def persistently_saturated(self) -> bool:
        """Return whether so many tasks were held as saturated that publishers should hold more."""
        return self.shed_count >= _SATURATED_SHED_COUNT

    def drain(self) -> list[DeliveryTask]:
        """Remove and return all waiting tasks; then start again with a small queue."""
        self._capacity, self._was_full = _MIN_CAPACITY, False
        waiting, self.waiting = list(self.waiting), deque()
        return waiting

    def free_capacity(self, now: float) -> int:
        """Return how many more tasks the lane can take without having them held again.

        After tasks were held as saturated, only free slots count; else the queue's capacity too.
        With a rate limit slots are free while no token is, so only hanging attempts count as such.
        """
        free = self.slots - self.busy - len(self.waiting)
        if self.shed_count and (self.tokens is None or not self._fast):
            return self._within_rate(free - self._expected_now(now), now)
        return self._in_portions(self._within_rate(free + self._capacity, now), now)

    def free_capacity_for_released(self, now: float, kept_part: float = 1.0) -> int:
        """Return how many held tasks may be released, if the queue cannot skip full lanes."""
        # Half of the limit, because released tasks must not be held again for new ones beside them.
        limit = self._overflow_limit(now, kept_part)
        capacity = (
            self._part_of_capacity(kept_part) if limit is None else min(self._capacity, limit // 2)
        )
        free = self.slots - self.busy + capacity - len(self.waiting) - self._expected_now(now)
        return self._in_portions(self._within_rate(free, now), now)

    def _within_rate(self, free: int, now: float) -> int:
        """Return how many of so many free places the rate lets tasks use soon."""
        startable = self.startable_by_rate(now)
        if startable is not None:
            free = min(free, startable - len(self.waiting) - self._expected_now(now))
        return max(0, free)

    def _in_portions(self, free: int, now: float) -> int:
        """Return 0 for less than half of what a limited lane can take.

        It would be a statement for each token.
        """
        startable = self.startable_by_rate(now)
        return free if startable is None or free * 2 >= min(startable, _MIN_CAPACITY) else 0
