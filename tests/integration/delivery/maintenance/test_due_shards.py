"""Scheduling shards: each delivery is in one of them and is sent once, for any number of shards."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from delivery.leadership.postgres import HeartbeatConfig, PostgresElection
from delivery.maintenance.due import partition_name
from delivery.maintenance.service import TaskIntervals, run_tasks
from rooms.clock import SystemClock
from rooms.db.queue.lookahead import (
    HASH_SLOTS,
    schedule_shard_count,
    stage_due,
)
from rooms.db.writer import LogWriter
from rooms.domain.cluster import ClusterView
from rooms.domain.work_location import BrokerMode
from tests.support.installation import Installation, ago, installed, until
from tests.support.relay import RELAYED, Counting

ROWS = 60
PULSE = HeartbeatConfig(lease_s=20.0, trust_s=19.0, ping_s=0.2)


@pytest.fixture
def shape() -> BrokerMode:
    return RELAYED


async def waiting(installation: Installation, count: int = ROWS) -> None:
    """Store deliveries beyond the look-ahead that are due by now."""
    subscription = await installation.subscribe()
    await installation.publish_many(subscription, count, due=ago())
    await installation.rows(
        "UPDATE deliveries SET state = 'scheduled' WHERE subscription_id = %s", subscription
    )
    await installation.rows("UPDATE outbox SET kind = 6 WHERE subscription_id = %s", subscription)


async def set_count(installation: Installation, count: int) -> None:
    await installation.rows("UPDATE due_buckets SET count = %s", count)


async def logged(installation: Installation) -> int:
    found = await installation.value("SELECT count(*) FROM delivery_log WHERE kind = 'coming_due'")
    return int(found)


async def test_each_delivery_is_in_one_shard_for_every_number_of_shards(
    installation: Installation, writer: LogWriter
) -> None:
    """Stage shard after shard.

    Oracle: each shard stages some deliveries, all together every one; a shard beyond the number
    none.
    """
    assert await schedule_shard_count(writer) == 8
    await waiting(installation)
    for count in (1, 3, 8, 200, HASH_SLOTS):
        await installation.rows("UPDATE outbox SET kind = 6")
        await set_count(installation, count)
        moved = [
            (await stage_due(writer, shards=[bucket], limit=ROWS)).staged for bucket in range(count)
        ]
        assert sum(moved) == ROWS
        assert max(moved) < ROWS or count == 1
        await installation.rows("UPDATE outbox SET kind = 6")
        assert (await stage_due(writer, shards=[count, 10_000], limit=ROWS)).staged == 0


async def test_the_earliest_of_a_slot_come_first(
    installation: Installation, writer: LogWriter
) -> None:
    await waiting(installation, count := HASH_SLOTS + 1)  # so that two are in one slot
    first = await stage_due(writer, shards=range(8), limit=1)
    assert first.has_more
    assert 0 < first.staged < count
    while (await stage_due(writer, shards=range(8), limit=1)).has_more:
        pass
    assert await logged(installation) == count


async def test_two_members_in_one_shard_send_each_delivery_once(
    installation: Installation, writer: LogWriter, database: str
) -> None:
    """Stage while the first member's move is not committed.

    Oracle: the second member waits, and changes none of the first one's deliveries.
    """
    await waiting(installation)
    async with installed(database) as other, other.connection.transaction():
        await other.rows("UPDATE outbox SET kind = 2 WHERE id IN (SELECT id FROM outbox LIMIT 20)")
        task = asyncio.create_task(stage_due(writer, shards=range(8), limit=ROWS))

        async def waits() -> bool:
            return bool(
                await installation.rows(
                    "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                )
            )

        await until(waits, "the look that meets rows which are just being moved")
    assert (await task).staged == ROWS - 20
    assert await logged(installation) == ROWS - 20
    assert await installation.states() == {"queued": ROWS - 20, "scheduled": 20}


@asynccontextmanager
async def keeping(url: str, *members: str) -> AsyncIterator[PostgresElection]:
    """Run maintenance processes, each with its own election; yield the first one's election."""
    stop, clock = asyncio.Event(), SystemClock()
    pace = TaskIntervals(due_s=0.1, retry_s=0.1)
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(Counting())
        elections = [
            await stack.enter_async_context(
                PostgresElection(url, member=member, clock=clock, heartbeat=PULSE)
            )
            for member in members
        ]
        tasks = [
            asyncio.create_task(
                run_tasks(
                    database_url=url,
                    election=one,
                    clock=clock,
                    stop=stop,
                    broker=broker,
                    broker_mode=RELAYED,
                    intervals=pace,
                )
            )
            for one in elections
        ]
        try:
            yield elections[0]
        finally:
            stop.set()
            await asyncio.gather(*tasks)


def buckets_of(view: ClusterView) -> list[Sequence[str]]:
    return [
        [name for name in member.partitions if name.startswith("due/")] for member in view.members
    ]


async def test_the_number_of_shards_changes_under_two_members(
    installation: Installation, writer: LogWriter, database: str
) -> None:
    """Change the number from 8 to 3 to 21.

    Oracle: the members have all shards between them, each some, and due deliveries are found.
    """
    async with keeping(database, "a", "b") as election:
        for count in (8, 3, 21):
            await set_count(installation, count)
            wanted = [partition_name(bucket) for bucket in range(count)]

            async def shared(wanted: list[str] = wanted) -> bool:
                found = buckets_of(await election.view())
                return len(found) == 2 and all(found) and sorted(found[0] + found[1]) == wanted  # type: ignore[operator]

            await until(shared, f"{count} buckets shared out")
            await waiting(installation)

            async def moved() -> bool:
                return not await installation.rows("SELECT 1 FROM outbox WHERE kind = 6 LIMIT 1")

            await until(moved, "what is due")
    assert await logged(installation) == 3 * ROWS
