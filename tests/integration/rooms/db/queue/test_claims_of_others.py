"""Test that a claim skips the same rows, whether it hashes subscriptions or looks up their owners."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from rooms.db.queue import claims, relay
from rooms.db.queue.claims import Outbox
from rooms.db.queue.relay import RelayOutbox
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId, SubscriptionId, first_id
from rooms.domain.work_location import POSTGRES_MODE, BrokerMode
from tests.integration.rooms.db.queue.test_claims_plans import DAY_MS, explained, nodes, taken
from tests.support.installation import Installation, ago, now_ms, other_organisation
from tests.support.relay import RELAYED

LIMIT = 100
MANY = 200


@pytest.fixture(params=[POSTGRES_MODE, RELAYED], ids=["worker", "relay"])
def shape(request: pytest.FixtureRequest) -> BrokerMode:
    mode: BrokerMode = request.param
    return mode


@pytest.fixture
async def outbox(shape: BrokerMode, database: str) -> AsyncIterator[Outbox | RelayOutbox]:
    kind = "worker" if shape == POSTGRES_MODE else relay.RELAY_WRITER_KIND
    async with LogWriter(database, kind=kind) as writer:
        yield Outbox(writer) if shape == POSTGRES_MODE else RelayOutbox(writer)


async def claim_of_others(
    outbox: Outbox | RelayOutbox, organisation: str, **more: Any
) -> Counter[SubscriptionId]:
    """Claim for all organisations but one, and return the rows of each subscription."""
    common: dict[str, Any] = {
        "limit": LIMIT,
        "claim_s": 60.0,
        "deadline": time.monotonic() + 60,
        "watermarks_us": [0] * 10,
        "excluded_organisations": [OrganisationId(organisation)],
        **more,
    }
    if isinstance(outbox, Outbox):
        batch = await outbox.claim(**common, now_ms=now_ms(), dead_workers=(), excluded=frozenset())
        return Counter(task.subscription_id for task in batch.tasks)
    sent = await outbox.claim(**common, dead_relays=())
    return Counter(task.subscription_id for task in sent.tasks)


async def subscribe_many(installation: Installation, count: int) -> None:
    ids = [installation.ids.generate(installation.room, now_ms()) for _ in range(count)]
    await installation.rows(
        "INSERT INTO subscriptions (room_id, organisation_id, id, name, type, push_url, timeout_ms, secret)"
        " SELECT %s, %s, i, i::text, 'PUSH', 'http://x/' || i, 30000, '' FROM unnest(%s::uuid[]) AS i",
        installation.room, installation.organisation, ids,
    )  # fmt: skip


@pytest.mark.parametrize("looks_up_owners", [False, True], ids=["hash", "look-up"])
async def test_a_claim_skips_what_an_organisation_has_but_for_deleted_subscriptions(
    installation: Installation, outbox: Outbox | RelayOutbox, *, looks_up_owners: bool
) -> None:
    """Those it skips by name: they may be many more than the others. A relay claims what is due later, too."""
    large, deleted, ended = [await installation.subscribe() for _ in range(3)]
    small = await installation.subscribe()
    await other_organisation(installation, small)
    for count, subscription in enumerate((large, deleted, ended, small), 2):
        await installation.publish_many(subscription, count, due=ago(60))
    for subscription in (large, small):
        await installation.publish_many(subscription, 1, due=ago(-30))
    await installation.rows(
        "UPDATE subscriptions SET status = 'deleted' WHERE id = ANY (%s::uuid[])", [deleted, ended]
    )
    found = await claim_of_others(
        outbox, installation.organisation, ended=[ended], looks_up_owners=looks_up_owners
    )
    assert found == {deleted: 3, small: 5 if isinstance(outbox, Outbox) else 6}


@pytest.mark.parametrize(("count", "many"), [(3, False), (4, True)])
async def test_subscriptions_are_counted_up_to_a_bound(
    installation: Installation,
    outbox: Outbox | RelayOutbox,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    *,
    many: bool,
) -> None:
    monkeypatch.setattr(claims, "MANY_SUBSCRIPTIONS", 3)
    small = await installation.subscribe()
    await other_organisation(installation, small)
    await subscribe_many(installation, count)
    deleted = await installation.subscribe()
    await installation.rows("UPDATE subscriptions SET status = 'deleted' WHERE id = %s", deleted)
    owner = OrganisationId(installation.organisation)
    assert await outbox.have_many_subscriptions([owner]) is many
    assert not await outbox.have_many_subscriptions([])


def values_of_claim(organisations: Sequence[str]) -> dict[str, str]:
    return {
        "low": "'{0,0,0,0,0,0,0,0,0,0}'",
        "dead": "'{}'",
        "excluded": "'{}'",
        "ended": "'{}'",
        "organisations": f"'{{{','.join(organisations)}}}'",
        "limit": str(LIMIT),
        "bytes": "1000000",
        "claim_s": "60",
        "writer": "1",
        "first": f"'{first_id(now_ms() - DAY_MS)}'",
        "last": f"'{first_id(now_ms() + DAY_MS)}'",
    }


async def test_a_claim_that_looks_up_owners_reads_no_subscription_without_rows(
    installation: Installation, shape: BrokerMode
) -> None:
    large, small = await installation.subscribe(), await installation.subscribe()
    await other_organisation(installation, small)
    await subscribe_many(installation, MANY)
    await installation.publish_many(large, 20, due=ago(60))
    await installation.publish_many(small, 3, due=ago(60))
    await installation.rows("VACUUM ANALYZE subscriptions, outbox")
    module = claims if shape == POSTGRES_MODE else relay
    plan = await explained(
        installation.url,
        module._CLAIM_OF_OTHERS_BY_KEY,
        values_of_claim([installation.organisation]),
    )
    assert taken(plan) == 3
    read = [
        node["Index Name"]
        for node in nodes(plan)
        if node.get("Relation Name") == "subscriptions" and node["Actual Loops"]
    ]
    assert set(read) == {"subscriptions_pkey"}
