"""Score found incidents against the truth of a world."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Final, Protocol

from delivery.analytics.findings.incidents import Edge
from tests.support.failure_worlds import TrueIncident, World
from tests.support.sealed_segments import START_S

_ALIKE: Final = 0.5


class FoundIncident(Protocol):
    """An incident as scored; times are seconds since 1970."""

    @property
    def keys(self) -> tuple[int, ...]: ...
    @property
    def begin(self) -> Edge: ...
    @property
    def end(self) -> Edge: ...


@dataclass(slots=True, kw_only=True)
class Scores:
    """Sums over worlds."""

    true: int = 0
    found: int = 0
    recovered: int = 0
    right: int = 0
    """Found incidents that are a true one."""
    named: int = 0
    """Recovered incidents whose right cause is first."""
    listed: int = 0
    begin_errors_s: list[float] = field(default_factory=list)
    end_errors_s: list[float] = field(default_factory=list)
    begins_held: int = 0
    ends_held: int = 0

    def add(self, other: "Scores") -> None:
        """Add the sums of another world."""
        self.true += other.true
        self.found += other.found
        self.recovered += other.recovered
        self.right += other.right
        self.named += other.named
        self.listed += other.listed
        self.begin_errors_s += other.begin_errors_s
        self.end_errors_s += other.end_errors_s
        self.begins_held += other.begins_held
        self.ends_held += other.ends_held

    def values(self) -> dict[str, float]:
        """Return the scores; shares are 0 to 1, and absent where there is nothing to count."""
        found: dict[str, float] = {"true": self.true, "found": self.found}
        if self.true:
            found["recall"] = self.recovered / self.true
        if self.found:
            found["precision"] = self.right / self.found
        if self.recovered:
            found |= {
                "right cause first": self.named / self.recovered,
                "cause listed": self.listed / self.recovered,
                "begin error s": median(self.begin_errors_s),
                "end error s": median(self.end_errors_s),
                "begin in range": self.begins_held / self.recovered,
                "end in range": self.ends_held / self.recovered,
            }
        return found


def score(
    world: World,
    found: Sequence[FoundIncident],
    causes: Sequence[Sequence[tuple[str, str]]],
) -> Scores:
    """Compare incidents and their causes (attribute, value), the first one first, with the truth."""
    scores = Scores(true=len(world.truth), found=len(found))
    pairs = sorted(
        (
            (-_likeness(true, one), place, number)
            for place, true in enumerate(world.truth)
            for number, one in enumerate(found)
            if _likeness(true, one) >= _ALIKE
        ),
    )
    scores.right = len({number for _, _, number in pairs})
    taken: set[int] = set()
    for _, place, number in pairs:
        if place in taken:
            continue
        taken.add(place)
        true, one = world.truth[place], found[number]
        scores.recovered += 1
        scores.named += bool(causes[number]) and true.cause == causes[number][0]
        scores.listed += true.cause in causes[number]
        begin, end = START_S + true.begin_s, START_S + true.end_s
        scores.begin_errors_s.append(abs(one.begin.at - begin))
        scores.end_errors_s.append(abs(one.end.at - end))
        scores.begins_held += one.begin.low <= begin <= one.begin.high
        scores.ends_held += one.end.low <= end <= one.end.high
    return scores


def _likeness(true: TrueIncident, found: FoundIncident) -> float:
    """Return the lesser of the Jaccard indices of subscriptions and of time."""
    keys = set(found.keys)
    subscriptions = len(keys & true.subscriptions) / len(keys | true.subscriptions)
    begin, end = START_S + true.begin_s, START_S + true.end_s
    both = min(end, found.end.at) - max(begin, found.begin.at)
    either = max(end, found.end.at) - min(begin, found.begin.at)
    return min(subscriptions, max(both, 0.0) / either if either > 0 else 0.0)


def true_pairs(world: World) -> set[tuple[int, int]]:
    """Return the pairs of subscriptions with a fault of their common host or network."""
    return {
        pair
        for true in world.truth
        if true.cause[0] in {"target_host", "network"}
        for pair in combinations(sorted(true.subscriptions), 2)
    }


def average_precision(
    ranked: Iterable[tuple[int, int]], true: Mapping[tuple[int, int], object] | set[tuple[int, int]]
) -> float:
    """Return the average precision of ranked pairs; pairs that are not ranked count as missed."""
    hits, total = 0, 0.0
    for place, pair in enumerate(ranked, 1):
        if pair in true:
            hits += 1
            total += hits / place
    return total / len(true) if true else 1.0
