"""Compare with another version: both run, and play the same bursts of S1, S2 and S3 at the same time.

A machine that is shared changes its speed within seconds, so whole runs one after the other differ by a fifth, and
alternating bursts of a few seconds by a sixth. Bursts at the same time meet the same machine: their ratios differ by
a sixteenth. What is compared first of all is CPU time a delivery. How fast the deliveries are says how the two share
the machine.

Yet the ratio of many such pairs of the same processes is not the ratio of the versions: the place of a process in
memory changes its speed by several percent for as long as it runs, and what is started first is 1 to 2 % slower. So the pairs
are played in rounds, each with new processes, and each version is started first in every other round. The 95 % range
is that of the means of the rounds.
"""

# ruff: noqa: T201 what a bench measures is printed

import math
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.bench.service import ROOT, BenchError
from tests.bench.sink import Arrivals
from tests.bench.stage import Stage, staged

_PAIRS: Final = 30
_ROUNDS: Final = 6
_WARM_UPS: Final = 1
_T_95: Final = (12.706, 4.303, 3.182, 2.776, 2.571)
"""Student's t of the 95 % range of a mean, by its degrees of freedom from 1 on."""
_FIGURES: Final = {
    "per_cpu_s": "deliveries a CPU-second",
    "per_s": "deliveries a second",
    "publishes_per_s": "publishes a second",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """`messages` in each burst, to `subscriptions` webhooks each."""

    name: str
    subscriptions: int
    messages: int
    connections: int


_CASES: Final = (
    _Case(name="S1", subscriptions=1, messages=10_000, connections=32),
    _Case(name="S2", subscriptions=10, messages=1_500, connections=32),
    _Case(name="S3", subscriptions=1, messages=10_000, connections=64),
)


_Round = tuple[list[Run], list[Run]]
"""The runs of this version and of the other one in one round."""


@dataclass(slots=True)
class _Side:
    """One of the two versions, with the room of a case."""

    stage: Stage
    room: str = ""
    prefix: str = ""
    runs: list[Run] = field(default_factory=list)

    def open(self, case: _Case) -> None:
        self.prefix = self.stage.fresh()
        self.room = self.stage.service.room(self.prefix)
        for number in range(case.subscriptions):
            url = self.stage.sink.url(f"/{self.prefix}/{number}")
            self.stage.service.push(self.room, f"sink-{number}", url)
        self.runs = []

    def burst(self, case: _Case) -> Run:
        """Publish and deliver once. BenchError: something did not arrive."""
        stage, run = self.stage, Run()
        arrivals = Arrivals(f"/{self.prefix}/")
        expected, before = case.messages * case.subscriptions, stage.delivered()
        with stage.window() as window:
            load = stage.load(room=self.room, messages=case.messages, connections=case.connections)
            stage.await_arrivals(arrivals, expected, load)
            reported = stage.await_delivered(before + expected) - before
        tally = load.tally()
        if tally.refused or reported != expected or len(arrivals.webhooks) != expected:
            raise BenchError(
                f"{len(arrivals.webhooks):,} of {expected:,} arrived, {reported:,} reported; refused: {tally.refused}"
            )
        window.enter(run, done=expected)
        run.values["per_s"] = expected / (arrivals.last_at - tally.began)
        run.values["publishes_per_s"] = tally.per_s
        return run


def pairs(plan: Plan) -> Iterator[Lines]:
    """Thirty pairs of bursts of each case (with --quick three); `--pairs` sets another number, `--only` a case."""
    if plan.against is None:
        raise BenchError(
            "pairs needs --against FOLDER: a checkout of another version, with its .venv (make setup)"
        )
    count = plan.pairs or plan.some(_PAIRS)
    rounds = min(_ROUNDS, count)
    cases = [case for case in _CASES if plan.only in case.name]
    checkouts = [ROOT, plan.against.resolve()]
    played: dict[str, list[_Round]] = {case.name: [] for case in cases}
    for number in range(rounds):
        of_round = count // rounds + (number < count % rounds)
        with ExitStack() as stack:
            order = checkouts if number % 2 == 0 else checkouts[::-1]
            sides = {
                checkout: _Side(stack.enter_context(staged(plan.folder, checkout=checkout)))
                for checkout in order
            }
            now, then = (sides[checkout] for checkout in checkouts)
            for case in cases:
                _play(case, now, then, of_round)
                played[case.name].append((now.runs, then.runs))
        print(f"  round {number + 1} of {rounds}", flush=True)
    for name, of_case in played.items():
        first = of_case[0][0][0]
        for figure, title in _FIGURES.items():
            ratio, low, high = ratio_range(
                [
                    [
                        (own.values[figure], other.values[figure])
                        for own, other in zip(*runs, strict=True)
                    ]
                    for runs in of_case
                ]
            )
            text = f"{title}, ratio to {plan.against.name}: {ratio:.3f} (95 % range {low:.3f} to {high:.3f})"
            first.verified.append(
                f"{text}; {count} pairs in {rounds} rounds, every message arrived"
            )
            print(f"  {name}: {text}", flush=True)
        for ours, others in of_case:
            for own, other in zip(ours, others, strict=True):
                yield {f"{name}, this version": own, f"{name}, {plan.against.name}": other}


def _play(case: _Case, now: _Side, then: _Side, count: int) -> None:
    for side in (now, then):
        side.open(case)
        for _ in range(_WARM_UPS):
            side.burst(case)
    with ThreadPoolExecutor(2) as pool:
        for number in range(count):
            # Each begins first as often as the other.
            order = (now, then) if number % 2 == 0 else (then, now)
            bursts = [(side, pool.submit(side.burst, case)) for side in order]
            for side, burst in bursts:
                side.runs.append(burst.result())


def ratio_range(rounds: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float, float]:
    """Return the geometric mean of the pairs' ratios, and the ends of its 95 % range.

    `rounds`: the pairs of each round. The range is that of the rounds' means; one round has none:
    its ends are the ratio.
    """
    means = [statistics.fmean(math.log(own / other) for own, other in pairs) for pairs in rounds]
    every = [math.log(own / other) for pairs in rounds for own, other in pairs]
    mean, error = statistics.fmean(every), 0.0
    if len(means) > 1:
        error = _T_95[len(means) - 2] * statistics.stdev(means) / math.sqrt(len(means))
    return math.exp(mean), math.exp(mean - error), math.exp(mean + error)
