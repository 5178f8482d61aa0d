"""The days ahead, where rows stand in the default partitions: nobody waits while those are read, and no row is refused."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Final
from unittest import mock

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.domain.states import State
from rooms.storage import partitions as storage
from rooms.storage.engine import open_engine, sqlalchemy_url
from rooms.storage.partitions import check_out, keep_out, make_day, missing_days
from rooms.upkeep import partitions as duty
from rooms.upkeep.partitions import PartitionsAhead
from tests.installation import Installation
from tests.past import At, write

TODAY: Final = datetime(2031, 5, 10, 12, tzinfo=UTC)
"""So far on that nothing is made of it by the schema."""
TABLES: Final = ("deliveries", "log_entries", "messages")


def always() -> bool:
    return True


def day(ahead: int) -> datetime:
    return TODAY + timedelta(days=ahead)


@pytest.fixture
async def engine(database: str) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(database, size=1)
    try:
        yield engine
    finally:
        await engine.dispose()


async def made(installation: Installation, *days_ahead: int) -> dict[int, list[str]]:
    """Which tables have a partition of these days."""
    found = {}
    for ahead in days_ahead:
        rows = await installation.rows(
            "SELECT inhparent::regclass::text AS name FROM pg_inherits"
            " WHERE right(inhrelid::regclass::text, 9) = %s ORDER BY 1",
            f"_{day(ahead):%Y%m%d}",
        )
        found[ahead] = [row["name"] for row in rows]
    return found


async def kept_out(installation: Installation) -> int:
    """The constraints on default partitions."""
    return int(await installation.value("SELECT count(*) FROM pg_constraint WHERE conname ~ '_apart$'"))


async def test_a_day_that_a_table_has_rows_of_is_left_whole_and_the_others_are_made(
    installation: Installation, engine: AsyncEngine
) -> None:
    old = await write(installation, await installation.subscribe(), State.SIDELINED, born=day(2))
    await installation.rows("DELETE FROM deliveries WHERE id = %s", old.delivery)
    await PartitionsAhead(engine, At(TODAY)).run(always)
    whole = list(TABLES)
    assert await made(installation, 0, 1, 2, 3, 7, 8) == {0: whole, 1: whole, 2: [], 3: whole, 7: whole, 8: []}


async def test_large_default_partitions_are_read_before_and_let_everything_in_afterwards(
    installation: Installation, engine: AsyncEngine
) -> None:
    subscription = await installation.subscribe()
    await write(installation, subscription, State.SIDELINED, born=day(2))
    with mock.patch.object(duty, "REST_BYTES", 0):
        await PartitionsAhead(engine, At(TODAY)).run(always)
    whole = list(TABLES)
    assert await made(installation, 0, 1, 2, 3, 7) == {0: [], 1: whole, 2: [], 3: whole, 7: whole}
    assert await kept_out(installation) == 0
    for ahead in (0, 1, 2, 20):
        await write(installation, subscription, State.DELIVERED, born=day(ahead))


async def test_what_is_kept_out_is_not_read_for_while_everybody_waits(
    installation: Installation, database: str
) -> None:
    """PostgreSQL says so itself."""
    await write(installation, await installation.subscribe(), State.SIDELINED, born=day(2))
    said: list[str] = []
    engine = create_engine(sqlalchemy_url(database))
    try:
        with engine.begin() as connection:
            raw = connection.connection.driver_connection
            assert isinstance(raw, psycopg.Connection)
            raw.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
            (first,) = missing_days(connection, TODAY, 0)
            keep_out(connection, first)
            check_out(connection, first)
            connection.exec_driver_sql("SET LOCAL client_min_messages = debug1")
            make_day(connection, first)
    finally:
        engine.dispose()
    spared = [line for line in said if "default partition" in line and "implied by existing constraints" in line]
    assert len(spared) == len(TABLES), said


@pytest.mark.parametrize("step", ["keep_out", "check_out", "make_day"])
async def test_who_fails_in_between_keeps_nothing_out(
    installation: Installation, engine: AsyncEngine, step: str
) -> None:
    subscription = await installation.subscribe()
    await write(installation, subscription, State.SIDELINED, born=day(9))
    with (
        mock.patch.object(duty, "REST_BYTES", 0),
        mock.patch.object(duty, step, side_effect=RuntimeError("failed")),
        pytest.raises(RuntimeError),
    ):
        await PartitionsAhead(engine, At(TODAY)).run(always)
    assert await kept_out(installation) == 0
    await write(installation, subscription, State.DELIVERED, born=day(1))


async def test_what_somebody_kept_out_who_died_is_let_in(
    installation: Installation, engine: AsyncEngine, database: str
) -> None:
    dead = create_engine(sqlalchemy_url(database))
    try:
        with dead.begin() as connection:
            keep_out(connection, missing_days(connection, TODAY, 1)[1])
    finally:
        dead.dispose()
    assert await kept_out(installation) == len(TABLES)
    with mock.patch.object(duty, "missing_days", return_value=[]):
        await PartitionsAhead(engine, At(TODAY)).run(always)
    await write(installation, await installation.subscribe(), State.DELIVERED, born=day(1))
    assert await kept_out(installation) == 0


async def test_a_day_is_made_whole_or_not_at_all(installation: Installation, engine: AsyncEngine) -> None:
    """Half of one would never be gone through by retention."""
    broken = {**storage.STORAGE, "log_entries": "WITH (no_such_setting = 1)"}
    with mock.patch.object(storage, "STORAGE", broken), pytest.raises(Exception, match="no_such_setting"):
        await PartitionsAhead(engine, At(TODAY)).run(always)
    assert await made(installation, 0) == {0: []}
    await PartitionsAhead(engine, At(TODAY)).run(always)
    assert await made(installation, 0) == {0: list(TABLES)}
