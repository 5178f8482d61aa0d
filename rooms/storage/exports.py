"""The log on its way out of PostgreSQL: which transactions' rows have left, and the statements that read the next ones.

A writer's transaction that began early may commit late, so neither time nor any sequence tells what is new. The snapshot
does: below `pg_snapshot_xmin` every transaction is over, and its rows never change. A **plan** is a range of transactions
[first, end) below that mark; it is committed before its rows are read and sealed when they are safe elsewhere, and the
next plan begins where it ended. Whoever dies in between leaves a plan that is read again, to the same rows.

Rows of a range are found by `log_entries_xid`, a BRIN index: the log is only appended to, so it costs a few bytes a
megabyte, and blocks that it knows nothing of yet are read whatever was asked for. It holds wherever a row lies: one that
is written today about a message of last month stands in that month's partition.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from types import TracebackType
from typing import Any, Final, Self

import psycopg
from psycopg import sql

from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.storage.engine import psycopg_url

EXPORT_LOCK: Final = 0x6C6F67
"""Key of the session lock that lets one export work at a time."""

_XID: Final = "(xid::text::bigint)"
SYSTEM: Final = "SELECT system_identifier::text FROM pg_control_system()"
_OPEN: Final = """
SELECT id, system, first_xid, end_xid FROM log_exports WHERE destination = %s AND sealed_at IS NULL ORDER BY id LIMIT 1
"""
_LAST: Final = "SELECT max(end_xid) FROM log_exports WHERE destination = %s AND system = %s AND sealed_at IS NOT NULL"
_HORIZON: Final = "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
_ANY: Final = f"SELECT EXISTS (SELECT FROM log_entries WHERE {_XID} >= %s AND {_XID} < %s)"  # noqa: S608 - ours
_PLAN: Final = """
INSERT INTO log_exports (destination, system, first_xid, end_xid) VALUES (%s, %s, %s, %s)
RETURNING id, system, first_xid, end_xid
"""
_OTHER_SYSTEM: Final = "DELETE FROM log_export_writers WHERE destination = %s AND system <> %s"
_SEAL: Final = """
UPDATE log_exports SET sealed_at = now(), rows = %s, bytes = %s, files = %s WHERE id = %s AND sealed_at IS NULL
"""
# A writer numbers its rows in the order of its transactions, so of those that left none may be missing in between.
_COUNT: Final = """
INSERT INTO log_export_writers AS w (destination, system, writer_id, rows, last_seq)
SELECT %s, %s, * FROM unnest(%s::int4[], %s::int8[], %s::int8[])
ON CONFLICT (destination, system, writer_id)
    DO UPDATE SET rows = w.rows + excluded.rows, last_seq = greatest(w.last_seq, excluded.last_seq)
RETURNING w.writer_id, w.last_seq - w.rows
"""
_HOLDER: Final = """
SELECT pid, application_name, state, extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age_s
FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start LIMIT 1
"""
# Also what retention asks before it lets a day of the log go.
EXPORTED: Final = """
SELECT coalesce(max(end_xid), 0), coalesce(sum(rows), 0)::bigint, max(sealed_at) FROM log_exports
WHERE destination = %s AND system = %s AND sealed_at IS NOT NULL
"""
_INDEXES: Final = """
SELECT i.indexrelid::regclass::text FROM pg_inherits h JOIN pg_index i ON i.indexrelid = h.inhrelid
WHERE h.inhparent = 'log_entries_xid'::regclass
"""
_COPY: Final = """
COPY (SELECT {columns} FROM delivery_log WHERE {xid} >= {first} AND {xid} < {end}
    ORDER BY date_trunc('hour', ts), writer_id, writer_seq) TO STDOUT (FORMAT csv)
"""
_AS: Final[Mapping[str, str]] = {"xid": _XID, "ts": "(extract(epoch FROM ts) * 1000000)::bigint"}
# Sequential scans would read a whole month for a minute's rows; the sort goes to disk where it is large.
_MANNERS: Final = (
    "SET enable_seqscan = off; SET max_parallel_workers_per_gather = 0; SET work_mem = '32MB'; SET TimeZone = 'UTC'"
)
_LINES: Final = 500
_AWAY: Final = (psycopg.OperationalError, psycopg.InterfaceError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rows of the transactions [first, end) of one database (`system`: PostgreSQL's system identifier)."""

    id: int
    system: str
    first: int
    end: int
    begun: bool
    """Whether somebody may have written a part of it already."""

    @property
    def stem(self) -> str:
        """What its segments are called, whoever writes them and however often."""
        return f"{int(self.system):016x}-{self.first}-{self.end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The oldest transaction that writes: nothing later can be exported before it is over."""

    pid: int
    name: str
    state: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Every row of a transaction below `end` has left, `rows` in all, the last ones at `at`."""

    end: int
    rows: int
    at: datetime | None


class Exports:
    """One connection that exports to one destination. Blocking; use as `with Exports(url, destination) as exports`.

    StorageUnavailableError: PostgreSQL is away. StorageRefusedError: it will not take more right now.
    """

    def __init__(self, url: str, destination: str) -> None:
        self._url = psycopg_url(url)
        self.destination = destination
        self._connection: psycopg.Connection[Any] | None = None
        self.system = ""

    def __enter__(self) -> Self:
        with _translated():
            connection = psycopg.connect(
                self._url, autocommit=True, application_name="rooms export", connect_timeout=5, client_encoding="utf8"
            )
            self._connection = connection
            connection.execute(_MANNERS)
            self.system = self._value(SYSTEM)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.close()

    def cancel(self) -> None:
        """Break off the statement under way, from any thread."""
        if self._connection is not None and not self._connection.closed:
            self._connection.cancel_safe(timeout=2)

    def lock(self) -> bool:
        """Become the one that exports, until the connection ends; False: somebody else is."""
        with _translated():
            return bool(self._value("SELECT pg_try_advisory_lock(%s)", EXPORT_LOCK))

    def horizon(self) -> int:
        """Every transaction below this one is over, and its rows never change."""
        with _translated():
            return int(self._value(_HORIZON))

    def next_plan(self, horizon: int, *, most: int) -> Plan | None:
        """What to export now: a plan that was left, or a new one of at most so many transactions below the horizon; None:
        there is nothing.

        A plan that was left counts for another database where that one was dumped into this one; its rows come again.
        """
        with _translated():
            for found in self._rows(_OPEN, self.destination):
                if found[1] == self.system:
                    return _plan(found, begun=True)
                self._connected.execute("DELETE FROM log_exports WHERE id = %s", (found[0],))
            first = self._value(_LAST, self.destination, self.system) or 0
            while first < horizon:
                end = min(first + most, horizon)
                if self._value(_ANY, first, end):
                    with self._connected.transaction():
                        self._connected.execute(_OTHER_SYSTEM, (self.destination, self.system))
                        return _plan(self._rows(_PLAN, self.destination, self.system, first, end)[0], begun=False)
                if not self._value(_ANY, end, horizon):
                    return None
                first = end
            return None

    @contextmanager
    def rows_of(self, plan: Plan, columns: Sequence[str]) -> Iterator[Callable[[], bytes]]:
        """Gives the plan's rows as CSV, a piece a call, b"" at the end: these columns of the log in their order, by hour
        of `ts`, writer and number. `ts` comes as µs since 1970. Null is an empty field, an empty text is quoted.
        """
        copy = sql.SQL(_COPY).format(
            columns=sql.SQL(", ").join(sql.SQL(_AS[name]) if name in _AS else sql.Identifier(name) for name in columns),
            xid=sql.SQL(_XID),
            first=plan.first,
            end=plan.end,
        )
        with _translated(), self._connected.cursor().copy(copy) as rows:
            lines = iter(rows)

            def read() -> bytes:
                return b"".join(islice(lines, _LINES))

            yield read

    def seal(self, plan: Plan, *, files: int, size: int, writers: Mapping[int, tuple[int, int]]) -> Mapping[int, int]:
        """The plan is done: so many files and bytes; of each writer so many rows, the last with that number.

        Returns how many numbers each of these writers gave out that are in no row: gaps of the log itself.
        """
        rows = sum(count for count, _ in writers.values())
        with _translated(), self._connected.transaction():
            sealed = self._connected.execute(_SEAL, (rows, size, files, plan.id)).rowcount
            if not sealed:
                raise StorageRefusedError(f"export {plan.id} was sealed by somebody else")
            counts, lasts = zip(*writers.values(), strict=True) if writers else ((), ())
            found = self._rows(_COUNT, self.destination, self.system, list(writers), list(counts), list(lasts))
        return {writer: missing for writer, missing in found if missing}

    def holder(self) -> Holder | None:
        """Who holds the export back, if anybody is in the middle of writing."""
        with _translated():
            for pid, name, state, age_s in self._rows(_HOLDER):
                return Holder(pid=pid, name=name or "", state=state or "", age_s=age_s or 0.0)
        return None

    def exported(self) -> Exported:
        """What has left. Where the log is exported, a partition may be dropped once none of its rows is of a
        transaction from `end` on.
        """
        with _translated():
            end, rows, at = self._rows(EXPORTED, self.destination, self.system)[0]
        return Exported(end=end, rows=rows, at=at)

    def summarize(self) -> None:
        """Tell the index of the blocks that are new since, so that they are not read for nothing. May be left out."""
        with _translated():
            for (index,) in self._rows(_INDEXES):
                try:
                    with self._connected.transaction():
                        self._connected.execute("SET LOCAL lock_timeout = '200ms'")
                        self._connected.execute("SELECT brin_summarize_new_values(%s::regclass)", (index,))
                except (
                    psycopg.errors.LockNotAvailable,
                    psycopg.errors.InsufficientPrivilege,
                    psycopg.errors.UndefinedTable,  # retention was here
                ):
                    continue

    @property
    def _connected(self) -> psycopg.Connection[Any]:
        assert self._connection is not None, "the connection is opened by `with`"
        return self._connection

    def _rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connected.execute(statement, values).fetchall()

    def _value(self, statement: str, *values: Any) -> Any:
        return self._rows(statement, *values)[0][0]


def _plan(row: tuple[Any, ...], *, begun: bool) -> Plan:
    return Plan(id=row[0], system=row[1], first=row[2], end=row[3], begun=begun)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.QueryCanceled as exc:
        raise StorageRefusedError(str(exc)) from exc
    except _AWAY as exc:
        raise StorageUnavailableError(str(exc)) from exc
