"""Export the log: record which transactions' rows have been exported, and read the next ones.

A writer's transaction that began early may commit late, so neither time nor any sequence shows what
is new. The snapshot does: every transaction below `pg_snapshot_xmin` is over, and its rows never
change. An **export range** is a range of transactions [first, end) below that id. It is committed
before its rows are read, and sealed when they are safe elsewhere. The next range begins where it
ended. A process that dies in between leaves a range that is read again, with the same rows.

A log that was restored into another server is exported first, in ranges of its own
(`restored_log`).

Rows of a range are found by `log_entries_xid`, a BRIN index. The log is only appended to, so the
index costs a few bytes a megabyte, and blocks that it does not summarize yet are always read
(`rooms.db.retention.log_index`). It works in every partition: a row that is written today about a
message of last month is in that month's partition.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, Final, Self

import psycopg
from psycopg import sql

from rooms.db.connection import CONNECTION_LOST, psycopg_url
from rooms.db.queries.restored_log import (
    DELETE_PASSED_WRITERS,
    FIRST_RESTORED,
    NEXT_XID,
    RESTORED_END,
    find_range,
    restored_system,
)
from rooms.db.session_settings import SERVER_KEEPALIVES, apply_settings
from rooms.errors import StorageRefusedError, StorageUnavailableError

EXPORT_LOCK: Final = 0x6C6F67
"""The key of the session lock that lets one export work at a time."""

_XID: Final = "(xid::text::bigint)"
SYSTEM_IDENTIFIER: Final = "SELECT system_identifier::text FROM pg_control_system()"
_OPEN_RANGE: Final = """
SELECT id, system, first_xid, end_xid FROM log_exports WHERE destination = %s AND sealed_at IS NULL ORDER BY id LIMIT 1
"""
_LAST_XID: Final = """
SELECT max(end_xid) FROM log_exports WHERE destination = %s AND system = %s AND sealed_at IS NOT NULL
"""
_SETTLED_XID: Final = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
_HAS_ROWS: Final = f"""
SELECT EXISTS (SELECT FROM log_entries WHERE {_XID} >= %s AND {_XID} < %s)
"""  # noqa: S608 - constants of this package
_INSERT_RANGE: Final = """
INSERT INTO log_exports (destination, system, first_xid, end_xid) VALUES (%s, %s, %s, %s)
RETURNING id, system, first_xid, end_xid
"""
_DELETE_OTHER_SYSTEM: Final = (
    "DELETE FROM log_export_writers WHERE destination = %s AND system <> ALL (%s)"
)
_SEAL: Final = """
UPDATE log_exports SET sealed_at = now(), rows = %s, bytes = %s, files = %s WHERE id = %s AND sealed_at IS NULL
"""
# A writer numbers its rows in the order of its transactions, so the numbers of a range follow those
# of the last one, and none may be missing between. What a writer wrote before its first export may
# have been deleted by retention.
_COUNT_WRITER_ROWS: Final = """
WITH n AS (
    SELECT n.*, w.last_seq AS before FROM unnest(%(writers)s::int4[], %(rows)s::int8[], %(firsts)s::int8[], %(lasts)s::int8[]) AS n (writer_id, rows, first, last)
        LEFT JOIN log_export_writers w ON w.destination = %(destination)s AND w.system = %(system)s AND w.writer_id = n.writer_id
    WHERE NOT EXISTS (SELECT FROM log_export_writers o WHERE o.destination = %(destination)s AND o.system = %(restored)s AND o.writer_id = n.writer_id)
), counted AS (
    INSERT INTO log_export_writers AS w (destination, system, writer_id, rows, last_seq)
    SELECT %(destination)s, %(system)s, writer_id, rows, last FROM n
    ON CONFLICT (destination, system, writer_id)
        DO UPDATE SET rows = w.rows + excluded.rows, last_seq = greatest(w.last_seq, excluded.last_seq)
)
SELECT writer_id, last - coalesce(before, first - 1) - rows FROM n
"""
# A run that finds nothing leaves no range. An hour is exact enough for whether an export is in use.
_RECORD_LOOK: Final = """
UPDATE log_exports SET seen_at = now() WHERE id = (
    SELECT id FROM log_exports WHERE destination = %(destination)s AND system = %(system)s AND sealed_at IS NOT NULL
    ORDER BY first_xid DESC LIMIT 1
) AND greatest(sealed_at, seen_at) < now() - interval '1 hour'
"""
# The rows of a writer that has ended are of transactions below the next one at a later time. As
# soon as those are exported, its last number has nothing to be compared with any more.
_DELETE_ENDED_WRITERS: Final = """
WITH gone AS (
    DELETE FROM log_export_writers WHERE destination = %(destination)s AND system = %(system)s AND ended_xid <= %(exported)s
)
UPDATE log_export_writers w SET ended_xid = pg_snapshot_xmax(pg_current_snapshot())::text::bigint
WHERE w.destination = %(destination)s AND w.system = %(system)s AND w.ended_xid IS NULL
    AND NOT EXISTS (SELECT FROM writers v WHERE v.id = w.writer_id)
"""
_OLDEST_TRANSACTION: Final = """
SELECT pid, application_name, state, extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age_s
FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start LIMIT 1
"""
# Retention also reads this before it deletes a day of the log.
EXPORTED_TOTALS: Final = """
SELECT coalesce(max(end_xid), 0), coalesce(sum(rows), 0)::bigint, max(sealed_at) FROM log_exports
WHERE destination = %s AND system = %s AND sealed_at IS NOT NULL
"""
_COPY: Final = """
COPY (SELECT {columns} FROM delivery_log l LEFT JOIN LATERAL (
        SELECT m.publisher_id, coalesce(m.publisher_organisation_id, r.organisation_id) AS publisher_organisation_id, m.application
        FROM messages m JOIN rooms r ON r.id = m.room_id
        WHERE l.kind = 'published' AND m.room_id = l.room_id AND m.id = l.message_id LIMIT 1
    ) p ON true LEFT JOIN (SELECT id AS worker, version AS worker_version FROM writers) w USING (worker)
    WHERE {xid} >= {first} AND {xid} < {end}
    ORDER BY date_trunc('hour', ts), writer_id, writer_seq) TO STDOUT (FORMAT csv)
"""
_COLUMN_SQL: Final[Mapping[str, str]] = {
    "xid": _XID,
    "ts": "(extract(epoch FROM ts) * 1000000)::bigint",
}
# Sequential scans would read a whole month for a minute's rows; the sort goes to disk if it is
# large.
_SESSION_SETTINGS: Final = (
    "SET enable_seqscan = off; SET max_parallel_workers_per_gather = 0; SET work_mem = '32MB'; "
    "SET TimeZone = 'UTC'"
)
_LINES_PER_READ: Final = 500
_UNAVAILABLE: Final = (psycopg.InterfaceError, *CONNECTION_LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRange:
    """Name the rows of the transactions [first, end) of one database.

    `system`: PostgreSQL's system identifier; another one for restored rows.
    """

    id: int
    system: str
    first_xid: int
    end_xid: int
    started: bool
    """True if a part of it may have been written already."""

    @property
    def file_stem(self) -> str:
        """Return the name of its segments, the same for every writer and every try."""
        system, *kind = self.system.split("/")
        return "-".join((f"{int(system):016x}", str(self.first_xid), str(self.end_xid), *kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestTransaction:
    """Describe the oldest writing transaction: nothing later can be exported before it is over."""

    pid: int
    name: str
    state: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportProgress:
    """Hold the export's totals.

    Every row of a transaction below `end_xid` has been exported, `rows` in all.
    """

    end_xid: int
    rows: int
    exported_at: datetime | None


class ExportConnection:
    """Export to one destination on one connection.

    Blocking; use as `with ExportConnection(url, destination) as exports`.

    StorageUnavailableError: PostgreSQL is away. StorageRefusedError: it cannot take more right now.
    """

    def __init__(self, url: str, destination: str) -> None:
        self._url = psycopg_url(url)
        self.destination = destination
        self._connection: psycopg.Connection[Any] | None = None
        self.system = ""
        self._searched = ""
        """The system whose log has no restored rows that are not exported."""

    def __enter__(self) -> Self:
        with _translate_errors():
            connection = psycopg.connect(
                self._url,
                autocommit=True,
                application_name="rooms export",
                connect_timeout=5,
                client_encoding="utf8",
            )
            # Between two reads the destination may take its time.
            apply_settings(connection, self._url, SERVER_KEEPALIVES)
            self._connection = connection
            connection.execute(_SESSION_SETTINGS)
            self.system = self._value(SYSTEM_IDENTIFIER)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._connection is None:
            return
        if kind is None:
            # The server notices a closed connection some time later, and another export may be
            # asked for until then.
            with suppress(psycopg.Error):
                self._connection.execute("SELECT pg_advisory_unlock_all()")
        self._connection.close()

    def cancel(self) -> None:
        """Cancel the statement that is running, from any thread."""
        if self._connection is not None and not self._connection.closed:
            self._connection.cancel_safe(timeout=2)

    def lock(self) -> bool:
        """Take the export lock until the connection ends; False: another process has it."""
        with _translate_errors():
            return bool(self._value("SELECT pg_try_advisory_lock(%s)", EXPORT_LOCK))

    def settled_xid(self) -> int:
        """Return the id below which every transaction is over, so that its rows never change."""
        with _translate_errors():
            return int(self._value(_SETTLED_XID))

    def next_range(self, settled_xid: int, *, max_transactions: int) -> ExportRange | None:
        """Return a range that was not sealed, or a new one below `settled_xid`.

        A new one has at most `max_transactions`. None: there is nothing to export. An open range of
        another database, which was dumped into this one, is deleted: its rows are exported again.
        """
        with _translate_errors():
            for found in self._rows(_OPEN_RANGE, self.destination):
                if found[1] in (self.system, restored_system(self.system)):
                    return _range_from_row(found, started=True)
                self._open_connection.execute("DELETE FROM log_exports WHERE id = %s", (found[0],))
            last = self._value(_LAST_XID, self.destination, self.system)
            # To look for restored rows reads what the index does not summarize yet, so not each
            # time.
            if last is None or self._searched != self.system:
                if (restored := self._restored_range(max_transactions)) is not None:
                    return restored
                self._searched = self.system
            first = last or 0
            while first < settled_xid:
                end = min(first + max_transactions, settled_xid)
                if self._value(_HAS_ROWS, first, end):
                    with self._open_connection.transaction():
                        self._open_connection.execute(
                            _DELETE_OTHER_SYSTEM,
                            (self.destination, [self.system, restored_system(self.system)]),
                        )
                        return _range_from_row(
                            self._rows(_INSERT_RANGE, self.destination, self.system, first, end)[0],
                            started=False,
                        )
                if not self._value(_HAS_ROWS, end, settled_xid):
                    return None
                first = end
            return None

    def _restored_range(self, max_transactions: int) -> ExportRange | None:
        exported = self._value(RESTORED_END, self.destination)
        for (first,) in self._open_connection.execute(FIRST_RESTORED, {"end": exported}):
            found = find_range(
                first, lambda low, high: bool(self._value(_HAS_ROWS, low, high)), max_transactions
            )
            if found is not None:
                values = (self.destination, restored_system(self.system), *found)
                return _range_from_row(self._rows(_INSERT_RANGE, *values)[0], started=False)
        return None

    @contextmanager
    def read_csv(
        self, export_range: ExportRange, columns: Sequence[str]
    ) -> Iterator[Callable[[], bytes]]:
        """Return a function that reads the range's rows as CSV, a piece a call, b"" at the end.

        The columns are those of the log in the given order, the rows are sorted by hour of `ts`,
        writer and number. `ts` is in µs since 1970. Null is an empty field, an empty text is
        quoted.
        """
        first: sql.Composable = sql.Literal(export_range.first_xid)
        if export_range.system != self.system:
            # Since this range was planned, transactions of this server may have got ids of it.
            first = sql.SQL("greatest({}, {})").format(first, sql.SQL(NEXT_XID))
        copy = sql.SQL(_COPY).format(
            columns=sql.SQL(", ").join(
                sql.SQL(_COLUMN_SQL[name]) if name in _COLUMN_SQL else sql.Identifier(name)
                for name in columns
            ),
            xid=sql.SQL(_XID),
            first=first,
            end=export_range.end_xid,
        )
        with _translate_errors(), self._open_connection.cursor().copy(copy) as rows:
            lines = iter(rows)

            def read() -> bytes:
                return b"".join(islice(lines, _LINES_PER_READ))

            yield read

    def seal(
        self,
        export_range: ExportRange,
        *,
        files: int,
        size: int,
        writers: Mapping[int, tuple[int, int, int]],
    ) -> Mapping[int, int]:
        """Seal the range with its files and bytes.

        For each writer, its number of rows, its first and its last number in the range. Return for
        each of these writers how many of its numbers since the last range are in no row: gaps of
        the log itself.
        """
        rows = sum(count for count, _, _ in writers.values())
        with _translate_errors(), self._open_connection.transaction():
            sealed = self._open_connection.execute(
                _SEAL, (rows, size, files, export_range.id)
            ).rowcount
            if not sealed:
                raise StorageRefusedError(f"export {export_range.id} was sealed by another process")
            counts, firsts, lasts = zip(*writers.values(), strict=True) if writers else ((),) * 3
            found = self._open_connection.execute(
                _COUNT_WRITER_ROWS,
                {
                    "destination": self.destination,
                    "system": export_range.system,
                    "restored": restored_system(export_range.system),
                    "writers": list(writers),
                    "rows": list(counts),
                    "firsts": list(firsts),
                    "lasts": list(lasts),
                },
            ).fetchall()
        return {writer: missing for writer, missing in found if missing}

    def record_complete(self, exported_xid: int) -> None:
        """Record that every row of a transaction below this one has been exported.

        So the destination is in use, and the numbers of writers that ended before are forgotten.
        """
        values = {
            "destination": self.destination,
            "system": self.system,
            "exported": exported_xid,
        }
        with _translate_errors():
            self._open_connection.execute(_RECORD_LOOK, values)
            self._open_connection.execute(_DELETE_ENDED_WRITERS, values)
            self._open_connection.execute(DELETE_PASSED_WRITERS, values)

    def oldest_transaction(self) -> OldestTransaction | None:
        """Return the oldest writing transaction, which delays the export; None: there is none."""
        with _translate_errors():
            for pid, name, state, age_s in self._rows(_OLDEST_TRANSACTION):
                return OldestTransaction(
                    pid=pid, name=name or "", state=state or "", age_s=age_s or 0.0
                )
        return None

    def progress(self) -> ExportProgress:
        """Return what has been exported.

        With an export, a partition may be dropped once none of its rows is of a transaction from
        `end_xid` on, but for restored rows.
        """
        with _translate_errors():
            end, rows, at = self._rows(EXPORTED_TOTALS, self.destination, self.system)[0]
        return ExportProgress(end_xid=end, rows=rows, exported_at=at)

    @property
    def _open_connection(self) -> psycopg.Connection[Any]:
        assert self._connection is not None, "the connection is opened by `with`"
        return self._connection

    def _rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._open_connection.execute(statement, values).fetchall()

    def _value(self, statement: str, *values: Any) -> Any:
        return self._rows(statement, *values)[0][0]


def _range_from_row(row: tuple[Any, ...], *, started: bool) -> ExportRange:
    return ExportRange(id=row[0], system=row[1], first_xid=row[2], end_xid=row[3], started=started)


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.QueryCanceled as exc:
        raise StorageRefusedError(str(exc)) from exc
    except _UNAVAILABLE as exc:
        raise StorageUnavailableError(str(exc)) from exc
