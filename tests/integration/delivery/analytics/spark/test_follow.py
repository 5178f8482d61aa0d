"""Test when the stream of new segments starts an analysis; `test_engine` tests the results."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from delivery.analytics.runs.errors import AnalysisError, StateError
from delivery.analytics.spark.follow import CHECKPOINT, follow_segments
from tests.support.planted_outages import Town, plant
from tests.support.sealed_segments import hours, write

EVERY_S = 0.2


def test_processes_new_files_and_continues_after_a_restart(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Unsealed files, and files seen before a restart, start nothing."""
    town = Town(seed=3, minutes=130, rooms=1, per_room=1, a_minute=0.2)
    first, second, *_ = (rows for rows in hours(plant(town).rows).values())
    segments, out = tmp_path / "segments", tmp_path / "out"
    done: list[int] = []

    def work() -> None:
        done.append(len(list(segments.rglob("*.parquet"))))

    with follow_segments(
        spark, segments_at=str(segments), output=str(out), work=work, every_s=EVERY_S
    ) as stream:
        stream.catch_up()
        assert done == []
        write(first, segments)
        stream.catch_up()
        assert done == [1]
        stream.catch_up()
        (sealed,) = segments.rglob("*.parquet")
        (sealed.parent / "_b-0.parquet.1234").write_bytes(b"half of a segm")
        stream.catch_up()
        assert done == [1]
        write(second, segments)
        stream.catch_up()
        assert done == [1, 2]
    with follow_segments(
        spark, segments_at=str(segments), output=str(out), work=work, every_s=EVERY_S
    ) as stream:
        stream.catch_up()
    assert done == [1, 2]
    assert (out / CHECKPOINT).is_dir()


def test_an_error_of_a_run_ends_the_stream(spark: SparkSession, tmp_path: Path) -> None:
    write(
        plant(Town(seed=3, minutes=30, rooms=1, per_room=1, a_minute=0.2)).rows,
        tmp_path / "segments",
    )

    def work() -> None:
        raise StateError("run once with --full")

    places = {"segments_at": str(tmp_path / "segments"), "output": str(tmp_path / "out")}
    with (
        follow_segments(spark, **places, work=work, every_s=EVERY_S) as stream,
        pytest.raises(AnalysisError, match="run once with --full"),
    ):
        stream.catch_up()
