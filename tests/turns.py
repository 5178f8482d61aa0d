"""Which process runs which tests, and in what order, where several do: `pytest -n 2 --dist loadfile`."""

from typing import Final

import pytest
from xdist.scheduler import LoadFileScheduling

ANALYSIS: Final = "tests/correlation/"
_LONGEST_FIRST: Final = (ANALYSIS, "tests/faults/", "tests/e2e/", "tests/contract/")


def rank(nodeid: str) -> int:
    """What takes minutes begins at once; what takes seconds fills up the ends."""
    found = [number for number, folder in enumerate(_LONGEST_FIRST) if nodeid.startswith(folder)]
    return found[0] if found else len(_LONGEST_FIRST)


class Turns(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """By file, in the order of collection; the analysis is as one file, for each process would start a Spark of its own."""

    def _split_scope(self, nodeid: str) -> str:
        return ANALYSIS if nodeid.startswith(ANALYSIS) else nodeid.partition("::")[0]


def scheduler(config: pytest.Config, log: object) -> Turns | None:
    """None: whoever asks for another way gets it."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # which would put files of few tests last: the longest ones
    return Turns(config, log)
