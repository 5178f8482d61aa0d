"""An endpoint that is dead for ten minutes of traffic and then back: what it is called with meanwhile, and what comes then."""

import asyncio
import time
from collections.abc import Iterator
from typing import Final

from tests.bench.figures import Run
from tests.bench.ordered import crewed, publish, wait
from tests.bench.plan import Lines, Plan
from tests.bench.service import EVENT_TYPE, Service
from tests.bench.turns import Turns, turning

_DEAD_S: Final = 600.0
_PER_S: Final = 20.0
_KEYS: Final = 50
_OPEN_MS: Final = 5000
_FAILURES: Final = 5
_DRAIN_PER_S: Final = 100.0
_WORKERS: Final = 2
_ROOM: Final = {
    "delivery_delay_ms": 1000,
    "delivery_delay_multiplier": 1,
    "delivery_attempts": 1000,
}
_LANE: Final = {
    "circuit_failures": _FAILURES,
    "circuit_open_ms": _OPEN_MS,
    "drain_per_s": _DRAIN_PER_S,
    "max_concurrency": 8,
    "ordered": True,
}
_MOST_UNDER_WAY: Final = _WORKERS * (8 + _FAILURES)
_DRAWN_AT_ONCE: Final = 0.2 * _DRAIN_PER_S


def outage(plan: Plan) -> Iterator[Lines]:
    """Once (with --quick a minute of it): half of the messages with ordering keys, half without."""
    dead_s = plan.some(int(_DEAD_S))
    with crewed(plan, _WORKERS) as workers:
        yield {f"dead for {dead_s} s": _run(plan, workers.service, float(dead_s))}


def _run(plan: Plan, service: Service, dead_s: float) -> Run:
    run, began = Run(), time.time()
    with turning(plan.folder, dead_s=dead_s) as turns:
        room = str(service.post("/rooms", {"name": f"outage-{turns.port}", **_ROOM})["id"])
        service.post(f"/rooms/{room}/event-types", {"name": EVENT_TYPE})
        reported = {"name": "dead", "type": "PUSH", "push_url": turns.url, **_LANE}
        subscription = service.post(f"/rooms/{room}/subscriptions", reported)["id"]
        keys = [f"{'k' if number % 2 else '-'}{number}" for number in range(_KEYS)]
        count = int((dead_s - (time.time() - began) - 2) * _PER_S) // _KEYS
        asyncio.run(publish(service, room, keys, count, batch=1, per_s=_PER_S))
        lane = service.api.get(f"/v1/subscriptions/{subscription}/lane").json()
        run.values["held at last"] = sum(lane["held"].values())
        wait(turns, lambda: len(turns.done) == count * _KEYS)
        _verify(run, turns, count * _KEYS, probes=lane["circuit"]["probes"])
    return run


def _verify(run: Run, turns: Turns, expected: int, *, probes: int) -> None:
    failed = [at for at, success in turns.calls if not success]
    came = [at for at, success in turns.calls if success]
    run.values |= {
        "calls while dead": len(failed),
        "probes": probes,
        "drained in s": came[-1] - came[0],
    }
    run.values["per_s"] = len(came) / (came[-1] - came[0])
    most = _MOST_UNDER_WAY + (failed[-1] - failed[0]) * 1000 / _OPEN_MS + 1
    if len(failed) > most:
        run.faults.append(
            f"{len(failed)} calls while it was dead; {most:.0f} are the probes and what was under way"
        )
    # The probe, and the next of its key, are beside the drain; who looks a moment late draws what
    # came due meanwhile.
    burst = _DRAWN_AT_ONCE + 2 + _WORKERS
    if late := [
        number
        for number, at in enumerate(came, 1)
        if number > burst + (at - came[0]) * _DRAIN_PER_S
    ]:
        run.faults.append(f"{len(late)} came faster than {_DRAIN_PER_S:g} a second")
    if len(turns.done) != expected:
        run.faults.append(f"{len(turns.done):,} of {expected:,} came")
    if wrong := [key for key in turns.disorder() if key.startswith("k")]:
        run.faults.append(f"{len(wrong)} keys went back: {wrong[:5]}")
    if not run.faults:
        run.verified.append(
            f"all {expected:,} came, {len(failed)} calls while it was dead, then at most {_DRAIN_PER_S:g} a second, keys in order"
        )
