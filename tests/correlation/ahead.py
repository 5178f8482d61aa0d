"""What is worked out ahead of the tests that ask for it: a test mostly waits, for Spark's driver or for the service."""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from pyspark.sql import SparkSession

from tests.correlation.analysed import Analyse, Analysed
from tests.correlation.logs import SHARING, Mixed
from tests.correlation.planted import Planted, plant
from tests.correlation.sparks import CLUSTER, HERE, Sparks

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What is under way, in this order."""

    mixed: Future[Mixed]
    whole: Future[Analysed]
    spark: Future[SparkSession]
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
            sharing = begin("sharing", lambda: plant(SHARING))
            # With settings of its own: tests analyse other logs at the same time.
            analyse = Analyse(lambda: spark.result().newSession(), folder, now)
            together = begin("together", lambda: analyse(sharing.result().rows))
            yield cls(mixed=mixed, whole=whole, spark=spark, sharing=sharing, together=together)
            pool.shutdown(cancel_futures=True)
