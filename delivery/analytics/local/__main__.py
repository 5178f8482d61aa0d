"""Analyse a folder: `python -m delivery.analytics.local --segments FOLDER --out FOLDER`."""

# ruff: noqa: T201 - a command line program prints

import argparse
import sys
import traceback
from datetime import UTC, datetime
from typing import Final

from delivery.analytics.local.engine import LocalEngine
from delivery.analytics.runs.run import Analysis
from delivery.analytics.sealing.reasons import set_aside_lines
from delivery.errors import DeliveryError
from rooms.safe_text import lines_safe, terminal_safe

_EXIT_INCOMPLETE: Final = 3
_SHOWN: Final = 20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m delivery.analytics.local", description="Analyse a small delivery log."
    )
    parser.add_argument("--segments", required=True, help="folder of the sealed segments")
    parser.add_argument("--out", required=True, help="folder for tables and state")
    parser.add_argument("--full", action="store_true", help="process every partition again")
    parser.add_argument(
        "--accept-gone",
        action="store_true",
        help="segments that are gone were removed on purpose: keep their numbers",
    )
    parser.add_argument("--debug", action="store_true", help="print tracebacks")
    return parser.parse_args()


def _print_status(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {terminal_safe(text)}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the analysis.

    Return exit code 0; 1 if the analysis failed; 3 if segments are set aside.
    """
    given = _arguments()
    analysis = Analysis(
        LocalEngine(segments_at=given.segments, output=given.out, on_status=_print_status)
    )
    try:
        report = analysis.run(now=datetime.now(UTC), full=given.full, accept_gone=given.accept_gone)
        aside = analysis.set_aside()
    except DeliveryError as exc:
        if given.debug:
            traceback.print_exc()
        print(f"analysis: {lines_safe(str(exc))}", file=sys.stderr)
        return _EXIT_INCOMPLETE if getattr(exc, "is_incomplete", False) else 1
    if report is None:
        _print_status("no new segments")
    else:
        _print_status(
            f"run {report.run}: {report.partitions} of {report.known} partitions; {report.totals}"
        )
    for line in set_aside_lines(aside, len(aside), limit=_SHOWN):
        _print_status(line)
    return _EXIT_INCOMPLETE if aside else 0


if __name__ == "__main__":
    sys.exit(main())
