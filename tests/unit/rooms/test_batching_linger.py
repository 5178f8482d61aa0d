"""Test the adaptive linger: it follows the steady rate, not a burst."""

from itertools import pairwise

from rooms.batching import AdaptiveLinger

LONGEST_S = 0.03
FULL_PER_S = 3_000.0


def gathering() -> AdaptiveLinger:
    return AdaptiveLinger(max_delay_s=LONGEST_S, saturation_per_s=FULL_PER_S)


def steady(
    given: AdaptiveLinger, per_s: float, *, seconds: float = 5.0, rounds_per_s: float = 100.0
) -> tuple[float, float]:
    """The last pause, and when it was given, where so many come each second."""
    pause_s = now = 0.0
    for number in range(1, round(seconds * rounds_per_s) + 1):
        now = number / rounds_per_s
        pause_s = given.next_delay_s(round(per_s / rounds_per_s), now)
    return pause_s, now


def test_more_waits_longer_up_to_the_longest() -> None:
    pauses = [steady(gathering(), per_s)[0] for per_s in (500, 1_000, 1_500, 2_000, 3_000, 30_000)]
    assert all(less <= more for less, more in pairwise(pauses))
    assert pauses[0] < LONGEST_S / 20
    assert LONGEST_S / 10 < pauses[2] < LONGEST_S / 6
    assert pauses[-1] == LONGEST_S


def test_a_burst_is_no_rate() -> None:
    given = gathering()
    usual_s, now = steady(given, 1_000)
    assert given.next_delay_s(110, now + 0.01) < 2 * usual_s


def test_single_items_do_not_linger() -> None:
    given = gathering()
    assert [given.next_delay_s(1, float(now)) for now in range(1, 10)] == [0.0] * 9
    assert given.next_delay_s(100, 20.0) == 0.0


def test_a_rate_is_forgotten_when_it_ends() -> None:
    given = gathering()
    assert steady(given, 30_000)[0] == LONGEST_S
    assert given.next_delay_s(10, 15.0) == 0.0


def test_two_rounds_at_the_same_moment_are_no_endless_rate() -> None:
    given = gathering()
    given.next_delay_s(100, 1.0)
    assert given.next_delay_s(100, 1.0) < LONGEST_S
