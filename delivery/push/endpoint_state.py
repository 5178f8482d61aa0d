"""Track the state of endpoints: what attempts show, kept until it is written for all workers.

result of an attempt   adapts the lane's concurrency and feeds its circuit breaker
EndpointEvent          what the result showed beyond its own delivery: failing, healthy, gone …
EndpointEventQueue     keeps events and status reasons until they are written
EndpointStateWriter    writes them by compare-and-set and notifies the other workers
ConcurrencyReporter    writes how far the worker reduced the concurrency of its lanes
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

from delivery.push.endpoints import Endpoint
from delivery.push.lane import Lane
from delivery.push.lanes import Lanes
from rooms.db.notify import Channel, Notifier
from rooms.db.queue.endpoints import EndpointRecord
from rooms.db.queue.throttle import SharedLaneState
from rooms.domain.attempt import AttemptResult
from rooms.domain.ids import RoomId, SubscriptionId, room_of
from rooms.errors import StorageRefusedError
from rooms.outages import OUTAGES

_TOO_MANY_REQUESTS: Final = 429
_FIRST_SERVER_ERROR: Final = 500
_CONCURRENCY_REPORT_EVERY_S: Final = 5.0
MAX_FLUSHED: Final = 100
FLUSH_S: Final = 0.5
"""Events that one flush writes, and its time. The endpoints of one organisation may all fail at
once, and the rest of the worker's tick must not wait for that.
"""
LOCK_TIMEOUT_MS: Final = 100
"""The longest time that a write waits for a room or subscription that is being changed."""
_REFUSED: Final = "writes about endpoints were refused"


class EndpointSignal(StrEnum):
    """Enumerate what a worker can find out about an endpoint."""

    GONE = "gone"
    FAILED_TOO_LONG = "failed_long"
    CIRCUIT_OPENED = "tripped"
    CIRCUIT_CLOSED = "recovered"
    FAILING = "failing"
    HEALTHY = "well"


_SIGNAL_SUBJECTS: Final = {
    EndpointSignal.GONE: "status",
    EndpointSignal.FAILED_TOO_LONG: "status",
    EndpointSignal.CIRCUIT_OPENED: "circuit",
    EndpointSignal.CIRCUIT_CLOSED: "circuit",
    EndpointSignal.FAILING: "failing",
    EndpointSignal.HEALTHY: "failing",
}
"""Of two signals about one subject, the later one counts."""
_STATUS_REASON: Final = "status_reason"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointEvent:
    """Carry a signal about an endpoint, with a text for people."""

    signal: EndpointSignal
    endpoint: Endpoint
    detail: str = ""


def record_result(
    lane: Lane,
    result: AttemptResult,
    *,
    tried: Endpoint,
    is_probe: bool,
    started: float,
    now: float,
) -> Sequence[EndpointEvent]:
    """Adapt the lane to the result of an attempt, and return what it shows about the endpoint.

    Times are monotonic seconds. `is_probe`: it was sent although the circuit was open. `tried`: as
    it was when the attempt began. If its URL, a secret or a header has changed, or it was resumed,
    the result shows nothing.
    """
    if result.error is None:
        lane.concurrency.on_success(
            busy=lane.busy, started=started, now=now, latency_ms=result.latency_ms
        )
    elif (
        result.status is None
        or result.status == _TOO_MANY_REQUESTS
        or result.status >= _FIRST_SERVER_ERROR
    ):
        lane.concurrency.on_overload(started=started, now=now)
    if not lane.tracks_failures or not lane.endpoint.record.has_same_target(tried.record):
        return ()
    return _track_failures(lane, result, now, is_probe=is_probe)


def _track_failures(
    lane: Lane, result: AttemptResult, now: float, *, is_probe: bool
) -> Sequence[EndpointEvent]:
    events: list[EndpointEvent] = []
    endpoint = lane.endpoint
    record, policy, retry = endpoint.record, endpoint.record.throttle, endpoint.record.policy
    # A status that the subscription declares terminal or ignorable shows an endpoint that works.
    if (
        result.error is None
        or result.status in retry.terminal_statuses
        or result.status in retry.ignorable_statuses
    ):
        lane.breaker.succeeded()
        lane.failure_streak.succeeded(now)
        # Also if another probe is named by now, because this one took longer than the period.
        if is_probe and record.circuit_open:
            events.append(EndpointEvent(signal=EndpointSignal.CIRCUIT_CLOSED, endpoint=endpoint))
        if record.failing or lane.reported_failing:
            lane.reported_failing = False
            events.append(EndpointEvent(signal=EndpointSignal.HEALTHY, endpoint=endpoint))
        return events
    closed = record.circuit_open or lane.tripped_version == record.version
    window_s = policy.circuit_window_ms / 1000
    if not closed and lane.breaker.failed(now, failures=policy.circuit_failures, window_s=window_s):
        lane.tripped_version = record.version
        events.append(EndpointEvent(signal=EndpointSignal.CIRCUIT_OPENED, endpoint=endpoint))
    if not lane.failure_streak.failed(now) or policy.disable_after_ms is None:
        return events
    if not record.failing:
        lane.reported_failing = True
        events.append(EndpointEvent(signal=EndpointSignal.FAILING, endpoint=endpoint))
    elif lane.failure_streak.succeeded_at > lane.failing_since:
        # Another worker wrote this without knowing of the success that this worker saw.
        events.append(EndpointEvent(signal=EndpointSignal.HEALTHY, endpoint=endpoint))
    elif (now - lane.failing_since) * 1000 >= policy.disable_after_ms:
        detail = (
            f"nothing but failures for {policy.disable_after_ms} ms, "
            f"the last one: {result.detail or result.error}"
        )
        events.append(
            EndpointEvent(signal=EndpointSignal.FAILED_TOO_LONG, endpoint=endpoint, detail=detail)
        )
    return events


_Subject = tuple[SubscriptionId, str]


@dataclass(slots=True, eq=False)
class _QueuedWrite:
    """Hold one write, which gets its age in seconds, and since when it counts."""

    write: Callable[[float], Awaitable[None]]
    since: float


class EndpointEventQueue:
    """Keep events and status reasons until they are written; the last one of a subject counts.

    A status reason explains why an active subscription cannot be served; None removes it. Rooms
    take turns, and in a room the oldest write is first.
    """

    def __init__(
        self,
        *,
        write_event: Callable[[EndpointEvent, float], Awaitable[None]],
        write_status_reason: Callable[[EndpointRecord, str | None], Awaitable[None]],
        monotonic: Callable[[], float],
    ) -> None:
        """Configure the queue. `write_event` gets an event and its age in seconds."""
        self._write_event = write_event
        self._write_status_reason = write_status_reason
        self._monotonic = monotonic
        self._rooms: dict[RoomId, dict[_Subject, _QueuedWrite]] = {}
        """The room whose turn is next first; of each the oldest write first."""
        self._refusing: set[RoomId] = set()
        """The rooms whose last write was refused."""

    def add(self, event: EndpointEvent) -> None:
        """Queue an event in place of an earlier one about the same subject."""
        subject = event.endpoint.record.subscription_id, _SIGNAL_SUBJECTS[event.signal]
        self._queue(subject, partial(self._write_event, event))

    def set_status_reason(self, record: EndpointRecord, reason: str | None) -> None:
        """Queue the reason why a subscription cannot be served, or None if it can."""

        async def write(_age_s: float) -> None:
            await self._write_status_reason(record, reason)

        self._queue((record.subscription_id, _STATUS_REASON), write)

    def _queue(self, subject: _Subject, write: Callable[[float], Awaitable[None]]) -> None:
        writes = self._rooms.setdefault(room_of(subject[0]), {})
        writes[subject] = _QueuedWrite(write, self._monotonic())

    async def flush(self) -> bool:
        """Write what is queued, a write of each room in turn, up to `MAX_FLUSHED` in `FLUSH_S`.

        Return whether there is more. A refused one is logged, and queued again behind the others of
        its room, for the next time. These wait for that, too: the room may be locked. After any
        other error, which is raised, the rest stays queued.
        """
        deadline = self._monotonic() + FLUSH_S
        turns = deque(self._rooms)
        for _ in range(MAX_FLUSHED):
            if not turns or self._monotonic() >= deadline:
                break
            room = turns.popleft()
            if await self._write_oldest(room):
                turns.append(room)
        if not self._refusing:
            OUTAGES.record_success(_REFUSED)
        return len(self._rooms) > len(self._refusing)

    async def _write_oldest(self, room: RoomId) -> bool:
        """Write the room's oldest, and return whether more of it may be written now."""
        writes = self._rooms[room]
        subject, queued = next(iter(writes.items()))
        try:
            await queued.write(self._monotonic() - queued.since)
        except StorageRefusedError as exc:
            OUTAGES.record_failure(exc, _REFUSED)
            self._refusing.add(room)
            # All others have a turn before it, since only its own subscription may be locked.
            writes[subject] = writes.pop(subject)
        else:
            self._refusing.discard(room)
            if writes[subject] is queued:
                del writes[subject]
        finally:
            # A later event was added meanwhile. If it came before the time that PostgreSQL gave to
            # this one, it would seem to be the earlier one, and change nothing.
            if (later := writes.get(subject)) is not None and later is not queued:
                later.since = self._monotonic()
        del self._rooms[room]
        if writes:
            self._rooms[room] = writes
        return bool(writes) and room not in self._refusing


class EndpointStateWriter:
    """Write events to the database, and call `observe` with each signal that changed something."""

    def __init__(
        self,
        lanes: SharedLaneState,
        signals: Notifier,
        *,
        observe: Callable[[EndpointSignal], None],
    ) -> None:
        self._lanes = lanes
        self._signals = signals
        self._observe = observe

    async def write(self, event: EndpointEvent, age_s: float = 0.0) -> None:
        """Write an event that is `age_s` old, unless it is recorded already or out of date.

        Other workers are notified.

        After StorageUnavailableError or StorageRefusedError it must be written again.
        """
        record = event.endpoint.record
        if await self._apply(event, age_s):
            self._observe(event.signal)
        # Also if another worker was first: its notification may be lost.
        self._signals.notify(Channel.CONFIG, str(record.room_id))

    async def set_status_reason(self, record: EndpointRecord, reason: str | None) -> None:
        """Write why the subscription cannot be served (None: it can)."""
        await self._lanes.set_status_reason(
            record.room_id, record.subscription_id, version=record.version, reason=reason
        )

    async def _apply(self, event: EndpointEvent, age_s: float) -> bool:
        record = event.endpoint.record
        match event.signal:
            case EndpointSignal.GONE:
                return await self._lanes.disable(record, reason=event.detail)
            case EndpointSignal.FAILED_TOO_LONG:
                failing_ms = record.throttle.disable_after_ms
                return await self._lanes.disable(record, reason=event.detail, failing_ms=failing_ms)
            case EndpointSignal.CIRCUIT_OPENED:
                return await self._lanes.open_circuit(
                    record, open_ms=record.throttle.circuit_open_ms
                )
            case EndpointSignal.CIRCUIT_CLOSED:
                return await self._lanes.close_circuit(record)
            case EndpointSignal.FAILING:
                return await self._lanes.mark_failing(record)
            case EndpointSignal.HEALTHY:
                return await self._lanes.clear_failing(record, age_s=age_s)


class ConcurrencyReporter:
    """Write the concurrency of lanes that overload has reduced, and count them."""

    def __init__(
        self, lanes: Lanes, shared: SharedLaneState, *, report_slowed: Callable[[int], None]
    ) -> None:
        self._lanes = lanes
        self._shared = shared
        self._report_slowed = report_slowed
        self._next_at = 0.0

    async def report_changes(self, now: float) -> None:
        """Write changes since the last report, at most every 5 s. `now`: monotonic seconds."""
        if now < self._next_at:
            return
        self._next_at = now + _CONCURRENCY_REPORT_EVERY_S
        reduced = [lane for lane in self._lanes if lane.concurrency.is_reduced]
        self._report_slowed(len(reduced))
        changed = [lane for lane in reduced if lane.reported_concurrency != lane.slots]
        changed += [
            lane
            for lane in self._lanes
            if lane.reported_concurrency is not None and not lane.concurrency.is_reduced
        ]
        if changed:
            await self._shared.report_concurrency(
                [(lane.subscription_id, lane.slots) for lane in changed]
            )
        for lane in changed:
            lane.reported_concurrency = lane.slots if lane.concurrency.is_reduced else None
