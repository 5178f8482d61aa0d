"""Test that the tasks know every handler queue, and read only those that changed."""

from collections.abc import Sequence
from typing import Any

import pytest

from delivery.handlers import known_queues
from delivery.handlers.known_queues import KnownQueues
from rooms.db.catalog.handler_queues import (
    create_queue,
    mark_deleting,
    read_queues,
    update_queue,
)
from rooms.db.connection import transaction
from rooms.domain.handler_queue import QueueSettings
from tests.support.handler_queues import Desk, desk


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of queues whose settings were read, in pages of two queues."""
    names: list[str] = []

    async def recorded(connection: Any, store_names: Sequence[str]) -> Any:
        names.extend(store_names)
        return await read_queues(connection, store_names)

    monkeypatch.setattr(known_queues, "read_queues", recorded)
    monkeypatch.setattr(known_queues, "_PAGE", 2)
    return names


async def create(at: Desk, name: str, **settings: Any) -> str:
    async with transaction(at.engine) as connection:
        queue = await create_queue(
            connection, at.organisation, name, QueueSettings(**settings), new_id=name
        )
        return queue.store_name


async def test_only_changed_queues_are_read_again(database: str, read: list[str]) -> None:
    async with desk(database) as at:
        queues = KnownQueues(at.engine)
        assert await queues.refresh() == []
        made = [await create(at, f"queue {n}") for n in range(5)]
        for _ in range(2):
            assert {queue.store_name for queue in await queues.refresh()} == set(made)
        assert sorted(read) == made
        read.clear()
        async with transaction(at.engine) as connection:
            await update_queue(connection, made[1], QueueSettings(concurrency=9))
            await mark_deleting(connection, made[3])
        new = await create(at, "queue 9")
        found = {queue.store_name: queue for queue in await queues.refresh()}
        assert found.keys() == {*made, new} - {made[3]}
        assert found[made[1]].settings.concurrency == 9
        assert sorted(read) == [made[1], new]


async def test_a_queue_that_expires_is_read_again(database: str, read: list[str]) -> None:
    async with desk(database) as at:
        queues = KnownQueues(at.engine)
        name = await create(at, "short", queue_expiry_s=3600)
        assert [queue.active for queue in await queues.refresh()] == [True]
        async with transaction(at.engine) as connection:
            await connection.exec_driver_sql(
                "UPDATE queues SET created_at = created_at - interval '2 h'"
            )
        assert [queue.active for queue in await queues.refresh()] == [False]
        assert read == [name, name]
