"""Test whose failures are kept where there are too many."""

import tracemalloc
from array import array
from dataclasses import replace

import pytest

from delivery.push import failure_cache
from delivery.push.failure_cache import FailureCache, UnrecordedFailures
from rooms.domain.ids import OrganisationId, SubscriptionId

FAILURES = UnrecordedFailures(
    version=1, valid_until=100.0, since=1.0, is_reported=False, failed_at=()
)


def test_failures_are_returned_once() -> None:
    cache, one = FailureCache(), SubscriptionId("one")
    assert cache.take(one) is None
    for _ in range(2):
        cache.add(one, OrganisationId("its owner"), FAILURES)
    assert cache.take(one) is FAILURES
    assert cache.take(one) is None
    assert len(cache) == 0


def test_an_organisation_with_many_failures_displaces_only_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_cache, "_MAX_CACHED", 10)
    cache, few, many = FailureCache(), OrganisationId("few"), OrganisationId("many")
    for number in range(3):
        cache.add(SubscriptionId(f"few-{number}"), few, FAILURES)
    for number in range(50):
        cache.add(SubscriptionId(f"many-{number}"), many, FAILURES)
    assert len(cache) == 10
    assert all(cache.take(SubscriptionId(f"few-{number}")) for number in range(3))
    kept = [number for number in range(50) if cache.take(SubscriptionId(f"many-{number}"))]
    assert kept == [*range(43, 50)]


def long_row(times: int) -> UnrecordedFailures:
    return replace(FAILURES, failed_at=array("d", [0.0] * times))


def test_long_rows_of_failures_take_no_more_memory_than_short_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_cache, "_MAX_CACHED", 2_000)

    def size(times: int) -> int:
        tracemalloc.start()
        cache = FailureCache()
        for number in range(4_000):
            cache.add(SubscriptionId(f"{number:036}"), OrganisationId("one"), long_row(times))
        assert cache.take(SubscriptionId(f"{3_999:036}")) is not None
        found, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return found

    assert size(999) < 1.5 * size(4)


def test_an_organisation_with_long_rows_displaces_only_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has fewer entries than the other, and takes more memory."""
    monkeypatch.setattr(failure_cache, "_MAX_CACHED", 100)
    cache, short, long = FailureCache(), OrganisationId("short"), OrganisationId("long")
    for number in range(40):
        cache.add(SubscriptionId(f"short-{number}"), short, FAILURES)
    for number in range(20):
        cache.add(SubscriptionId(f"long-{number}"), long, long_row(999))
    assert len(cache) == 40 + 1
    assert all(cache.take(SubscriptionId(f"short-{number}")) for number in range(40))
    assert cache.take(SubscriptionId("long-19")) is not None
    assert len(cache) == 0


def test_failures_that_replace_others_leave_nothing_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failure_cache, "_MAX_CACHED", 40)
    cache, one = FailureCache(), SubscriptionId("one")
    for times in (999, 500, 3):
        cache.add(one, OrganisationId("its owner"), long_row(times))
    for number in range(39):
        cache.add(SubscriptionId(f"{number}"), OrganisationId("its owner"), FAILURES)
    assert cache.take(one) is not None
    assert len(cache) == 39
