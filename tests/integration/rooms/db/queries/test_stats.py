"""Test the bounds of what is counted for Prometheus, and what a refused count leaves."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from rooms.db.connection import DRIVER, connect, connect_arguments, open_engine
from rooms.db.queries import stats
from rooms.db.queries.stats import CACHE_S, CachedStats, QueueStats
from rooms.db.writer import LogWriter
from rooms.domain.state_machine import SubscriptionType
from rooms.outages import OUTAGES
from tests.support.installation import Installation

BOUND = 3
ROWS = 8


@pytest.fixture
async def engine(database: str) -> AsyncIterator[AsyncEngine]:
    opened = open_engine(database, name="rooms metrics")
    yield opened
    await opened.dispose()


async def fill(installation: Installation) -> None:
    """Give each table `ROWS` rows that are counted."""
    for _ in range(ROWS):
        await installation.subscribe(circuit_failures=5)
    first = await installation.subscribe(SubscriptionType.PULL)
    copies = [copy for _ in range(ROWS) for copy in await installation.publish(first)]
    await installation.queue(*copies)
    await installation.rows(
        "UPDATE outbox SET abandoned = 2, due_at = now() - interval '100 s',"
        " claimed_until = now() + interval '1 min'"
    )
    await installation.rows(
        "INSERT INTO lanes (room_id, id, circuit_open) SELECT room_id, id, true FROM subscriptions"
        " WHERE type = 'PUSH' ON CONFLICT (room_id, id) DO UPDATE SET circuit_open = true"
    )
    for table, columns, values in (
        ("held", "reason, priority, delay_ms, since", "'paused', 4, 0, now()"),
        ("leases", "generation, until", "0, now() + interval '1 min'"),
        ("sidelined", "generation, since, reason", "0, now(), 'nacked'"),
    ):
        await installation.rows(
            f"INSERT INTO {table} (room_id, id, subscription_id, {columns})"
            f" SELECT room_id, id, subscription_id, {values} FROM outbox"
        )
    await installation.rows(
        "INSERT INTO ordered_keys (room_id, subscription_id, key, tail, head, head_id, since)"
        " SELECT room_id, subscription_id, uuid_send(id), 1, 1, id, now() FROM outbox"
    )


def figures(counts: QueueStats) -> dict[str, float]:
    """Return the samples by metric, added up over the labels."""
    found: dict[str, float] = {}
    for family in counts.collect():
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


COUNTS = (
    "rooms_queue_depth",
    "rooms_queue_claimed",
    "rooms_outbox_rows",
    "rooms_outbox_abandoned",
    "rooms_held",
    "rooms_sidelined",
    "rooms_sideline_unloaded",
    "rooms_circuits_open",
    "rooms_ordered_keys",
    "rooms_parked_keys",
    "rooms_leased",
)


@pytest.mark.parametrize("bound", [BOUND, ROWS + 1])
async def test_a_figure_stops_at_its_bound(
    installation: Installation, engine: AsyncEngine, bound: int
) -> None:
    """One organisation may have any number of ordering keys, leases, and so on."""
    await fill(installation)
    gauges = CachedStats(engine, lambda: 0.0, max_read=bound, max_counted=bound)
    found = figures(await gauges.counts())
    assert {name: found[name] for name in COUNTS} == dict.fromkeys(COUNTS, min(bound, ROWS))


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
async def test_the_oldest_row_counts_though_it_is_beyond_the_bound(
    installation: Installation, engine: AsyncEngine, kind: int
) -> None:
    """Rows that one organisation scheduled must not hide that nothing leaves."""
    await fill(installation)
    await installation.rows(
        "UPDATE outbox SET kind = %s, due_at = now() + interval '1 h' WHERE id <> (SELECT max(id::text)::uuid FROM outbox)",
        kind,
    )
    await installation.rows(
        "UPDATE outbox SET kind = %s, due_at = now() - interval '1000 s' WHERE due_at < now()", kind
    )
    gauges = CachedStats(engine, lambda: 0.0, max_read=BOUND, max_counted=BOUND)
    found = figures(await gauges.counts())
    assert 1000 <= found["rooms_outbox_age_seconds"] < 1100
    assert 1000 <= found["rooms_queue_oldest_seconds"] < 1100


async def test_a_refused_statement_only_leaves_out_its_own_figures(
    installation: Installation,
    engine: AsyncEngine,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A statement that waits for a lock is stopped like one that reads for too long."""
    await fill(installation)
    monkeypatch.setattr(stats, "_TIMEOUT_MS", 100)
    monkeypatch.setattr(
        stats, "_SETTINGS", text("SELECT set_config('statement_timeout', '100', true)")
    )
    now_s = 0.0
    gauges = CachedStats(engine, lambda: now_s)
    async with await connect(database, name="a test") as other, other.transaction():
        await other.execute("LOCK TABLE ordered_keys, held IN ACCESS EXCLUSIVE MODE")
        async with asyncio.timeout(20):
            counts = await gauges.counts()
    found = figures(counts)
    left_out = {"rooms_ordered_keys", "rooms_parked_keys", "rooms_held"}
    assert found["rooms_database_up"] == 1
    assert {name: found.get(name) for name in COUNTS} == {
        name: None if name in left_out else ROWS for name in COUNTS
    }
    assert {name for name, is_refused in counts.refused.items() if is_refused} == {
        "held",
        "ordering_keys",
    }
    assert (counts.held, counts.sidelined) == (None, {"nacked": ROWS})
    assert OUTAGES.any_failing
    now_s += CACHE_S
    assert left_out.isdisjoint(figures(await gauges.counts())), "it is not repeated each time"
    now_s += 60.0
    assert left_out <= set(figures(await gauges.counts()))
    assert not OUTAGES.any_failing


async def test_figures_of_a_refused_count_are_those_of_before_for_some_minutes(
    installation: Installation,
    engine: AsyncEngine,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else an alert on what is missing would fire, and one on what is there would begin anew."""
    await fill(installation)
    monkeypatch.setattr(
        stats, "_SETTINGS", text("SELECT set_config('statement_timeout', '100', true)")
    )
    now_s = 0.0
    gauges = CachedStats(engine, lambda: now_s)
    async with LogWriter(database, kind="worker") as writer:
        await writer.run("SELECT 0, 1", {})
        before = figures(await gauges.counts())
    assert before["rooms_processes_alive"] == 1
    assert before["rooms_counts_refused"] == 0
    async with await connect(database, name="a test") as other, other.transaction():
        await other.execute("LOCK TABLE outbox, writers IN ACCESS EXCLUSIVE MODE")
        for later_s in (CACHE_S, 2 * CACHE_S, 200.0):
            now_s = later_s
            counts = await gauges.counts()
            found = figures(counts)
            assert found.pop("rooms_counts_refused") >= 2
            assert counts.refused["outbox"] == counts.refused["processes"] == 1
            assert found == {name: found[name] for name in before if name in found}
            for name in ("rooms_queue_depth", "rooms_processes_alive", "rooms_outbox_rows"):
                assert found[name] == before[name], name
        now_s = 301.0
        found = figures(await gauges.counts())
        assert "rooms_queue_depth" not in found
        assert found["rooms_held"] == ROWS


async def test_a_bound_leaves_out_the_same_rows_each_time(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL may begin a scan of a large table where the last one ended."""
    setting = text(
        "SELECT count(*) FROM pg_settings WHERE name = 'synchronize_seqscans' AND setting = 'off'"
    )
    count = replace(stats._LEASED_COUNT, statement=setting)
    monkeypatch.setattr(stats, "_LEASED_COUNT", count)
    monkeypatch.setattr(stats, "_COUNTS", (count,))
    assert (await CachedStats(engine, lambda: 0.0).counts()).leased == 1


async def test_a_count_ends_in_time_however_many_statements_are_slow(
    engine: AsyncEngine, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = text("SELECT pg_sleep(0.2), 1")
    counts = tuple(
        replace(stats._LEASED_COUNT, name=str(number), statement=slow) for number in range(9)
    )
    monkeypatch.setattr(stats, "_COUNTS", counts)
    monkeypatch.setattr(stats, "_ALL_S", 0.5)
    found = await CachedStats(engine, time.monotonic).counts()
    assert list(found.refused.values()) == [0] * 3 + [1] * 6


async def test_without_a_free_connection_the_database_counts_as_away_after_a_while(
    database: str,
) -> None:
    engine = create_async_engine(
        DRIVER,
        connect_args=connect_arguments(database, name="rooms metrics"),
        pool_size=1,
        max_overflow=0,
        pool_timeout=0.1,
    )
    now_s = 0.0
    gauges = CachedStats(engine, lambda: now_s)
    try:
        before = figures(await gauges.counts())
        async with engine.connect():
            now_s = 29.0
            found = figures(await gauges.counts())
            assert found.pop("rooms_counts_refused") == len(stats._COUNTS)
            assert found == {name: before[name] for name in found}
            assert found["rooms_database_up"] == 1
            now_s = 40.0
            assert figures(await gauges.counts()) == {"rooms_database_up": 0}
    finally:
        await engine.dispose()
