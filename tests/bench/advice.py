"""Score retry advice against the truth of simulated endpoints, over seeds that tuned nothing.

Parameters were set on seeds below 100, tests hold the scores on 101 to 103, and these are others.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.support.retry_worlds import WORLDS, AdviceScore, score

_FIRST_SEED: Final = 1001
_SEEDS: Final = 10
_EFFECTS: Final = {
    "delivered": "share delivered",
    "attempts": "attempts",
    "mean_wait_s": "mean wait",
}


def advice(plan: Plan) -> Iterator[Lines]:
    """Score every world over ten seeds (with --quick: one), once."""
    lines: dict[str, Run] = {}
    everything: list[AdviceScore] = []
    for world in WORLDS:
        found = [score(world, seed) for seed in range(_FIRST_SEED, _FIRST_SEED + plan.some(_SEEDS))]
        scores = [one for one in found if one is not None]
        everything += scores
        lines[f"advice, {world.name}"] = _scored(scores)
    lines["advice, all worlds"] = _scored(everything)
    yield lines


def _scored(scores: Sequence[AdviceScore]) -> Run:
    advised = [one for one in scores if one.recommended is not None]
    worse = sum(one.is_worse for one in advised)
    later = sum(one.is_worse_later for one in advised)
    caught = sum(
        (one.is_worse or one.is_worse_later) and one.advice.held_up is False for one in advised
    )
    errors = sorted(abs(one.error()) for one in advised)
    run = Run(
        values={
            "each": float(len(scores)),
            "recommended": float(len(advised)),
            "worse": float(worse),
            "worse later": float(later),
            "worst error, points": errors[-1] if errors else 0.0,
        }
    )
    run.verified.append(
        f"{len(advised)} of {len(scores)} with a recommendation; worse than what was set: {worse}, "
        f"in a later period: {later}, of them caught by the back-test: {caught}"
    )
    if advised:
        right = sum(one.is_right for one in advised)
        run.verified.append(
            f"promised share right within a point or by its interval: {right} of {len(advised)}; "
            f"error {errors[len(errors) // 2]:.2f} points at the median, {errors[-1]:.2f} at most"
        )
        held = [
            f"{text} {sum(one.holds(one.recommended, name) for one in advised)}"
            for name, text in _EFFECTS.items()
        ]
        again = sum(one.holds(one.recommended_later, "delivered") for one in advised)
        run.verified.append(
            f"intervals that hold, of {len(advised)}: {', '.join(held)}; "
            f"share delivered in a later period {again}"
        )
    if worse:
        run.faults.append(f"{worse} pieces of advice are worse than what was set")
    return run
