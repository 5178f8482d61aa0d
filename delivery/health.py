"""What an answer says about the endpoint, beyond its own delivery: whether it can do more, is failing, or is well again."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from delivery.endpoint import Endpoint
from delivery.lane import Lane
from rooms.domain.attempt import Answer
from rooms.domain.copy import Copy

_TOO_MANY: Final = 429
_SERVERS_OWN: Final = 500


class Word(StrEnum):
    """What workers tell the records of a subscription. Of two that contradict each other the later one counts."""

    GONE = "gone"
    FAILED_LONG = "failed_long"
    TRIPPED = "tripped"
    RECOVERED = "recovered"
    FAILING = "failing"
    WELL = "well"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One of them; `detail` for people, `for_s`: for how long already."""

    word: Word
    endpoint: Endpoint
    detail: str = ""
    for_s: float = 0.0


def examine(
    lane: Lane, copy: Copy, answer: Answer, *, started: float, now: float, tell: Callable[[Lane, Notice], None]
) -> None:
    """Let the lane learn from an attempt that began at `started` and was answered `now` (monotonic seconds)."""
    if answer.error is None:
        lane.concurrency.succeeded(busy=lane.busy, started=started, now=now, latency_ms=answer.latency_ms)
    elif answer.status is None or answer.status == _TOO_MANY or answer.status >= _SERVERS_OWN:
        lane.concurrency.troubled(started=started, now=now)
    if lane.watched:
        _watch(lane, copy, answer, now, tell)


def _watch(lane: Lane, copy: Copy, answer: Answer, now: float, tell: Callable[[Lane, Notice], None]) -> None:
    endpoint = lane.endpoint
    record, policy, retry = endpoint.record, endpoint.record.lane, endpoint.record.policy
    # An answer that its owner has a meaning for comes from an endpoint that works.
    if answer.error is None or answer.status in retry.terminal_statuses or answer.status in retry.ignorable_statuses:
        lane.breaker.succeeded()
        lane.streak.succeeded(now)
        if endpoint.probed_by(copy):
            tell(lane, Notice(word=Word.RECOVERED, endpoint=endpoint))
        if record.failing:
            tell(lane, Notice(word=Word.WELL, endpoint=endpoint))
        return
    closed = record.circuit_open or lane.tripped == record.version
    window_s = policy.circuit_window_ms / 1000
    if not closed and lane.breaker.failed(now, failures=policy.circuit_failures, window_s=window_s):
        lane.tripped = record.version
        tell(lane, Notice(word=Word.TRIPPED, endpoint=endpoint))
    lasted = lane.streak.failed(now)
    if lasted is None or policy.disable_after_ms is None:
        return
    if not record.failing:
        tell(lane, Notice(word=Word.FAILING, endpoint=endpoint, for_s=lasted))
    elif lane.streak.well_at > lane.failing_from:
        # Another worker says so, and did not know of the success that this one saw.
        tell(lane, Notice(word=Word.WELL, endpoint=endpoint))
    elif (now - lane.failing_from) * 1000 >= policy.disable_after_ms:
        detail = f"nothing but failures for {policy.disable_after_ms} ms, the last: {answer.detail or answer.error}"
        tell(lane, Notice(word=Word.FAILED_LONG, endpoint=endpoint, detail=detail))
