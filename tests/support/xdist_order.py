"""Order tests and assign them to processes.

`pytest -n 2 --dist loadfile`.
"""

from typing import Final

import pytest
from xdist.scheduler import LoadFileScheduling

ANALYSIS: Final = "tests/integration/delivery/analytics/"
_WITHOUT_SPARK: Final = f"{ANALYSIS}export/"
# Of the analysis first what waits for the service, last what is analysed last (`prepared_analyses.py`).
_LONGEST_FIRST: Final = (
    *(
        f"{ANALYSIS}{file}.py"
        for file in (
            "results/test_pipeline",
            "spark/test_engine",
            "spark/test_follow",
            "spark/test_journeys",
        )
    ),
    f"{ANALYSIS}spark/",
    "tests/faults/",
    "tests/e2e/",
    "tests/contract/",
    "tests/integration/",
)


def rank(nodeid: str) -> int:
    """Start files that take minutes first; short ones fill the ends."""
    found = [number for number, folder in enumerate(_LONGEST_FIRST) if nodeid.startswith(folder)]
    return found[0] if found else len(_LONGEST_FIRST)


class Turns(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """By file, in the order of collection; what needs Spark is as one file, for each process would start one of its own."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return (
            ANALYSIS if file.startswith(ANALYSIS) and not file.startswith(_WITHOUT_SPARK) else file
        )


def scheduler(config: pytest.Config, log: object) -> Turns | None:
    """Return the scheduler; None where another distribution mode was chosen."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = (
        False  # which would put files of few tests last: the longest ones
    )
    return Turns(config, log)
