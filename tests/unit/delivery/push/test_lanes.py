"""Test which lanes a worker keeps, which it looks at, and what it knows of a removed one."""

from dataclasses import replace
from typing import cast

import pytest

from delivery.push import lanes as lanes_module
from delivery.push.endpoint_state import EndpointSignal, record_result
from delivery.push.endpoints import Endpoint
from delivery.push.lane import IDLE_AFTER_S, KEEP_STREAK_S, Lane
from delivery.push.lanes import Lanes
from delivery.push.outcome_writer import OutcomeWriter
from delivery.push.unsent import SaturationReporter, UnsentHandler
from rooms.db.queue.endpoints import EndpointRecord
from rooms.domain.attempt import AttemptResult
from rooms.domain.ids import SubscriptionId
from tests.support.push_worker import OK, answered
from tests.unit.delivery.push.test_endpoints import RECORD, SEAL, TASK

MONTH_MS = 30 * 86_400_000
WATCHED = replace(RECORD, throttle=replace(RECORD.throttle, disable_after_ms=60_000))
BREAKS = replace(
    RECORD,
    throttle=replace(RECORD.throttle, circuit_failures=2, circuit_window_ms=10 * MONTH_MS),
)
FAILED = answered(503)
WAITING = replace(TASK, deadline=1e6)


class Place:
    """Hold lanes and tick as a worker does. `now_s` is the time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lanes = Lanes(slots=4, on_full_changed=lambda _identities: None)
        reporter = SaturationReporter(self.lanes, lambda _identity: None)
        self.unsent = UnsentHandler(self.lanes, cast("OutcomeWriter", None), reporter)

    def lane(self, record: EndpointRecord, number: int = 0) -> Lane:
        identity = SubscriptionId(f"s{number}") if number else record.subscription_id
        record = replace(record, subscription_id=identity)
        return self.lanes.get_or_create(Endpoint(record, SEAL), self.now_s)

    def attempt(
        self, record: EndpointRecord, result: AttemptResult, *, number: int = 0
    ) -> list[EndpointSignal]:
        """Return what one attempt shows."""
        lane = self.lane(record, number)
        lane.on_attempt_done(self.now_s, started=self.now_s)
        events = record_result(
            lane,
            result,
            tried=lane.endpoint,
            is_probe=False,
            started=self.now_s,
            now=self.now_s,
        )
        return [event.signal for event in events]

    def tick(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.unsent.check_lanes(self.now_s)

    def rest(self, for_s: float) -> None:
        """Tick often enough that idle lanes are removed."""
        self.tick()
        self.tick(for_s)


def test_ticks_look_only_at_lanes_that_may_have_work() -> None:
    place = Place()
    waiting, busy, _ = (place.lane(RECORD, number) for number in (1, 2, 3))
    waiting.enqueue([WAITING], 0.0)
    busy.busy = 1
    place.tick()
    assert place.lanes.working() == [waiting, busy]
    assert len(place.lanes) == len(list(place.lanes)) == 3
    assert place.lane(RECORD, 3) in place.lanes.working()
    assert [place.lanes.get(SubscriptionId(f"s{number}")) for number in (1, 4)] == [waiting, None]


def test_an_idle_lane_is_removed_after_a_minute() -> None:
    place = Place()
    lane = place.lane(RECORD)
    place.tick()
    place.tick(IDLE_AFTER_S - 1)
    assert place.lanes.get(lane.subscription_id) is lane
    place.tick(1)
    assert len(place.lanes) == 0
    assert place.lane(RECORD) is not lane


def test_work_begins_the_minute_anew() -> None:
    place = Place()
    lane = place.lane(RECORD)
    place.rest(IDLE_AFTER_S - 1)
    assert place.lane(RECORD) is lane
    lane.on_attempt_done(place.now_s, started=place.now_s)
    place.rest(IDLE_AFTER_S - 1)
    assert place.lanes.get(lane.subscription_id) is lane


def test_a_lane_that_awaits_a_token_is_kept_until_then() -> None:
    place = Place()
    lane = place.lane(replace(RECORD, throttle=replace(RECORD.throttle, rate_per_s=0.001)))
    lane.next_token_at = 10 * IDLE_AFTER_S
    for _ in range(9):
        place.tick(IDLE_AFTER_S)
        assert place.lanes.get(lane.subscription_id) is lane
    for _ in range(2):
        place.tick(IDLE_AFTER_S)
    assert len(place.lanes) == 0


def test_too_many_lanes_lose_those_that_are_idle_for_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes_module, "_MAX_LANES", 10)
    place = Place()
    place.lane(RECORD, 1).enqueue([WAITING], 0.0)
    for number in range(2, 50):
        place.lane(RECORD, number)
        place.tick(0.25)
    kept = {lane.subscription_id for lane in place.lanes}
    assert kept == {"s1", *(f"s{number}" for number in range(41, 50))}


def test_a_tick_removes_so_many_lanes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "_REMOVED_AT_A_TIME", 10)
    place = Place()
    for number in range(25):
        place.lane(RECORD, number + 1)
    place.tick()
    counts = []
    for _ in range(3):
        place.tick(IDLE_AFTER_S)
        counts.append(len(place.lanes))
    assert counts == [15, 5, 0]


def test_a_saturated_lane_without_work_is_still_reported() -> None:
    """With a rate limit it is often empty between two tokens."""
    place, reported = Place(), list[str]()
    lane = place.lane(replace(RECORD, throttle=replace(RECORD.throttle, rate_per_s=0.1)))
    lane.shed_count = 100
    place.unsent._saturation_reporter = SaturationReporter(place.lanes, reported.append)
    for _ in range(3):
        place.tick(1.0)
    assert len(reported) == 3
    place.tick(IDLE_AFTER_S)
    assert len(place.lanes) == 0


def test_waiting_tasks_of_all_lanes_are_drained() -> None:
    place = Place()
    place.lane(RECORD, 1).enqueue([WAITING], 0.0)
    place.lane(RECORD, 2)
    place.tick()
    assert place.lanes.drain() == [WAITING]


@pytest.mark.parametrize("is_idle", [True, False])
def test_the_lane_of_a_deleted_subscription_is_removed(
    is_idle: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    place = Place()
    lane = place.lane(WATCHED)
    if is_idle:
        place.tick()
    place.lanes.remove(lane)
    assert len(place.lanes) == 0


@pytest.mark.parametrize("longest_ms", [60_000, MONTH_MS])
def test_failures_that_are_not_recorded_outlast_their_lane(longest_ms: int) -> None:
    """A redelivery may be due hours later, and its failure must not be the first one again."""
    record = replace(WATCHED, throttle=replace(WATCHED.throttle, disable_after_ms=longest_ms))
    keep_s = max(KEEP_STREAK_S, longest_ms / 1000)
    for after_s, signals in ((keep_s - 1, [EndpointSignal.FAILING]), (keep_s, [])):
        place = Place()
        assert place.attempt(record, FAILED) == []
        place.rest(after_s)
        assert len(place.lanes) == 0
        assert place.attempt(record, FAILED) == signals


def test_failures_for_the_circuit_outlast_their_lane() -> None:
    place = Place()
    assert place.attempt(BREAKS, FAILED) == []
    place.rest(9 * MONTH_MS / 1000)
    assert len(place.lanes) == 0
    assert place.attempt(BREAKS, FAILED) == [EndpointSignal.CIRCUIT_OPENED]


def test_a_success_takes_back_failures_that_were_reported_before_the_lane_was_removed() -> None:
    place = Place()
    for signals in ([], [EndpointSignal.FAILING]):
        assert place.attempt(WATCHED, FAILED) == signals
        place.tick(2.0)
    place.rest(3600)
    assert len(place.lanes) == 0
    assert place.attempt(WATCHED, OK) == [EndpointSignal.HEALTHY]


def test_failures_of_former_settings_do_not_count() -> None:
    place = Place()
    assert place.attempt(WATCHED, FAILED) == []
    place.rest(3600)
    assert place.attempt(replace(WATCHED, version=9), FAILED) == []


def test_recorded_failures_are_not_kept() -> None:
    place = Place()
    assert place.attempt(WATCHED, FAILED) == []
    lane = place.lane(replace(WATCHED, version=4, failing=True))
    assert lane.unrecorded_failures() is None
    place.rest(3600)
    assert len(place.lanes._failures) == 0
