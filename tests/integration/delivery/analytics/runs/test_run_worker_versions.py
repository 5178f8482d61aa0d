"""Test that both engines know the version of the workers, where the log names it.

Oracle: half of the workers run a broken version from a moment on, and nothing else fails.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from delivery.analytics.findings.cells import LOGGED
from tests.support.analysis_run import Analyse, Analysed, AnalyseHere
from tests.support.planted_outages import Town, plant
from tests.support.sealed_segments import START_S, hours, write

NOW = datetime(2026, 1, 9, tzinfo=UTC)
BROKEN_S = START_S + 3600 + 1200
ENDS_S = BROKEN_S + 1200


def rollout() -> pa.Table:
    """Return a log in which two of four workers run version 2.0 for twenty minutes, and fail."""
    rows = plant(Town(seed=5, minutes=118, rooms=2, per_room=3, a_minute=8.0, noise=0.0)).rows
    seconds = pc.cast(rows["ts"], pa.int64()).to_numpy() // 1_000_000
    tried = pc.equal(rows["kind"], "attempted").to_numpy()
    ours = tried & pc.is_in(rows["worker"], pa.array([2, 4], pa.int32())).to_numpy()
    broken = ours & (seconds >= BROKEN_S) & (seconds < ENDS_S)
    assert 100 < broken.sum() < tried.sum() / 4
    versions = pc.if_else(pa.array(broken), "2.0", pc.if_else(pa.array(tried), "1.0", None))
    for name, value in (("error_class", "status"), ("http_status", pa.scalar(503, pa.int32()))):
        changed = pc.if_else(pa.array(broken), value, rows[name])
        rows = rows.set_column(rows.column_names.index(name), rows.field(name), changed)
    return rows.append_column("worker_version", versions)


def forget_versions(out: Analysed) -> None:
    """Let the state and the findings be those of a version that knew no versions."""
    for path in out.out.glob("state/run=*/causes/*.parquet"):
        pq.write_table(pq.ParquetFile(path).read().drop_columns(["worker_version"]), path)
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    manifest = out.out / "state" / "manifest.json"
    document = json.loads(manifest.read_text())
    if "causes" in document["schemas"]:
        schema = json.loads(document["schemas"]["causes"])
        schema["fields"] = [one for one in schema["fields"] if one["name"] != "worker_version"]
        document["schemas"]["causes"] = json.dumps(schema)
    manifest.write_text(json.dumps(document))
    latest = out.out / "latest.json"
    latest.write_text(json.dumps({**out.latest(), "findings": None}))


@pytest.mark.parametrize("engine", ["local", "spark"])
def test_a_broken_version_is_the_cause(
    engine: str, request: pytest.FixtureRequest, folder: Callable[[], Path]
) -> None:
    """The first hour is of a version that did not log it, in its segments and in the state."""
    analyse: Analyse = (
        request.getfixturevalue("analyse") if engine == "spark" else AnalyseHere(folder, NOW)
    )
    root = folder()
    log = Analysed(segments=root / "segments", out=root / "out", report=None)
    first, *rest = hours(rollout()).values()
    write(first.drop_columns(["worker_version"]), log.segments)
    analyse.again(log)
    assert "worker_version" in LOGGED
    forget_versions(log)
    after = analyse.again(log)
    assert after.report is not None
    assert after.report.partitions == 0
    assert log.rows("incidents") == []

    for rows in rest:
        write(rows, log.segments)
    analyse.again(log)
    (row,) = log.rows("incidents")
    cause = row["causes"][0]
    assert (cause["attribute"], cause["value"]) == ("worker_version", "2.0")
    assert ("worker_version", "2.0") in {
        (change["attribute"], change["value"]) for change in row["changes"]
    }
    assert abs(row["began"].timestamp() - BROKEN_S) <= 30
    assert abs(row["ended"].timestamp() - ENDS_S) <= 30
