"""The tables of the last whole run of the analysis, read by Arrow without Spark."""

import json
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow import fs

from delivery.errors import DeliveryError

Row = dict[str, Any]
_BATCH: Final = 1 << 16


class NotAnalysedError(DeliveryError):
    """There are no tables at the address: nothing was analysed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One run's tables."""

    run: int
    at: datetime
    totals: Mapping[str, int]
    _files: Any
    _root: str
    _tables: Mapping[str, str]

    @classmethod
    def open(cls, url: str) -> Self:
        """What lies at the address, a local path or a URI. NotAnalysedError."""
        try:
            if "://" in url:
                files, root = fs.FileSystem.from_uri(url)
            else:
                files, root = fs.LocalFileSystem(), os.path.abspath(url)  # noqa: PTH100 - of text, as the others are
            with files.open_input_stream(posixpath.join(root, "latest.json")) as stream:
                told = json.loads(stream.read())
        except FileNotFoundError as exc:
            raise NotAnalysedError(f"nothing was analysed yet: {url} has no tables. Run `rooms analyze`") from exc
        except (OSError, pa.ArrowInvalid) as exc:
            raise NotAnalysedError(f"{url}: {exc}") from exc
        return cls(
            run=told["run"],
            at=datetime.fromisoformat(told["at"]),
            totals=told["totals"],
            _files=files,
            _root=root,
            _tables=told["tables"],
        )

    def rows(self, table: str, columns: Sequence[str] | None = None, *, where: Any = None) -> list[Row]:
        """The rows of a table; `where`: an expression of Arrow about its columns."""
        tables = self._dataset(table)
        if tables is None:
            return []
        read: list[Row] = tables.to_table(columns=None if columns is None else list(columns), filter=where).to_pylist()
        return read

    def batches(self, table: str, columns: Sequence[str]) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """The columns of a large table, some rows at a time; nulls of a number make it a fraction with NaN."""
        tables = self._dataset(table)
        if tables is None:
            return
        for batch in tables.to_batches(
            columns=list(columns), batch_size=_BATCH, batch_readahead=1, fragment_readahead=1
        ):
            if batch.num_rows:
                yield {name: batch.column(name).to_numpy(zero_copy_only=False) for name in columns}

    def _dataset(self, table: str) -> Any:
        folder = posixpath.join(self._root, self._tables[table])
        found = self._files.get_file_info(fs.FileSelector(folder))
        paths = sorted(one.path for one in found if one.base_name.endswith(".parquet"))
        if not paths:
            return None
        schema = pq.read_schema(paths[0], filesystem=self._files)
        return ds.dataset(paths, schema=schema, filesystem=self._files, format="parquet")
