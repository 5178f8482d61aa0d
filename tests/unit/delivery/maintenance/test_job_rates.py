"""The limiters of jobs: kept between time slices, and not for ever."""

import pytest

from delivery.maintenance import job_rates
from delivery.maintenance.job_rates import JobRateLimiters
from rooms.domain.ids import JobId
from tests.support.manual_clock import ManualClock


def test_a_job_has_one_limiter_until_it_is_done() -> None:
    limiters = JobRateLimiters(ManualClock().monotonic)
    limiters.get(JobId("a"), 0.1).take(1)
    assert limiters.get(JobId("b"), 0.1).delay_s() == 0.0
    assert limiters.get(JobId("a"), 0.1).delay_s() == 10.0
    limiters.forget(JobId("a"))
    limiters.forget(JobId("a"))
    assert limiters.get(JobId("a"), 0.1).delay_s() == 0.0


def test_those_of_cancelled_jobs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_rates, "_MAX_KEPT", 3)
    limiters = JobRateLimiters(ManualClock().monotonic)
    for number in range(50):
        limiters.get(JobId("runs"), 0.1).take(1)
        limiters.get(JobId(f"cancelled {number}"), 0.1).take(1)
        limiters.get(JobId(f"without a rate {number}"), None).take(1)
    assert limiters.get(JobId("runs"), 0.1).delay_s() > 10.0
    assert limiters.get(JobId("cancelled 0"), 0.1).delay_s() == 0.0
    assert len(limiters._limiters) == 3
