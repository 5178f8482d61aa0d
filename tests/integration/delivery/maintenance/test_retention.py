"""Check retention on a database: what is deleted, what stays, what runs against it, and that no statement waits for it."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest import mock

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from delivery.analytics.export.exporter import Exporter
from delivery.maintenance import retention as duty
from delivery.maintenance.retention import Disposition, RetentionRules, RetentionTask, preview
from rooms.app.maintenance import export_tasks, retention_tasks
from rooms.db.connection import Connection, open_connection
from rooms.db.jobs.delete import START, DeleteQueries
from rooms.db.queries.deliveries import redeliver
from rooms.db.queue.orphans import create_orphan_rows
from rooms.db.retention import replace as storage
from rooms.db.retention.bounded_locks import prepare_session
from rooms.db.retention.cleanup import clean_default_partitions
from rooms.db.retention.partitions import list_partition_sets, ranges_to_replace
from rooms.db.retention.replace import PartitionReplacement, drop_unfinished
from rooms.db.writer import LogWriter
from rooms.domain.ids import JobId
from rooms.domain.state_machine import UNFINISHED, State, SubscriptionType
from rooms.errors import NotFoundError, StorageRefusedError, StorageUnavailableError
from rooms.metrics import Metrics
from rooms.settings import read_settings
from tests.support.exported_log import sealed, written
from tests.support.installation import Installation, installed, until
from tests.support.old_messages import (
    DAY,
    GONE,
    NOW,
    PAYLOAD,
    At,
    Old,
    found,
    left_over,
    log,
    make_days,
    partitions,
    whole,
    write,
)

RULES: Final = RetentionRules(days=30, pauses_s=(), settle_timeout_s=60.0)
BEFORE: Final = NOW - timedelta(days=30)
PATIENT: Final = 60_000
KEPT: Final = UNFINISHED | {State.SIDELINED}


def always() -> bool:
    return True


@pytest.fixture
async def installation(database: str) -> AsyncIterator[Installation]:
    make_days(database, DAY)
    async with installed(database) as installation:
        yield installation


@pytest.fixture
async def writer(database: str) -> AsyncIterator[LogWriter]:
    async with LogWriter(database, kind="test") as writer:
        yield writer


async def retain(
    installation: Installation,
    rules: RetentionRules = RULES,
    *,
    now: datetime = NOW,
    metrics: Metrics | None = None,
) -> None:
    await RetentionTask(installation.url, rules, At(now), metrics or Metrics()).run(always)


def gauge(metrics: Metrics, name: str) -> float:
    (line,) = [
        line for line in metrics.render().decode().splitlines() if line.startswith(name + " ")
    ]
    return float(line.split()[-1])


@asynccontextmanager
async def replacing(
    installation: Installation,
    *,
    patience_ms: int = PATIENT,
    held_ms: int = PATIENT,
    exported: int | None = None,
) -> AsyncIterator[tuple[Connection, PartitionReplacement]]:
    """The replacement of the one day that is over, to be done step by step."""
    before = NOW - timedelta(days=30)
    async with open_connection(installation.url, name="rooms retention") as connection:
        assert await prepare_session(connection, lock_timeout_ms=patience_ms)
        (span,) = ranges_to_replace(
            await list_partition_sets(connection), int(before.timestamp() * 1000)
        )
        yield (
            connection,
            PartitionReplacement(
                connection, span, before=before, exported=exported, lock_ms=held_ms
            ),
        )


# --- what goes and what stays -------------------------------------------------------------------------------------


async def test_what_has_ended_goes_and_everything_else_stays(installation: Installation) -> None:
    """With its message, its payload, its work and its journey, in a partition of its own."""
    subscription = await installation.subscribe()
    kept = [await write(installation, subscription, state) for state in sorted(KEPT)]
    gone = [
        await write(installation, subscription, state) for state in sorted(set(State) - KEPT) * 2
    ]
    metrics = Metrics()
    await retain(installation, metrics=metrics)
    assert [await found(installation, old) for old in kept] == [
        whole(state) for state in sorted(KEPT)
    ]
    assert [await found(installation, old) for old in gone] == [GONE] * len(gone)
    for table in ("messages", "deliveries", "log_entries"):
        assert await partitions(installation, table) == [f"{table}_20200310_kept1"]
    assert await left_over(installation) == []
    work = "SELECT (SELECT count(*) FROM outbox) + (SELECT count(*) FROM held) + (SELECT count(*) FROM leases)"
    assert await installation.value(work) == len(UNFINISHED)
    assert await installation.value("SELECT count(*) FROM sidelined") == 1
    assert gauge(metrics, "rooms_retention_kept") == len(kept)
    assert gauge(metrics, "rooms_retention_remains") == 1
    assert gauge(metrics, "rooms_retention_success_timestamp_seconds") == NOW.timestamp()


async def test_a_day_of_which_nothing_stays_is_dropped(installation: Installation) -> None:
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.DELIVERED)
    await retain(installation)
    assert await found(installation, old) == GONE
    assert await partitions(installation) == []
    assert await left_over(installation) == []
    await log(installation, old, 9, "late")  # whatever still comes about it has a place
    assert (await found(installation, old))["log"] == ["late"]


@pytest.mark.parametrize(("days_ago", "there"), [(29, True), (30, True), (31, False)])
async def test_a_day_goes_once_all_of_it_is_old_enough(
    installation: Installation, days_ago: int, *, there: bool
) -> None:
    """Now is midnight: the day that began 30 days ago is not over by so much, the one that ended then is."""
    born = NOW - timedelta(days=days_ago) + timedelta(hours=23)
    make_days(installation.url, born)
    old = await write(installation, await installation.subscribe(), State.DELIVERED, born=born)
    await retain(installation)
    assert (await found(installation, old) != GONE) is there


async def test_what_ended_lately_stays_so_long(installation: Installation) -> None:
    """A delivery that was retried for weeks can be looked at as long as any other, and then goes."""
    subscription = await installation.subscribe()
    late = await write(
        installation, subscription, State.DELIVERED, changed=NOW - timedelta(days=29)
    )
    early = await write(installation, subscription, State.DELIVERED)
    await retain(installation)
    assert await found(installation, late) == whole(State.DELIVERED)
    assert await found(installation, early) == GONE
    await retain(installation, now=NOW + timedelta(days=2))
    assert await found(installation, late) == GONE
    assert await partitions(installation) == []


async def test_a_day_most_of_which_would_stay_is_left_as_it_is(installation: Installation) -> None:
    """To copy it would cost more than it frees."""
    subscription = await installation.subscribe()
    kept = [await write(installation, subscription, State.SIDELINED) for _ in range(3)]
    ended = await write(installation, subscription, State.DELIVERED)
    await retain(installation)
    assert await partitions(installation) == ["deliveries_20200310"]
    assert await found(installation, ended) == whole(State.DELIVERED)
    for old in kept[:2]:
        await installation.rows(
            "UPDATE deliveries SET state = 'purged', updated_at = %s WHERE id = %s",
            DAY,
            old.delivery,
        )
    await retain(installation)
    assert await partitions(installation) == ["deliveries_20200310_kept1"]
    assert await found(installation, kept[2]) == whole(State.SIDELINED)


async def test_one_delivery_keeps_its_message_and_not_what_else_had_it(
    installation: Installation,
) -> None:
    """A message with two deliveries of which one is unfinished: its whole journey stays."""
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.QUEUED)
    other = installation.ids.generate(installation.room, int(DAY.timestamp() * 1000))
    await installation.rows(
        "INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, updated_at)"
        " VALUES (%s, %s, %s, %s, 'delivered', %s)",
        old.room, other, old.message, subscription, DAY,
    )  # fmt: skip
    await retain(installation)
    assert await found(installation, old) == whole(State.QUEUED)
    assert (
        await installation.value(
            "SELECT count(*) FROM deliveries WHERE message_id = %s", old.message
        )
        == 1
    )


async def test_ids_of_publishers_are_free_when_their_message_is_gone(
    installation: Installation,
) -> None:
    subscription = await installation.subscribe()
    await write(installation, subscription, State.DELIVERED, caller_id="gone")
    await write(installation, subscription, State.HELD, caller_id="kept")
    await retain(installation)
    assert [
        row["caller_id"] for row in await installation.rows("SELECT caller_id FROM message_ids")
    ] == ["kept"]


async def test_remains_of_a_month_and_of_a_year_become_one(installation: Installation) -> None:
    """However long an installation lives, its statements have few partitions to look at."""
    subscription = await installation.subscribe()
    days = [
        datetime(2020, 3, 11, tzinfo=UTC),
        datetime(2020, 3, 31, 23, 59, tzinfo=UTC),
        datetime(2020, 2, 29, tzinfo=UTC),
    ]
    make_days(installation.url, *days)
    kept = [
        await write(installation, subscription, State.SIDELINED, born=born) for born in (DAY, *days)
    ]
    gone = [
        await write(installation, subscription, State.DELIVERED, born=born) for born in (DAY, *days)
    ]
    await retain(installation)
    assert await partitions(installation) == [
        "deliveries_20200229_kept1",
        "deliveries_202003_kept1",
    ]
    make_days(installation.url, datetime(2020, 4, 30, tzinfo=UTC))
    await retain(installation, now=datetime(2021, 2, 1, tzinfo=UTC))
    for table in ("messages", "deliveries", "log_entries"):
        assert await partitions(installation, table) == [f"{table}_2020_kept1"]
    assert [await found(installation, old) for old in kept] == [whole(State.SIDELINED)] * len(kept)
    assert [await found(installation, old) for old in gone] == [GONE] * len(gone)
    assert await left_over(installation) == []


async def test_kept_sets_with_default_rows_between_them_are_not_merged(
    installation: Installation,
) -> None:
    """A row of a dropped day is in the default partition, over which no other partition can be made."""
    subscription = await installation.subscribe()
    other = datetime(2020, 3, 20, tzinfo=UTC)
    make_days(installation.url, other)
    kept = [
        await write(installation, subscription, State.SIDELINED, born=born) for born in (DAY, other)
    ]
    stray = await write(
        installation, subscription, State.SIDELINED, born=datetime(2020, 3, 15, tzinfo=UTC)
    )
    for born in (DAY, other):
        await write(installation, subscription, State.DELIVERED, born=born)
    await retain(installation)
    assert await partitions(installation) == [
        "deliveries_20200310_kept1",
        "deliveries_20200320_kept1",
    ]
    assert [await found(installation, old) for old in (*kept, stray)] == [
        whole(State.SIDELINED)
    ] * 3


async def test_rows_without_a_day_are_deleted_too(installation: Installation) -> None:
    subscription = await installation.subscribe()
    born = datetime(2019, 1, 5, tzinfo=UTC)
    kept = await write(installation, subscription, State.QUEUED, born=born, caller_id="kept")
    gone = await write(installation, subscription, State.DELIVERED, born=born, caller_id="gone")
    lonely = await write(installation, subscription, State.CANCELLED, born=born)
    await installation.rows("DELETE FROM messages WHERE id = %s", lonely.message)
    young = await write(installation, subscription, State.DELIVERED, born=NOW)
    await retain(installation)
    assert await found(installation, kept) == whole(State.QUEUED)
    assert await found(installation, young) == whole(State.DELIVERED)
    assert [await found(installation, old) for old in (gone, lonely)] == [GONE] * 2
    assert [
        row["caller_id"] for row in await installation.rows("SELECT caller_id FROM message_ids")
    ] == ["kept"]


async def test_finished_jobs_and_records_of_exports_go(installation: Installation) -> None:
    """The totals of all exports are still known."""
    for number, finished in enumerate((DAY, NOW, None)):
        await installation.rows(
            "INSERT INTO jobs (id, organisation_id, kind, finished_at, created_at) VALUES (%s, %s, 'restore', %s, %s)",
            JobId(installation.ids.generate_global(number)), installation.organisation, finished, DAY,
        )  # fmt: skip
    for first, at in ((1, DAY), (5, DAY), (9, DAY), (13, NOW), (17, None)):
        await installation.rows(
            "INSERT INTO log_exports (destination, system, first_xid, end_xid, sealed_at, rows, bytes, files)"
            " VALUES ('here', 'this', %s, %s, %s, 10, 100, 1)",
            first, first + 4, at,
        )  # fmt: skip
    # Destinations that nothing was exported to since, or only once more without any new rows.
    for destination, at, seen_at in (
        ("unused", DAY, DAY),
        ("quiet", DAY, NOW),
        ("new", None, None),
    ):
        await installation.rows(
            "INSERT INTO log_exports (destination, system, first_xid, end_xid, sealed_at, seen_at, rows, bytes, files)"
            " VALUES (%s, 'this', 1, 2, %s, %s, 0, 0, 0)",
            destination, at, seen_at,
        )  # fmt: skip
    for destination in ("here", "unused", "quiet", "new"):
        await installation.rows(
            "INSERT INTO log_export_writers (destination, system, writer_id, rows, last_seq) VALUES (%s, 'this', 1, 1, 1)",
            destination,
        )
    await retain(installation)
    writers = await installation.rows("SELECT destination FROM log_export_writers ORDER BY 1")
    assert [row["destination"] for row in writers] == ["here", "new", "quiet"]
    await installation.rows("DELETE FROM log_exports WHERE destination <> 'here'")
    assert await installation.value("SELECT count(*) FROM jobs") == 2
    exports = await installation.rows(
        "SELECT first_xid, end_xid, rows::int, bytes::int, files FROM log_exports ORDER BY id"
    )
    assert [tuple(row.values()) for row in exports] == [
        (9, 13, 30, 300, 3),
        (13, 17, 10, 100, 1),
        (17, 21, 10, 100, 1),
    ]


async def test_a_copy_of_what_is_gone_does_not_come_back_as_an_orphan(
    installation: Installation, writer: LogWriter
) -> None:
    """Somewhere in a broker lay a copy of a delivery that had ended.

    One of a day that is there is rescued all the same.
    """
    subscription = await installation.subscribe()
    gone = await write(installation, subscription, State.CANCELLED)
    (copy,) = await installation.publish(subscription)
    await retain(installation)
    old = replace(copy, delivery_id=gone.delivery, message_id=gone.message)
    assert await create_orphan_rows(writer, [old]) == (0, 1)
    assert await found(installation, gone) == GONE
    await installation.rows("DELETE FROM deliveries WHERE id = %s", copy.delivery_id)
    assert await create_orphan_rows(writer, [copy]) == (1, 0)


async def test_a_clock_that_is_far_ahead_takes_nothing(installation: Installation) -> None:
    """Messages are as old as PostgreSQL's clock says, because their ids contain the time."""
    (copy,) = await installation.publish(await installation.subscribe(), state=State.DELIVERED)
    days = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'deliveries'::regclass"
    before = await installation.value(days)
    await retain(installation, now=datetime.now(UTC) + timedelta(days=90))
    assert await installation.state(copy) is State.DELIVERED
    assert await installation.value(days) == before - 1  # the day of 2020 is over on any clock
    assert await installation.value(
        "SELECT at FROM upkeep_marks WHERE name = 'retention'"
    ) < DAY + timedelta(days=1)


# --- the export ---------------------------------------------------------------------------------------------------


async def seal(installation: Installation, destination: str, end: int | None = None) -> None:
    """As if everything so far, or below `end`, had been exported."""
    await installation.rows(
        "INSERT INTO log_exports (destination, system, first_xid, end_xid, sealed_at, rows)"
        " SELECT %s, system_identifier::text, 1, coalesce(%s, pg_current_xact_id()::text::int8), now(), 1 FROM pg_control_system()",
        destination, end,
    )  # fmt: skip


async def test_a_day_waits_until_all_of_its_log_has_left(installation: Installation) -> None:
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.DELIVERED)
    await seal(installation, "elsewhere")
    await seal(installation, "here", end=2)
    rules, metrics = replace(RULES, destination="here"), Metrics()
    await retain(installation, rules, metrics=metrics)
    assert await found(installation, old) == whole(State.DELIVERED)
    assert gauge(metrics, 'rooms_retention_waiting{for="export"}') == 1
    assert (
        gauge(metrics, "rooms_retention_oldest_timestamp_seconds")
        == DAY.replace(hour=0).timestamp()
    )
    await installation.rows("DELETE FROM log_exports WHERE destination = 'here'")
    await seal(installation, "here")
    await retain(installation, rules, metrics=metrics)
    assert await found(installation, old) == GONE
    assert gauge(metrics, 'rooms_retention_waiting{for="export"}') == 0


async def test_what_the_export_has_sealed_may_go(
    installation: Installation, tmp_path: Path
) -> None:
    """With the real export: every row of the day is in a segment when the day is dropped."""
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.DELIVERED)
    logged = written(installation.url)
    exporter = Exporter(installation.url, str(tmp_path))
    rules = replace(RULES, destination=exporter.destination.name)
    await retain(installation, rules)
    assert await found(installation, old) == whole(State.DELIVERED)

    async def all_left() -> bool:
        await asyncio.to_thread(exporter.run)
        return sealed(tmp_path) == logged

    await until(all_left, "the log to leave")
    await retain(installation, rules)
    assert await found(installation, old) == GONE
    assert logged.total() == 3


async def test_a_restored_log_may_go_once_it_has_left(
    installation: Installation, tmp_path: Path
) -> None:
    """Its rows have transactions that this server begins in years. Those that it writes wait as ever."""
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.DELIVERED)
    born = datetime(2019, 1, 5, tzinfo=UTC)
    stray = await write(installation, subscription, State.DELIVERED, born=born)
    alone = await write(installation, subscription, State.CANCELLED, born=born)
    await installation.rows("DELETE FROM messages WHERE id = %s", alone.message)
    await installation.rows(
        "UPDATE log_entries SET xid = (xid::text::int8 + (1::int8 << 40))::text::xid8"
    )
    exporter = Exporter(installation.url, str(tmp_path))
    rules = replace(RULES, destination=exporter.destination.name)
    await retain(installation, rules)
    assert [await found(installation, one) for one in (old, stray)] == [whole(State.DELIVERED)] * 2
    assert (await found(installation, alone))["log"] != []
    await asyncio.to_thread(exporter.run)
    for one in (old, stray, alone):
        await log(installation, one, 9, "late")
    await retain(installation, rules)
    for one in (old, stray, alone):
        assert "late" in (await found(installation, one))["log"]
    await installation.rows("DELETE FROM log_entries WHERE kind = 'late'")
    previewed = await preview(installation.url, days=30, destination=exporter.destination.name)
    assert [one.fate for one in previewed] == [Disposition.DROP]
    await retain(installation, rules)
    assert [await found(installation, one) for one in (old, stray, alone)] == [GONE] * 3


@pytest.mark.parametrize(("export_s", "waits_for"), [("0", None), ("20", "local:{}/segments")])
def test_the_process_keeps_what_its_settings_say(
    tmp_path: Path, export_s: str, waits_for: str | None
) -> None:
    """Without an export nothing waits for it; with 0 days retention does not run."""
    environment = {"ROOMS_ANALYSIS_URL": str(tmp_path), "ROOMS_EXPORT_S": export_s}
    url, clock, metrics = "postgresql://nowhere/rooms", At(), Metrics()
    _, destination = export_tasks(read_settings(environment), url, metrics)
    assert destination == (waits_for and waits_for.format(tmp_path))
    for days, names in (("0", []), ("7", ["upkeep/retention"])):
        settings = read_settings({**environment, "ROOMS_RETENTION_DAYS": days})
        chores = retention_tasks(settings, url, destination, clock, metrics)
        assert [chore.partition for chore in chores] == names


async def test_what_is_logged_meanwhile_stays_until_it_has_left(installation: Installation) -> None:
    """A row about a message that goes, written between the look and the swap."""
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.DELIVERED)
    exported = int(await installation.value("SELECT pg_current_xact_id()::text::int8"))
    async with replacing(installation, exported=exported) as (_, replacement):
        assert await replacement.is_exported()
        await replacement.prepare()
        await log(installation, old, 9, "late")
        assert await replacement.copy(always)
        assert await replacement.is_exported()
        await until(replacement.has_no_older_snapshot, "older snapshots to go")
        assert await replacement.swap()
    assert await found(installation, old) == {"payload": [], "states": [], "log": ["late"]}
    await seal(installation, "here")
    await retain(installation, replace(RULES, destination="here"))
    assert await found(installation, old) == GONE
    assert await partitions(installation) == []


# --- what crosses it ----------------------------------------------------------------------------------------------


async def stays_of(installation: Installation, old: Old) -> dict[str, Any]:
    reported = await found(installation, old)
    return {**reported, "log": sorted(reported["log"])}


def once_more(state: State, kind: str) -> dict[str, Any]:
    return {**whole(state), "states": ["queued"], "log": sorted([*whole(state)["log"], kind])}


@pytest.mark.parametrize("copied", [False, True], ids=["before the copy", "after the copy"])
async def test_what_changes_before_the_swap_is_as_it_became(
    installation: Installation, writer: LogWriter, *, copied: bool
) -> None:
    """A shoveled delivery, one that was over and is restored, one that ends."""
    subscription = await installation.subscribe()
    sidelined = await write(installation, subscription, State.SIDELINED)
    expired = await write(installation, subscription, State.EXPIRED)
    queued = await write(installation, subscription, State.QUEUED)
    async with replacing(installation) as (_, replacement):
        await replacement.prepare()
        if copied:
            assert await replacement.copy(always)
        for old in (sidelined, expired):
            assert (
                await redeliver(writer, installation.organisation, old.delivery)
            ).after is State.QUEUED
        await installation.rows(
            "UPDATE deliveries SET state = 'delivered' WHERE id = %s", queued.delivery
        )
        if not copied:
            assert await replacement.copy(always)
        await until(replacement.has_no_older_snapshot, "older snapshots to go")
        assert await replacement.swap()
    assert await stays_of(installation, sidelined) == once_more(State.SIDELINED, "shoveled")
    assert await stays_of(installation, expired) == once_more(State.EXPIRED, "restored")
    assert (await found(installation, queued))["states"] in ([], ["delivered"])
    assert (
        await installation.value(
            "SELECT generation FROM deliveries WHERE id = %s", expired.delivery
        )
        == 1
    )


async def test_what_waits_for_the_swap_finds_what_stays(
    installation: Installation, writer: LogWriter
) -> None:
    """A shovel's statement took its snapshot before the swap is committed, and goes on behind it."""
    subscription = await installation.subscribe()
    sidelined = await write(installation, subscription, State.SIDELINED)
    touched = await write(installation, subscription, State.SIDELINED)
    expired = await write(installation, subscription, State.EXPIRED)
    await installation.rows("INSERT INTO upkeep_marks (name, at) VALUES ('retention', %s)", DAY)
    warm = await write(installation, subscription, State.SIDELINED)
    for _ in range(2):  # the statement's plan is kept, with the partitions that are there
        await redeliver(writer, installation.organisation, warm.delivery)
    async with (
        LogWriter(installation.url, kind="other") as other,
        replacing(installation) as (_, replacement),
    ):
        await replacement.prepare()
        assert await replacement.copy(always)
        # Changed after the copy, so that only the mirror knows it.
        await redeliver(writer, installation.organisation, touched.delivery)
        await installation.rows(
            "WITH gone AS (DELETE FROM outbox WHERE id = %s) UPDATE deliveries SET state = 'sidelined', generation = 5 WHERE id = %s",
            touched.delivery, touched.delivery,
        )  # fmt: skip
        await until(replacement.has_no_older_snapshot, "older snapshots to go")
        async with (
            open_connection(installation.url, name="obstacle") as obstacle,
            asyncio.TaskGroup() as group,
            obstacle.transaction(),
        ):
            await obstacle.execute("UPDATE upkeep_marks SET at = at WHERE name = 'retention'")
            swap = group.create_task(replacement.swap())
            await waiting(installation, "rooms retention")
            moves = [
                group.create_task(redeliver(to, installation.organisation, old.delivery))
                for to, old in ((writer, sidelined), (other, touched))
            ]
            late = group.create_task(lost(installation, expired))
            for name in ("rooms test", "rooms other", "rooms late"):
                await waiting(installation, name)
            assert not swap.done()
        assert swap.result()
        assert [move.result().after for move in moves] == [State.QUEUED] * 2
        assert late.result()
    assert await stays_of(installation, sidelined) == once_more(State.SIDELINED, "shoveled")
    assert (
        await installation.value(
            "SELECT generation FROM deliveries WHERE id = %s", touched.delivery
        )
        == 6
    )
    assert await found(installation, expired) == GONE
    assert (
        await installation.value("SELECT count(*) FROM outbox WHERE id = %s", sidelined.delivery)
        == 1
    )


async def waiting(installation: Installation, name: str) -> None:
    async def is_waiting() -> bool:
        return bool(
            await installation.value(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()"
                " AND wait_event_type = 'Lock'",
                name,
            )
        )

    await until(is_waiting, f"{name} to wait for a lock")


async def lost(installation: Installation, old: Old) -> bool:
    """Return whether there is nothing to redeliver."""
    async with LogWriter(installation.url, kind="late") as late:
        try:
            await redeliver(late, installation.organisation, old.delivery)
        except NotFoundError:
            return True
    return False


_REST: Final = """
WITH o AS (DELETE FROM outbox WHERE room_id = %(room)s::int4 AND id = %(id)s::uuid), d AS (
    UPDATE deliveries SET state = 'sidelined', updated_at = now() WHERE room_id = %(room)s::int4 AND id = %(id)s::uuid RETURNING 1
) SELECT 0, count(*) FROM d
"""


async def test_what_moves_all_the_time_keeps_every_move(installation: Installation) -> None:
    """Deliveries change state while one retention run after another replaces their day.

    In a deadlock it is retention that gives up: PostgreSQL's own detection takes a minute here, and
    might end the other one.
    """
    await installation.rows(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout TO 60000', current_database()); END $$"
    )
    subscription = await installation.subscribe()
    moving = [await write(installation, subscription, State.SIDELINED) for _ in range(8)]
    for _ in range(20):
        await write(installation, subscription, State.DELIVERED)
    swapped = asyncio.Event()
    moves: Counter[str] = Counter()

    async def move(mine: Sequence[Old]) -> None:
        async with LogWriter(installation.url, kind="mover") as mover:
            while not swapped.is_set() or any(moves[old.delivery] < 3 for old in mine):
                for old in mine:
                    assert (
                        await redeliver(mover, installation.organisation, old.delivery)
                    ).after is State.QUEUED
                    moves[old.delivery] += 1
                    assert await mover.run(_REST, {"room": old.room, "id": old.delivery}) == [(1,)]

    async def retention() -> None:
        while await partitions(installation) == ["deliveries_20200310"]:
            await retain(
                installation, replace(RULES, lock_timeout_ms=300, pauses_s=(0.1, 0.1, 0.1))
            )
        swapped.set()

    async with asyncio.TaskGroup() as group:
        for n in range(4):
            group.create_task(move(moving[n::4]))
        group.create_task(retention())
    assert await partitions(installation) == ["deliveries_20200310_kept1"]
    rows = await installation.rows("SELECT id::text, generation FROM deliveries")
    assert {row["id"]: row["generation"] for row in rows} == dict(moves)
    for old in moving:
        reported = await found(installation, old)
        assert reported["payload"] == [PAYLOAD]
        assert reported["log"].count("shoveled") == moves[old.delivery]


async def test_what_is_deleted_meanwhile_does_not_come_back(
    installation: Installation, writer: LogWriter
) -> None:
    """The deletion of a room goes on while its rows are copied."""
    subscription = await installation.subscribe(SubscriptionType.PULL)
    kept = [await write(installation, subscription, State.SIDELINED) for _ in range(3)]
    async with replacing(installation) as (_, replacement):
        await replacement.prepare()
        await installation.rows("DELETE FROM messages WHERE id = %s", kept[0].message)
        assert await replacement.copy(always)
        for table in ("deliveries", "log_entries", "messages"):
            await DeleteQueries(writer).delete(table, installation.room, START)
        await until(replacement.has_no_older_snapshot, "older snapshots to go")
        assert not await replacement.swap()
    assert [await found(installation, old) for old in kept] == [GONE] * 3


async def test_a_transaction_from_before_is_waited_for(installation: Installation) -> None:
    """A transaction with a snapshot without the copy does not get the copy."""
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.SIDELINED)
    await write(installation, subscription, State.DELIVERED)
    async with open_connection(installation.url, name="reader") as reader, reader.transaction():
        await reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        await reader.execute("SELECT count(*) FROM rooms")
        metrics = Metrics()
        await retain(installation, replace(RULES, settle_timeout_s=0.0), metrics=metrics)
        assert gauge(metrics, 'rooms_retention_waiting{for="busy"}') == 1
        assert await partitions(installation) == ["deliveries_20200310"]
        assert await left_over(installation) == []
        cursor = await reader.execute("SELECT state FROM deliveries WHERE id = %s", (old.delivery,))
        assert await cursor.fetchall() == [("sidelined",)]
    await retain(installation)
    assert await found(installation, old) == whole(State.SIDELINED)
    assert await partitions(installation) == ["deliveries_20200310_kept1"]


# --- no statement waits for it ---


async def test_publishing_goes_on_while_the_locks_are_not_granted(
    installation: Installation,
) -> None:
    """A long query is in the way: retention gives up after its lock time-out, and no statement waits longer behind it."""
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.DELIVERED)
    async with open_connection(installation.url, name="reader") as reader, reader.transaction():
        await reader.execute("LOCK TABLE deliveries IN ACCESS SHARE MODE")
        trying = asyncio.create_task(retain(installation, replace(RULES, lock_timeout_ms=50)))
        while not trying.done():
            await installation.publish(
                subscription
            )  # it would never end behind a lock that waits for the reader
        await trying
        assert await found(installation, old) == whole(State.DELIVERED)
    await retain(installation)
    assert await found(installation, old) == GONE
    assert await left_over(installation) == []


async def test_no_lock_is_held_between_the_steps(installation: Installation) -> None:
    """While it copies and waits, retention holds no lock that another transaction could wait for."""
    subscription = await installation.subscribe()
    await write(installation, subscription, State.SIDELINED)
    held = (
        "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE a.application_name = 'rooms retention'"
        " AND l.locktype <> 'advisory'"
    )
    async with replacing(installation, patience_ms=100) as (connection, replacement):
        await replacement.prepare()
        assert await installation.value(held) == 0
        assert await replacement.copy(always)
        assert await installation.value(held) == 0
        ((patience,),) = await (await connection.execute("SHOW lock_timeout")).fetchall()
        assert patience == "100ms"
        assert await replacement.swap()
        assert await installation.value(held) == 0


async def test_a_swap_suspended_in_the_middle_blocks_nothing_for_long(
    installation: Installation,
) -> None:
    """PostgreSQL ends its session, and nothing has happened."""
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.DELIVERED)
    frozen, thawed = asyncio.Event(), asyncio.Event()
    async with replacing(installation, held_ms=1000) as (connection, replacement):
        execute = connection.execute

        async def freezing(statement: Any, *values: Any) -> Any:
            if "DETACH" in statement:
                frozen.set()
                await thawed.wait()
            return await execute(statement, *values)

        await replacement.prepare()
        assert await replacement.copy(always)
        with mock.patch.object(connection, "execute", freezing):
            swap = asyncio.create_task(replacement.swap())
            await asyncio.wait(
                [swap, asyncio.create_task(frozen.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            assert not swap.done()
            await installation.publish(
                subscription
            )  # waits until the frozen session has been ended
            assert not swap.done()
            thawed.set()
            with pytest.raises(psycopg.Error):
                await swap
    assert await found(installation, old) == whole(State.DELIVERED)
    await installation.gone("rooms retention")
    await retain(installation)
    assert await found(installation, old) == GONE


async def lose_session(installation: Installation, connection: Connection) -> None:
    """Suspend a transaction until the server has ended its session, and go on."""
    await connection.execute("SET idle_in_transaction_session_timeout = '20ms'")
    async with connection.transaction():
        await connection.execute("SELECT 1")
        await installation.gone(connection.info.get_parameters()["application_name"])
        await connection.execute("SELECT 1")


@pytest.mark.parametrize("step", ["prepare", "swap", "clean"])
async def test_a_session_that_the_server_ends_is_an_outage(
    installation: Installation,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process that was suspended tries again, and logs no error of its own."""
    old = await write(installation, await installation.subscribe(), State.DELIVERED)

    async def end(first: Any, *_: object, **__: object) -> None:
        await lose_session(installation, first._connection if step != "clean" else first)

    with monkeypatch.context() as patch:
        if step == "clean":
            patch.setattr(duty, "clean_default_partitions", end)
        else:
            patch.setattr(PartitionReplacement, step, end)
        with pytest.raises(StorageUnavailableError):
            await retain(installation)
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []
    await installation.gone("rooms retention")
    await retain(installation)
    assert await found(installation, old) == GONE


async def test_a_preview_whose_session_the_server_ends_meets_an_outage(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(installation, await installation.subscribe(), State.DELIVERED)

    async def end(connection: Connection, *_: object) -> None:
        await lose_session(installation, connection)

    monkeypatch.setattr(duty, "count_kept", end)
    with pytest.raises(StorageUnavailableError):
        await preview(installation.url, days=30, destination=None)


async def test_a_suspended_cleanup_of_default_partitions_blocks_nothing_for_long(
    installation: Installation, writer: LogWriter
) -> None:
    """Each of a worker's decisions locks every partition, so it would wait behind what is frozen there for ever."""
    subscription = await installation.subscribe()
    stray = await write(
        installation, subscription, State.DELIVERED, born=datetime(2019, 1, 5, tzinfo=UTC)
    )
    sidelined = await write(installation, subscription, State.SIDELINED)
    frozen, thawed = asyncio.Event(), asyncio.Event()
    async with open_connection(installation.url, name="rooms retention") as connection:
        assert await prepare_session(connection, lock_timeout_ms=PATIENT)
        execute = connection.execute

        async def freezing(statement: Any, *values: Any) -> Any:
            if "DELETE FROM messages_rest" in statement:
                frozen.set()
                await thawed.wait()
            return await execute(statement, *values)

        with mock.patch.object(connection, "execute", freezing):
            emptying = asyncio.create_task(
                clean_default_partitions(connection, BEFORE, None, always, lock_ms=1000)
            )
            await asyncio.wait(
                [emptying, asyncio.create_task(frozen.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            assert not emptying.done()
            async with asyncio.timeout(60):
                moved = await redeliver(writer, installation.organisation, sidelined.delivery)
            assert moved.after is State.QUEUED
            thawed.set()
            with pytest.raises(psycopg.Error):
                await emptying
    assert await found(installation, stray) == whole(State.DELIVERED)


async def test_default_partitions_are_scanned_without_a_lock(installation: Installation) -> None:
    """However much must stay there, no statement waits while it is read."""
    subscription = await installation.subscribe()
    born = datetime(2019, 1, 5, tzinfo=UTC)
    kept = [await write(installation, subscription, State.SIDELINED, born=born) for _ in range(3)]
    async with open_connection(installation.url, name="rooms retention") as connection:
        assert await prepare_session(connection)
        with mock.patch.object(connection, "execute", wraps=connection.execute) as execute:
            assert await clean_default_partitions(connection, BEFORE, None, always) == 0
        assert [
            call.args[0] for call in execute.call_args_list if call.args[0].startswith("LOCK")
        ] == []
    assert [await found(installation, old) for old in kept] == [whole(State.SIDELINED)] * len(kept)


async def test_a_day_that_would_be_put_beside_too_much_without_a_day_waits(
    installation: Installation,
) -> None:
    """PostgreSQL would read all of that while others wait.

    If nothing stays, nothing is attached.
    """
    subscription, other = await installation.subscribe(), datetime(2020, 3, 20, tzinfo=UTC)
    make_days(installation.url, other)
    kept = await write(installation, subscription, State.SIDELINED)
    ended, gone = [
        await write(installation, subscription, State.DELIVERED, born=born) for born in (DAY, other)
    ]
    await write(installation, subscription, State.SIDELINED, born=datetime(2019, 1, 5, tzinfo=UTC))
    metrics = Metrics()
    with mock.patch.object(storage, "MAX_DEFAULT_PARTITION_BYTES", 0):
        await retain(installation, metrics=metrics)
    assert gauge(metrics, 'rooms_retention_waiting{for="busy"}') == 1
    assert await partitions(installation) == ["deliveries_20200310"]
    assert [await found(installation, old) for old in (ended, gone)] == [
        whole(State.DELIVERED),
        GONE,
    ]
    assert await left_over(installation) == []
    await retain(installation)
    assert [await found(installation, old) for old in (kept, ended)] == [
        whole(State.SIDELINED),
        GONE,
    ]


async def test_a_swap_that_takes_too_long_is_taken_back(installation: Installation) -> None:
    """However many days it consists of, others wait for it."""
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.DELIVERED)
    async with replacing(installation, held_ms=1000) as (connection, replacement):
        execute, loop = connection.execute, asyncio.get_running_loop()

        async def slow(statement: Any, *values: Any) -> Any:
            try:
                return await execute(statement, *values)
            finally:
                if "DETACH" in statement:
                    late.start()

        late = mock.patch.object(loop, "time", lambda at=loop.time: at() + 10)
        await replacement.prepare()
        assert await replacement.copy(always)
        with mock.patch.object(connection, "execute", slow):
            try:
                with pytest.raises(StorageRefusedError):
                    await replacement.swap()
            finally:
                late.stop()
        assert await found(installation, old) == whole(State.DELIVERED)
        assert not await replacement.swap()
    assert await found(installation, old) == GONE


# --- crashes ------------------------------------------------------------------------------------------------------


_HAS_ENDED: Final = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"


@contextmanager
def dying_at(number: int, died: list[tuple[int, int]]) -> Iterator[None]:
    """Kill retention's connection right before its statement of this number, if there is one.

    `died` gets how many statements later to kill it next (in the middle of a transaction the exact
    place hardly matters), and the id of the session, which ends a moment later.
    """
    seen = iter(range(number))

    @asynccontextmanager
    async def mortal(url: str, *, name: str) -> AsyncIterator[Connection]:
        async with open_connection(url, name=name) as connection:
            execute = connection.execute

            async def counted(*args: Any, **kwargs: Any) -> Any:
                if next(seen, None) is None:
                    is_idle = connection.info.transaction_status is TransactionStatus.IDLE
                    died.append((1 if is_idle else 5, connection.info.backend_pid))
                    await connection.close()
                    raise psycopg.OperationalError("killed")
                return await execute(*args, **kwargs)

            with mock.patch.object(connection, "execute", counted):
                yield connection

    with mock.patch.object(duty, "open_connection", mortal):
        yield


async def test_a_kill_between_any_two_statements_loses_nothing(
    installation: Installation, writer: LogWriter
) -> None:
    """After each kill everything that must stay is there and can change state.

    The next run completes the replacement.
    """
    subscription = await installation.subscribe()
    kept = {
        state: await write(installation, subscription, state)
        for state in (State.QUEUED, State.SIDELINED)
    }
    gone = [
        await write(installation, subscription, State.DELIVERED, caller_id=f"gone {n}")
        for n in range(len(kept))
    ]
    kills = 0
    while True:
        died: list[tuple[int, int]] = []
        with dying_at(kills, died):
            try:
                await retain(installation)
            except StorageUnavailableError:
                assert died
        assert {state: await found(installation, old) for state, old in kept.items()} == {
            state: whole(state) for state in kept
        }
        if not died:
            break
        ((step, session),) = died
        kills += step
        # Until then it has the lock, and the next run would leave retention to it.
        await until(partial(installation.value, _HAS_ENDED, session), "the session's end")
    assert kills > 40
    assert [await found(installation, old) for old in gone] == [GONE] * len(gone)
    assert await installation.value("SELECT count(*) FROM message_ids") == 0
    assert await left_over(installation) == []
    moved = await redeliver(writer, installation.organisation, kept[State.SIDELINED].delivery)
    assert moved.after is State.QUEUED


async def test_remains_of_a_dead_process_change_nothing(
    installation: Installation, writer: LogWriter
) -> None:
    """Its mirrors go on without harm until the next one takes them away."""
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.SIDELINED)
    async with replacing(installation) as (_, replacement):
        await replacement.prepare()
    assert await left_over(installation) != []
    assert (await redeliver(writer, installation.organisation, old.delivery)).after is State.QUEUED
    await installation.rows(
        "ALTER TABLE deliveries ADD COLUMN newer text"
    )  # a migration comes before it
    await installation.rows(
        "UPDATE deliveries SET state = 'sidelined', newer = 'x' WHERE id = %s", old.delivery
    )
    await write(installation, subscription, State.DELIVERED)
    await retain(installation)
    assert (await found(installation, old))["states"] == ["sidelined"]
    assert (
        await installation.value("SELECT newer FROM deliveries WHERE id = %s", old.delivery) == "x"
    )
    assert await partitions(installation) == ["deliveries_20200310_kept1"]
    assert await left_over(installation) == []


async def test_two_at_once_do_not_meet(installation: Installation) -> None:
    """A member that lost its term without knowing finds the other at work."""
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.DELIVERED)
    async with replacing(installation) as (connection, replacement):
        await replacement.prepare()
        await retain(installation)
        assert await found(installation, old) == whole(State.DELIVERED)
        assert await left_over(installation) != []
        await drop_unfinished(connection)
    await retain(installation)
    assert await found(installation, old) == GONE


async def test_it_ends_when_it_is_not_its_turn_any_more(installation: Installation) -> None:
    subscription = await installation.subscribe()
    old = await write(installation, subscription, State.SIDELINED)
    await write(installation, subscription, State.DELIVERED)
    asked = 0
    for turns in range(1, 1000):
        left = iter(range(turns))

        def go_on(left: Iterator[int] = left) -> bool:
            return next(left, None) is not None

        await RetentionTask(installation.url, RULES, At(), Metrics()).run(go_on)
        assert await found(installation, old) == whole(State.SIDELINED)
        asked = turns
        if await partitions(installation) == ["deliveries_20200310_kept1"] and not await left_over(
            installation
        ):
            break
    assert 5 < asked < 100


# --- who clears what ----------------------------------------------------------------------------------------------

CLEARED: Final = {
    "messages": "retention, by days", "deliveries": "retention, by days", "log_entries": "retention, by days",
    "message_ids": "retention, with their message", "jobs": "retention", "log_exports": "retention: the old ones become one",
    "outbox": "the end of a delivery", "held": "the end of a delivery", "leases": "the end of a delivery",
    "sidelined": "the end of a delivery, and the audit", "ordered_keys": "the end of a key's last delivery",
    "sequences": "retention: idle keys", "ordered_waiting": "a delivery's turn, or its end", "idempotency_keys": "upkeep, after a day",
    "writers": "upkeep, after a week", "election_members": "the leader, with their lease",
    "magazine_entries": "the member that took the entry", "magazines": "the end of their queue or subscription",
    "magazine_pointers": "the end of their magazine", "analysis_runs": "the next run", "analysis_rows": "the next run",
    "log_export_writers": "the export, when they have ended; retention: unused destinations", "lanes": "small: a row a subscription at most",
    "shovel_schedules": "small: a row a subscription at most", "subscriptions": "small: the end of their room",
    "event_types": "small: the end of their room", "event_type_versions": "small: the end of their room",
    "organisations": "small", "api_keys": "small; sessions: upkeep, a day after their end", "rooms": "small", "queues": "small", "handler_queues": "small",
    "upkeep_marks": "small", "due_buckets": "small", "election_partitions": "small", "election_terms": "small",
    "grants": "small: revoked ones stay, for a replay", "subscription_history": "the end of their room, or of the subscriber",
    "journal": "journal retention", "journal_heads": "small: a row an organisation",
    "usage_hours": "usage retention", "usage_mark": "small: one row", "activity_minutes": "the count of usage",
    "quota_days": "upkeep, after two days", "quota_stored": "upkeep, when the limit is removed",
    "sign_in_links": "upkeep, a day after their end",
    "signing_keys": "small: 200 an organisation", "receipt_keys": "small: one a rotation",
    "operational_outbox": "upkeep, every second", "operational_overflow": "upkeep, every second",
    "operational_messages": "upkeep, when their message is completed", "operational_pace": "small: a row a room and kind",
    "processes": "the next process, an hour after their end", "write_probes": "small: one row", "alembic_version": "small",
}  # fmt: skip
"""Check that each table is kept from growing for ever."""


async def test_every_table_has_a_cleaner(installation: Installation) -> None:
    tables = await installation.rows(
        "SELECT c.relname::text AS name FROM pg_class c JOIN pg_namespace s ON s.oid = c.relnamespace AND s.nspname = 'public'"
        " WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition"
    )
    assert {row["name"] for row in tables} == set(CLEARED)
