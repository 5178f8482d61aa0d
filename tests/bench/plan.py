"""Describe the settings of a benchmark run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.figures import Run

Lines = Mapping[str, Run]
"""One run of a scenario: a run by the name of its line."""
Scenario = Callable[["Plan"], Iterator[Lines]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`folder` takes the data of the services, and whatever else is written.

    `artemis`: play on Artemis as well, where a scenario can. `only`: of S5, the cases whose names
    hold this, and what they are compared with; of pairs, the cases. `against`: the checkout of
    another version, for `pairs` of bursts.
    """

    folder: Path
    runs: int = 3
    quick: bool = False
    profile: bool = False
    artemis: bool = True
    only: str = ""
    against: Path | None = None
    pairs: int | None = None
    keep: Path = field(default_factory=Path.cwd)
    """Takes what is worth keeping afterwards."""

    def some(self, count: int) -> int:
        """So many, or a tenth of them where it has to be quick."""
        return count // 10 if self.quick else count
