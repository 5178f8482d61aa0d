"""The extra `spark`: told how to install where it is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final

from rooms.cli.errors import CliError

_ARROW: Final = ("numpy", "pyarrow")
_PLOTS: Final = (*_ARROW, "altair", "vl_convert")
_SPARK: Final = (*_ARROW, "pandas", "pyspark")


def need_arrow() -> None:
    """What reads and writes Parquet. CliError."""
    _need(_ARROW)


def need_plots() -> None:
    """What draws. CliError."""
    _need(_PLOTS)


def need_spark() -> None:
    """What analyses. CliError."""
    _need(_SPARK)


@contextmanager
def explained() -> Iterator[None]:
    """Errors of the export, the analysis and PostgreSQL as the command line tells them."""
    from delivery.errors import DeliveryError
    from rooms.errors import RoomsError

    try:
        yield
    except (DeliveryError, RoomsError) as exc:
        raise CliError(str(exc)) from exc


def _need(modules: tuple[str, ...]) -> None:
    absent = [name for name in modules if find_spec(name) is None]
    if absent:
        raise CliError(f"this needs the extra `spark` ({', '.join(absent)} not found): pip install 'rooms[spark]'")
