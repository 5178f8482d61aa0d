"""Test what the results of attempts show about an endpoint."""

from dataclasses import replace

from delivery.push.circuit import REPORT_AFTER_S
from delivery.push.endpoint_state import EndpointSignal, record_result
from delivery.push.endpoints import Endpoint
from delivery.push.lane import Lane
from rooms.domain.attempt import AttemptResult
from tests.support.push_worker import OK, answered
from tests.unit.delivery.push.test_endpoints import RECORD, SEAL

THROTTLE = replace(RECORD.throttle, disable_after_ms=60_000)
WATCHED = replace(RECORD, throttle=THROTTLE)


def signals_of(lane: Lane, *results: AttemptResult, now: float) -> list[EndpointSignal]:
    return [
        event.signal
        for result in results
        for event in record_result(lane, result, is_probe=False, started=now, now=now)
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
