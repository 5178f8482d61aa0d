"""Test the concurrency limit: up by one a round, down by half on overload."""

from hypothesis import given
from hypothesis import strategies as st

from delivery.push.concurrency import INITIAL_LIMIT, AdaptiveConcurrency


def rounds(
    found: AdaptiveConcurrency, count: int, *, latency_ms: float = 5.0, now: float = 0.0
) -> None:
    """Record rounds of successes of a lane that uses every slot."""
    for _ in range(count):
        for _ in range(found.limit):
            found.on_success(busy=found.limit, started=now, now=now, latency_ms=latency_ms)


def test_the_limit_doubles_each_round_up_to_the_maximum() -> None:
    found = AdaptiveConcurrency(32)
    seen = [found.limit]
    while found.limit < 32:
        rounds(found, 1)
        seen.append(found.limit)
    assert seen == [INITIAL_LIMIT, 8, 16, 32]
    assert not found.is_reduced


def test_overload_halves_the_limit_and_successes_add_one_a_round() -> None:
    found = AdaptiveConcurrency(32)
    rounds(found, 5)
    found.on_overload(started=1.0, now=2.0)
    assert found.limit == 16
    assert found.is_reduced
    rounds(found, 1, now=3.0)
    assert 16 <= found.limit <= 17
    rounds(found, 3, now=3.0)
    assert 18 <= found.limit <= 20
    rounds(found, 40, now=3.0)
    assert found.limit == 32
    assert not found.is_reduced


def test_a_round_of_failures_is_one_overload() -> None:
    found = AdaptiveConcurrency(32)
    rounds(found, 5)
    for _ in range(32):
        found.on_overload(started=1.0, now=2.0)
    assert found.limit == 16
    for now in range(3, 20):
        found.on_overload(started=now - 0.5, now=now)
    assert found.limit == INITIAL_LIMIT, "never less"


def test_an_unused_limit_does_not_grow() -> None:
    found = AdaptiveConcurrency(32)
    for _ in range(100):
        found.on_success(busy=1, started=0.0, now=0.0, latency_ms=1.0)
    assert found.limit == INITIAL_LIMIT


def test_a_round_far_slower_than_the_baseline_is_an_overload() -> None:
    found = AdaptiveConcurrency(32)
    rounds(found, 10, latency_ms=20.0)
    assert found.limit == 32
    rounds(found, 1, latency_ms=130.0, now=5.0)
    assert found.limit == 32, "twice the usual and a bit is none"
    rounds(found, 1, latency_ms=400.0, now=6.0)
    assert found.limit in {25, 26}


def test_an_endpoint_slower_for_good_is_accepted_in_the_end() -> None:
    found = AdaptiveConcurrency(8)
    rounds(found, 10, latency_ms=20.0)
    now = 0.0
    for _ in range(400):
        now += 1
        rounds(found, 1, latency_ms=1000.0, now=now)
    assert found.limit == 8


def test_a_new_maximum_holds_at_once_and_a_higher_one_is_used() -> None:
    found = AdaptiveConcurrency(32)
    rounds(found, 5)
    found.set_maximum(3)
    assert found.limit == 3
    found.on_overload(started=1.0, now=1.0)
    assert found.limit == 3
    assert AdaptiveConcurrency(1).limit == 1
    found.set_maximum(32)
    rounds(found, 40)
    assert found.limit > 16


@given(
    most=st.integers(1, 64),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("ok"), st.floats(0.1, 20_000)),
            st.tuples(st.just("trouble"), st.floats(0, 5)),
            st.tuples(st.just("allow"), st.integers(1, 64)),
        ),
        max_size=200,
    ),
)
def test_the_limit_stays_between_minimum_and_maximum(
    most: int, steps: list[tuple[str, float]]
) -> None:
    found, now = AdaptiveConcurrency(most), 0.0
    for what, value in steps:
        now += 0.01
        before = found.limit
        match what:
            case "ok":
                found.on_success(busy=before, started=now - 0.005, now=now, latency_ms=value)
                assert found.limit <= before + 1
            case "trouble":
                found.on_overload(started=now - value, now=now)
                assert found.limit <= before
            case _:
                most = int(value)
                found.set_maximum(most)
        assert min(INITIAL_LIMIT, most) <= found.limit <= most
