"""Give the tests of the export a log that is written, and a folder for its segments."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from delivery.analytics.export.exporter import Exporter
from tests.support.exported_log import LogWriter, writer


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "segments"


@pytest.fixture
def exporter(database: str, out: Path) -> Exporter:
    return Exporter(database, str(out))


@pytest.fixture
def scribe(database: str) -> Iterator[LogWriter]:
    with writer(database, 1) as one:
        yield one
