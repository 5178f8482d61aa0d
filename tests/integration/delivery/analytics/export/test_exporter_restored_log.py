"""Check the export of a log that was restored into another server, where ids of transactions begin anew."""

from pathlib import Path

import pytest

from delivery.analytics.export.exporter import Exporter
from tests.support.exported_log import LogWriter, execute, sealed, writer, written

AHEAD = 1 << 40


def restore(url: str, ahead: int = AHEAD) -> None:
    """Make of what is there a log of another server, which had so many more transactions."""
    execute(
        url,
        f"UPDATE log_entries SET xid = ((xid::text::bigint) + {ahead})::text::xid8;"
        "UPDATE log_exports SET system = '42' WHERE system !~ '^42'",
    )


@pytest.mark.parametrize("was_exported", [False, True])
def test_a_restored_log_leaves_once_and_the_new_rows_too(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path, *, was_exported: bool
) -> None:
    scribe.write(5)
    scribe.commit()
    if was_exported:
        exporter.run()
    before = sealed(out)
    restore(database)
    scribe.write(1)
    scribe.commit()
    report = exporter.run()
    assert (report.rows, report.gaps) == (6, {})
    assert sealed(out) - before == written(database)
    assert exporter.run().rows == 0
    scribe.write(2)
    scribe.commit()
    report = exporter.run()
    assert (report.rows, report.gaps) == (2, {})


def test_a_restored_log_leaves_in_parts(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path
) -> None:
    """Each has few transactions, also where many ids are between them."""
    for _ in range(5):
        scribe.write(3)
        scribe.commit()
    execute(
        database,
        "UPDATE log_entries SET xid = (xid::text::bigint + writer_seq << 33)::text::xid8 WHERE writer_seq % 2 = 0",
    )
    restore(database)
    report = exporter.run(max_xids=2)
    assert report.rows == 15
    assert report.plans >= 7
    assert sealed(out) == written(database)
    assert exporter.run(max_xids=2).rows == 0


def test_a_restored_log_leaves_where_newer_rows_have_left_before(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path
) -> None:
    """As an earlier version left them, which passed over the restored ones."""
    scribe.write(5)
    scribe.commit()
    exporter.run()
    execute(database, f"UPDATE log_entries SET xid = (xid::text::bigint + {AHEAD})::text::xid8")
    scribe.write(1)
    scribe.commit()
    assert Exporter(database, str(out)).run().rows == 6
    assert Exporter(database, str(out)).run().rows == 0


def test_an_export_of_a_restored_log_that_broke_off_is_repeated(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path
) -> None:
    scribe.write(5)
    scribe.commit()
    restore(database)
    scribe.write(1)
    scribe.commit()
    with exporter.exports as exports:
        begun = exports.next_range(exports.settled_xid(), max_transactions=50_000)
    with exporter.exports as exports:
        again = exports.next_range(exports.settled_xid(), max_transactions=50_000)
    assert begun is not None
    assert again is not None
    assert (again.id, again.file_stem, again.started) == (begun.id, begun.file_stem, True)
    assert exporter.run().rows == 6
    assert sealed(out) == written(database)


def test_rows_that_are_written_meanwhile_are_not_taken_for_restored_ones(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path
) -> None:
    """Their ids are in the range of the restored rows, which is read later than it was planned."""
    scribe.write(5)
    scribe.commit()
    restore(database, 1000)
    with exporter.exports as exports:
        assert exports.next_range(exports.settled_xid(), max_transactions=50_000)
    with writer(database, 2) as later:
        for _ in range(5):
            later.write(1)
            later.commit()
        assert exporter.run().rows == 10
        assert sealed(out) == written(database)
        execute(database, "UPDATE log_export_writers SET last_seq = 3 WHERE writer_id = 2")
        later.write(1)
        later.commit()
        report = exporter.run()
    assert (report.rows, report.gaps) == (1, {2: 2})


def test_ids_that_a_restored_log_has_used_leave_again_when_they_are_given_anew(
    database: str, exporter: Exporter, scribe: LogWriter, out: Path
) -> None:
    """None of this server's rows is passed over, and restored rows that retention took are no gap."""
    kept = "SELECT count(*) FROM log_export_writers WHERE system LIKE '%/restored'"
    scribe.write(5)
    scribe.commit()
    restore(database, 1000)
    with writer(database, 2) as later:
        later.write(1)
        later.commit()
        assert exporter.run(max_xids=100).rows == 6
        execute(database, "DELETE FROM log_entries WHERE writer_id = 1 AND writer_seq IN (2, 3)")
        later.write(1)
        later.commit()
        assert exporter.run().rows == 1
        assert execute(database, kept) == [(1,)]
        for _ in range(1100):
            later.write(1)
            later.commit()
        execute(database, "DELETE FROM log_entries WHERE writer_id = 2 AND writer_seq = 999")
        report = exporter.run()
    assert (report.rows, report.gaps) == (1102, {2: 1})
    assert sealed(out).keys() >= written(database).keys()
    assert exporter.run().rows == 0
    assert execute(database, kept) == [(0,)]
