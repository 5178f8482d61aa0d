"""Test percentiles that are estimated from buckets."""

from math import ceil, log2

from hypothesis import given
from hypothesis import strategies as st

from rooms.domain.usage import BUCKETS, add_latencies, percentile_ms


def bucket_of(latency_ms: float) -> int:
    return 0 if latency_ms <= 1 else min(BUCKETS - 1, ceil(2 * log2(latency_ms)))


def counted(latencies: list[float]) -> list[int]:
    calls = [0] * BUCKETS
    for one in latencies:
        calls[bucket_of(one)] += 1
    return calls


@given(st.lists(st.floats(1.01, 60_000), min_size=1, max_size=50), st.sampled_from((0.5, 0.95, 1)))
def test_an_estimate_is_in_the_bucket_of_the_exact_value(
    latencies: list[float], share: float
) -> None:
    exact = sorted(latencies)[ceil(share * len(latencies)) - 1]
    estimate = percentile_ms(counted(latencies), share)
    assert estimate is not None
    assert exact / 2**0.5 - 0.01 <= estimate <= exact * 2**0.5 + 0.01


def test_the_ends() -> None:
    assert percentile_ms([], 0.5) is None
    assert percentile_ms([0] * BUCKETS, 0.5) is None
    assert percentile_ms(counted([0.2, 0.3]), 1) == 1
    assert percentile_ms(counted([10_000_000]), 0.5) == 65_536


def test_minutes_are_added() -> None:
    both = add_latencies([counted([5, 5]), (), counted([5, 300])])
    assert both == counted([5, 5, 5, 300])
