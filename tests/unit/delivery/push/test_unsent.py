"""Test notices of saturated lanes: sent in turns by workers, kept briefly by publishers."""

from dataclasses import replace
from typing import cast

import pytest

from delivery.brokers.credit_shares import CreditShares
from delivery.push.endpoints import Endpoint
from delivery.push.lane import CLAIM_MARGIN_S, Lane
from delivery.push.lanes import Lanes
from delivery.push.outcome_writer import OutcomeWriter
from delivery.push.unsent import SaturationReporter, UnsentHandler
from rooms.db.queue.outcomes import DeliveryOutcome
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import Reason, State, SubscriptionStatus
from rooms.publishing.backpressure import HINT_TTL_S, SaturatedEndpoints
from tests.unit.delivery.push.test_endpoints import RECORD, SEAL, TASK


class Watch:
    """Return the time that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_notice_is_kept_for_a_moment_after_the_last_one() -> None:
    watch = Watch()
    crowd = SaturatedEndpoints(watch)
    assert crowd.current() == frozenset()
    crowd.on_notify(["a", "b"])
    watch.now += HINT_TTL_S / 2
    crowd.on_notify(["b", "c"])
    assert crowd.current() == {"a", "b", "c"}
    watch.now += HINT_TTL_S / 2
    assert crowd.current() == {"b", "c"}
    watch.now += HINT_TTL_S / 2
    assert crowd.current() == frozenset()


def test_without_notices_no_lane_is_saturated() -> None:
    crowd = SaturatedEndpoints(Watch())
    crowd.on_notify(["a"])
    crowd.on_notify([])
    assert crowd.current() == {"a"}


def test_the_members_are_the_same_object_until_they_change() -> None:
    crowd = SaturatedEndpoints(Watch())
    crowd.on_notify(["a"])
    before = crowd.current()
    crowd.on_notify(["a"])
    assert crowd.current() is before
    crowd.on_notify(["b"])
    assert crowd.current() is not before


def crowded(
    lanes: Lanes, number: int, status: SubscriptionStatus = SubscriptionStatus.ACTIVE
) -> Lane:
    record = replace(RECORD, subscription_id=SubscriptionId(f"s{number}"), status=status)
    lane = lanes.get_or_create(Endpoint(record, SEAL), 0.0)
    lane.shed_count = 100
    return lane


def test_a_saturated_lane_is_reported_once_a_second_while_it_is_so() -> None:
    lanes = Lanes(slots=4, on_full_changed=lambda _identities: None)
    reported: list[str] = []
    crowding = SaturationReporter(lanes, reported.append)
    lane = crowded(lanes, 1)
    crowding.report_due(10.0)
    crowding.report_due(10.5)
    assert reported == ["s1"]
    crowding.report_due(11.0)
    assert reported == ["s1", "s1"]
    lane.shed_count = 0
    crowding.report_due(12.0)
    assert reported == ["s1", "s1"]


@pytest.mark.parametrize("status", [SubscriptionStatus.PAUSED, SubscriptionStatus.DISABLED])
def test_a_lane_closed_for_another_reason_is_not_reported(status: SubscriptionStatus) -> None:
    lanes = Lanes(slots=4, on_full_changed=lambda _identities: None)
    reported: list[str] = []
    crowded(lanes, 1, status)
    SaturationReporter(lanes, reported.append).report_due(10.0)
    assert reported == []


def test_many_lanes_are_reported_in_turns() -> None:
    lanes = Lanes(slots=4, on_full_changed=lambda _identities: None)
    reported: list[str] = []
    for number in range(250):
        crowded(lanes, number)
    crowding = SaturationReporter(lanes, reported.append)
    for now in (10.0, 10.25):
        crowding.report_due(now)
    assert len(reported) == len(set(reported)) == 200, "a wake-up does not carry more"
    crowding.report_due(10.5)
    assert len(set(reported)) == 250


class Outcomes:
    """Collect outcomes."""

    def __init__(self) -> None:
        self.added: list[DeliveryOutcome] = []

    def add(self, outcome: DeliveryOutcome) -> None:
        self.added.append(outcome)


@pytest.mark.parametrize("supports_exclude", [True, False])
def test_expired_tasks_return_to_a_queue_that_keeps_them_and_are_held_otherwise(
    supports_exclude: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    lanes, outcomes = Lanes(slots=4, on_full_changed=lambda _identities: None), Outcomes()
    reporter = SaturationReporter(lanes, lambda _identity: None)
    unsent = UnsentHandler(lanes, cast("OutcomeWriter", outcomes), reporter)
    unsent.shares = None if supports_exclude else CreditShares(credit=100, max_bytes=1 << 20)
    assert unsent.supports_exclude == supports_exclude
    lane = lanes.get_or_create(Endpoint(RECORD, SEAL), 0.0)
    lane.enqueue([replace(TASK, deadline=100.0)], 0.0)
    unsent.check_lanes(100.0 - lane.endpoint.timeout_s - CLAIM_MARGIN_S + 0.1)
    assert len(unsent.take_to_release()) == supports_exclude
    assert [(one.state, one.reason) for one in outcomes.added] == (
        [] if supports_exclude else [(State.HELD, Reason.SATURATED)]
    )


def test_lanes_that_flow_give_way_until_others_of_their_organisation_find_room() -> None:
    """Two of three have what they complete in ten seconds, which is all that may be had."""
    lanes, outcomes = Lanes(slots=4, on_full_changed=lambda _identities: None), Outcomes()
    reporter = SaturationReporter(lanes, lambda _identity: None)
    unsent = UnsentHandler(lanes, cast("OutcomeWriter", outcomes), reporter)
    unsent.shares = CreditShares(credit=1400, max_bytes=1 << 30)
    flowing, idle = [lane_of(lanes, name) for name in ("a", "b")], lane_of(lanes, "c")

    def arrive(lane: Lane, count: int, now: float) -> int:
        """Return how many the lane gets."""
        kept = unsent.hold_excess(lane, [replace(TASK, deadline=1000.0) for _ in range(count)], now)
        lane.enqueue(kept, now)
        unsent.hold_overflow(lane, now)
        return len(kept)

    now, got = 0.0, 0
    for lane in flowing:
        assert arrive(lane, 350, now) == 350
    assert unsent.shares.room_for(idle.endpoint.organisation, now) == 0
    while not got and now < 60:
        now += 0.25
        for lane in flowing:
            lane.busy = lane.slots
            for _ in range(10):
                task = lane.dequeue()
                assert task is not None
                lane.on_attempt_done(now, started=now - 0.1)
                unsent.shares.discard([task])
            arrive(lane, 100, now)
        unsent.check_lanes(now)
        if unsent.shares.room_for(idle.endpoint.organisation, now):
            got = arrive(idle, 20, now)
    assert got == 20
    assert now <= 3.0
    assert min(len(lane.waiting) for lane in flowing) >= 40, "a second of work"


def lane_of(lanes: Lanes, name: str) -> Lane:
    record = replace(RECORD, subscription_id=SubscriptionId(name))
    return lanes.get_or_create(Endpoint(record, SEAL), 0.0)


def test_a_webhook_that_became_slow_is_not_claimed_and_returned_again_and_again() -> None:
    """It was fast, so its lane keeps 512, and a claim brings more than it starts in time."""
    lanes, outcomes = Lanes(slots=1, on_full_changed=lambda _identities: None), Outcomes()
    reporter = SaturationReporter(lanes, lambda _identity: None)
    unsent = UnsentHandler(lanes, cast("OutcomeWriter", outcomes), reporter)
    lane = lanes.get_or_create(Endpoint(RECORD, SEAL), 0.0)
    for _ in range(5):
        lane.enqueue([TASK] * 600, 0.0)
        assert lane.is_full()
        while lane.dequeue() is not None:
            pass
    claimed, lane.busy = 0, lane.slots
    for tick in range(400):
        now = tick * 0.05
        if lane.subscription_id not in lanes.full:
            claimed += 500
            lane.enqueue([replace(TASK, deadline=now + 60.0) for _ in range(500)], now)
            unsent.hold_overflow(lane, now)
            lanes.exclude_full([lane.subscription_id])
        if tick % 6 == 0:
            lane.on_attempt_done(now, started=now - 3.0)
            assert lane.dequeue() is not None
            lanes.on_task_dequeued(lane)
        if tick % 5 == 0:
            unsent.check_lanes(now)
    assert claimed == 500
    assert len(unsent.take_to_release()) > 250
    assert outcomes.added == []
