"""Compare with another version: both run at the same time, and short bursts of S1, S2 and S3 alternate between them.

A machine that is shared changes its speed within seconds, so whole runs one after the other differ by a fifth. Two
bursts that follow each other within a second or two meet nearly the same machine. The ratio of many such pairs is
exact to a percent or two; its 95 % range is printed.
"""

# ruff: noqa: T201 what a bench measures is printed

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.bench.service import ROOT, BenchError
from tests.bench.sink import Arrivals
from tests.bench.stage import Stage, staged

_PAIRS: Final = 30
_WARM_UPS: Final = 1
_PROGRESS_EVERY: Final = 10
_Z_95: Final = 1.96
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
    with ExitStack() as stack:
        now, then = (
            _Side(stack.enter_context(staged(plan.folder, checkout=checkout)))
            for checkout in (ROOT, plan.against.resolve())
        )
        for case in _CASES:
            if plan.only not in case.name:
                continue
            _play(case, now, then, count)
            lines = {f"{case.name}, this version": now, f"{case.name}, {plan.against.name}": then}
            for name, title in _FIGURES.items():
                ratio, low, high = ratio_range(
                    [run.values[name] for run in now.runs], [run.values[name] for run in then.runs]
                )
                text = f"{title}, ratio to {plan.against.name}: {ratio:.3f} (95 % range {low:.3f} to {high:.3f})"
                now.runs[0].verified.append(f"{text}; {count} pairs, every message arrived")
                print(f"  {case.name}: {text}", flush=True)
            for number in range(count):
                yield {name: side.runs[number] for name, side in lines.items()}


def _play(case: _Case, now: _Side, then: _Side, count: int) -> None:
    for side in (now, then):
        side.open(case)
        for _ in range(_WARM_UPS):
            side.burst(case)
    for number in range(count):
        # Alternately, each first as often as the other, so that a drift of the machine cancels out.
        for side in (now, then) if number % 2 == 0 else (then, now):
            side.runs.append(side.burst(case))
        if (number + 1) % _PROGRESS_EVERY == 0:
            print(f"  {case.name}: {number + 1} of {count} pairs", flush=True)


def ratio_range(ours: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the pairs' ratios, and the ends of its 95 % range.

    One pair has no range: its ends are the ratio.
    """
    logs = [math.log(own / other) for own, other in zip(ours, others, strict=True)]
    mean = statistics.fmean(logs)
    error = _Z_95 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return math.exp(mean), math.exp(mean - error), math.exp(mean + error)
