"""Make folders of sealed segments."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from delivery.analytics.sealing.check import CheckedSegments, KnownSegment, check_segments
from delivery.analytics.sealing.files import LocalFiles
from tests.support.planted_outages import Town, plant
from tests.support.sealed_segments import hours, write_sealed

Check = Callable[..., CheckedSegments]
NOW_MS = 1 << 50
"""So late that every unfinished file is old."""


@pytest.fixture(scope="session")
def hourly() -> dict[str, pa.Table]:
    """Return the rows of three hours by folder."""
    town = Town(seed=7, minutes=170, rooms=2, per_room=2, a_minute=1.5)
    found = hours(plant(town).rows)
    assert len(found) == 3
    return found


@pytest.fixture
def root(tmp_path: Path, hourly: dict[str, pa.Table]) -> Path:
    """Return a folder with one sealed segment in each of three hours."""
    folder = tmp_path / "segments"
    for name, rows in hourly.items():
        write_sealed(rows, folder, f"{name}/a.parquet")
    return folder


@pytest.fixture
def check(root: Path) -> Check:
    """Return a function that checks the folder."""

    def run(
        known: dict[str, KnownSegment] | None = None,
        *,
        now_ms: int = NOW_MS,
        trust_known: bool = True,
    ) -> CheckedSegments:
        return check_segments(
            LocalFiles(str(root)), known or {}, now_ms=now_ms, trust_known=trust_known
        )

    return run
