"""Check that a room's routing is read whole, in pages, as of one moment."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db.connection import open_engine, transaction
from rooms.db.publish import routing
from rooms.db.publish.routing import load_routing
from tests.support.publisher import House


@pytest.fixture
async def engine(database: str) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(database, size=2)
    yield engine
    await engine.dispose()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7])
async def test_all_pages_are_read_in_order(
    database: str, engine: AsyncEngine, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "_PAGE", 3)
    house = House(database)
    room, other = house.room(), house.room()
    house.event_type(room)
    made = [house.subscription(room) for _ in range(count)]
    house.subscription(other)
    record = await load_routing(engine, room)
    assert record is not None
    assert [one.id for one in record.subscriptions] == sorted(made)


async def test_pages_are_of_one_moment(
    database: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a change between two pages would be in the routes, and not in their version."""
    monkeypatch.setattr(routing, "_PAGE", 1)
    house = House(database)
    room = house.room()
    made = [house.subscription(room) for _ in range(3)]
    decode = routing._subscriptions.decode

    class ChangesMeanwhile:
        def __init__(self) -> None:
            self.is_first = True

        def decode(self, page: str) -> object:
            if self.is_first:
                self.is_first = False
                made.append(house.subscription(room))
            return decode(page)

    monkeypatch.setattr(routing, "_subscriptions", ChangesMeanwhile())
    record = await load_routing(engine, room)
    assert record is not None
    assert [one.id for one in record.subscriptions] == sorted(made[:3])
    monkeypatch.undo()
    async with transaction(engine) as connection:
        version = await connection.scalar(
            text("SELECT plan_version FROM rooms WHERE id = :room"), {"room": room}
        )
    assert version is not None
    assert record.plan_version == version - 1
