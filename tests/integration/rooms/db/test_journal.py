"""Test how entries are appended to the chains of organisations, many at a time and by many."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db.connection import open_engine, transaction
from rooms.db.journal import (
    JournalFilter,
    append,
    bounded,
    entries_before,
    read_batches,
    read_chain,
    verify_chain,
)
from rooms.domain.ids import IdGenerator, OrganisationId
from rooms.domain.journal import FIRST_HASH, ActorKind, JournalEntry, Outcome
from tests.support.journal_chain import check_chain

_IDS = IdGenerator(secrets.randbits)
_NUMBERS = itertools.count(1)
ODD_TEXT = "ünï \\ \" ' , { } \u0000 \U0001f512"


def organisation() -> OrganisationId:
    return OrganisationId(_IDS.generate_global(next(_NUMBERS)))


def entry(owner: OrganisationId, action: str, **fields: Any) -> JournalEntry:
    plain: dict[str, Any] = {
        "id": _IDS.generate_global(next(_NUMBERS)),
        "organisation_id": owner,
        "at": datetime.now(UTC),
        "actor_kind": ActorKind.KEY,
        "actor_id": None,
        "actor_name": "test",
        "actor_organisation_id": owner,
        "application": None,
        "source": None,
        "request_id": "r",
        "action": action,
        "object": "/v1/rooms/1",
        "before": None,
        "after": None,
        "outcome": Outcome.SUCCEEDED,
        "reason": None,
    }
    return JournalEntry(**plain | fields)


@pytest.fixture
async def engine(database: str) -> AsyncIterator[AsyncEngine]:
    engine = open_engine(database)
    yield engine
    await engine.dispose()


async def chain_of(engine: AsyncEngine, owner: OrganisationId) -> list[JournalEntry]:
    """Return the entries of a chain that is whole, and whose head is right."""
    report = await verify_chain(engine, owner)
    assert report.broken is None
    async with transaction(engine) as connection:
        chain = await read_chain(connection, owner, after=0, limit=1000)
    assert check_chain(chain) is None
    assert [one.seq for one in chain] == list(range(1, len(chain) + 1))
    assert not chain or chain[0].previous_hash == FIRST_HASH
    return [one.entry for one in chain]


async def test_entries_are_stored_as_they_are_and_in_their_order(engine: AsyncEngine) -> None:
    owner = organisation()
    rows = [
        entry(owner, "first"),
        entry(
            owner,
            "second",
            actor_id=_IDS.generate_global(1),
            application="desk",
            source="127.0.0.1",
            before={"b": [1, 2.5, None, True], "a": {"text": ODD_TEXT}},
            after=ODD_TEXT,
            outcome=Outcome.REFUSED,
            reason=ODD_TEXT.replace("\u0000", ""),
        ),
        entry(owner, "third", after=[], before=0, actor_kind=ActorKind.SERVICE),
    ]
    async with transaction(engine) as connection:
        await append(connection, rows[0])
        await append(connection)
        await append(connection, *rows[1:])
    assert await chain_of(engine, owner) == rows


async def test_appending_at_the_same_time_keeps_chains_whole(engine: AsyncEngine) -> None:
    owners = [organisation(), organisation()]

    async def write(owner: OrganisationId, name: str, count: int) -> None:
        async with transaction(engine) as connection:
            await append(connection, *(entry(owner, f"{name}.{n}") for n in range(count)))

    sizes = (1, 5, 2, 1, 7, 3, 1, 4)
    await asyncio.gather(
        *(write(owner, str(n), size) for n, size in enumerate(sizes) for owner in owners)
    )
    for owner in owners:
        found = [one.action for one in await chain_of(engine, owner)]
        assert len(found) == sum(sizes)
        for n, size in enumerate(sizes):
            start = found.index(f"{n}.0")  # a run is not interrupted by another
            assert found[start : start + size] == [f"{n}.{k}" for k in range(size)]


async def test_a_transaction_that_is_rolled_back_leaves_no_gap(engine: AsyncEngine) -> None:
    owner = organisation()

    async def fail(entries: Iterable[JournalEntry]) -> None:
        async with transaction(engine) as connection:
            await append(connection, *entries)
            raise RuntimeError("after the journal")

    for before in (0, 2):
        with pytest.raises(RuntimeError):
            await fail([entry(owner, "lost"), entry(owner, "lost")])
        assert len(await chain_of(engine, owner)) == before
        async with transaction(engine) as connection:
            await append(connection, entry(owner, "kept"), entry(owner, "kept"))
    assert [one.action for one in await chain_of(engine, owner)] == ["kept"] * 4


async def test_a_run_is_of_one_organisation(engine: AsyncEngine) -> None:
    first, second = organisation(), organisation()
    with pytest.raises(ValueError, match="one organisation"):
        async with transaction(engine) as connection:
            await append(connection, entry(first, "a"), entry(second, "b"))
    assert await chain_of(engine, first) == await chain_of(engine, second) == []


async def test_a_later_page_reads_none_of_the_entries_before_it(engine: AsyncEngine) -> None:
    owner = organisation()
    rows = """
        INSERT INTO journal (organisation_id, seq, id, at, actor_kind, actor_name, action, object, outcome, previous_hash, hash)
        SELECT CAST(:owner AS uuid), n, gen_random_uuid(), timestamptz '2026-01-01Z' + n * interval '1 s', 'key', 'a', 'b', '/', 'succeeded',
            '', '' FROM generate_series(1, 50000) n"""
    middle = (datetime(2026, 1, 1, 7, tzinfo=UTC), owner)  # 25,200 of 50,000 are older
    statement = entries_before(JournalFilter(organisation=owner), middle).limit(51)
    compiled = statement.compile(
        dialect=postgresql.dialect(),  # type: ignore[no-untyped-call]
        compile_kwargs={"literal_binds": True},
    )
    async with transaction(engine) as connection:
        await connection.execute(text(rows), {"owner": owner})
        await connection.execute(text("ANALYZE journal"))
        plan = await connection.exec_driver_sql(
            f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {compiled}"
        )
    lines = [line for (line,) in plan]
    assert any("Index Scan" in line for line in lines), lines
    removed = [int(line.rpartition(" ")[2]) for line in lines if "Rows Removed" in line]
    assert sum(removed) <= 1, lines


async def test_a_long_journal_of_large_entries_does_not_block_the_loop(
    engine: AsyncEngine,
) -> None:
    """The guard of stalls fails it."""
    owner, count = organisation(), 1000
    large = {"enum": [1] * 4000}  # nothing takes longer to decode for its size
    assert bounded(large) == large
    for _ in range(count // 20):
        async with transaction(engine) as connection:
            entries = [entry(owner, "x", before=large, after=large) for _ in range(20)]
            await append(connection, *entries)
    report = await verify_chain(engine, owner)
    assert (report.broken, report.entries) == (None, count)
    read = [len(batch) async for batch in read_batches(engine, owner)]
    assert sum(read) == count
