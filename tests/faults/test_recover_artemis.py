"""`rooms broker resend` on a live Artemis whose records were lost while deliveries wait.

Oracle: everything that is unfinished and was in the broker comes once more, each at its attempt and not before its due
time, under the next generation; nothing else is touched.
"""

import asyncio
from collections.abc import Callable

import pytest

from delivery.brokers import open_broker
from delivery.maintenance.resend import BrokerRecovery
from rooms.clock import SystemClock
from rooms.db.jobs.jobs import JobQueue
from rooms.db.queue.integrity import START, IntegrityCheck
from rooms.db.queue.resend import ResendQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import SubscriptionType
from rooms.domain.work_location import BrokerMode, WorkLocation
from rooms.errors import BrokerUnavailableError
from rooms.ports import Broker
from tests.faults.test_relay_artemis import client, received
from tests.integration.delivery.maintenance.test_service import always, ask, job
from tests.support.installation import Installation, ago, until
from tests.support.local_servers import TestServer
from tests.support.relay import RELAYED, places, relaying, until_sent
from tests.support.sentinel import put_sentinel

PULL = SubscriptionType.PULL
MANY = 1500
DELAYED = 300
LEASED = 100
LATER = 50


@pytest.fixture
def shape() -> BrokerMode:
    return RELAYED


async def furnish(installation: Installation) -> tuple[SubscriptionId, SubscriptionId]:
    """Deliveries that are due (some of them retried), due within the look-ahead, beyond it, and leased."""
    push, pull = await installation.subscribe(), await installation.subscribe(PULL)
    await installation.publish_many(push, MANY)
    await installation.rows(
        "WITH d AS (UPDATE deliveries SET attempt = 2 WHERE id IN (SELECT id FROM deliveries ORDER BY id LIMIT 500) RETURNING id)"
        " UPDATE outbox SET attempt = 2, delay_ms = 4000 WHERE id IN (SELECT id FROM d)"
    )
    await installation.publish_many(push, DELAYED, due=ago(-50))
    await installation.publish_many(push, LATER, due=ago(-3600))
    await installation.rows("UPDATE outbox SET kind = 6 WHERE due_at > now() + interval '60 s'")
    await installation.rows(
        "UPDATE deliveries SET state = 'scheduled' WHERE id IN (SELECT id FROM outbox WHERE kind = 6)"
    )
    await installation.rows(
        "UPDATE deliveries d SET due_at = o.due_at FROM outbox o WHERE o.id = d.id"
    )
    await installation.publish_many(pull, LEASED)
    await installation.rows(
        "WITH o AS (DELETE FROM outbox WHERE subscription_id = %s RETURNING room_id, id, subscription_id),"
        " d AS (UPDATE deliveries SET state = 'leased' WHERE id IN (SELECT id FROM o))"
        " INSERT INTO leases (room_id, id, subscription_id, generation, until) SELECT *, 0, %s FROM o",
        pull, ago(-600),
    )  # fmt: skip
    return push, pull


async def is_back(broker: Broker) -> bool:
    try:
        return not await broker.has_sentinel()
    except BrokerUnavailableError:
        return False


async def test_what_an_emptied_broker_had_is_sent_again(
    installation: Installation, artemis_server: Callable[..., TestServer], database: str
) -> None:
    server = await asyncio.to_thread(artemis_server)
    await furnish(installation)
    async with (
        open_broker(server.url, claim_s=60, farm="rooms", client=client()) as broker,
        LogWriter(database, kind="chores", broker_mode=RELAYED) as writer,
    ):
        async with relaying(installation.url, broker):
            await until_sent(installation)
        await put_sentinel(broker)
        before = await installation.rows(
            "SELECT id, generation, attempt, due_at FROM outbox ORDER BY id"
        )
        await asyncio.to_thread(server.kill)
        server.erase()
        await asyncio.to_thread(server.start)
        await until(lambda: is_back(broker), "the broker to be back")
        identity = await ask(installation, "recover", age_s=0.0)
        duty = BrokerRecovery(
            ResendQueries(writer), broker, SystemClock(), lambda: None, job_queue=JobQueue(writer)
        )
        await duty.run(always)
        row = await job(installation, identity)
        assert (row["state"], row["done"], row["total"]) == ("done", MANY + DELAYED, MANY + DELAYED)
        assert await broker.has_sentinel()
        assert await places(installation) == {
            WorkLocation.PUSH_TO_RELAY: MANY + DELAYED,
            WorkLocation.PUSH_SCHEDULED: LATER,
        }
        async with relaying(installation.url, broker):
            await until_sent(installation)
        after = await installation.rows(
            "SELECT id, generation, attempt, due_at, kind FROM outbox ORDER BY id"
        )
        for old, new in zip(before, after, strict=True):
            moved = int(new["kind"] != WorkLocation.PUSH_SCHEDULED)
            assert (new["id"], new["generation"], new["attempt"], new["due_at"]) == (
                old["id"], old["generation"] + moved, old["attempt"], old["due_at"],
            )  # fmt: skip
        copies = await received(broker, MANY)
        assert len(copies) == MANY, "what is due later is not handed out yet"
        due = {str(row["id"]): row for row in after if row["due_at"] <= ago(0)}
        assert {(copy.delivery_id, copy.generation, copy.attempt) for copy in copies} == {
            (identity, 1, row["attempt"]) for identity, row in due.items()
        }
        assert (await IntegrityCheck(writer).scan(START, limit=10_000))[0] == []
    assert await installation.states() == {
        "queued": MANY + DELAYED,
        "scheduled": LATER,
        "leased": LEASED,
    }
    assert await installation.value("SELECT count(*) FROM leases WHERE generation = 0") == LEASED
