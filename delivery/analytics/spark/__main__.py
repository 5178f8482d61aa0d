"""Run the analysis: `python -m delivery.analytics.spark --segments URI --out URI [--full]`.

The same file works with `spark-submit … __main__.py …`.
"""

# ruff: noqa: T201 - a command line program prints

import argparse
import sys
from datetime import UTC, datetime

from delivery.analytics.spark.errors import AnalysisError
from delivery.analytics.spark.run import Analysis
from delivery.analytics.spark.session import spark_session
from rooms.safe_text import lines_safe, terminal_safe


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m delivery.analytics.spark", description="Analyse the delivery log."
    )
    parser.add_argument(
        "--segments", required=True, metavar="URI", help="address of the sealed segments"
    )
    parser.add_argument("--out", required=True, metavar="URI", help="address for tables and state")
    parser.add_argument(
        "--full",
        action="store_true",
        help="process every partition again",
    )
    return parser.parse_args()


def _print_status(text: str) -> None:
    # One write, as several threads print.
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {terminal_safe(text)}\n")
    sys.stderr.flush()


def main() -> int:
    """Run the analysis. Return exit code 0, or 1 if the analysis failed."""
    given = _arguments()
    try:
        with spark_session() as spark:
            analysis = Analysis(
                spark, segments_at=given.segments, output=given.out, on_status=_print_status
            )
            report = analysis.run(now=datetime.now(UTC), full=given.full)
    except AnalysisError as exc:
        print(f"analysis: {lines_safe(str(exc))}", file=sys.stderr)
        return 1
    if report is None:
        _print_status("no new segments")
    else:
        _print_status(
            f"run {report.run}: {report.partitions} of {report.known} partitions; {report.totals}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
