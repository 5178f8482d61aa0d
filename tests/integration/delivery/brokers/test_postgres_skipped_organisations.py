"""Test which claims of a worker hash the subscriptions of organisations that they skip."""

import time
from typing import Any

import pytest

from delivery.brokers.postgres import PostgresConsumer
from rooms.db.queue import claims
from rooms.db.queue.claims import ClaimedBatch, Outbox
from rooms.domain.ids import OrganisationId
from rooms.domain.work_location import POSTGRES_MODE
from tests.support.installation import Installation, ago, other_organisation

LIMIT = 50


class RecordingOutbox(Outbox):
    """Record of each claim which organisations it skipped, and whether it looked up owners."""

    def __init__(self, consumer: PostgresConsumer) -> None:
        super().__init__(consumer._writer)
        self.claims: list[tuple[list[OrganisationId], bool]] = []

    async def claim(self, **asked: Any) -> ClaimedBatch:
        self.claims.append((asked["excluded_organisations"], asked["looks_up_owners"]))
        return await super().claim(**asked)


@pytest.mark.parametrize("most", [1, 2])
async def test_only_claims_that_begin_behind_a_backlog_look_up_the_owners_of_rows(
    installation: Installation, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The large organisation has two subscriptions. With as many allowed, every claim hashes them."""
    monkeypatch.setattr(claims, "MANY_SUBSCRIPTIONS", most)
    assert installation.shape == POSTGRES_MODE
    large, more = await installation.subscribe(), await installation.subscribe()
    small = await installation.subscribe()
    await other_organisation(installation, small)
    await installation.publish_many(large, 500, due=ago(60))
    await installation.publish_many(more, 100, due=ago(60))
    consumer = PostgresConsumer(installation.url, credit=1 << 30, claim_s=60, poll_s=600)
    consumer._outbox = outbox = RecordingOutbox(consumer)
    async with consumer:
        taken = []
        for number in range(12):
            await installation.publish_many(small, 1, due=ago(0))
            if number == 4:
                consumer._next_full_scan = 0.0
            claimed = await consumer._claim(LIMIT, time.monotonic())
            taken.append({task.subscription_id for task in claimed.tasks})
    looked_up = [looks_up for skipped, looks_up in outbox.claims if skipped]
    is_many = most == 1
    # The one that is first to skip the organisation, and the full scan, pass over its rows.
    assert [skipped for skipped, _ in outbox.claims].count([installation.organisation]) >= 4
    assert looked_up.count(True) == (len(looked_up) - 2 if is_many else 0), outbox.claims
    assert small in taken[1] | taken[2]
