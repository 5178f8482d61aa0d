"""Memory of the processes while a million deliveries go through: it has to stay flat."""

import time
from collections.abc import Iterator
from typing import Final

from tests.bench.figures import MIB, Run
from tests.bench.plan import Lines, Plan
from tests.bench.sink import Arrivals
from tests.bench.stage import PATIENCE_S, Stage, staged

_SUBSCRIPTIONS: Final = 10
_DELIVERIES: Final = 1_000_000
_BATCH: Final = 100
_PORTIONS: Final = 50
_PARTS: Final = ("worker", "api", "upkeep", "supervisor")


def long(plan: Plan) -> Iterator[Lines]:
    """A million deliveries (a tenth of it with --quick), published in portions, each delivered before the next."""
    messages = plan.some(_DELIVERIES) // _SUBSCRIPTIONS
    portion = messages // _PORTIONS
    with staged(plan.folder) as stage:
        room = stage.service.room("long")
        for number in range(_SUBSCRIPTIONS):
            stage.service.push(room, f"sink-{number}", stage.sink.url(f"/long/{number}"))
        run, began, before, accepted = Run(), time.monotonic(), stage.delivered(), 0
        with stage.window() as window:
            for place in range(_PORTIONS):
                load = stage.load(room=room, messages=portion, connections=2, batch=_BATCH)
                accepted += load.tally().messages
                _await_log(stage, accepted * _SUBSCRIPTIONS)
                # The first portion fills caches and pools; what comes after it should add nothing.
                for moment, at in (
                    ("start", 0),
                    ("middle", _PORTIONS // 2),
                    ("end", _PORTIONS - 1),
                ):
                    if place == at:
                        _note(stage, run, moment)
                if not place:
                    stage.service.reset_peaks()
            reported = stage.await_delivered(before + accepted * _SUBSCRIPTIONS) - before
        took_s = time.monotonic() - began
        window.enter(run, done=reported)
        run.values["per_s"] = reported / took_s
        run.values |= {f"{MIB}{part} peak": stage.service.memory()[part].peak for part in _PARTS}
        _verify(stage, run, accepted, messages, reported)
        yield {f"{messages * _SUBSCRIPTIONS:,} deliveries": run}


def _note(stage: Stage, run: Run, moment: str) -> None:
    found = stage.service.memory()
    run.values |= {f"{MIB}{part} {moment}": found[part].rss for part in _PARTS}
    # The parts are resident sizes; here shared pages count once, so that it is what the machine
    # really gives.
    run.values[f"{MIB}everything {moment}"] = sum(memory.pss for memory in found.values())


def _await_log(stage: Stage, deliveries: int) -> None:
    """Wait until the sink's log has (about) so many lines: to keep every id would take more memory than what is measured."""
    until = time.monotonic() + PATIENCE_S
    while stage.sink.requests() < deliveries and time.monotonic() < until:
        time.sleep(0.05)


def _verify(stage: Stage, run: Run, accepted: int, ordered: int, reported: int) -> None:
    arrivals = stage.sink.read(Arrivals("/long/"))
    unique = len(arrivals.webhooks)
    if accepted != ordered or unique != accepted * _SUBSCRIPTIONS or reported != unique:
        run.faults.append(
            f"{ordered:,} published, {accepted:,} accepted, {unique:,} webhooks arrived, {reported:,} delivered by GET /metrics"
        )
    else:
        run.verified.append(
            f"{accepted:,} messages x {_SUBSCRIPTIONS} = {unique:,} webhooks arrived, {arrivals.requests - unique} twice"
        )
