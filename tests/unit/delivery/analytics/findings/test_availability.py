"""Test that availability is distinguished from refused bodies, and blocks from each other."""

import tracemalloc

import numpy as np

from delivery.analytics.findings.availability import (
    AvailabilityPaths,
    GivenUp,
    Timeline,
    sample_availability,
)
from delivery.analytics.findings.series import Floats, Ints

TRIES = 5


def bins_of(size: int) -> tuple[Ints, Ints, Ints]:
    """Return bins with four successful attempts in each."""
    some = np.arange(1000, 1000 + size)
    return some, np.full(size, 4), np.full(size, 4)


def rates_at(paths: AvailabilityPaths, bins: Floats) -> Floats:
    """Return the success rate of each path (first axis) at these bins."""
    found: Floats = paths.rates[:, paths.timeline.blocks_at(bins)]
    return found


def test_blocks_part_where_the_rate_changes() -> None:
    some, attempts, successes = bins_of(256)
    successes = successes.copy()
    successes[100:140] = 0
    found = Timeline.of_bins(some, attempts, successes, beyond=64)
    assert found.blocks_at(np.array([1099.5]))[0] != found.blocks_at(np.array([1100.5]))[0]
    assert found.blocks_at(np.array([1139.5]))[0] != found.blocks_at(np.array([1140.5]))[0]
    assert found.attempts.sum() == 1024
    assert found.successes.sum() == 864
    assert found.lengths.sum() == 320
    assert len(found.lengths) < 80


def test_a_long_noisy_log_has_few_blocks() -> None:
    random = np.random.default_rng(1)
    some = np.arange(100_000)
    attempts = np.full(100_000, 3)
    found = Timeline.of_bins(some, attempts, random.binomial(3, 0.7, 100_000), beyond=10)
    assert len(found.lengths) <= 1200
    assert found.attempts.sum() == 300_000


def test_an_outage_is_not_a_refused_body_and_a_refused_body_is_no_outage() -> None:
    some, attempts, successes = bins_of(2000)
    attempts, successes = attempts.copy(), successes.copy()
    # All deliveries of ten minutes fail; of two others every attempt fails while others succeed.
    successes[500:540] = 0
    waits = np.array([0, 2, 6, 14, 30])
    refused = np.array([1100, 1900])
    for first in refused:
        attempts[first - 1000 + waits] += 1
    outage = np.arange(1500, 1509)
    given_up = GivenUp(
        first=np.concatenate((refused, outage)),
        count=np.concatenate((np.ones(2, dtype=np.int64), np.full(len(outage), 2))),
        offsets=waits.astype(np.float64),
    )
    paths = sample_availability(
        Timeline.of_bins(some, attempts, successes, beyond=40),
        given_up,
        deliveries=8000,
        random=np.random.default_rng(2),
    )
    assert paths.undeliverable[:, :2].mean() > 0.9
    assert paths.undeliverable[:, 2:].mean() < 0.2
    rates = rates_at(paths, np.array([1300.5, 1520.5, 1900.5]))
    assert (rates[:, [0, 2]] > 0.9).all()
    assert (rates[:, 1] < 0.1).all()


def test_a_lone_failure_between_successes_is_noise() -> None:
    """Test that an attempt is not its own availability: others an hour apart succeed."""
    some = np.arange(0, 240 * 200, 240)
    attempts = np.ones(200, dtype=np.int64)
    successes = attempts.copy()
    successes[[20, 60, 90, 120, 150]] = 0
    # Each of these is retried half a minute later, with success.
    retried = some[[20, 60, 90, 120, 150]] + 2
    bins = np.concatenate((some, retried))
    order = np.argsort(bins)
    paths = sample_availability(
        Timeline.of_bins(
            bins[order],
            np.concatenate((attempts, np.ones(5, dtype=np.int64)))[order],
            np.concatenate((successes, np.ones(5, dtype=np.int64)))[order],
            beyond=100,
        ),
        GivenUp(
            first=np.zeros(0, dtype=np.int64),
            count=np.zeros(0, dtype=np.int64),
            offsets=np.arange(TRIES, dtype=np.float64),
        ),
        deliveries=200,
        random=np.random.default_rng(3),
    )
    assert rates_at(paths, np.array([some[60] + 1.0])).mean() > 0.7


def test_memory_does_not_grow_with_the_attempts_of_given_up_deliveries() -> None:
    # An endpoint that is away for a day, whose deliveries are tried a hundred times each.
    first = np.arange(5_000)
    tracemalloc.start()
    try:
        sample_availability(
            Timeline.of_bins(first, np.full(5_000, 100), np.zeros(5_000, np.int64), beyond=100),
            GivenUp(
                first=first, count=np.ones(5_000, np.int64), offsets=np.linspace(0.0, 396.0, 100)
            ),
            deliveries=5_000,
            random=np.random.default_rng(4),
        )
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20
