"""`python -m delivery.correlation --segments URI --out URI [--full]`, and unchanged: `spark-submit … __main__.py …`."""

# ruff: noqa: T201 a job that people start tells them what it does

import argparse
import sys
from datetime import UTC, datetime

from delivery.correlation.analysis import Analysis
from delivery.correlation.errors import AnalysisError
from delivery.correlation.session import spark_session
from rooms.terminal import lines_safe, terminal_safe


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m delivery.correlation", description="Analyse the delivery log.")
    parser.add_argument("--segments", required=True, metavar="URI", help="where the sealed segments lie")
    parser.add_argument("--out", required=True, metavar="URI", help="where tables and state go")
    parser.add_argument("--full", action="store_true", help="work on every partition again, whatever was done before")
    return parser.parse_args()


def _tell(line: str) -> None:
    # In one piece: several threads tell.
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {terminal_safe(line)}\n")
    sys.stderr.flush()


def main() -> int:
    """Exit code 0; 1 where the analysis cannot go on."""
    given = _arguments()
    try:
        with spark_session() as spark:
            analysis = Analysis(spark, segments_at=given.segments, out=given.out, tell=_tell)
            report = analysis.run(now=datetime.now(UTC), full=given.full)
    except AnalysisError as exc:
        print(f"analysis: {lines_safe(str(exc))}", file=sys.stderr)
        return 1
    if report is None:
        _tell("nothing is new")
    else:
        _tell(f"run {report.run}: {report.partitions} of {report.known} partitions; {report.totals}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
