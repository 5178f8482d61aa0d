"""Analyse a folder: `python -m delivery.analytics.local --segments FOLDER --out FOLDER`."""

import sys
from contextlib import nullcontext

from delivery.analytics.local.engine import LocalEngine
from delivery.analytics.runs.command import analyse, parse_arguments, print_status


def main() -> int:
    """Run the analysis. Return its exit code."""
    given = parse_arguments(
        "delivery.analytics.local", "Analyse a small delivery log.", debug="print tracebacks"
    )
    engine = LocalEngine(segments_at=given.segments, output=given.out, on_status=print_status)
    return analyse(given, nullcontext(engine), print_status)


if __name__ == "__main__":
    sys.exit(main())
