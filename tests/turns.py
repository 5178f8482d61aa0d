"""Which process runs which tests, and in what order, where several do: `pytest -n 2 --dist loadfile`."""

from typing import Final

import pytest
from xdist.scheduler import LoadFileScheduling

ANALYSIS: Final = "tests/correlation/"
_WITHOUT_SPARK: Final = frozenset(f"{ANALYSIS}test_{name}.py" for name in ("archive", "conformance", "java", "kin"))
# Of the analysis first what waits for the service, last what is analysed last (`ahead.py`).
_LONGEST_FIRST: Final = (
    *(f"{ANALYSIS}test_{name}.py" for name in ("commands", "incremental", "plans", "follow", "hours")),
    ANALYSIS, "tests/faults/", "tests/e2e/", "tests/contract/",
)  # fmt: skip


def rank(nodeid: str) -> int:
    """What takes minutes begins at once; what takes seconds fills up the ends."""
    found = [number for number, folder in enumerate(_LONGEST_FIRST) if nodeid.startswith(folder)]
    return found[0] if found else len(_LONGEST_FIRST)


class Turns(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """By file, in the order of collection; what needs Spark is as one file, for each process would start one of its own."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return ANALYSIS if file.startswith(ANALYSIS) and file not in _WITHOUT_SPARK else file


def scheduler(config: pytest.Config, log: object) -> Turns | None:
    """None: whoever asks for another way gets it."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # which would put files of few tests last: the longest ones
    return Turns(config, log)
