"""Due buckets: every delivery lies in one of them whatever their number, and whoever looks into it, it comes due once."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from delivery.elections.postgres import PostgresElection, Pulse
from rooms.clock import SystemClock
from rooms.domain.cluster import ClusterView
from rooms.domain.place import Shape
from rooms.storage.horizon import SLOTS, bucket_count, come_due, set_bucket_count
from rooms.storage.writer import Writer
from rooms.upkeep.horizon import partition_of
from rooms.upkeep.service import Pace, keep
from tests.installation import Installation, ago, installed, until
from tests.relaying import RELAYED, Counting

ROWS = 60
PULSE = Pulse(lease_s=20.0, trust_s=19.0, ping_s=0.2)


@pytest.fixture
def shape() -> Shape:
    return RELAYED


async def waiting(installation: Installation, count: int = ROWS) -> None:
    """Deliveries beyond the horizon that are due by now."""
    subscription = await installation.subscribe()
    await installation.publish_many(subscription, count, due=ago())
    await installation.rows("UPDATE deliveries SET state = 'scheduled' WHERE subscription_id = %s", subscription)
    await installation.rows("UPDATE outbox SET kind = 6 WHERE subscription_id = %s", subscription)


async def logged(installation: Installation) -> int:
    found = await installation.value("SELECT count(*) FROM delivery_log WHERE kind = 'coming_due'")
    return int(found)


@pytest.mark.row("E6")
async def test_each_delivery_lies_in_one_bucket_whatever_their_number(
    installation: Installation, writer: Writer
) -> None:
    """Oracle: bucket after bucket moves some, all of them together every one; a bucket beyond the number moves none."""
    assert await bucket_count(writer) == 8
    await waiting(installation)
    for count in (1, 3, 8, 200, SLOTS):
        await installation.rows("UPDATE outbox SET kind = 6")
        await set_bucket_count(writer, count)
        moved = [(await come_due(writer, buckets=[bucket], limit=ROWS)).moved for bucket in range(count)]
        assert sum(moved) == ROWS
        assert max(moved) < ROWS or count == 1
        await installation.rows("UPDATE outbox SET kind = 6")
        assert (await come_due(writer, buckets=[count, 10_000], limit=ROWS)).moved == 0


@pytest.mark.row("E6")
async def test_the_earliest_of_a_slot_come_first_and_there_is_more(installation: Installation, writer: Writer) -> None:
    await waiting(installation, count := SLOTS + 1)  # so that two are in one slot
    first = await come_due(writer, buckets=range(8), limit=1)
    assert first.more
    assert 0 < first.moved < count
    while (await come_due(writer, buckets=range(8), limit=1)).more:
        pass
    assert await logged(installation) == count


@pytest.mark.row("E6")
async def test_two_in_one_bucket_have_each_delivery_sent_once(
    installation: Installation, writer: Writer, database: str
) -> None:
    """Oracle: the second looks while the first one's move is not committed; it waits, and changes nothing of it."""
    await waiting(installation)
    async with installed(database) as other, other.connection.transaction():
        await other.rows("UPDATE outbox SET kind = 2 WHERE id IN (SELECT id FROM outbox LIMIT 20)")
        task = asyncio.create_task(come_due(writer, buckets=range(8), limit=ROWS))

        async def waits() -> bool:
            return bool(
                await installation.rows(
                    "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                )
            )

        await until(waits, "the look that meets rows which are just being moved")
    assert (await task).moved == ROWS - 20
    assert await logged(installation) == ROWS - 20
    assert await installation.states() == {"queued": ROWS - 20, "scheduled": 20}


@asynccontextmanager
async def keeping(url: str, *members: str) -> AsyncIterator[PostgresElection]:
    """Upkeeps, each with an election of its own; that of the first."""
    stop, clock = asyncio.Event(), SystemClock()
    pace = Pace(horizon_s=0.1, retry_s=0.1)
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(Counting())
        elections = [
            await stack.enter_async_context(PostgresElection(url, member=member, clock=clock, pulse=PULSE))
            for member in members
        ]
        tasks = [
            asyncio.create_task(
                keep(database_url=url, election=one, clock=clock, stop=stop, broker=broker, shape=RELAYED, pace=pace)
            )
            for one in elections
        ]
        try:
            yield elections[0]
        finally:
            stop.set()
            await asyncio.gather(*tasks)


def buckets_of(view: ClusterView) -> list[Sequence[str]]:
    return [[name for name in member.partitions if name.startswith("due/")] for member in view.members]


@pytest.mark.row("E6")
async def test_their_number_changes_under_two_members_that_share_them(
    installation: Installation, writer: Writer, database: str
) -> None:
    """Oracle: after 8 → 3 → 21 the members have all of them between them, each some, and what comes due is found."""
    async with keeping(database, "a", "b") as election:
        for count in (8, 3, 21):
            await set_bucket_count(writer, count)
            wanted = [partition_of(bucket) for bucket in range(count)]

            async def shared(wanted: list[str] = wanted) -> bool:
                found = buckets_of(await election.view())
                return len(found) == 2 and all(found) and sorted(found[0] + found[1]) == wanted  # type: ignore[operator]

            await until(shared, f"{count} buckets shared out")
            await waiting(installation)

            async def moved() -> bool:
                return not await installation.rows("SELECT 1 FROM outbox WHERE kind = 6 LIMIT 1")

            await until(moved, "what is due")
    assert await logged(installation) == 3 * ROWS
