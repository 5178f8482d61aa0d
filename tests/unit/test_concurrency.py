"""How many attempts at a time: up by one a round, down by half, by what the endpoint shows."""

from hypothesis import given
from hypothesis import strategies as st

from delivery.concurrency import FIRST, Concurrency


def rounds(found: Concurrency, count: int, *, latency_ms: float = 5.0, now: float = 0.0) -> None:
    """So many rounds of successes by a lane that uses every slot."""
    for _ in range(count):
        for _ in range(found.limit):
            found.succeeded(busy=found.limit, started=now, now=now, latency_ms=latency_ms)


def test_it_doubles_a_round_until_the_most() -> None:
    found = Concurrency(32)
    seen = [found.limit]
    while found.limit < 32:
        rounds(found, 1)
        seen.append(found.limit)
    assert seen == [FIRST, 8, 16, 32]
    assert not found.cut


def test_trouble_halves_it_and_successes_add_one_a_round() -> None:
    found = Concurrency(32)
    rounds(found, 5)
    found.troubled(started=1.0, now=2.0)
    assert found.limit == 16
    assert found.cut
    rounds(found, 1, now=3.0)
    assert 16 <= found.limit <= 17
    rounds(found, 3, now=3.0)
    assert 18 <= found.limit <= 20
    rounds(found, 40, now=3.0)
    assert found.limit == 32
    assert not found.cut


def test_a_round_that_fails_together_is_one_trouble() -> None:
    found = Concurrency(32)
    rounds(found, 5)
    for _ in range(32):
        found.troubled(started=1.0, now=2.0)
    assert found.limit == 16
    for now in range(3, 20):
        found.troubled(started=now - 0.5, now=now)
    assert found.limit == FIRST, "never less"


def test_who_does_not_use_what_he_has_gets_no_more() -> None:
    found = Concurrency(32)
    for _ in range(100):
        found.succeeded(busy=1, started=0.0, now=0.0, latency_ms=1.0)
    assert found.limit == FIRST


def test_rounds_that_take_far_longer_than_they_did_are_trouble() -> None:
    found = Concurrency(32)
    rounds(found, 10, latency_ms=20.0)
    assert found.limit == 32
    rounds(found, 1, latency_ms=130.0, now=5.0)
    assert found.limit == 32, "twice the usual and a bit is none"
    rounds(found, 1, latency_ms=400.0, now=6.0)
    assert found.limit in {25, 26}


def test_an_endpoint_that_got_slower_for_good_is_left_alone_in_the_end() -> None:
    found = Concurrency(8)
    rounds(found, 10, latency_ms=20.0)
    now = 0.0
    for _ in range(400):
        now += 1
        rounds(found, 1, latency_ms=1000.0, now=now)
    assert found.limit == 8


def test_another_bound_holds_at_once_and_room_above_is_used_again() -> None:
    found = Concurrency(32)
    rounds(found, 5)
    found.allow(3)
    assert found.limit == 3
    found.troubled(started=1.0, now=1.0)
    assert found.limit == 3
    assert Concurrency(1).limit == 1
    found.allow(32)
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
def test_it_stays_between_a_few_and_the_most_whatever_comes(most: int, steps: list[tuple[str, float]]) -> None:
    found, now = Concurrency(most), 0.0
    for what, value in steps:
        now += 0.01
        before = found.limit
        match what:
            case "ok":
                found.succeeded(busy=before, started=now - 0.005, now=now, latency_ms=value)
                assert found.limit <= before + 1
            case "trouble":
                found.troubled(started=now - value, now=now)
                assert found.limit <= before
            case _:
                most = int(value)
                found.allow(most)
        assert min(FIRST, most) <= found.limit <= most
