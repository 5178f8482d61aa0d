"""What the metrics are told of attempts, a committed batch at a time."""

from collections import Counter
from collections.abc import Sequence

from rooms.domain.states import State
from rooms.metrics import Metrics, observe_many, status_label
from rooms.ports import Clock
from rooms.storage.outcomes import Outcome


class Telemetry:
    """Counts outcomes; labels are bounded by the states, error classes and status families there are."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock

    def observe(self, batch: Sequence[Outcome]) -> None:
        """Tell of a batch that was just committed."""
        now_ms = self._clock.now_ms()
        delivered = State.DELIVERED  # looked up once: in Python 3.11 that is a call
        kinds = [
            (outcome.to, None, None)
            if (answer := outcome.answer) is None
            else (outcome.to, answer.error, answer.status)
            for outcome in batch
        ]
        for (to, error, status), count in Counter(kinds).items():
            self._metrics.attempts.labels(to, error or "none", status_label(status)).inc(count)
        observe_many(
            self._metrics.attempt_latency,
            [outcome.answer.latency_ms / 1000 for outcome in batch if outcome.answer is not None],
        )
        observe_many(
            self._metrics.delivered_latency,
            [max(0, now_ms - outcome.copy.published_ms) / 1000 for outcome in batch if outcome.to is delivered],
        )
