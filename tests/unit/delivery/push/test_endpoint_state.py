"""Test what the results of attempts show about an endpoint."""

from dataclasses import replace
from datetime import timedelta

import pytest

from delivery.push.circuit import REPORT_AFTER_S
from delivery.push.endpoint_state import EndpointSignal, record_result
from delivery.push.endpoints import Endpoint
from delivery.push.lane import Lane
from rooms.db.queue.endpoints import EndpointRecord
from rooms.domain.attempt import AttemptResult
from tests.support.push_worker import OK, answered
from tests.unit.delivery.push.test_endpoints import RECORD, SEAL

THROTTLE = replace(RECORD.throttle, disable_after_ms=60_000)
WATCHED = replace(RECORD, throttle=THROTTLE)
LATER = RECORD.updated_at + timedelta(hours=1)


def signals_of(lane: Lane, *results: AttemptResult, now: float) -> list[EndpointSignal]:
    return [
        event.signal
        for result in results
        for event in record_result(
            lane, result, tried=lane.endpoint, is_probe=False, started=now, now=now
        )
    ]


def test_a_success_takes_back_failures_that_are_not_recorded_yet() -> None:
    """They may be written by now, and the settings that show it are not loaded yet."""
    lane = Lane(Endpoint(WATCHED, SEAL), slots=4, now=0.0)
    assert signals_of(lane, answered(500), now=1.0) == []
    now = 1.0 + REPORT_AFTER_S
    assert signals_of(lane, answered(500), now=now) == [EndpointSignal.FAILING]
    lane.update(Endpoint(replace(WATCHED, version=9), SEAL), now)  # changed for another reason
    assert signals_of(lane, OK, OK, now=now) == [EndpointSignal.HEALTHY]


def test_a_success_that_follows_none_is_not_reported() -> None:
    lane = Lane(Endpoint(WATCHED, SEAL), slots=4, now=0.0)
    assert signals_of(lane, OK, OK, now=1.0) == []


def lane_of(record: EndpointRecord, now: float = 0.0) -> Lane:
    return Lane(Endpoint(record, SEAL), slots=4, now=now)


def test_a_worker_vouches_for_no_time_before_its_report() -> None:
    """Other workers cleared nothing until then, however often the endpoint answered them."""
    lane = lane_of(WATCHED)
    assert signals_of(lane, answered(500), now=0.0) == []
    assert signals_of(lane, answered(500), now=90_000.0) == [EndpointSignal.FAILING]
    failing = replace(WATCHED, version=4, failing=True, failing_s=0.0)
    lane.update(Endpoint(failing, SEAL), 90_000.0)
    assert signals_of(lane, answered(500), now=90_059.0) == []
    assert signals_of(lane, answered(500), now=90_060.0) == [EndpointSignal.FAILED_TOO_LONG]


def test_a_streak_ends_when_another_worker_clears_the_record() -> None:
    lane = lane_of(WATCHED)
    assert signals_of(lane, answered(500), answered(500), now=0.0) == []
    assert signals_of(lane, answered(500), now=2.0) == [EndpointSignal.FAILING]
    lane.update(Endpoint(replace(WATCHED, version=4, failing=True), SEAL), 2.0)
    lane.update(Endpoint(replace(WATCHED, version=5), SEAL), 50.0)
    assert signals_of(lane, answered(500), now=90_000.0) == []
    assert signals_of(lane, OK, now=90_000.5) == [], "nothing is recorded that it could clear"


def test_an_older_read_of_the_record_ends_no_streak() -> None:
    """Two loads may end in the other order; the report of this worker is still recorded."""
    lane = lane_of(WATCHED)
    assert signals_of(lane, answered(500), now=0.0) == []
    assert signals_of(lane, answered(500), now=2.0) == [EndpointSignal.FAILING]
    lane.update(Endpoint(replace(WATCHED, version=4, failing=True), SEAL), 2.0)
    lane.update(Endpoint(WATCHED, SEAL), 2.0)
    assert signals_of(lane, OK, now=3.0) == [EndpointSignal.HEALTHY]


BREAKS = replace(
    RECORD, throttle=replace(RECORD.throttle, circuit_failures=2, circuit_window_ms=60_000)
)
OTHER_TARGETS = [
    replace(BREAKS, push_url="https://new.example/hook"),
    replace(BREAKS, encrypted_secrets=(b"another",), updated_at=LATER),
    replace(BREAKS, sealed_headers=b"others", updated_at=LATER),
    replace(BREAKS, status_since=LATER),
]


@pytest.mark.parametrize("changed", OTHER_TARGETS)
def test_failures_of_former_settings_do_not_open_the_circuit(changed: EndpointRecord) -> None:
    lane = Lane(tried := Endpoint(BREAKS, SEAL), slots=4, now=0.0)
    assert signals_of(lane, answered(500), now=1.0) == []
    lane.update(with_settings(changed), 1.0)
    late = [
        record_result(lane, answered(500), tried=tried, is_probe=False, started=1.0, now=2.0)
        for _ in range(2)
    ]
    assert late == [(), ()], "attempts that began before the change"
    assert signals_of(lane, answered(500), now=2.0) == []
    assert signals_of(lane, answered(500), now=2.0) == [EndpointSignal.CIRCUIT_OPENED]


@pytest.mark.parametrize("changed", OTHER_TARGETS)
def test_a_probe_with_former_settings_does_not_close_the_circuit(changed: EndpointRecord) -> None:
    lane = Lane(tried := Endpoint(replace(BREAKS, circuit_open=True), SEAL), slots=4, now=0.0)
    lane.update(with_settings(replace(changed, circuit_open=True)), 1.0)
    assert record_result(lane, OK, tried=tried, is_probe=True, started=0.0, now=2.0) == ()


def test_settings_that_requests_do_not_show_keep_what_was_counted() -> None:
    """Such as a limit, a probe that was named, or a new key of the installation."""
    lane = Lane(Endpoint(BREAKS, SEAL), slots=4, now=0.0)
    assert signals_of(lane, answered(500), now=1.0) == []
    for version, changed in enumerate(
        (
            replace(BREAKS, updated_at=LATER),
            replace(BREAKS, updated_at=LATER, encrypted_secrets=(b"sealed anew",)),
        ),
        start=BREAKS.version + 1,
    ):
        lane.update(with_settings(replace(changed, version=version)), 1.0)
    assert lane.endpoint.record.has_same_target(replace(BREAKS, updated_at=LATER))
    tried = lane.endpoint
    late = record_result(lane, answered(500), tried=tried, is_probe=False, started=1.0, now=2.0)
    assert [event.signal for event in late] == [EndpointSignal.CIRCUIT_OPENED]


def with_settings(record: EndpointRecord) -> Endpoint:
    """Return an endpoint whose record only seems to be sealed otherwise."""
    endpoint = Endpoint(
        replace(record, encrypted_secrets=RECORD.encrypted_secrets, sealed_headers=None), SEAL
    )
    endpoint.record = record
    return endpoint
