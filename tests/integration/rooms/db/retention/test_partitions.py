"""Check that coming days are made while the default partitions have rows: no statement waits, and no row is refused."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Final
from unittest import mock

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine

from delivery.maintenance import cleanup
from delivery.maintenance.cleanup import create_partitions_ahead
from rooms.db.connection import open_engine
from rooms.db.retention import partitions as storage
from rooms.db.retention.partitions import (
    add_exclusion,
    create_partitions,
    missing_days,
    validate_exclusion,
)
from rooms.domain.ids import first_id
from rooms.domain.state_machine import State
from tests.support.installation import Installation
from tests.support.old_messages import At, write
from tests.support.sqlalchemy_urls import sqlalchemy_url

TODAY: Final = datetime(2031, 5, 10, 12, tzinfo=UTC)
"""So far on that nothing is made of it by the schema."""
TABLES: Final = ("deliveries", "log_entries", "messages")


def always() -> bool:
    return True


def day(ahead: int) -> datetime:
    return TODAY + timedelta(days=ahead)


def midnight(ahead: int) -> datetime:
    return day(ahead).replace(hour=0)


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
    return int(
        await installation.value("SELECT count(*) FROM pg_constraint WHERE conname ~ '_apart$'")
    )


async def test_a_day_that_a_table_has_rows_of_is_left_whole_and_the_others_are_made(
    installation: Installation, engine: AsyncEngine
) -> None:
    old = await write(installation, await installation.subscribe(), State.SIDELINED, born=day(2))
    await installation.rows("DELETE FROM deliveries WHERE id = %s", old.delivery)
    await create_partitions_ahead(engine, At(TODAY), always)
    whole = list(TABLES)
    assert await made(installation, 0, 1, 2, 3, 7, 8) == {
        0: whole,
        1: whole,
        2: [],
        3: whole,
        7: whole,
        8: [],
    }


async def test_large_default_partitions_are_read_before_and_let_everything_in_afterwards(
    installation: Installation, engine: AsyncEngine
) -> None:
    subscription = await installation.subscribe()
    await write(installation, subscription, State.SIDELINED, born=day(2))
    with mock.patch.object(cleanup, "MAX_DEFAULT_PARTITION_BYTES", 0):
        await create_partitions_ahead(engine, At(TODAY), always)
    whole = list(TABLES)
    assert await made(installation, 0, 1, 2, 3, 7) == {0: [], 1: whole, 2: [], 3: whole, 7: whole}
    assert await kept_out(installation) == 0
    for ahead in (0, 1, 2, 20):
        await write(installation, subscription, State.DELIVERED, born=day(ahead))


async def test_an_excluded_day_needs_no_scan_under_a_lock(
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
            add_exclusion(connection, first)
            validate_exclusion(connection, first)
            connection.exec_driver_sql("SET LOCAL client_min_messages = debug1")
            create_partitions(connection, first)
    finally:
        engine.dispose()
    spared = [
        line
        for line in said
        if "default partition" in line and "implied by existing constraints" in line
    ]
    assert len(spared) == len(TABLES), said


@pytest.mark.parametrize("step", ["add_exclusion", "validate_exclusion", "create_partitions"])
async def test_a_failure_in_between_leaves_no_exclusion(
    installation: Installation, engine: AsyncEngine, step: str
) -> None:
    subscription = await installation.subscribe()
    await write(installation, subscription, State.SIDELINED, born=day(9))
    with (
        mock.patch.object(cleanup, "MAX_DEFAULT_PARTITION_BYTES", 0),
        mock.patch.object(cleanup, step, side_effect=RuntimeError("failed")),
        pytest.raises(RuntimeError),
    ):
        await create_partitions_ahead(engine, At(TODAY), always)
    assert await kept_out(installation) == 0
    await write(installation, subscription, State.DELIVERED, born=day(1))


async def test_exclusions_of_a_dead_process_are_dropped(
    installation: Installation, engine: AsyncEngine, database: str
) -> None:
    dead = create_engine(sqlalchemy_url(database))
    try:
        with dead.begin() as connection:
            add_exclusion(connection, missing_days(connection, TODAY, 1)[1])
    finally:
        dead.dispose()
    assert await kept_out(installation) == len(TABLES)
    with mock.patch.object(cleanup, "missing_days", return_value=[]):
        await create_partitions_ahead(engine, At(TODAY), always)
    await write(installation, await installation.subscribe(), State.DELIVERED, born=day(1))
    assert await kept_out(installation) == 0


@pytest.mark.parametrize(("label", "low", "high"), [("20310511", 1, 2), ("203105", -9, 22)])
async def test_a_day_within_what_retention_kept_needs_no_partition(
    installation: Installation, engine: AsyncEngine, label: str, low: int, high: int
) -> None:
    """The clock is behind: a day or month that retention has replaced seems to be ahead."""
    first, end = (first_id(int(midnight(ahead).timestamp() * 1000)) for ahead in (low, high))
    for table in TABLES:
        await installation.rows(
            f"CREATE TABLE {table}_{label}_kept1 PARTITION OF {table}"
            f" FOR VALUES FROM ('{first}') TO ('{end}')"
        )
    await create_partitions_ahead(engine, At(TODAY), always)
    lacking = [
        ahead for ahead, tables in (await made(installation, *range(8))).items() if not tables
    ]
    assert lacking == [ahead for ahead in range(8) if low <= ahead < high]


async def test_a_day_that_cannot_be_made_does_not_prevent_the_next(
    installation: Installation, engine: AsyncEngine
) -> None:
    await installation.rows(f"CREATE TABLE messages_{day(1):%Y%m%d} ()")
    with pytest.raises(ProgrammingError, match="already exists"):
        await create_partitions_ahead(engine, At(TODAY), always)
    found = await made(installation, 0, 1, 2, 7)
    assert found == {0: list(TABLES), 1: [], 2: list(TABLES), 7: list(TABLES)}


async def test_a_day_is_made_whole_or_not_at_all(
    installation: Installation, engine: AsyncEngine
) -> None:
    """Half of one would never be gone through by retention."""
    broken = {**storage.STORAGE_OPTIONS, "log_entries": "WITH (no_such_setting = 1)"}
    with (
        mock.patch.object(storage, "STORAGE_OPTIONS", broken),
        pytest.raises(Exception, match="no_such_setting"),
    ):
        await create_partitions_ahead(engine, At(TODAY), always)
    assert await made(installation, 0) == {0: []}
    await create_partitions_ahead(engine, At(TODAY), always)
    assert await made(installation, 0) == {0: list(TABLES)}
