"""Test the turns of organisations at the connection that returns and looks up leases."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from delivery.pull.lease_statements import LeaseStatements
from delivery.pull.target import PullTarget
from rooms.db.leases.acquire import SubscriptionAccess
from rooms.db.leases.release import LeaseQueries
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

    async def nack(
        self,
        _room: RoomId,
        _subscription: SubscriptionId,
        organisation: OrganisationId,
        _leases: Sequence[tuple[bytes, bytes]],
        *,
        delay_ms: int,
    ) -> tuple[SubscriptionAccess, frozenset[int], bool]:
        assert delay_ms == 0
        async with self._lock:
            self.begun.append(organisation)
            await self.gate.wait()
            if self.broken:
                raise StorageUnavailableError("away")
            self.ended.append(organisation)
        return SubscriptionAccess.OPEN, frozenset(), True


@pytest.fixture
async def connection() -> Connection:
    return Connection()


@pytest.fixture
async def statements(connection: Connection) -> LeaseStatements:
    return LeaseStatements(cast("LeaseQueries", connection))


def nack(statements: LeaseStatements, organisation: str) -> "asyncio.Task[Any]":
    key = PullTarget(RoomId(1), SubscriptionId("s"), OrganisationId(organisation))
    return asyncio.create_task(statements.nack(key, [], delay_ms=0))


async def turns_of_the_loop(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_an_organisation_waits_for_one_statement_of_another(
    connection: Connection, statements: LeaseStatements
) -> None:
    tasks = [nack(statements, "many") for _ in range(20)]
    await turns_of_the_loop()
    tasks += [nack(statements, "few"), nack(statements, "another")]
    await turns_of_the_loop()
    connection.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)
    assert connection.begun[:4] == ["many", "few", "another", "many"]
    assert connection.begun.count("many") == 20


async def test_a_statement_that_has_begun_ends_without_its_caller(
    connection: Connection, statements: LeaseStatements
) -> None:
    """One that has not begun is left out. Closing waits for those under way."""
    leaving, late, staying = (nack(statements, "one") for _ in range(3))
    await turns_of_the_loop()
    for task in (leaving, late):
        task.cancel()
    await asyncio.wait([leaving, late])
    assert connection.begun == ["one"]
    closing = asyncio.create_task(statements.close())
    await turns_of_the_loop()
    assert not closing.done()
    connection.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        await staying
        await closing
    assert connection.ended == ["one", "one"]


async def test_an_error_without_a_reader_ends_the_turn(
    connection: Connection, statements: LeaseStatements
) -> None:
    connection.broken = True
    leaving, staying = nack(statements, "one"), nack(statements, "one")
    await turns_of_the_loop()
    leaving.cancel()
    connection.gate.set()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StorageUnavailableError):
            await staying
