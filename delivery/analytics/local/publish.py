"""Write the tables of one run from the state of all partitions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import duckdb
import pyarrow as pa

from delivery.analytics.findings import advice, results
from delivery.analytics.findings.cells import AttemptCells, sample_step
from delivery.analytics.local import queries
from delivery.analytics.local.counting import make_views, quoted, write_query
from delivery.analytics.local.files import LocalOutput
from delivery.analytics.runs.conformance import CODES, is_legal
from delivery.analytics.runs.engine import OnStatus, Publication, run_folder
from delivery.analytics.runs.small_tables import checked_names, rows_of_table, small_file
from delivery.analytics.runs.tables import TABLES_BY_NAME, TOTALS

_TYPES: Final = {
    "int": "INTEGER",
    "bigint": "BIGINT",
    "double": "DOUBLE",
    "boolean": "BOOLEAN",
    "string": "VARCHAR",
    "timestamp": "TIMESTAMPTZ",
    "date": "DATE",
}
_KIND_NAMES: Final = ("unknown", *(kind.value for kind in CODES))
_NO_ROWS: Final = (
    "(SELECT NULL::BIGINT AS delivery_hi, NULL::BIGINT AS delivery_lo,"
    " NULL::BIGINT AS order_key, NULL::UTINYINT AS code WHERE false)"
)
ReadRows = Callable[[Sequence[int]], Sequence[str]]
"""Makes views of the rows of those partitions whose segments still exist, and returns them."""


class LocalPublisher:
    """Write the tables of one run; readers do not see them before `latest.json` names it."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        files: LocalOutput,
        given: Publication,
        on_status: OnStatus,
    ) -> None:
        self._connection = connection
        self._files = files
        self._given = given
        self._on_status = on_status

    def publish(self, read: ReadRows) -> dict[str, int]:
        """Write the tables. Return the reconciliation totals."""
        given, run = self._given, self._connection.execute
        make_views(self._connection, self._files, given.manifest)
        run(queries.MACROS)
        run("CREATE OR REPLACE TABLE known AS SELECT DISTINCT what, key, name FROM names")
        known = checked_names(self._arrow("SELECT * FROM known"))
        subscriptions = {key: name for what, key, name in known if what == "subscription"}
        self._on_status("merging journeys")
        end_us = self._log_end_us()
        query = queries.journeys(end_us=end_us, unread=given.unread)
        run(f"CREATE OR REPLACE TABLE whole AS {query}")
        self._write("journeys", queries.JOURNEYS)
        self._on_status("checking paths")
        self._write_paths(read)
        self._on_status("reconciling")
        run(f"CREATE OR REPLACE TABLE balances AS {queries.balances(given.unread)}")
        self._write("reconciliation", queries.RECONCILIATION)
        self._write("missing", queries.MISSING)
        self._write("gaps", queries.GAPS)
        self._write("ages", queries.ages(end_us=end_us))
        self._write("outcomes", queries.OUTCOME_COUNTS)
        self._on_status("rolling up")
        self._write("rollups_hourly", queries.HOURLY)
        self._write("rollups_daily", queries.DAILY)
        totals = self._totals()
        given.on_books(totals)
        if given.with_findings:
            self._write_findings(subscriptions)
        return totals

    def _log_end_us(self) -> int:
        """Return the time of the newest row of any delivery, but not after now."""
        now_us = int(self._given.now.timestamp() * 1_000_000)
        ((newest,),) = self._connection.execute("SELECT max(last_us) FROM deliveries").fetchall()
        return now_us if newest is None else min(int(newest), now_us)

    def _write_paths(self, read: ReadRows) -> None:
        """Write the paths of deliveries that are not plain; keep those without new rows."""
        run = self._connection.execute
        run(
            "CREATE OR REPLACE TABLE pending AS"
            " SELECT delivery_hi, delivery_lo, events FROM whole WHERE NOT plain"
        )
        columns = "delivery_hi, delivery_lo, events, path, legal"
        empty = "NULL::BIGINT, NULL::BIGINT, NULL::BIGINT, NULL::VARCHAR, NULL::BOOLEAN"
        earlier = f"SELECT {empty} WHERE false"
        if self._given.previous_run is not None:
            folder = self._files.path(run_folder(self._given.previous_run, "paths"))
            earlier = (
                f"SELECT {columns} FROM read_parquet({quoted(f'{folder}/*.parquet')})"
                " SEMI JOIN pending USING (delivery_hi, delivery_lo, events)"
                " WHERE legal IS NOT NULL"
            )
        run(
            f"CREATE OR REPLACE TABLE earlier(delivery_hi, delivery_lo, events, path, legal)"
            f" AS {earlier}"
        )
        run("DELETE FROM pending p WHERE EXISTS (SELECT 1 FROM earlier e WHERE"
            " e.delivery_hi = p.delivery_hi AND e.delivery_lo = p.delivery_lo"
            " AND e.events = p.events)")  # fmt: skip
        # Not those between its first and its last row: one delivery of last year would have the
        # whole log read in every run.
        hours = run(
            "SELECT DISTINCT part FROM deliveries SEMI JOIN pending"
            " USING (delivery_hi, delivery_lo) ORDER BY part"
        ).fetchall()
        found = [
            f"SELECT delivery_hi, delivery_lo, order_key, code FROM {view}"
            for view in (*read([hour for (hour,) in hours]), _NO_ROWS)
        ]
        rows = " UNION ALL ".join(found)
        run(
            f"""CREATE OR REPLACE TABLE walked AS
            SELECT delivery_hi, delivery_lo, count(*) AS events,
                list(code ORDER BY order_key) AS codes
            FROM ({rows}) SEMI JOIN pending USING (delivery_hi, delivery_lo) GROUP BY ALL"""
        )
        kinds = run("SELECT DISTINCT codes FROM walked").fetchall()
        judged = pa.table(
            {
                "codes": pa.array([codes for (codes,) in kinds], pa.list_(pa.uint8())),
                "path": pa.array([_path(codes) for (codes,) in kinds], pa.string()),
                "legal": pa.array([is_legal(codes) for (codes,) in kinds], pa.bool_()),
            }
        )
        self._connection.register("judged", judged)
        run(
            f"""CREATE OR REPLACE TABLE paths AS SELECT {columns} FROM earlier UNION ALL
            SELECT p.delivery_hi, p.delivery_lo, p.events, path, legal FROM pending p
                LEFT JOIN walked USING (delivery_hi, delivery_lo, events)
                LEFT JOIN judged USING (codes)"""
        )
        self._connection.unregister("judged")
        self._write("paths", "SELECT * FROM paths")
        run(f"CREATE OR REPLACE VIEW named_journeys AS {queries.JOURNEYS}")
        self._write("anomalies", queries.ANOMALIES)

    def _write_findings(self, subscriptions: Mapping[int, str]) -> None:
        self._on_status("finding incidents")
        found = results.CofailureResult.from_cells(self._cells(), self._given.now)
        self._write_rows("cofailures", results.cofailure_rows(found.pairs, subscriptions))
        self._write_rows("incidents", results.incident_rows(found, subscriptions))
        self._on_status("replaying retries")
        rates = self._arrow(queries.SUCCESS_RATES).to_pylist()
        self._write_rows(
            "hazards", [{**row, "subscription_id": subscriptions[row["sub_key"]]} for row in rates]
        )
        keys = advice.advised_keys(rates)
        bins = self._arrow(queries.ATTEMPTS_BY_BIN, keys) if keys else None
        advised = advice.advise_all(
            self._arrow(queries.ARRIVALS, keys) if keys else None,
            advice.AdvisedSubscriptions.from_counts(rates, bins),
            self._given.now,
        )
        rows, fronts = advice.advice_rows(advised, subscriptions)
        self._write_rows("advice", rows)
        self._write_rows("advice_front", fronts)

    def _cells(self) -> AttemptCells:
        """Return the counts of attempts, or a sample of them if they are too many."""
        ((rows,),) = self._connection.execute("SELECT count(*) FROM causes").fetchall()
        step = sample_step(rows)
        query = queries.CAUSES if step == 1 else queries.sampled_causes(step)
        return AttemptCells.from_arrow(self._arrow(query), weight=step)

    def _totals(self) -> dict[str, int]:
        path = self._files.path(self._given.folder("reconciliation"))
        sums = ", ".join(f"coalesce(sum({name}), 0)::BIGINT" for name in TOTALS)
        (row,) = self._connection.execute(
            f"SELECT {sums} FROM read_parquet({quoted(f'{path}/*.parquet')})"
        ).fetchall()
        return dict(zip(TOTALS, row, strict=True))

    def _arrow(self, query: str, *values: Any) -> pa.Table:
        return self._connection.sql(query, params=list(values)).to_arrow_table()

    def _write(self, table: str, query: str) -> None:
        """Write a table with the columns, order and types of its schema."""
        columns = ", ".join(
            f"{one.name}::{_TYPES[one.type]} AS {one.name}" for one in TABLES_BY_NAME[table].columns
        )
        write_query(
            self._connection,
            f"SELECT {columns} FROM ({query})",
            self._files,
            self._given.folder(table),
        )

    def _write_rows(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        name = f"{self._given.folder(table)}/part-0.parquet"
        self._files.write(name, small_file(rows_of_table(table, rows)))


def _path(codes: Sequence[int]) -> str:
    return " ".join(_KIND_NAMES[code] for code in codes)
