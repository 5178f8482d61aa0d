"""Score the search for incidents on simulated worlds with known causes, without Spark.

Each kind of world is drawn with seeds on which nothing was tuned. Its line has the scores of all
seeds together. Pairs are scored by average precision, a pair being true if its host or network has
failed.
"""

import time
from collections.abc import Iterator
from typing import Final

from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.support.failure_scenarios import HELD_OUT_SEEDS, SCENARIOS, many
from tests.support.failure_worlds import simulate
from tests.support.world_scores import WorldScores, score_world, score_worlds

_AIMS: Final = {
    "recall": 0.9,
    "precision": 0.8,
    "right cause first": 0.9,
    "begin in range": 0.9,
    "end in range": 0.9,
    "pairs": 0.9,
}
"""Least shares."""
_SHARES: Final = frozenset({*_AIMS, "cause listed"})
_MOST_ERROR_S: Final = {"begin error s": 30.0, "end error s": 20.0}


def incidents(plan: Plan) -> Iterator[Lines]:
    """Score every kind of world once, with a single seed if it must be quick."""
    seeds = HELD_OUT_SEEDS[:1] if plan.quick else HELD_OUT_SEEDS
    total = WorldScores()
    lines: dict[str, Run] = {}
    for name in SCENARIOS:
        began = time.process_time()
        scores = score_worlds(name, seeds)
        lines[f"incidents {name}"] = _run(scores, time.process_time() - began)
        total.add(scores)
    lines["incidents, all worlds"] = _run(total, 0.0, aimed=True)
    if not plan.quick:
        began = time.process_time()
        scores = score_world(simulate(many(HELD_OUT_SEEDS[0])))
        lines["incidents of 2,000 subscriptions"] = _run(scores, time.process_time() - began)
    yield lines


def _run(scores: WorldScores, took_s: float, *, aimed: bool = False) -> Run:
    values = scores.values()
    run = Run(
        values={
            f"{name} %" if name in _SHARES else name: value * 100 if name in _SHARES else value
            for name, value in values.items()
        }
    )
    if took_s:
        run.values["simulated and searched in CPU s"] = took_s
    if scores.pairs:
        run.verified.append(
            f"{scores.significant} pairs significant of {scores.pairs} true ones, "
            f"{scores.significant_by_chance} of them by chance"
        )
    if aimed:
        run.verified += [
            f"{name} {values[name]:.3f}, aimed at {aim}: {_verdict(values[name] >= aim)}"
            for name, aim in _AIMS.items()
        ]
        run.verified += [
            f"{name} {values[name]:.1f}, aimed at {aim:.0f}: {_verdict(values[name] <= aim)}"
            for name, aim in _MOST_ERROR_S.items()
        ]
    return run


def _verdict(met: bool) -> str:  # noqa: FBT001 - of one use
    return "met" if met else "missed"
