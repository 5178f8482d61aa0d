"""Test what a subscription's newest deliveries are summarized to."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rooms.console.subscription_health import BARS, summarize

START = datetime(2026, 1, 1, tzinfo=UTC)


def delivery(at_s: float, state: str, *, took_ms: float = 0, due_s: float = 0) -> dict[str, Any]:
    created = START + timedelta(seconds=at_s)
    due = created + timedelta(seconds=due_s)
    return {
        "state": state,
        "attempts": 2 if state == "sidelined" else 1,
        "created_at": created.isoformat(),
        "due_at": due.isoformat() if due_s else None,
        "updated_at": (due + timedelta(milliseconds=took_ms)).isoformat(),
    }


def test_no_delivery_is_no_health() -> None:
    assert summarize([]) is None


def test_one_delivery_that_waits() -> None:
    health = summarize([delivery(0, "queued")])
    assert health is not None
    assert (health.count, health.unfinished, health.success, health.p50_ms) == (1, 1, None, None)


def test_states_are_counted_and_drawn_over_time() -> None:
    states = ["delivered", "handed_over", "sidelined", "expired", "cancelled", "held", "leased"]
    health = summarize([delivery(at, state) for at, state in reversed(list(enumerate(states)))])
    assert health is not None
    assert (health.delivered, health.failed, health.unfinished, health.retried) == (2, 2, 2, 1)
    assert health.success == 0.5
    bars = dict(health.bars)
    assert {kind: sum(values) for kind, values in bars.items()} == {
        "good": 2,
        "busy": 2,
        "off": 1,
        "bad": 2,
    }
    assert bars["good"][0] == 1
    assert bars["busy"][BARS - 1] == 1


@pytest.mark.parametrize("count", [1, 2, 99, 100])
def test_percentiles_are_those_of_the_delivered(count: int) -> None:
    deliveries = [delivery(0, "delivered", took_ms=n + 1, due_s=5) for n in range(count)]
    health = summarize([*deliveries, delivery(0, "sidelined", took_ms=10**9)])
    assert health is not None
    assert health.p50_ms == -(-count // 2)
    assert health.p99_ms == pytest.approx(-(-99 * count // 100))
    assert len(health.latencies_ms) == count
