"""Check how many streams and waiting polls an organisation may have."""

import pytest

from delivery.pull.consumer_limit import ConsumerLimit, stream_weight
from rooms.domain.ids import OrganisationId
from rooms.errors import RateLimitedError


def test_a_stream_of_many_subscriptions_counts_as_several() -> None:
    refused: list[None] = []
    limit = ConsumerLimit(12, lambda: refused.append(None))
    weights = [stream_weight(range(count)) for count in (0, 1, 10, 11, 100)]
    assert weights == [1, 1, 1, 2, 10]
    limit.acquire(OrganisationId("owner"), 10)
    limit.acquire(OrganisationId("owner"))
    with pytest.raises(RateLimitedError):
        limit.acquire(OrganisationId("owner"), 2)
    assert len(refused) == 1
    limit.acquire(OrganisationId("other"), 12)
    limit.release(OrganisationId("owner"), 10)
    limit.acquire(OrganisationId("owner"), 11)
