"""Run the search for incidents on simulated worlds, and score it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from delivery.analytics.findings.cells import CELL_S, AttemptCells
from delivery.analytics.findings.incidents import CHRONIC
from delivery.analytics.findings.results import CofailureResult
from delivery.analytics.findings.root_cause import find_causes
from tests.support.failure_scenarios import SCENARIOS
from tests.support.failure_worlds import World, simulate
from tests.support.incident_scores import Scores, average_precision, score, true_pairs


@dataclass(slots=True, kw_only=True)
class WorldScores:
    """Scores of the incidents of some worlds, and of the pairs of each world that has true ones."""

    incidents: Scores = field(default_factory=Scores)
    average_precisions: list[float] = field(default_factory=list)
    pairs: int = 0
    """True pairs."""
    significant: int = 0
    significant_by_chance: int = 0

    def add(self, other: "WorldScores") -> None:
        """Add the scores of other worlds."""
        self.incidents.add(other.incidents)
        self.average_precisions += other.average_precisions
        self.pairs += other.pairs
        self.significant += other.significant
        self.significant_by_chance += other.significant_by_chance

    def values(self) -> dict[str, float]:
        """Return the scores by name."""
        values = self.incidents.values()
        if self.average_precisions:
            values["pairs"] = sum(self.average_precisions) / len(self.average_precisions)
        return values


def score_worlds(scenario: str, seeds: Iterable[int]) -> WorldScores:
    """Simulate a scenario with these seeds, and score what is found."""
    total = WorldScores()
    for seed in seeds:
        total.add(score_world(simulate(SCENARIOS[scenario](seed))))
    return total


def score_world(world: World) -> WorldScores:
    """Score what is found in a world."""
    cells = AttemptCells.from_arrow(world.cells(CELL_S))
    result = CofailureResult.from_cells(cells)
    found = [one for one in result.incidents if one.kind != CHRONIC]
    causes = [
        [
            (cause.attribute, cause.value)
            for cause in find_causes(
                cells,
                one.rows,
                begin=int(one.begin.at // cells.bin_s),
                end=int(one.end.at // cells.bin_s),
            )
        ]
        for one in found
    ]
    true = true_pairs(world)
    ranked = [(pair.first, pair.second) for pair in result.pairs]
    called = [(pair.first, pair.second) for pair in result.pairs if pair.significant]
    return WorldScores(
        incidents=score(world, found, causes),
        average_precisions=[average_precision(ranked, true)] if true else [],
        pairs=len(true),
        significant=len(called),
        significant_by_chance=sum(pair not in true for pair in called),
    )
