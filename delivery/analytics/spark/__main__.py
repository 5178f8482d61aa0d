"""Run the analysis: `python -m delivery.analytics.spark --segments URI --out URI [--full]`.

The same file works with `spark-submit … __main__.py …`.
"""

import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from delivery.analytics.runs.command import analyse, parse_arguments, print_status
from delivery.analytics.runs.engine import Engine
from delivery.analytics.spark.engine import SparkEngine
from delivery.analytics.spark.session import spark_session


@contextmanager
def _engine(given: Namespace) -> Iterator[Engine]:
    """Open Spark. Its log is kept if the analysis fails."""
    log = None if given.debug else Path(tempfile.mkdtemp(prefix="rooms-analysis-"), "spark.log")
    with spark_session(log=log) as spark:
        yield SparkEngine(
            spark, segments_at=given.segments, output=given.out, on_status=print_status
        )
    if log is not None:
        shutil.rmtree(log.parent, ignore_errors=True)


def main() -> int:
    """Run the analysis. Return its exit code."""
    given = parse_arguments(
        "delivery.analytics.spark",
        "Analyse the delivery log.",
        debug="print everything that Spark logs, and tracebacks",
    )
    return analyse(given, _engine(given), print_status)


if __name__ == "__main__":
    sys.exit(main())
