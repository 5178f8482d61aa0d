"""Test whose failures are kept where there are too many."""

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
