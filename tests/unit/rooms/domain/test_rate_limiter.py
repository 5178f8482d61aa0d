"""The rate of shovels and replays, on a clock that goes as the test says."""

from dataclasses import dataclass

import pytest

from rooms.domain.rate_limiter import RateLimiter

TURN_S = 0.1


@dataclass
class Clock:
    now_s: float = 50.0

    def monotonic(self) -> float:
        return self.now_s


def gone(pace: RateLimiter, clock: Clock, number: int, *, each_takes_s: float = 0.0) -> list[float]:
    """When each of so many goes, taken in the batches that the pace asks for."""
    times: list[float] = []
    while len(times) < number:
        count = min(pace.batch_size(500), number - len(times))
        clock.now_s += pace.delay_s()
        pace.take(count)
        times += [clock.now_s] * count
        clock.now_s += each_takes_s
    return times


@pytest.mark.parametrize("rate", [1, 7, 10, 100, 1000, 4000, 5000])
@pytest.mark.parametrize("number", [1, 2, 50, 1000, 10_000])
@pytest.mark.parametrize("before_s", [0.0, 0.5, 3600.0])
def test_no_number_goes_faster_than_its_rate(rate: float, number: int, before_s: float) -> None:
    """However long it took from the order to the first of them."""
    clock = Clock()
    pace = RateLimiter(rate, clock.monotonic)
    clock.now_s += before_s
    times = gone(pace, clock, number)
    assert times[-1] - times[0] >= (number - 1) / rate - max(TURN_S, 1 / rate) - 1e-6
    assert times[-1] - times[0] <= number / rate


@pytest.mark.parametrize("each_takes_s", [0.001, 0.05, 0.099])
def test_what_a_batch_takes_is_no_pause(each_takes_s: float) -> None:
    clock = Clock()
    times = gone(RateLimiter(1000, clock.monotonic), clock, 10_000, each_takes_s=each_takes_s)
    assert times[-1] - times[0] == pytest.approx(9.9)


def test_a_pause_earns_one_turn() -> None:
    clock = Clock()
    pace = RateLimiter(1000, clock.monotonic)
    gone(pace, clock, 1000)
    clock.now_s += 3600
    times = gone(pace, clock, 1000)
    assert times[-1] - times[0] == pytest.approx(0.8)


def test_a_wait_that_is_broken_off_takes_nothing() -> None:
    """Time slices of 5 s, and a batch every 10 s: each second slice makes one."""
    clock = Clock()
    pace = RateLimiter(0.1, clock.monotonic)
    gone(pace, clock, 1)
    for _ in range(100):
        assert pace.delay_s() == 10.0
        clock.now_s += 5.0
        assert pace.delay_s() == 5.0
        clock.now_s += 5.0
        pace.take(1)


def test_without_a_rate_nothing_waits() -> None:
    clock = Clock()
    assert set(gone(RateLimiter(None, clock.monotonic), clock, 100_000)) == {50.0}
