"""Share the arguments and the output of the programs that analyse a folder."""

# ruff: noqa: T201 - a command line program prints

import sys
import traceback
from argparse import ArgumentParser, Namespace
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Final

from delivery.analytics.runs.engine import Engine, OnStatus
from delivery.analytics.runs.run import Analysis
from delivery.analytics.sealing.errors import set_aside_lines
from rooms.errors import DeliveryError
from rooms.safe_text import lines_safe, terminal_safe

EXIT_INCOMPLETE: Final = 3
_SHOWN: Final = 20


def parse_arguments(program: str, description: str, *, debug: str) -> Namespace:
    """Return `segments`, `out`, `full`, `accept_gone` and `debug`, whose help is given."""
    parser = ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument(
        "--segments", required=True, metavar="URI", help="address of the sealed segments"
    )
    parser.add_argument("--out", required=True, metavar="URI", help="address for tables and state")
    parser.add_argument("--full", action="store_true", help="process every partition again")
    parser.add_argument(
        "--accept-gone",
        action="store_true",
        help="segments that are gone were removed on purpose: keep their numbers",
    )
    parser.add_argument("--debug", action="store_true", help=debug)
    return parser.parse_args()


def print_status(text: str) -> None:
    """Print a line with the time of day on standard error."""
    # One write, as several threads print.
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {terminal_safe(text)}\n")
    sys.stderr.flush()


def analyse(given: Namespace, opened: AbstractContextManager[Engine], on_status: OnStatus) -> int:
    """Run the analysis, and report it.

    Return exit code 0; 1 if the analysis failed; 3 if segments are set aside.
    """
    try:
        with opened as engine:
            analysis = Analysis(engine)
            report = analysis.run(
                now=datetime.now(UTC), full=given.full, accept_gone=given.accept_gone
            )
            aside = analysis.set_aside()
    except DeliveryError as exc:
        if given.debug:
            traceback.print_exc()
        print(f"analysis: {lines_safe(str(exc))}", file=sys.stderr)
        return EXIT_INCOMPLETE if getattr(exc, "is_incomplete", False) else 1
    if report is None:
        on_status("no new segments")
    else:
        on_status(
            f"run {report.run}: {report.partitions} of {report.known} partitions; {report.totals}"
        )
    for line in set_aside_lines(aside, len(aside), limit=_SHOWN):
        on_status(line)
    return EXIT_INCOMPLETE if aside else 0
