"""The stream of new segments: when it has the analysis done, and when not. What a run makes of them, `test_incremental` says."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from delivery.correlation.errors import AnalysisError, StateError
from delivery.correlation.follow import CHECKPOINT, following
from tests.correlation.planted import Town, plant
from tests.correlation.sealed import hours, write

EVERY_S = 0.2


def test_it_works_on_what_is_new_and_goes_on_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    """Files that are not sealed yet, and those that were seen before a restart, call for nothing."""
    town = Town(seed=3, minutes=130, rooms=1, per_room=1, a_minute=0.2)
    first, second, *_ = (rows for rows in hours(plant(town).rows).values())
    segments, out = tmp_path / "segments", tmp_path / "out"
    done: list[int] = []

    def work() -> None:
        done.append(len(list(segments.rglob("*.parquet"))))

    with following(spark, segments_at=str(segments), out=str(out), work=work, every_s=EVERY_S) as stream:
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
    with following(spark, segments_at=str(segments), out=str(out), work=work, every_s=EVERY_S) as stream:
        stream.catch_up()
    assert done == [1, 2]
    assert (out / CHECKPOINT).is_dir()


def test_what_stops_a_run_ends_the_stream_with_its_own_words(spark: SparkSession, tmp_path: Path) -> None:
    write(plant(Town(seed=3, minutes=30, rooms=1, per_room=1, a_minute=0.2)).rows, tmp_path / "segments")

    def work() -> None:
        raise StateError("run once with --full")

    places = {"segments_at": str(tmp_path / "segments"), "out": str(tmp_path / "out")}
    with (
        following(spark, **places, work=work, every_s=EVERY_S) as stream,
        pytest.raises(AnalysisError, match="run once with --full"),
    ):
        stream.catch_up()
