"""Jobs with more rows than are counted: they have no total until they are done, and count once."""

from typing import Any

import pytest

from delivery.maintenance.deletions import DeleteJob
from delivery.maintenance.jobs import JobHandler
from delivery.maintenance.replay import ReplayJob
from delivery.maintenance.restore import ClearJob, RestoreJob
from rooms.clock import SystemClock
from rooms.db import bounded_counts
from rooms.db.jobs.delete import DeleteQueries
from rooms.db.jobs.jobs import JobQueue, OpenJob
from rooms.db.jobs.replay import ReplayQueries
from rooms.db.jobs.restore import ClearQueries, RestoreQueries
from rooms.db.queue.ordering import OrderingQueries
from rooms.db.writer import LogWriter
from rooms.domain.job import JobKind
from rooms.domain.state_machine import State
from tests.integration.delivery.maintenance.test_service import (
    NothingDone,
    Times,
    always,
    ask,
    delete_room,
    job,
)
from tests.support.installation import Installation
from tests.support.sandboxes import idle_sandbox

COUNT = 7


class CountedStatements(LogWriter):
    """Count the statements that only count."""

    number = 0

    async def run(self, statement: str, parameters: Any) -> list[tuple[Any, ...]]:
        self.number += "most" in parameters
        return await super().run(statement, parameters)


def handlers(writer: LogWriter) -> dict[JobKind, JobHandler]:
    queue, restores = JobQueue(writer), RestoreQueries(writer)

    def quiet(_: object) -> None:
        pass

    return {
        **DeleteJob(queue, DeleteQueries(writer), batch=1).handlers(),
        **RestoreJob(queue, restores, on_queued=quiet, batch=1).handlers(),
        **ClearJob(
            queue,
            ClearQueries(writer),
            restores,
            OrderingQueries(writer),
            on_queued=quiet,
            batch=1,
        ).handlers(),
        **ReplayJob(
            queue,
            ReplayQueries(writer),
            SystemClock(),
            on_queued=quiet,
            batch=1,
            sandbox=idle_sandbox(),
        ).handlers(),
    }


@pytest.mark.parametrize("most", [COUNT - 1, COUNT])
@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("restore", {"states": ["queued"]}),
        ("clear_room", {}),
        ("clear_subscription", {"subscription_id": ""}),
        ("replay", {"subscription_id": "", "since": "2020-01-01T00:00:00+00:00"}),
        ("replay", {"subscription_id": "", "since": "2020-01-01T00:00:00+00:00", "business_keys": ["k"]}),
        ("delete_subscription", {"subscription_id": ""}),
    ],
)  # fmt: skip
async def test_a_job_with_many_rows_counts_them_once_and_no_more_than_needed(
    installation: Installation,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    arguments: dict[str, Any],
    most: int,
) -> None:
    monkeypatch.setattr(bounded_counts, "MAX_COUNTED", most)
    subscription = await installation.subscribe()
    for _ in range(COUNT):
        await installation.publish(subscription, state=State.DELIVERED)
    await installation.rows("UPDATE messages SET business_key = 'k'")
    if kind == "delete_subscription":
        await installation.change(subscription, status="deleted")
    named = {"subscription_id": subscription} if "subscription_id" in arguments else {}
    age_s = 60.0 if kind == "delete_subscription" else 0.0
    identity = await ask(
        installation, kind, age_s=age_s, room_id=installation.room, **{**arguments, **named}
    )
    async with CountedStatements(installation.url, kind="upkeep") as writer:
        queue, handler = JobQueue(writer), handlers(writer)[JobKind(kind)]
        (open_job,) = await queue.fetch_open([JobKind(kind)])
        slices = 1
        while not await handler(open_job, Times(3)):
            row = await job(installation, identity)
            assert row["total"] == (COUNT if most >= COUNT else None)
            (open_job,) = await queue.fetch_open([JobKind(kind)])
            slices += 1
            assert slices < 20
        await queue.finish_job(open_job)
        assert slices > 2
        assert writer.number == 1
    row = await job(installation, identity)
    assert (row["state"], row["done"], row["total"]) == ("done", COUNT, COUNT)


@pytest.mark.parametrize(("most", "total"), [(3, None), (4, 4)])
async def test_the_total_of_a_rooms_deletion_has_a_bound(
    installation: Installation,
    writer: LogWriter,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    total: int | None,
) -> None:
    """Check it with two deliveries and two messages."""
    monkeypatch.setattr(bounded_counts, "MAX_COUNTED", most)
    subscription = await installation.subscribe()
    for _ in range(2):
        await installation.publish(subscription, state=State.DELIVERED)
    assert await DeleteQueries(writer).count(installation.room, None) == total


async def test_a_successor_counts_what_is_left_of_a_room_with_many_rows(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill a process that had too many rows to count, when few enough for its successor are left."""
    monkeypatch.setattr(bounded_counts, "MAX_COUNTED", 2 * COUNT - 1)
    subscription = await installation.subscribe()
    for _ in range(COUNT):
        await installation.publish(subscription, state=State.DELIVERED)
    identity = await delete_room(installation, installation.room)
    queue = JobQueue(writer)

    async def open_job() -> OpenJob:
        (found,) = await queue.fetch_open([JobKind.DELETE_ROOM])
        return found

    first = handlers(writer)[JobKind.DELETE_ROOM]
    until_one = NothingDone(installation.url)
    while (await job(installation, identity))["done"] == 0:
        assert not await first(await open_job(), until_one)
    row = await job(installation, identity)
    assert (row["done"], row["total"]) == (1, None)
    successor = handlers(writer)[JobKind.DELETE_ROOM]
    last = await open_job()
    while not await successor(last, always):
        last = await open_job()
    await queue.finish_job(last)
    row = await job(installation, identity)
    assert (row["state"], row["done"], row["total"]) == ("done", 2 * COUNT, 2 * COUNT)
