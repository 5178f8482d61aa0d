"""The extra `spark`: told how to install where it is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final

from rooms.cli.errors import CliError

_ARROW: Final = ("numpy", "pyarrow")
_SPARK: Final = (*_ARROW, "pandas", "pyspark")
_PLOTS: Final = (*_ARROW, "altair", "vl_convert")


def need_arrow() -> None:
    """What reads and writes Parquet. CliError."""
    _need(_ARROW)


def need_spark() -> None:
    """What analyses. CliError."""
    _need(_SPARK)


def _need(modules: tuple[str, ...]) -> None:
    absent = [name for name in modules if find_spec(name) is None]
    if absent:
        raise CliError(f"this needs the extra `spark` ({', '.join(absent)} not found): pip install 'rooms[spark]'")
