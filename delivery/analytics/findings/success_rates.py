"""Read the deployed retry policy off the attempts that were made, by their number."""

from dataclasses import dataclass

import numpy as np

from delivery.analytics.findings.policy_simulation import Policy
from delivery.analytics.findings.series import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSuccessRates:
    """Hold attempts, successes, retries and waits by attempt number (0: the first attempt)."""

    attempts: Ints
    successes: Ints
    retries: Ints
    delay_ms: Ints
    latency_us: Ints
    jitter: float = 0.0
    """Spread of single waits, as a share of their mean."""

    def deployed_policy(self) -> Policy:
        """Return the policy that the measured waits indicate."""
        retried = np.flatnonzero(self.retries > 0)
        if not len(retried):
            return Policy(delay_ms=0.0, multiplier=1.0, attempts=0)
        waits = self.delay_ms[retried] / self.retries[retried]
        growth = waits[1] / waits[0] if len(waits) > 1 and waits[0] else 1.0
        with np.errstate(over="ignore"):
            free = waits[0] * growth ** np.arange(len(waits))
        capped = free > waits * 1.1
        return Policy(
            delay_ms=float(waits[0]),
            multiplier=round(float(growth), 3),
            attempts=int(retried[-1]) + 1,
            max_delay_ms=float(waits[capped].max()) if capped.any() else None,
            jitter=self.jitter,
        )

    def offsets_s(self) -> Floats:
        """Return seconds from the end of the first attempt to the end of each, with durations."""
        policy = self.deployed_policy()
        steps = np.arange(1, policy.attempts + 1)
        known = steps < len(self.attempts)
        waits = (
            self.delay_ms[: policy.attempts] / np.maximum(self.retries[: policy.attempts], 1) / 1e3
        )
        took = np.zeros(policy.attempts)
        took[known] = (
            self.latency_us[steps[known]] / np.maximum(self.attempts[steps[known]], 1) / 1e6
        )
        return np.concatenate(([0.0], np.cumsum(waits + took)))

    def retry_duration_s(self) -> float:
        """Return the mean duration of a retry."""
        return float(self.latency_us[1:].sum() / max(self.attempts[1:].sum(), 1) / 1e6)
