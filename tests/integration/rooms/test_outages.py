"""Test that a store which answers a call ends what was refused while it was away.

No probe has to fail during the outage, and none has to follow it.
"""

import os
import time

from delivery.brokers import open_broker
from delivery.leadership import open_election
from delivery.magazines import open_magazines
from rooms.clock import SystemClock
from rooms.db.connection import open_engine
from rooms.db.readiness import WriteCheck
from rooms.errors import (
    BrokerUnavailableError,
    ElectionUnavailableError,
    MagazineUnavailableError,
    StorageRefusedError,
    TransientError,
)
from rooms.outages import OUTAGES, REQUESTS_REFUSED

CLIENT = f"outages-{os.getpid()}"


def refuse(error: TransientError) -> None:
    """Record an outage as the API does that refuses one request."""
    OUTAGES.record_failure(error, REQUESTS_REFUSED)
    assert OUTAGES.any_failing


async def test_an_answer_of_artemis_ends_its_outage(artemis_url: str) -> None:
    async with open_broker(artemis_url, claim_s=60, farm="outages", client=CLIENT) as broker:
        refuse(BrokerUnavailableError("away"))
        await broker.disk_usage()
        assert not OUTAGES.any_failing
        refuse(BrokerUnavailableError("away"))
        async with broker.consume(credit=1):
            assert not OUTAGES.any_failing


async def test_an_answer_of_zookeeper_ends_its_outage(zookeeper_url: str) -> None:
    async with open_election(
        zookeeper_url, client=CLIENT, member="one", clock=SystemClock()
    ) as election:
        await election.view()
        refuse(ElectionUnavailableError("away"))
        await election.view()
        assert not OUTAGES.any_failing


async def test_an_answer_of_aerospike_ends_its_outage(aerospike_url: str) -> None:
    async with open_magazines(aerospike_url, farm="outages", client=CLIENT) as magazines:
        refuse(MagazineUnavailableError("away"))
        await magazines.check()
        assert not OUTAGES.any_failing


async def test_an_answer_ends_no_outage_of_another_store(aerospike_url: str) -> None:
    async with open_magazines(aerospike_url, farm="outages", client=CLIENT) as magazines:
        refuse(BrokerUnavailableError("away"))
        refuse(MagazineUnavailableError("full"))
        await magazines.check()
        assert OUTAGES.any_failing


async def test_a_write_that_works_ends_what_postgresql_refused(database: str) -> None:
    engine = open_engine(database, size=1)
    try:
        refuse(StorageRefusedError("no space left on device"))
        assert await WriteCheck(engine, time.monotonic).is_writable()
        assert not OUTAGES.any_failing
    finally:
        await engine.dispose()
