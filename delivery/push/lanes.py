"""Hold the lanes of a worker: those that may have work, the idle ones, and the set of full ones.

Only those that may have work are looked at in each tick. An idle lane stays for a minute, with the
settings of its endpoint and the speed that was found. Where there are too many lanes, those that
are idle for longest are removed before. Only failures that are not recorded yet are kept for longer
(`delivery.push.failure_cache`).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from delivery.push.endpoints import Endpoint
from delivery.push.failure_cache import FailureCache
from delivery.push.lane import IDLE_AFTER_S, Lane
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import SubscriptionId

_MAX_LANES: Final = 20_000
"""Beyond this many, idle lanes are removed at once: each keeps its endpoint in memory."""
_REMOVED_AT_A_TIME: Final = 2000
"""Idle lanes that one tick removes, in some milliseconds."""


class Lanes:
    """Hold the lanes of a worker by subscription. Times are monotonic seconds."""

    def __init__(
        self, *, slots: int, on_full_changed: Callable[[frozenset[SubscriptionId]], None]
    ) -> None:
        """Create an empty set. `slots`: the maximum of lanes without a setting of their own."""
        self._slots = slots
        self._on_full_changed = on_full_changed
        self._working: dict[SubscriptionId, Lane] = {}
        """The lanes that may have work."""
        self._idle: dict[SubscriptionId, tuple[float, Lane]] = {}
        """The others, each with the time since when; the first one is idle for longest."""
        self._failures = FailureCache()
        self.full: frozenset[SubscriptionId] = frozenset()

    def __iter__(self) -> Iterator[Lane]:
        yield from list(self._working.values())
        for _, lane in list(self._idle.values()):
            yield lane

    def __len__(self) -> int:
        return len(self._working) + len(self._idle)

    def working(self) -> list[Lane]:
        """Return the lanes that may have work."""
        return list(self._working.values())

    def get_or_create(self, endpoint: Endpoint, now: float) -> Lane:
        """Return the lane of an endpoint's subscription, a new one if needed, to give it work."""
        lane = self._working.get(endpoint.record.subscription_id)
        if lane is None:
            lane = self._add_working(endpoint, now)
        lane.update(endpoint, now)
        return lane

    def _add_working(self, endpoint: Endpoint, now: float) -> Lane:
        subscription_id = endpoint.record.subscription_id
        _, lane = self._idle.pop(subscription_id, (0.0, None))
        if lane is None:
            lane = Lane(endpoint, slots=self._slots, now=now)
            if (failures := self._failures.take(subscription_id)) is not None:
                lane.restore_failures(failures, now)
        self._working[subscription_id] = lane
        return lane

    def get(self, subscription_id: SubscriptionId) -> Lane | None:
        """Return the lane of a subscription, if it has one."""
        if (lane := self._working.get(subscription_id)) is not None:
            return lane
        return self._idle.get(subscription_id, (0.0, None))[1]

    def exclude_full(self, subscription_ids: Iterable[SubscriptionId]) -> None:
        """Add the full ones among these lanes to those that the queue skips."""
        full = {
            candidate
            for candidate in subscription_ids
            if (lane := self._working.get(candidate)) is not None and lane.is_full()
        }
        if full - self.full:
            self._set_full(self.full | full)

    def on_task_dequeued(self, lane: Lane) -> None:
        """Let the queue deliver this subscription's tasks again, once the lane is not full."""
        if self.full and lane.subscription_id in self.full and not lane.is_full():
            self._set_full(self.full - {lane.subscription_id})

    def set_idle(self, lane: Lane, now: float) -> None:
        """Record that a lane has no work, until `get_or_create` returns it again."""
        del self._working[lane.subscription_id]
        if lane.is_idle(now):
            self._keep_failures(lane)
        else:
            self._idle[lane.subscription_id] = now, lane

    def remove_idle(self, now: float) -> None:
        """Remove lanes that have been idle for long, and more if there are too many."""
        for _ in range(_REMOVED_AT_A_TIME):
            if not self._idle:
                return
            subscription_id, (since, lane) = next(iter(self._idle.items()))
            has_too_many = len(self) > _MAX_LANES
            if now - since < IDLE_AFTER_S and not has_too_many:
                return
            del self._idle[subscription_id]
            if has_too_many or lane.is_idle(now):
                self._keep_failures(lane)
            else:
                self._idle[subscription_id] = now, lane

    def _keep_failures(self, lane: Lane) -> None:
        if (failures := lane.unrecorded_failures()) is not None:
            self._failures.add(lane.subscription_id, lane.endpoint.organisation, failures)

    def remove(self, lane: Lane) -> None:
        """Remove an empty lane whose endpoint is gone."""
        if self._working.pop(lane.subscription_id, None) is None:
            del self._idle[lane.subscription_id]
        if lane.subscription_id in self.full:
            self._set_full(self.full - {lane.subscription_id})

    def drain(self) -> list[DeliveryTask]:
        """Remove and return the waiting tasks of all lanes; the queue skips none any more."""
        tasks = [task for lane in self for task in lane.drain()]
        if self.full:
            self._set_full(frozenset())
        return tasks

    def _set_full(self, full: frozenset[SubscriptionId]) -> None:
        self.full = full
        self._on_full_changed(full)
