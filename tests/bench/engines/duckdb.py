"""`python -m tests.bench.engines.duckdb SEGMENTS`: the core of the analysis in DuckDB."""

# ruff: noqa: T201 what a bench measures is printed

import sys
from pathlib import Path

from tests.support.duckdb_oracle import HOURLY, JOURNEYS, MISSING, PAIRS, Oracle


def main() -> None:
    oracle = Oracle(Path(sys.argv[1]))
    for query in (JOURNEYS, MISSING, HOURLY, PAIRS):
        print(oracle.count(query))


if __name__ == "__main__":
    main()
