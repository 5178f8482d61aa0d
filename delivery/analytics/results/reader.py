"""Read the tables of the last complete run with Arrow, without Spark.

Reconciliation sums up whether deliveries are lost and whether the log is complete.
"""

import json
import os
import posixpath
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Self

import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from rooms.errors import DeliveryError, TransientError

Row = dict[str, Any]
_BATCH: Final = 1 << 16
_ROWS: Final = 1000
_ORDER: Final = ("room_id", "subscription_id", "event_type", "target_host")
"""Columns that order rows of one time."""
_MAX_HOURS: Final = 100


class NotAnalysedError(DeliveryError):
    """Report that there are no analysis tables at the address."""


class TablesReplacedError(DeliveryError, TransientError):
    """Report that later runs have replaced the tables while they were read."""


@contextmanager
def _reading() -> Iterator[None]:
    """Raise TablesReplacedError if a file is gone."""
    try:
        yield
    except FileNotFoundError as exc:
        raise TablesReplacedError(
            "later runs of the analysis have replaced the tables while they were read: try again"
        ) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisTables:
    """Read the tables of one run. Raise TablesReplacedError once later runs deleted them."""

    run: int
    at: datetime
    findings_at: datetime | None
    """Time of incidents and retry advice, which a run publishes last; None: there are none yet."""
    totals: Mapping[str, int]
    set_aside: Sequence[Mapping[str, Any]]
    """Segments that the run has not read, as in `latest.json`; the first thousand."""
    set_aside_total: int
    _files: Any
    _root: str
    _tables: Mapping[str, str]

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the tables at a local path or a URI. Raise NotAnalysedError if there are none."""
        try:
            if "://" in url:
                files, root = fs.FileSystem.from_uri(url)
            else:
                files, root = fs.LocalFileSystem(), os.path.abspath(url)  # noqa: PTH100 - a text, like URIs
            with files.open_input_stream(posixpath.join(root, "latest.json")) as stream:
                latest = json.loads(stream.read())
            run = latest["run"]
            findings = latest.get("findings", latest)
            return cls(
                run=run,
                at=datetime.fromisoformat(latest["at"]),
                findings_at=None if findings is None else datetime.fromisoformat(findings["at"]),
                totals=latest["totals"],
                set_aside=latest.get("set_aside", ()),
                set_aside_total=latest.get("set_aside_total", 0),
                _files=files,
                _root=root,
                _tables=latest["tables"],
            )
        except FileNotFoundError as exc:
            raise NotAnalysedError(
                f"no analysis yet: {url} has no tables. Run `rooms analyze`"
            ) from exc
        except (OSError, pa.ArrowInvalid) as exc:
            raise NotAnalysedError(f"{url}: {exc}") from exc
        except (ValueError, KeyError, TypeError, RecursionError) as exc:
            raise NotAnalysedError(
                "the last result is damaged\n"
                f"{url}/latest.json\n"
                "run `rooms analyze --full`, which writes it again"
            ) from exc

    @property
    def is_incomplete(self) -> bool:
        """Return True if segments are set aside, so the tables lack rows of the log."""
        return self.set_aside_total > 0

    def hours_set_aside(self) -> list[dict[str, Any]]:
        """Return the hours whose segments were not read, without the names of the segments.

        At most 100 are named. Segments that are not listed by name have no hour.
        """
        found = Counter((one["part"], one["reason"]) for one in self.set_aside)
        if (rest := self.set_aside_total - found.total()) > 0:
            found[None, "others"] += rest
        ordered = sorted(
            found.items(), key=lambda item: (item[0][0] is None, item[0][0] or 0, item[0][1])
        )
        return [
            {
                "hour": None if part is None else _hour_text(part),
                "reason": reason,
                "segments": number,
            }
            for (part, reason), number in ordered[:_MAX_HOURS]
        ]

    @_reading()
    def rows(self, table: str) -> list[Row]:
        """Return the rows of a table that does not grow with the log."""
        tables = self._dataset(table)
        read: list[Row] = [] if tables is None else tables.to_table().to_pylist()
        return read

    def each_row(self, table: str, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yield the rows of a table that grows with the log, a thousand of them in memory."""
        with _reading():
            tables = self._dataset(table)
            if tables is None:
                return
            for batch in tables.to_batches(
                columns=None if columns is None else list(columns),
                batch_size=_ROWS,
                batch_readahead=1,
                fragment_readahead=1,
            ):
                yield from batch.to_pylist()

    def newest_rows(self, table: str, by: str, *, within: timedelta | None = None) -> Iterator[Row]:
        """Yield the rows of a table, the newest by a time first; `within` of the newest, if given.

        Only these are in memory, as columns; as rows, a thousand at a time.
        """
        with _reading():
            tables = self._dataset(table)
            if tables is None:
                return
            newer = None
            if within is not None:
                newest = max(
                    (
                        found
                        for batch in tables.to_batches(columns=[by])
                        if (found := pc.max(batch.column(by)).as_py()) is not None
                    ),
                    default=None,
                )
                # Hours after the analysis are of a clock that was wrong.
                newer = None if newest is None else ds.field(by) > min(newest, self.at) - within
            found = tables.to_table(filter=newer)
            order = [by, *(name for name in _ORDER if name in found.column_names)]
            for batch in found.sort_by([(name, "descending") for name in order]).to_batches(
                max_chunksize=_ROWS
            ):
                yield from batch.to_pylist()

    @_reading()
    def distinct(self, table: str, columns: Sequence[str]) -> list[Row]:
        """Return each combination of values that some columns of a table have."""
        tables = self._dataset(table)
        if tables is None:
            return []
        kept = None
        for batch in tables.to_batches(columns=list(columns), batch_size=_BATCH):
            part = pa.Table.from_batches([batch])
            both = part if kept is None else pa.concat_tables([kept, part])
            kept = both.group_by(list(columns)).aggregate([])
        rows: list[Row] = [] if kept is None else kept.to_pylist()
        return rows

    def batches(self, table: str, columns: Sequence[str]) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yield columns of a large table in batches; nulls turn integers into floats with NaN."""
        with _reading():
            tables = self._dataset(table)
            if tables is None:
                return
            for batch in tables.to_batches(
                columns=list(columns), batch_size=_BATCH, batch_readahead=1, fragment_readahead=1
            ):
                if batch.num_rows:
                    yield {
                        name: batch.column(name).to_numpy(zero_copy_only=False) for name in columns
                    }

    def _dataset(self, table: str) -> Any:
        if table not in self._tables:
            return None
        folder = posixpath.join(self._root, self._tables[table])
        found = self._files.get_file_info(fs.FileSelector(folder))
        paths = sorted(one.path for one in found if one.base_name.endswith(".parquet"))
        if not paths:
            # A table without rows has a file as well; files are deleted before their folder.
            raise FileNotFoundError(folder)
        schema = pq.read_schema(paths[0], filesystem=self._files)
        return ds.dataset(paths, schema=schema, filesystem=self._files, format="parquet")


def _hour_text(part: int) -> str:
    return datetime.fromtimestamp(part * 3600, UTC).isoformat()


RowMapping = Mapping[str, Any]
_KEYS: Final = frozenset({"hour", "room_id"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """Total all rooms and hours, with discrepancies by room and gaps in the log."""

    totals: Mapping[str, int]
    rooms: Mapping[int, Mapping[str, int]]
    """Only rooms with missing, lost or stuck deliveries, or with a contradiction of the log."""
    gaps: Sequence[RowMapping]
    is_incomplete: bool = False
    """True if segments are set aside: rows that seem to be missing may be in them."""

    @property
    def lost(self) -> int:
        """Return the number of deliveries that exist, and that no state explains."""
        return self._sum("lost")

    @property
    def missing(self) -> int:
        """Return the number of expected deliveries that do not exist."""
        return self._sum("missing")

    @property
    def stuck(self) -> int:
        """Return the number of deliveries that stand far beyond their time."""
        return self._sum("stuck")

    @property
    def has_losses(self) -> bool:
        """Return True if a delivery is lost or missing, or a total is wrong."""
        return bool(
            self.lost
            or self.missing
            or self._sum("residual_fanout")
            or self._sum("residual_outcome")
        )

    @property
    def log_rows_missing(self) -> int:
        """Return the number of missing log rows, as far as the log reaches back."""
        return sum(gap["missing"] for gap in self.gaps if not gap["before"])

    @property
    def holes(self) -> int:
        """Return the number of deliveries whose beginning is a hole of the log, and residuals."""
        return sum(
            abs(self._sum(name))
            for name in ("never_enqueued", "residual_fanout", "residual_outcome")
        )

    @property
    def contradictions(self) -> int:
        """Return the number of rows that create a delivery again, or one that is not expected."""
        return self._sum("enqueued_twice") + self._sum("excess")

    @property
    def unanchored(self) -> int:
        """Return the number of deliveries of messages whose publish is not in the log."""
        return self._sum("unanchored")

    @property
    def is_balanced(self) -> bool:
        """Return True if no delivery is lost, and the log is complete and consistent."""
        return not (
            self.has_losses
            or self.log_rows_missing
            or self.holes
            or self.contradictions
            or self.unanchored
            or self.is_incomplete
        )

    def describe(self) -> dict[str, Any]:
        """Return the totals for JSON output."""
        return {
            "closed": self.is_balanced,
            "incomplete": self.is_incomplete,
            "lost": self.lost,
            "missing": self.missing,
            "log_rows_missing": self.log_rows_missing,
            **self.totals,
            "rooms": [{"room_id": room, **found} for room, found in self.rooms.items()],
            "gaps": [dict(gap) for gap in self.gaps],
        }

    def _sum(self, name: str) -> int:
        return self.totals.get(name, 0)


def read_reconciliation(
    read: Callable[[str], Iterable[RowMapping]], *, is_incomplete: bool = False
) -> Reconciliation:
    """Sum up the tables `reconciliation` and `gaps`."""
    sums: dict[str, int] = {}
    rooms: dict[int, dict[str, int]] = {}
    for row in read("reconciliation"):
        of_room = rooms.setdefault(row["room_id"], {})
        for name, value in row.items():
            if name not in _KEYS:
                sums[name] = sums.get(name, 0) + value
                of_room[name] = of_room.get(name, 0) + value
    wrong = (
        "lost", "missing", "stuck", "never_enqueued", "unanchored", "excess", "enqueued_twice",
    )  # fmt: skip
    discrepancies = {
        room: {name: of.get(name, 0) for name in wrong}
        for room, of in sorted(rooms.items())
        if any(map(of.get, wrong))
    }
    return Reconciliation(
        totals=sums, rooms=discrepancies, gaps=list(read("gaps")), is_incomplete=is_incomplete
    )


def oldest_first(ages: Sequence[RowMapping]) -> list[RowMapping]:
    """Sort rows of `ages`: what needs a decision first, then the oldest."""
    order = ("lost", "stuck", "unknown", "in_flight", "held", "waiting", "sidelined")
    return sorted(
        ages,
        key=lambda row: (
            order.index(row["outcome"]),
            -(row["oldest_age_s"] or 0.0),
            row["room_id"],
        ),
    )
