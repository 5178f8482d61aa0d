"""Lanes: two hundred subscriptions, thirty of them sick, and what the healthy ones feel of it: pairs of runs that take turns."""

# ruff: noqa: T201 what a bench measures is printed

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

from tests.bench.figures import Run
from tests.bench.load import Loading, percentiles
from tests.bench.plan import Lines, Plan
from tests.bench.sink import Arrivals, sinking
from tests.bench.stage import Stage, staged

_HEALTHY: Final = 170
_SICK: Final = 10
"""So many hang, so many answer 503, and so many after two seconds."""
_EVENT: Final = "lane.happened"
_PER_S: Final = 5.0
_SECONDS: Final = 20
_WARM_UP_S: Final = 6
_CONNECTIONS: Final = 4
_HANG_S: Final = 600.0
_SLOW_S: Final = 2.0
_PAIRS: Final = 5
_FACTOR: Final = 1.5
_SLACK_MS: Final = 10.0


def lanes(plan: Plan) -> Iterator[Lines]:
    """Five pairs (with --quick one), first the one and then the other kind of run in front."""
    seconds = max(5, plan.some(_SECONDS))
    margins: list[float] = []
    for number in range(1 if plan.quick else _PAIRS):
        order = (False, True) if number % 2 == 0 else (True, False)
        found = {sick: _run(plan, seconds, sick=sick) for sick in order}
        alone, beside = (found[sick].values["p99_ms"] for sick in (False, True))
        bound = _FACTOR * alone + _SLACK_MS
        margins.append(beside - bound)
        print(
            f"  pair {number + 1}: p99 {alone:.1f} ms without the sick, {beside:.1f} ms beside them; bound {bound:.1f}",
            flush=True,
        )
        if number + 1 == _PAIRS and statistics.median(margins) > 0:
            found[True].faults.append(
                f"the median of the pairs is {statistics.median(margins):.1f} ms above its bound"
            )
        yield {"lanes, all healthy": found[False], "lanes beside 30 sick": found[True]}


def _run(plan: Plan, seconds: int, *, sick: bool) -> Run:
    run = Run()
    # What is sick leaves a backlog behind, so each run has a service of its own.
    with ExitStack() as stack:
        stage = stack.enter_context(staged(plan.folder, own_sink=True, profile=plan.profile))
        room = stage.service.room("lanes", event_types=(_EVENT,))
        paths = [f"/healthy/{number}" for number in range(_HEALTHY)]
        for number, path in enumerate(paths):
            stage.service.push(room, f"healthy-{number}", stage.sink.url(path), event_type=_EVENT)
        if sick:
            for name, hang_s, status in (
                ("hanging", _HANG_S, 204),
                ("failing", 0.0, 503),
                ("slow", _SLOW_S, 204),
            ):
                sink = stack.enter_context(
                    sinking(plan.folder, own=True, hang_s=hang_s, status=status)
                )
                for number in range(_SICK):
                    url = sink.url(f"/{name}/{number}", host=f"127.0.1.{number + 1}")
                    stage.service.push(room, f"{name}-{number}", url, event_type=_EVENT)
        warm, count = Arrivals("/healthy/"), int(_WARM_UP_S * _PER_S)
        stage.await_arrivals(warm, count * len(paths), loading := _load(stage, room, count))
        loading.tally()
        arrivals, count = Arrivals("/healthy/"), int(seconds * _PER_S)
        with stage.window(title="lanes") as window:
            load = _load(stage, room, count)
            stage.await_arrivals(arrivals, count * len(paths), load)
        tally = load.tally()
    latencies = [one for path in paths for one in arrivals.latencies_ms.get(path, ())]
    window.enter(run, done=len(latencies))
    run.values |= {f"{name}_ms": value for name, value in percentiles(latencies).items()}
    run.values["samples"] = len(latencies)
    ids = set(load.ids())
    missing = sum(len(ids - arrivals.messages.get(path, set())) for path in paths)
    if missing or tally.refused:
        run.faults.append(
            f"{missing} of {len(ids) * len(paths)} never arrived; other answers: {tally.refused}"
        )
    else:
        run.verified.append(f"all {len(ids):,} messages x {len(paths)} healthy endpoints arrived")
    return run


def _load(stage: Stage, room: str, count: int) -> Loading:
    return stage.load(
        room=room, event_type=_EVENT, messages=count, connections=_CONNECTIONS, rate_per_s=_PER_S
    )
