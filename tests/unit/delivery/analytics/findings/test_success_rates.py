"""Test that the deployed policy is read off the waits, up to the most that a tenant may set."""

import numpy as np

from delivery.analytics.findings.success_rates import AttemptSuccessRates


def test_a_thousand_retries_with_a_cap_are_a_policy() -> None:
    waits_ms = np.minimum(100 ** np.minimum(np.arange(1000), 4), 60_000)
    one = np.ones(1000, dtype=np.int64)
    found = AttemptSuccessRates(
        attempts=one, successes=0 * one, retries=one, delay_ms=waits_ms, latency_us=one
    ).deployed_policy()
    assert (found.delay_ms, found.multiplier, found.attempts) == (1.0, 100.0, 1000)
    assert found.max_delay_ms == 60_000
    waits_s = found.waits_s()
    assert waits_s.tolist() == [0.001, 0.1, 10.0, *[60.0] * 997]
