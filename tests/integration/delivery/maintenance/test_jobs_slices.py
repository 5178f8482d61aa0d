"""Jobs in slices of three pages, as where all slots are taken: each ends after a bounded number."""

import hashlib
from dataclasses import replace

from delivery.maintenance.deletions import DeleteJob
from delivery.maintenance.jobs import JobHandler
from delivery.maintenance.restore import ClearJob
from rooms.db.connection import connect
from rooms.db.jobs.delete import DeleteQueries
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.jobs.restore import ClearQueries, RestoreQueries
from rooms.db.queue.ordering import OrderingQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.job import JobKind
from rooms.domain.state_machine import State
from tests.integration.delivery.maintenance.test_service import (
    Times,
    always,
    ask,
    delete_subscription,
    job,
    queued,
)
from tests.support.installation import Installation

COUNT = 10


class CountedQueries(DeleteQueries):
    """Count how often deliveries are counted."""

    counts = 0

    async def count(self, room: RoomId, subscription: SubscriptionId | None) -> int | None:
        self.counts += 1
        return await super().count(room, subscription)


async def found(queue: JobQueue, kind: JobKind) -> OpenJob:
    (one,) = await queue.fetch_open([kind])
    return one


async def slices(queue: JobQueue, kind: JobKind, handler: JobHandler, *, most: int) -> int:
    """Run the only job until it is done; return the number of slices."""
    for count in range(1, most + 1):
        if await handler(await found(queue, kind), Times(3)):
            return count
    raise AssertionError(f"the job is not done after {most} slices")


async def test_a_deletion_continues_where_its_last_slice_ended(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    copies = [await queued(installation, subscription) for _ in range(COUNT)]
    identity = await delete_subscription(installation, subscription)
    queue, queries = JobQueue(writer), CountedQueries(writer)
    kind = JobKind.DELETE_SUBSCRIPTION
    handler = DeleteJob(queue, queries, batch=1).handlers()[kind]
    # Both walks read each delivery once, and find the end.
    await slices(queue, kind, handler, most=2 * COUNT // 3 + 3)
    assert {await installation.state(copy) for copy in copies} == {State.CANCELLED}
    row = await job(installation, identity)
    assert (row["done"], row["total"], queries.counts) == (COUNT, COUNT, 1)


async def test_a_walk_in_slices_is_as_old_as_its_begin(
    installation: Installation, writer: LogWriter
) -> None:
    """A publish may commit behind a walk that began too early, so another walk must follow."""
    subscription = await installation.subscribe()
    queue, kind = JobQueue(writer), JobKind.DELETE_SUBSCRIPTION
    handler = DeleteJob(queue, DeleteQueries(writer), batch=1, settle_s=5.0).handlers()[kind]
    async with await connect(installation.url, name="test publisher") as session:
        publisher = replace(installation, connection=session)
        async with session.transaction():
            late = await queued(publisher, subscription)
            for _ in range(4):
                await installation.publish(subscription, state=State.DELIVERED)
            await delete_subscription(installation, subscription)
            deletion = await found(queue, kind)
            assert not await handler(replace(deletion, age_s=4.0), Times(3))
    assert not await handler(replace(deletion, age_s=6.0), always)
    assert await installation.state(late) == State.QUEUED
    assert not await handler(replace(deletion, age_s=7.0), always)
    assert await installation.state(late) == State.CANCELLED
    assert await handler(replace(deletion, age_s=8.0), always)


async def test_a_skip_to_now_continues_where_its_last_slice_ended(
    installation: Installation, writer: LogWriter
) -> None:
    """Check it with ordering keys that it leaves alone: their heads were published later."""
    subscription = await installation.subscribe()
    await ask(
        installation,
        "skip_to_now",
        age_s=0.0,
        room_id=installation.room,
        subscription_id=subscription,
        name="sub",
    )
    for n in range(COUNT):
        (head,) = await installation.publish(subscription, state=State.SIDELINED)
        await installation.rows(
            "INSERT INTO ordered_keys (room_id, subscription_id, key, tail, head, head_id)"
            " VALUES (%s, %s, %s, 1, 1, %s)",
            installation.room,
            subscription,
            hashlib.sha256(str(n).encode()).digest()[:16],
            head.delivery_id,
        )
    queue, restores = JobQueue(writer), RestoreQueries(writer)
    skip = ClearJob(
        queue,
        ClearQueries(writer),
        restores,
        OrderingQueries(writer),
        on_queued=lambda _: None,
        batch=1,
    )
    handler = skip.handlers()[JobKind.SKIP_TO_NOW]
    await slices(queue, JobKind.SKIP_TO_NOW, handler, most=12)
    assert await installation.value("SELECT count(*) FROM ordered_keys") == COUNT
