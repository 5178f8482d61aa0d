"""Load the rows of segments into DuckDB as numbers: kinds by code, names by key.

Files are read one batch after another by Arrow, which verifies the checksums of pages. DuckDB
holds the rows below its memory limit, or else in its folder of temporary files.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from delivery.analytics.runs.conformance import ATTEMPT_SHIFT, CODES, GENERATION_SHIFT, order_base
from delivery.analytics.runs.errors import LocalFailedError, name_collision
from delivery.analytics.runs.keys import text_key
from delivery.analytics.runs.manifest import Partition
from delivery.analytics.sealing.layout import LOG_VERSION, NEVER_NULL
from delivery.analytics.sealing.manifest import SegmentManifest, WriterRange

_NUMBERS: Final = (
    "room_id", "message_hi", "message_lo", "writer_id", "writer_seq", "xid", "delivery_hi",
    "delivery_lo", "generation", "attempt", "event_version", "fanout", "policy_version",
    "delay_ms", "latency_ms", "worker", "http_status", "schema_version",
)  # fmt: skip
_TEXTS: Final = ("worker_host", "worker_version", "error_class")
NAMED: Final = {
    "subscription": ("sub_key", "subscription_id"),
    "type": ("type_key", "event_type"),
    "host": ("host_key", "target_host"),
}
"""Columns of keys, and the texts that they stand for, by what they name."""
_ENCODED: Final = ("kind", *(text for _, text in NAMED.values()))
_READ: Final = (*_NUMBERS, *_TEXTS, *_ENCODED, "ts", "message_id")
_BATCH_ROWS: Final = 1 << 17
_HOUR_US: Final = 3_600_000_000
_TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(_NUMBERS, "INTEGER"),
    **dict.fromkeys(
        ("message_hi", "message_lo", "writer_seq", "xid", "delivery_hi", "delivery_lo", "delay_ms"),
        "BIGINT",
    ),
    "latency_ms": "FLOAT",
}
_COLUMNS: Final = ", ".join(
    (
        "part INTEGER, file INTEGER, whole BOOLEAN, code UTINYINT, ts_us BIGINT",
        *(f"{name} {kind}" for name, kind in _TYPES.items()),
        *(f"{name} VARCHAR" for name in _TEXTS),
        *(f"{key} BIGINT" for key, _ in NAMED.values()),
    )
)


class SegmentRows:
    """Read rows of segments into one DuckDB, with the names of their keys."""

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, root: str, view: str, salt: str
    ) -> None:
        """`view`: the name of the rows without duplicates. `salt`: of the state's keys."""
        self._salt = salt
        self._connection = connection
        self._root = root
        self._view = view
        self._loaded = f"loaded_{view}"
        self.paths: list[str] = []
        """The segments that were loaded, in their order."""
        self.names: dict[tuple[str, int], str] = {}
        self._keys: dict[tuple[str, str], int] = {}
        connection.execute(f"CREATE OR REPLACE TABLE {self._loaded} ({_COLUMNS})")

    def load(self, partitions: Collection[Partition]) -> None:
        """Load all segments of partitions. Raise LocalFailedError if one cannot be read."""
        for one in partitions:
            for path in sorted(one.files):
                self._load_file(one.part, path)

    def _load_file(self, part: int, path: str) -> None:
        number = len(self.paths)
        self.paths.append(path)
        at = Path(self._root, path)
        try:
            with pq.ParquetFile(
                at, page_checksum_verification=True, read_dictionary=list(_ENCODED)
            ) as file:
                present = set(file.schema_arrow.names)
                columns = [name for name in _READ if name in present]
                for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
                    self._insert(pa.Table.from_batches([batch]), part, number)
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise LocalFailedError(
                f"a segment cannot be read: {str(exc).splitlines()[0]}",
                where=str(at),
                remedy="run it again; what is damaged is then set aside",
            ) from exc

    def _insert(self, rows: pa.Table, part: int, number: int) -> None:
        # Segments of earlier versions lack later columns, which are null then.
        present = set(rows.column_names)
        columns = {name: rows.column(name) for name in (*_NUMBERS, *_TEXTS) if name in present}
        columns["message_id"] = rows.column("message_id").is_valid()
        columns["kind"] = rows.column("kind").is_valid()
        columns["ts_us"] = rows.column("ts").cast(pa.int64())
        columns["code"] = _mapped(rows.column("kind"), _code)
        for what, (key, text) in NAMED.items():
            columns[key] = _mapped(rows.column(text), self._namer(what))
        whole = " AND ".join(
            name if name in {"message_id", "kind"} else f"{_stored(name)} IS NOT NULL"
            for name in NEVER_NULL
        )
        self._connection.register("batch", pa.table(columns))
        self._connection.execute(
            f"INSERT INTO {self._loaded} BY NAME SELECT * EXCLUDE (message_id, kind),"
            f" {part} AS part, {number} AS file, {whole} AS whole FROM batch"
        )
        self._connection.unregister("batch")

    def _namer(self, what: str) -> Callable[[str], int]:
        def key_of(text: str) -> int:
            known = self._keys.get((what, text))
            if known is not None:
                return known
            key = text_key(text, self._salt)
            other = self.names.setdefault((what, key), text)
            if other != text:
                raise name_collision(what, other, text)
            self._keys[what, text] = key
            return key

        return key_of

    def register_names(self, view: str) -> None:
        """Make a view (part, what, key, name) of the names in the rows of each partition."""
        found = [(what, key, name) for (what, key), name in self.names.items()]
        columns = zip(*found, strict=True) if found else ((), (), ())
        types = (pa.string(), pa.int64(), pa.string())
        named = [pa.array(list(column), kind) for column, kind in zip(columns, types, strict=True)]
        self._connection.register("all_names", pa.table(named, names=["what", "key", "name"]))
        used = " UNION ALL ".join(
            f"SELECT DISTINCT part, '{what}' AS what, {key} AS key FROM {self._view}"
            for what, (key, _) in NAMED.items()
        )
        self._connection.execute(
            f"CREATE OR REPLACE VIEW {view} AS"
            f" SELECT part, what, key, name FROM ({used}) JOIN all_names USING (what, key)"
        )

    def contradictions(self, manifests: Mapping[str, SegmentManifest]) -> dict[str, str]:
        """Return which of these segments have rows that their manifests do not state."""
        numbers = {number: path for number, path in enumerate(self.paths) if path in manifests}
        if not numbers:
            return {}
        refused: dict[str, str] = {}
        found: dict[str, dict[int, WriterRange]] = {}
        for number, writer, rows, first, last, wrong in self._connection.execute(
            f"""SELECT file, writer_id, count(*), min(writer_seq), max(writer_seq),
                count(*) FILTER (coalesce(NOT whole OR code = 0 OR schema_version > {LOG_VERSION}
                    OR writer_seq < 1 OR ts_us // {_HOUR_US} <> part, true))
            FROM {self._loaded} GROUP BY file, writer_id"""
        ).fetchall():
            path = numbers.get(number)
            if path is None:
                continue
            if wrong:
                refused[path] = f"{wrong} of its rows are not what its manifest states"
            else:
                found.setdefault(path, {})[writer] = WriterRange(rows=rows, first=first, last=last)
        for path, manifest in manifests.items():
            if path not in refused and found.get(path, {}) != dict(manifest.writers):
                refused[path] = "its writers and their numbers are not those of its manifest"
        return refused

    def keep(self, partitions: Collection[Partition]) -> None:
        """Drop the rows of all other segments."""
        kept = {path for one in partitions for path in one.files}
        others = [number for number, path in enumerate(self.paths) if path not in kept]
        if others:
            self._connection.execute(
                f"DELETE FROM {self._loaded} WHERE list_contains(?, file)",
                [others],
            )

    def finish(self) -> dict[int, int]:
        """Make the view without duplicates. Return the number of duplicates by partition.

        A row has one time, so its duplicates are in one partition.
        """
        self._connection.execute(
            f"""CREATE OR REPLACE TABLE {self._view}_numbers AS
            SELECT part, writer_id, writer_seq, count(*) AS copies
            FROM {self._loaded} GROUP BY ALL"""
        )
        doubled = dict(
            self._connection.execute(
                f"""SELECT part, sum(copies - 1)::BIGINT FROM {self._view}_numbers
                WHERE copies > 1 GROUP BY part ORDER BY part"""
            ).fetchall()
        )
        if doubled:
            self._connection.execute(
                f"""DELETE FROM {self._loaded} WHERE rowid IN (
                    SELECT row FROM (SELECT l.rowid AS row, row_number() OVER (
                        PARTITION BY part, writer_id, writer_seq ORDER BY xid, code) AS copy
                    FROM {self._loaded} l SEMI JOIN (FROM {self._view}_numbers WHERE copies > 1) n
                        USING (part, writer_id, writer_seq)) WHERE copy > 1)"""
            )
        bases = ", ".join(map(str, (0, *(order_base(kind) for kind in CODES))))
        self._connection.execute(
            f"""CREATE OR REPLACE VIEW {self._view} AS SELECT *,
                (message_hi >> 16) & {(1 << 48) - 1} AS born_ms,
                ([{bases}]::BIGINT[])[code + 1]
                    + (coalesce(generation, 0)::BIGINT << {GENERATION_SHIFT})
                    + (coalesce(attempt, 0)::BIGINT << {ATTEMPT_SHIFT}) AS order_key,
                floor(latency_ms::DOUBLE * 1000.0 + 0.5)::BIGINT AS latency_us
            FROM {self._loaded}"""
        )
        return doubled


def _stored(name: str) -> str:
    return "ts_us" if name == "ts" else name


_KIND_CODES: Final = {kind.value: code for kind, code in CODES.items()}


def _code(kind: str) -> int:
    return _KIND_CODES.get(kind, 0)


def _mapped(column: pa.ChunkedArray, number_of: Callable[[str], int]) -> pa.ChunkedArray:
    """Return a number for each text of a dictionary column; null for null."""
    return pa.chunked_array(list(_mapped_chunks(column, number_of)), pa.int64())


def _mapped_chunks(column: pa.ChunkedArray, number_of: Callable[[str], int]) -> Iterator[pa.Array]:
    for chunk in column.chunks:
        texts = chunk.dictionary.to_pylist()
        numbers = [None if text is None else number_of(text) for text in texts]
        yield pa.array(numbers, pa.int64()).take(chunk.indices)
