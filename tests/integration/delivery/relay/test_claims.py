"""Test whose rows a relay claims while an organisation has a backlog, on PostgreSQL."""

import pytest

from delivery.relay.claims import RelayClaims
from rooms.clock import SystemClock
from rooms.db.queue.relay import RELAY_WRITER_KIND, RelayOutbox
from rooms.db.writer import LogWriter
from rooms.domain.work_location import BrokerMode
from tests.support.installation import Installation, ago, other_organisation
from tests.support.relay import RELAYED

LIMIT = 200


@pytest.fixture
def shape() -> BrokerMode:
    return RELAYED


@pytest.mark.parametrize("status", ["active", "deleted", "terminated"])
@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
async def test_a_backlog_keeps_no_other_waiting_also_if_its_subscription_has_ended(
    installation: Installation, status: str, *, is_known: bool
) -> None:
    """It ends before any claim, or while its organisation takes turns already."""
    large, small = await installation.subscribe(), await installation.subscribe()
    await other_organisation(installation, small)
    await installation.publish_many(large, 5_000, due=ago(60))
    async with LogWriter(installation.url, kind=RELAY_WRITER_KIND) as writer:
        claims = RelayClaims(
            RelayOutbox(writer),
            clock=SystemClock(),
            claim_s=60.0,
            poll_s=600.0,
            on_backlog_ended=lambda: None,
        )
        if is_known:
            await claims.claim(LIMIT)
            await claims.claim(LIMIT, claims.next_turn())
        await installation.rows(
            "UPDATE subscriptions SET status = %s, version = version + 1 WHERE id = %s",
            status,
            large,
        )
        await installation.publish_many(small, 1, due=ago(1))
        found = [task for _ in range(2) for task in (await claims.claim(LIMIT)).tasks]
        assert [task.subscription_id for task in found].count(small) == 1
        # Every other turn of the organisation is for its other subscriptions, which have nothing.
        own = [
            task for _ in range(2) for task in (await claims.claim(LIMIT, claims.next_turn())).tasks
        ]
        assert [task.subscription_id for task in own] == [large] * LIMIT
