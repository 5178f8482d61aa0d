"""Fairness: one organisation publishes a hundred thousand messages at once, and what another feels of it: pairs of runs."""

# ruff: noqa: T201 what a bench measures is printed

import dataclasses
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final

import httpx

from tests.bench.figures import Run
from tests.bench.load import Loading, loading, percentiles
from tests.bench.plan import Lines, Plan
from tests.bench.service import Service
from tests.bench.sink import Arrivals, sinking
from tests.bench.stage import Stage, staged

_BURST: Final = 100_000
_BATCH: Final = 500
_CONNECTIONS: Final = 4
_PER_S: Final = 1.0
_SECONDS: Final = 30
_WARM_UP: Final = 10
_WARM_BURST: Final = 100_000
"""Delivered first in every run: Java compiles a broker's code during its first burst."""
_PAIRS: Final = 5
_FACTOR: Final = 1.5
_SLACK_MS: Final = 10.0


def fairness(plan: Plan) -> Iterator[Lines]:
    """Five pairs (with --quick one), first the one and then the other kind of run in front.

    With PostgreSQL as the broker, and then with Artemis; `--only` chooses cases by their title.
    The p99 of a run is the largest of its 30 latencies, so that of all pairs together is printed too.
    """
    cases = [(1, False), (20, False), *([(1, True), (20, True)] if plan.artemis else [])]
    for subscriptions, artemis in cases:
        title = f"{subscriptions} subscriptions on {'Artemis' if artemis else 'PostgreSQL'}"
        if plan.only in title:
            yield from _pairs(plan, title, subscriptions, artemis=artemis)


def _pairs(plan: Plan, title: str, subscriptions: int, *, artemis: bool) -> Iterator[Lines]:
    burst, count = plan.some(_BURST), plan.pairs or (1 if plan.quick else _PAIRS)
    margins: list[float] = []
    alone: list[float] = []
    beside: list[float] = []
    for number in range(count):
        found: dict[bool, Run] = {}
        for is_beside in (False, True) if number % 2 == 0 else (True, False):
            found[is_beside], latencies = _run(
                plan, burst if is_beside else 0, subscriptions, artemis=artemis
            )
            (beside if is_beside else alone).extend(latencies)
        pair = [found[is_beside].values["p99_ms"] for is_beside in (False, True)]
        margins.append(_margin(f"pair {number + 1}, {title}", *pair))
        if number + 1 == count:
            all_of_them = [percentiles(latencies)["p99"] for latencies in (alone, beside)]
            margin = _margin(f"all pairs together, {title}", *all_of_them)
            for name, over in (
                ("the median of the pairs", statistics.median(margins)),
                ("the p99 of all pairs together", margin),
            ):
                if over > 0:
                    found[True].faults.append(f"{name} is {over:.1f} ms above its bound")
        yield {
            f"fairness, alone, {title}": found[False],
            f"fairness, beside {burst:,}, {title}": found[True],
        }


def _margin(what: str, alone: float, beside: float) -> float:
    """Print two p99 in ms, and return by how much the second one exceeds its bound."""
    bound = _FACTOR * alone + _SLACK_MS
    print(
        f"  {what}: p99 {alone:.1f} ms alone, {beside:.1f} ms beside the burst; bound {bound:.1f}",
        flush=True,
    )
    return beside - bound


def _run(plan: Plan, burst: int, subscriptions: int, *, artemis: bool) -> tuple[Run, list[float]]:
    """Return a run, and the latencies of the other organisation's messages, in ms."""
    run = Run()
    with ExitStack() as stack:
        stage = stack.enter_context(
            staged(plan.folder, own_sink=True, profile=plan.profile, artemis=artemis)
        )
        # In a process of its own, so that only the service is shared.
        sink = stack.enter_context(sinking(plan.folder, own=True))
        steady, bursting = (_organisation(stage.service, name) for name in ("steady", "bursting"))
        room = steady.room("steady")
        steady.push(room, "steady", stage.sink.url("/steady"))
        others = bursting.room("bursting")
        for number in range(subscriptions):
            bursting.push(others, f"bursting-{number}", sink.url(f"/bursting/{number}"))
        count = stage.delivered() + plan.some(_WARM_BURST)
        _burst(stage, bursting, others, plan.some(_WARM_BURST) // subscriptions).tally()
        stage.await_delivered(count)
        warm = _steady(stage, steady, room, _WARM_UP)
        stage.await_arrivals(Arrivals("/steady"), _WARM_UP, warm)
        arrivals = Arrivals("/steady")
        with stage.window(title="fairness") as window:
            wave = None
            if burst:
                wave = _burst(stage, bursting, others, burst // subscriptions)
            load = _steady(stage, steady, room, _SECONDS)
            stage.await_arrivals(arrivals, _SECONDS, load)
            left = count + burst - stage.delivered() + _WARM_UP + _SECONDS
    tally = load.tally()
    latencies = arrivals.latencies_ms.get("/steady", [])
    window.enter(run, done=len(latencies))
    run.values |= {f"{name}_ms": value for name, value in percentiles(latencies).items()}
    run.values["burst still waiting"] = left
    if wave is not None:
        run.values["burst published in s"] = (sent := wave.tally()).ended - sent.began
    if len(latencies) != _SECONDS or tally.refused:
        run.faults.append(f"{len(latencies)} of {_SECONDS} arrived; refused: {tally.refused}")
    return run, latencies


def _steady(stage: Stage, service: Service, room: str, count: int) -> Loading:
    return loading(
        service, stage.folder, room=room, messages=count, connections=1, rate_per_s=_PER_S
    )


def _burst(stage: Stage, service: Service, room: str, count: int) -> Loading:
    return loading(
        service, stage.folder, room=room, messages=count, connections=_CONNECTIONS, batch=_BATCH
    )


def _organisation(service: Service, name: str) -> Service:
    """A new organisation: the same service, with its admin key."""
    made = service.post("/organisations", {"name": name})
    body = {"name": "admin", "scopes": ["admin"]}
    key = service.post(f"/organisations/{made['id']}/keys", body)["key"]
    api = httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {key}"})
    return dataclasses.replace(service, key=key, api=api)
