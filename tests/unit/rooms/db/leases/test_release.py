"""Test the turns of organisations at the connection that returns and looks up leases."""

import asyncio
from typing import Any, cast

import pytest

from rooms.db.leases.acquire import SubscriptionAccess
from rooms.db.leases.release import LeaseQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.errors import StorageUnavailableError

PATIENCE_S = 60.0


class Connection:
    """Run one statement at a time, in the order of their callers, as a `LogWriter` does."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.gate = asyncio.Event()
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.broken = False

    async def run(self, _statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        organisation = parameters["organisation"]
        async with self._lock:
            self.begun.append(organisation)
            await self.gate.wait()
            if self.broken:
                raise StorageUnavailableError("away")
            self.ended.append(organisation)
        return [(SubscriptionAccess.OPEN, "", True)]


@pytest.fixture
async def connection() -> Connection:
    return Connection()


@pytest.fixture
async def queries(connection: Connection) -> LeaseQueries:
    return LeaseQueries(cast("LogWriter", connection))


def nack(queries: LeaseQueries, organisation: str) -> "asyncio.Task[Any]":
    return asyncio.create_task(
        queries.nack(RoomId(1), SubscriptionId("s"), OrganisationId(organisation), [], delay_ms=0)
    )


async def turns_of_the_loop(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_organisation_waits_for_one_statement_of_another(
    connection: Connection, queries: LeaseQueries
) -> None:
    tasks = [nack(queries, "many") for _ in range(20)]
    await turns_of_the_loop()
    tasks += [nack(queries, "few"), nack(queries, "another")]
    await turns_of_the_loop()
    connection.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)
    assert connection.begun[:4] == ["many", "few", "another", "many"]
    assert connection.begun.count("many") == 20


async def test_a_statement_that_has_begun_ends_without_its_caller(
    connection: Connection, queries: LeaseQueries
) -> None:
    """One that has not begun is left out. Closing waits for those under way."""
    leaving, late, staying = (nack(queries, "one") for _ in range(3))
    await turns_of_the_loop()
    for task in (leaving, late):
        task.cancel()
    await asyncio.wait([leaving, late])
    assert connection.begun == ["one"]
    closing = asyncio.create_task(queries.close())
    await turns_of_the_loop()
    assert not closing.done()
    connection.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        await staying
        await closing
    assert connection.ended == ["one", "one"]


async def test_an_error_without_a_reader_ends_the_turn(
    connection: Connection, queries: LeaseQueries
) -> None:
    connection.broken = True
    leaving, staying = nack(queries, "one"), nack(queries, "one")
    await turns_of_the_loop()
    leaving.cancel()
    connection.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StorageUnavailableError):
            await staying
