"""Test the verdicts of the benchmark's report."""

import pytest

from tests.bench.figures import Run, reported

STEADY = "steady, 40/s on Artemis"


@pytest.mark.parametrize(
    ("name", "p50_ms", "p99_ms", "verdict"),
    [
        (STEADY, 15, 40, "p50 15 p99 40  aim met"),
        (STEADY, 15.1, 40, "p50 15 p99 40  AIM MISSED"),
        (STEADY, 15, 40.1, "p50 15 p99 40  AIM MISSED"),
        ("steady, 40/s", 15, 40.1, "p50 15 p99 40  AIM MISSED"),
        ("lateness", 100, 50, "p99 50  aim met"),
        ("lateness", 1, 50.1, "p99 50  AIM MISSED"),
        ("idle, first webhook", 10, 900, "p50 10  aim met"),
    ],
)
def test_a_latency_is_compared_with_every_aim(
    name: str, p50_ms: float, p99_ms: float, verdict: str
) -> None:
    text = reported({name: [Run(values={"p50_ms": p50_ms, "p99_ms": p99_ms})]})
    assert verdict in text


def test_a_latency_without_an_aim_has_no_verdict() -> None:
    text = reported({"S5 alone": [Run(values={"p50_ms": 1, "p99_ms": 900})]})
    assert "aim met" not in text
    assert "MISSED" not in text
