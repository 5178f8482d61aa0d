"""Run analyses ahead of the tests that use them, as tests mostly wait for Spark or the service."""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from pyspark.sql import SparkSession

from tests.support.analysis_logs import SHARING, Mixed
from tests.support.analysis_run import Analyse, Analysed
from tests.support.planted_outages import Planted, plant
from tests.support.sealed_segments import hours, write
from tests.support.spark_sessions import CLUSTER, HERE, Sparks

T = TypeVar("T")


def halved(analyse: Analyse, rows: pa.Table, root: Path) -> Analysed:
    """Analyse three hours without a tenth of their rows, then the rest through the stream."""
    early, late = list(hours(rows).values())[:3], list(hours(rows).values())[3:]
    for some in early:
        write(some.slice(some.num_rows // 10), root / "segments", files=2)
    first = Analysed(segments=root / "segments", out=root / "out", report=None)
    analyse.by_command(first)
    assert first.latest()["partitions"] == len(early)
    held_back = [some.slice(0, some.num_rows // 10) for some in early[:2]] + [
        early[2].slice(0, early[2].num_rows // 5)
    ]
    for some in [*held_back, *late]:
        write(some, root / "segments", name="b")
    # As after two dozen runs, so that the state is compacted too.
    return analyse.follow(first, many=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """Analyses in progress, in order of start."""

    mixed: Future[Mixed]
    whole: Future[Analysed]
    spark: Future[SparkSession]
    by_halves: Future[Analysed]
    sharing: Future[Planted]
    together: Future[Analysed]

    @classmethod
    @contextmanager
    def begun(
        cls, sparks: Sparks, folder: Callable[[], Path], now: datetime, asked: AbstractSet[str]
    ) -> "Iterator[Ahead]":
        """Start the fixtures named in `asked`, and cancel all others."""
        asked = asked | {"sharing"} if "together" in asked else asked
        with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:

            def begin(name: str, work: Callable[[], T]) -> Future[T]:
                begun: Future[T] = pool.submit(work) if name in asked else Future()
                if name not in asked:
                    begun.cancel()
                return begun

            mixed = pool.submit(Mixed.made)
            whole = begin(
                "whole",
                lambda: Analyse(lambda: sparks.at(CLUSTER), folder, now)(mixed.result().rows),
            )
            # The session stays at this master from here on.
            spark = pool.submit(sparks.at, HERE)
            # With separate settings, as tests analyse other logs at the same time.
            analyse = Analyse(lambda: spark.result().newSession(), folder, now)
            by_halves = begin("by_halves", lambda: halved(analyse, mixed.result().rows, folder()))
            sharing = begin("sharing", lambda: plant(SHARING))
            together = begin("together", lambda: analyse(sharing.result().rows))
            yield cls(
                mixed=mixed,
                whole=whole,
                spark=spark,
                by_halves=by_halves,
                sharing=sharing,
                together=together,
            )
            pool.shutdown(cancel_futures=True)
