"""Check that the whole log is exported, each row once, with late writers and wherever the export dies."""

import asyncio
import hashlib
import io
import logging
import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine

from delivery.analytics.export import segments
from delivery.analytics.export.exporter import Exporter, ExportReport, LogExportTask
from delivery.analytics.export.segments import InterruptedExportError
from delivery.analytics.sealing.check import check_segments
from delivery.analytics.sealing.contents import read_contents
from delivery.analytics.sealing.errors import ContentError
from delivery.analytics.sealing.files import LocalFiles
from delivery.analytics.sealing.layout import part_of
from delivery.analytics.sealing.manifest import WriterRange, parse_manifest
from delivery.analytics.sealing.seal import describe
from rooms.db.connection import psycopg_url
from rooms.db.queries.log_export import EXPORT_LOCK, ExportConnection, ExportRange
from rooms.db.retention.partitions import ensure_partitions
from rooms.errors import StorageUnavailableError
from rooms.metrics import Metrics
from tests.support.exported_log import (
    LogWriter,
    execute,
    files_of,
    long_ago,
    rows_of,
    sealed,
    writer,
    written,
)
from tests.support.installation import until
from tests.support.sqlalchemy_urls import sqlalchemy_url

PUBLISHER = ("publisher_id", "publisher_organisation_id", "application")
JOINED = {*PUBLISHER, "worker_version"}
"""Columns that are not of the log."""


class DiedError(Exception):
    """The process is gone."""


def test_the_export_equals_the_table(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path
) -> None:
    early = datetime(2026, 3, 1, 23, 59, 59, 999_999, tzinfo=UTC)
    scribe.write(9, at=early)
    scribe.write(9, at=early + timedelta(microseconds=1))
    scribe.write(9)
    scribe.commit()
    report = exporter.run()
    assert (report.rows, report.files, report.gaps) == (27, 3, {})
    names = [
        name
        for name in segments.SCHEMA.names
        if not name.endswith(("_hi", "_lo")) and name not in JOINED
    ]
    columns = ", ".join("xid::text::bigint AS xid" if name == "xid" else name for name in names)
    stored = execute(database, f"SELECT {columns} FROM delivery_log ORDER BY writer_seq")
    left = sorted(rows_of(out), key=lambda row: row["writer_seq"])
    plain = [
        tuple(str(row[name]) if isinstance(row[name], str) else row[name] for name in names)
        for row in left
    ]
    assert plain == [
        tuple(str(value) if isinstance(value, uuid.UUID) else value for value in row)
        for row in stored
    ]
    for row in left:
        for what in ("message", "delivery"):
            number = None if row[f"{what}_id"] is None else uuid.UUID(row[f"{what}_id"]).int
            halves = None if number is None else (number >> 64, number & (1 << 64) - 1)
            reported = row[f"{what}_hi"], row[f"{what}_lo"]
            assert halves == (
                None if reported == (None, None) else tuple(half % (1 << 64) for half in reported)
            )
    folders = {str(path.parent.relative_to(out)) for path in files_of(out)}
    assert {"dt=2026-03-01/hr=23", "dt=2026-03-02/hr=00"} < folders
    assert exporter.run().rows == 0


def test_a_publish_names_its_publisher(database: str, exporter: Exporter, out: Path) -> None:
    """The room's owner where no other organisation published it; nothing on other steps."""
    organisation, other, key = (str(uuid.uuid4()) for _ in range(3))
    execute(
        database,
        f"INSERT INTO organisations (id, name) VALUES ('{organisation}', 'owner'), ('{other}', 'other');"
        f"INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms, delivery_delay_multiplier, delivery_attempts)"
        f" VALUES (7, '{organisation}', 'r', 1, 1, 1)",
    )
    own, foreign, gone = (str(uuid.uuid4()) for _ in range(3))
    for message, publisher, application in (
        (own, "NULL", "NULL"),
        (foreign, f"'{other}'", "'app'"),
    ):
        execute(
            database,
            "INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, correlation_id, payload,"
            f" publisher_id, publisher_organisation_id, application) VALUES (7, '{message}', 't', 1, 4, 0, 'c', 'null',"
            f" '{key}', {publisher}, {application})",
        )
    for number, (message, kind) in enumerate(
        ((own, "published"), (foreign, "published"), (gone, "published"), (foreign, "expired")), 1
    ):
        execute(
            database,
            "INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, kind)"
            f" VALUES (7, '{message}', 1, {number}, '{kind}')",
        )
    assert exporter.run().rows == 4
    rows = sorted(rows_of(out), key=lambda row: row["writer_seq"])
    assert [tuple(row[name] for name in PUBLISHER) for row in rows] == [
        (key, organisation, None),
        (key, other, "app"),
        (None, None, None),
        (None, None, None),
    ]


def test_an_attempt_names_the_version_of_its_worker(
    database: str, exporter: Exporter, out: Path
) -> None:
    """Not a writer that the cleanup has deleted, nor one of a version that had no column for it."""
    execute(
        database,
        "INSERT INTO writers (id, kind, host, pid, version) OVERRIDING SYSTEM VALUE VALUES"
        " (1001, 'worker', 'a', 1, '0.2.0'), (1002, 'worker', 'b', 2, NULL)",
    )
    message, delivery, subscription = (str(uuid.uuid4()) for _ in range(3))
    for number, (kind, worker) in enumerate(
        (("attempted", 1001), ("attempted", 1002), ("attempted", 1003), ("retry_scheduled", None)),
        1,
    ):
        execute(
            database,
            "INSERT INTO log_entries (room_id, message_id, delivery_id, subscription_id, generation,"
            " attempt, worker, writer_id, writer_seq, kind)"
            f" VALUES (7, '{message}', '{delivery}', '{subscription}', 0, 0, {worker or 'NULL'},"
            f" 1001, {number}, '{kind}')",
        )
    assert exporter.run().rows == 4
    rows = sorted(rows_of(out), key=lambda row: row["writer_seq"])
    assert [row["worker_version"] for row in rows] == ["0.2.0", None, None, None]


def test_a_transaction_that_commits_late_is_exported_once(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path
) -> None:
    """An export by the highest number seen would lose this row."""
    with writer(database, 2) as late:
        late.write(3)
        scribe.write(5)
        scribe.commit()
        report = exporter.run()
        assert report.rows == 0
        assert report.holder is not None
        late.commit()
    assert exporter.run().rows == 8
    assert exporter.run().rows == 0
    assert sealed(out) == written(database)


@pytest.mark.parametrize("partition", [False, True], ids=["the rest", "a day of its own"])
def test_a_row_that_is_written_late_about_an_old_message_is_exported_once(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path, *, partition: bool
) -> None:
    """Its day's partition was exported long ago, and the index has summarised all of it."""
    if partition:
        engine = create_engine(sqlalchemy_url(database))
        with engine.begin() as connection:
            ensure_partitions(connection, long_ago(), 0)
        engine.dispose()
    scribe.write(4000, born=long_ago())
    scribe.commit()
    assert exporter.run().rows == 4000
    assert exporter.run().rows == 0
    for _ in range(3):
        scribe.write(1, born=long_ago())
        scribe.commit()
        assert exporter.run().rows == 1
    assert sealed(out) == written(database)


def test_an_export_follows_another_whose_end_the_server_has_not_noticed(
    exporter: Exporter, scribe: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[psycopg.Connection[Any]] = []

    def close(connection: psycopg.Connection[Any]) -> None:
        late.append(connection)

    try:
        for _ in range(3):
            scribe.write(1)
            scribe.commit()
            with monkeypatch.context() as patch:
                patch.setattr(psycopg.Connection, "close", close)
                assert exporter.run().rows == 1
        assert len(late) == 3
    finally:
        for connection in late:
            connection.close()


def test_rows_of_a_range_are_found_without_reading_the_table(
    database: str, scribe: LogWriter
) -> None:
    scribe.write(4000)
    scribe.commit()
    with ExportConnection(database, "here") as exports:
        shown = exports._rows(
            "EXPLAIN SELECT FROM delivery_log WHERE (xid::text::bigint) >= 1 AND (xid::text::bigint) < 2"
        )
    plan = "\n".join(line for (line,) in shown)
    assert "Bitmap Index Scan" in plan
    assert "Seq Scan" not in plan


@pytest.mark.parametrize(
    "where",
    [
        "between plan and write",
        "between two segments",
        "in a segment",
        "between manifest and segment",
        "before the seal",
    ],
)
def test_a_crash_is_taken_up_under_the_same_names(  # noqa: PLR0917 - fixtures
    where: str,
    database: str,
    exporter: Exporter,
    scribe: LogWriter,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = datetime.now(UTC)
    for hours in range(3):
        scribe.write(5, at=now - timedelta(hours=hours))
    scribe.commit()
    with monkeypatch.context() as patch:
        _die(where, patch)
        with pytest.raises((DiedError, InterruptedExportError)):
            exporter.run()
    _await_end_of_export(database)
    left = files_of(out)
    # What a crash left is read as far as it is sealed, and the rest is no damage: it comes again.
    now_ms = int(time.time() * 1000)
    found = check_segments(LocalFiles(str(out)), {}, now_ms=now_ms, trust_known=True)
    assert (len(found.sound), found.set_aside) == (len(left), ())
    assert len(left) == {
        "between plan and write": 0,
        "in a segment": 0,
        "between manifest and segment": 0,
        "between two segments": 1,
    }.get(where, 3)
    # What comes meanwhile does not change what the plan means.
    scribe.write(2)
    scribe.commit()
    report = Exporter(database, str(out)).run()
    assert (report.rows, report.plans) == (17, 2)
    assert set(left) <= set(files_of(out))
    assert sealed(out) == written(database)
    assert [path for path in out.rglob("_*") if not path.name.endswith(".manifest")] == []
    found = check_segments(LocalFiles(str(out)), {}, now_ms=1 << 50, trust_known=True)
    assert found.set_aside == ()
    assert {out / one.path for one in found.sound} == set(files_of(out))


def test_every_segment_has_a_manifest_of_its_rows(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path
) -> None:
    """Rows, writers with first and last number, checksum, versions; and pages have checksums."""
    scribe.write(9, at=datetime(2026, 3, 1, 23, 59, 59, tzinfo=UTC))
    scribe.write(5)
    scribe.commit()
    exporter.run()
    for path in files_of(out):
        at = path.with_name(f"_{path.name}.manifest")
        manifest = parse_manifest(at.read_text())
        rows = rows_of(path.parent)
        numbers = [row["writer_seq"] for row in rows]
        expected = WriterRange(rows=len(rows), first=min(numbers), last=max(numbers))
        assert manifest.writers == {1: expected}
        assert manifest.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        place = part_of(str(path))
        assert place is not None
        (entry,) = (one for one in LocalFiles(str(out)).entries() if path.name in one.path and
                    one.name == path.name and str(path).endswith(one.path))  # fmt: skip
        assert describe(LocalFiles(str(out)), entry, part=place[0], name=place[1]) == manifest
        # A page's checksum covers its data, which a column's last byte belongs to; the header in
        # front of the data is covered only by the manifest's checksum of the whole file.
        columns = pq.ParquetFile(path).metadata.row_group(0)
        for column in map(columns.column, range(columns.num_columns)):
            start = column.dictionary_page_offset or column.data_page_offset
            content = bytearray(path.read_bytes())
            content[start + column.total_compressed_size - 1] ^= 1
            with pytest.raises(ContentError):
                read_contents(io.BytesIO(content), part=place[0])


def _await_end_of_export(database: str) -> None:
    """Wait until the server has noticed that a session ended, which holds its lock until then."""
    with psycopg.connect(psycopg_url(database)) as connection:
        connection.execute("SET lock_timeout = '20s'")
        connection.execute("SELECT pg_advisory_lock(%s)", [EXPORT_LOCK])
        connection.execute("SELECT pg_advisory_unlock(%s)", [EXPORT_LOCK])


def _die(where: str, patch: pytest.MonkeyPatch) -> None:
    def dying(*_: Any, **__: Any) -> Any:
        raise DiedError

    match where:
        case "between plan and write":
            patch.setattr(segments, "write_segments", dying)
        case "before the seal":
            patch.setattr(ExportConnection, "seal", dying)
        case "between manifest and segment":
            publish = segments.Destination._publish

            def first_only(self: segments.Destination, hidden: str, final: str) -> None:
                if not final.endswith(".manifest"):
                    raise DiedError
                publish(self, hidden, final)

            patch.setattr(segments.Destination, "_publish", first_only)
        case "in a segment":
            patch.setattr(segments._RowGroups, "flush", dying)
        case _:
            file = segments.Destination.open_file
            seen: list[str] = []

            def once(self: segments.Destination, folder: str, name: str, token: str) -> Any:
                seen.append(folder)
                if len(seen) > 1:
                    raise DiedError
                return file(self, folder, name, token)

            patch.setattr(segments.Destination, "open_file", once)


def test_under_load_every_row_leaves_once(database: str, exporter: Exporter, out: Path) -> None:
    """Writers with transactions of any length, some taken back, while exports of few transactions each run all the time."""
    reports: list[ExportReport] = []
    enough = threading.Event()

    def work(number: int) -> None:
        chance = random.Random(number)
        with writer(database, number) as one:
            while not enough.is_set():
                one.write(chance.randint(1, 4), born=long_ago() if chance.random() < 0.2 else None)
                one.connection.execute("SELECT pg_sleep(%s)", (chance.random() / 20,))
                if chance.random() < 0.1:
                    one.connection.rollback()
                else:
                    one.commit()

    with ThreadPoolExecutor(4) as threads:
        working = [threads.submit(work, number) for number in range(1, 5)]
        try:
            while sum(1 for report in reports if report.rows) < 5 and not any(
                one.done() for one in working
            ):
                reports.append(exporter.run(max_xids=20))
        finally:
            enough.set()
        for one in working:
            one.result()
    reports.append(exporter.run(max_xids=20))
    assert sealed(out) == written(database)
    assert sum(report.rows for report in reports) == sum(written(database).values())


def test_numbers_that_are_in_no_row_are_reported(
    database: str, exporter: Exporter, scribe: LogWriter
) -> None:
    scribe.write(5)
    scribe.commit()
    assert exporter.run().gaps == {}
    scribe.write(5)
    scribe.commit()
    execute(database, "DELETE FROM log_entries WHERE writer_seq IN (7, 8)")
    assert exporter.run().gaps == {1: 2}
    scribe.write(5)
    scribe.commit()
    assert exporter.run().gaps == {}, "a gap is counted once"


async def test_a_run_that_breaks_off_reports_what_it_has_sealed(
    database: str,
    exporter: Exporter,
    scribe: LogWriter,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No later run finds the gaps of a sealed range, nor its rows."""
    scribe.write(5)
    scribe.commit()
    exporter.run()
    scribe.write(5)
    scribe.commit()
    execute(database, "DELETE FROM log_entries WHERE writer_seq IN (7, 8)")

    def restarted(_: ExportConnection) -> None:
        raise StorageUnavailableError("PostgreSQL restarts")

    monkeypatch.setattr(ExportConnection, "oldest_transaction", restarted)
    metrics = Metrics()
    with pytest.raises(StorageUnavailableError):
        await LogExportTask(exporter, metrics).run(lambda: True)
    assert "2 rows of writer 1 are missing" in caplog.text
    assert b"rooms_log_gaps_total 2.0" in metrics.render()
    assert b"rooms_log_exported_total 3.0" in metrics.render()


def test_what_was_deleted_before_the_first_export_is_no_gap(
    database: str, exporter: Exporter, scribe: LogWriter
) -> None:
    """Retention may have removed the first rows of a writer that still writes."""
    scribe.write(10)
    scribe.commit()
    execute(database, "DELETE FROM log_entries WHERE writer_seq <= 5")
    assert exporter.run().gaps == {}


def test_numbers_of_a_writer_that_has_ended_are_kept_until_its_last_row_is_exported(
    database: str, exporter: Exporter, scribe: LogWriter
) -> None:
    """A gap that an open transaction hides would not be found otherwise."""
    kept = "SELECT writer_id FROM log_export_writers ORDER BY writer_id"
    scribe.write(5)
    scribe.commit()
    with writer(database, 2) as late:
        late.write(1)
        exporter.run()
        scribe.write(5)
        scribe.commit()
        execute(database, "DELETE FROM log_entries WHERE writer_seq IN (7, 8)")
        execute(database, "DELETE FROM writers WHERE id = 1")
        for _ in range(3):
            assert exporter.run().gaps == {}
            assert execute(database, kept) == [(1,)]
        late.commit()
    report = exporter.run()
    assert (report.rows, report.gaps) == (4, {1: 2})
    assert execute(database, kept) == [(2,)]


def test_an_export_that_finds_nothing_is_noted_at_most_once_an_hour(
    database: str, exporter: Exporter, scribe: LogWriter
) -> None:
    seen = "SELECT seen_at FROM log_exports ORDER BY id"
    for _ in range(2):
        scribe.write(5)
        scribe.commit()
        exporter.run()
    exporter.run()
    assert execute(database, seen) == [(None,), (None,)]
    execute(database, "UPDATE log_exports SET sealed_at = sealed_at - interval '2 h'")
    exporter.run()
    first, last = execute(database, seen)
    assert first == (None,)
    assert last != (None,)
    exporter.run()
    assert execute(database, seen) == [first, last]


def test_one_exports_at_a_time(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path
) -> None:
    scribe.write(5)
    scribe.commit()
    with ExportConnection(database, "elsewhere") as other:
        assert other.lock()
        assert exporter.run().busy
    assert exporter.run().rows == 5


def test_another_place_gets_the_whole_log(
    database: str, exporter: Exporter, scribe: LogWriter, tmp_path: Path
) -> None:
    scribe.write(5)
    scribe.commit()
    exporter.run()
    assert Exporter(database, (tmp_path / "other").as_uri()).run().rows == 5


def test_a_log_that_was_moved_to_another_server_leaves_again(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path
) -> None:
    """There transactions are counted anew: rows come twice, under other names, and none is passed over."""
    scribe.write(5)
    scribe.commit()
    exporter.run()
    execute(
        database,
        "UPDATE log_exports SET system = '42', first_xid = 1 << 40, end_xid = 1::bigint << 41",
    )
    scribe.write(1)
    scribe.commit()
    assert exporter.run().rows == 6
    assert sealed(out).keys() == written(database).keys()


def test_progress_reports_what_was_exported(
    database: str, exporter: Exporter, scribe: LogWriter
) -> None:
    scribe.write(5)
    scribe.commit()
    exporter.run()
    with ExportConnection(database, exporter.destination.name) as exports:
        reported = exports.progress()
        scribe.write(1)
        scribe.commit()
        assert exports.progress() == reported
    (highest,) = execute(
        database, "SELECT max(xid::text::bigint) FROM delivery_log WHERE writer_seq <= 5"
    )[0]
    (later,) = execute(database, "SELECT max(xid::text::bigint) FROM delivery_log")[0]
    assert highest < reported.end_xid <= later
    assert reported.rows == 5


def test_an_open_transaction_is_reported(
    database: str,
    exporter: Exporter,
    scribe: LogWriter,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("delivery.analytics.export.exporter.HOLDER_WARN_AFTER_S", 0.0)
    scribe.write(1)
    with caplog.at_level(logging.WARNING):
        report = exporter.run()
    assert report.holder is not None
    assert report.holder.pid == scribe.connection.info.backend_pid
    assert f"process {report.holder.pid}" in caplog.text


async def test_the_duty_exports_and_counts(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path
) -> None:
    scribe.write(5)
    scribe.commit()
    metrics = Metrics()
    await LogExportTask(exporter, metrics).run(lambda: True)
    assert sealed(out) == written(database)
    assert b"rooms_log_exported_total 5.0" in metrics.render()


async def test_the_duty_ends_with_its_process(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled in the middle of a statement that would take for ever, it is over, and nothing is lost."""
    scribe.write(5)
    scribe.commit()
    reading = threading.Event()

    def endless(
        self: ExportConnection, settled_xid: int, *, max_transactions: int
    ) -> ExportRange | None:
        reading.set()
        self._rows("SELECT pg_sleep(600)")
        return None

    with monkeypatch.context() as patch:
        patch.setattr(ExportConnection, "next_range", endless)
        running = asyncio.create_task(LogExportTask(exporter, Metrics()).run(lambda: True))
        assert await asyncio.to_thread(reading.wait, 30), running

        async def asleep() -> bool:
            sleeping = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(600)' AND state = 'active'"
            return bool(execute(database, sleeping))

        await until(asleep, "the statement to run")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await LogExportTask(exporter, Metrics()).run(lambda: True)
    assert sealed(out) == written(database)
