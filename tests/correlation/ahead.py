"""What is worked out ahead of the tests that ask for it: a test mostly waits, for Spark's driver or for the service."""

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

from tests.correlation.analysed import Analyse, Analysed
from tests.correlation.logs import SHARING, Mixed
from tests.correlation.planted import Planted, plant
from tests.correlation.sealed import hours, write
from tests.correlation.sparks import CLUSTER, HERE, Sparks

T = TypeVar("T")


def halved(analyse: Analyse, rows: pa.Table, root: Path) -> Analysed:
    """The first three hours with a tenth of their rows held back; then, by the stream, the last hour and the tenth."""
    early, late = list(hours(rows).values())[:3], list(hours(rows).values())[3:]
    for some in early:
        write(some.slice(some.num_rows // 10), root / "segments", files=2)
    first = Analysed(segments=root / "segments", out=root / "out", report=None)
    analyse.by_command(first)
    assert first.latest()["partitions"] == len(early)
    held_back = [some.slice(0, some.num_rows // 10) for some in early[:2]] + [early[2].slice(0, early[2].num_rows // 5)]
    for some in [*held_back, *late]:
        write(some, root / "segments", name="b")
    # As after two dozen runs: what the runs left is put together as well.
    return analyse.follow(first, many=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What is under way, in this order."""

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
        """Begin what `asked` has the names of; the rest is cancelled."""
        with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:

            def begin(name: str, work: Callable[[], T]) -> Future[T]:
                begun: Future[T] = pool.submit(work) if name in asked else Future()
                if name not in asked:
                    begun.cancel()
                return begun

            mixed = pool.submit(Mixed.made)
            whole = begin("whole", lambda: Analyse(lambda: sparks.at(CLUSTER), folder, now)(mixed.result().rows))
            # Wherever it was: from here on it stays.
            spark = pool.submit(sparks.at, HERE)
            # With settings of their own: tests analyse other logs at the same time.
            analyse = Analyse(lambda: spark.result().newSession(), folder, now)
            by_halves = begin("by_halves", lambda: halved(analyse, mixed.result().rows, folder()))
            sharing = begin("sharing", lambda: plant(SHARING))
            together = begin("together", lambda: analyse(sharing.result().rows))
            yield cls(mixed=mixed, whole=whole, spark=spark, by_halves=by_halves, sharing=sharing, together=together)
            pool.shutdown(cancel_futures=True)
