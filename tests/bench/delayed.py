"""Messages that are due later: how late they come when a thousand a second come due, and what a million waiting ones cost.

Each payload contains the due time of its message, so that the sink's log shows the delay.
"""

import time
from collections.abc import Iterator
from typing import Final

from tests.bench.figures import Run
from tests.bench.load import percentiles
from tests.bench.plan import Lines, Plan
from tests.bench.progress import Progress
from tests.bench.sink import Arrivals
from tests.bench.stage import Stage, staged

_PER_S: Final = 1000
_SECONDS: Final = 60
_PUBLISHED_PER_S: Final = 1500
"""Minimum accepted a second: all messages are accepted before the first is due."""
_SPARE_S: Final = 10
_CONNECTIONS: Final = 8
_BATCH: Final = 100
_WAITING: Final = 1_000_000
_PARTS: Final = 10
_PROBES: Final = 2000
_WARM: Final = 10_000
_WEEK_S: Final = 7 * 86_400
_SOON_S: Final = 4.0
_EARLY_MS: Final = -1.0


def lateness(plan: Plan) -> Iterator[Lines]:
    """A thousand come due each second of a minute, published before the first of them is."""
    for _ in range(plan.runs):
        lines = {}
        for name, artemis in (
            ("lateness", False),
            *((("lateness, artemis", True),) if plan.artemis else ()),
        ):
            with staged(plan.folder, own_sink=True, artemis=artemis, profile=plan.profile) as stage:
                lines[name] = _late(stage, _PER_S * max(6, plan.some(_SECONDS)), name)
        yield lines


def _warm(stage: Stage) -> None:
    """Warm up: compilation and query planning must not be part of the measurement."""
    room = stage.service.room("warm")
    stage.service.push(room, "sink", stage.sink.url("/warm"))
    load = stage.load(room=room, messages=_WARM, connections=_CONNECTIONS, batch=_BATCH)
    stage.await_arrivals(Arrivals("/warm"), _WARM, load)
    load.tally()


def _late(stage: Stage, count: int, title: str) -> Run:
    progress = Progress(title)
    progress.step("it is warmed up")
    _warm(stage)
    run, room = Run(), stage.service.room("later")
    target = stage.service.push(room, "sink", stage.sink.url("/later"))
    due_in_s = count / _PUBLISHED_PER_S + _SPARE_S
    progress.step(f"{count:,} are published, of which the first is due in {due_in_s:.0f} s")
    load = stage.load(
        room=room,
        messages=count,
        connections=_CONNECTIONS,
        batch=_BATCH,
        due_in_s=due_in_s,
        due_per_s=_PER_S,
    )
    tally, arrivals = load.tally(), Arrivals("/later")
    first = tally.began + due_in_s
    if tally.ended > first:
        run.faults.append(
            f"the last was accepted {tally.ended - first:.1f} s after the first was due"
        )
    # What comes due is what is measured, not what accepts it.
    time.sleep(max(0.0, first - time.time() - 1))
    progress.step(f"they come due, for {count / _PER_S:.0f} s")
    with stage.window(title=title) as window:
        stage.await_arrivals(arrivals, count)
    late_ms = arrivals.latencies_ms.get("/later", [])
    window.enter(run, done=len(late_ms))
    _reported(run, late_ms)
    missing, doubles = (
        len(set(load.ids()) - arrivals.messages.get("/later", set())),
        arrivals.requests - count,
    )
    if missing or tally.refused:
        run.faults.append(f"{missing} of {count:,} never came; other answers: {tally.refused}")
    else:
        run.verified.append(
            f"{count:,} messages, {_PER_S:,} due a second: all came, {doubles} of them twice, none early; "
            f"accepted at {tally.per_s:,.0f} a second"
        )
    stage.verify_states(run, [target])
    return run


def _reported(run: Run, late_ms: list[float]) -> None:
    run.values |= {f"{name}_ms": value for name, value in percentiles(late_ms).items()}
    run.values["samples"] = len(late_ms)
    del run.values["per_cpu_s"]
    if min(late_ms, default=0.0) < _EARLY_MS:
        run.faults.append(f"one came {-min(late_ms):.1f} ms early")


def waiting(plan: Plan) -> Iterator[Lines]:
    """Compare publishing, the first due message and a restart, without and with a million messages for next week."""
    for _ in range(plan.runs):
        lines: dict[str, Run] = {}
        for shape, artemis in (("", False), *(((", artemis", True),) if plan.artemis else ())):
            with staged(plan.folder, own_sink=True, artemis=artemis) as stage:
                progress = Progress(f"waiting{shape}")
                room = stage.service.room("later")
                stage.service.push(room, "sink", stage.sink.url("/later"))
                _warm(stage)
                lines |= _beside(stage, room, f"nothing{shape}", progress)
                count = plan.some(_WAITING)
                filling = _fill(stage, room, count, progress)
                beside = _beside(stage, room, f"{count:,} waiting{shape}", progress)
                next(iter(beside.values())).verified.append(filling)
                lines |= beside
        yield lines


def _fill(stage: Stage, room: str, count: int, progress: Progress) -> str:
    """Publish so many for next week, in parts; what the first and the last part cost."""
    costs: list[float] = []
    for part in range(_PARTS):
        with stage.window() as window:
            stage.load(
                room=room, messages=count // _PARTS, connections=_CONNECTIONS, batch=_BATCH,
                due_in_s=_WEEK_S + part, due_per_s=_PER_S,
            ).tally()  # fmt: skip
        costs.append(sum(window.cpu_s.values()) / (count // _PARTS) * 1e6)
        progress.step(
            f"{count // _PARTS * (part + 1):,} of {count:,} wait; the last cost {costs[-1]:.0f} µs of CPU each"
        )
    return f"accepting one of them costs {costs[0]:.0f} µs of CPU at first and {costs[-1]:.0f} µs in the end"


def _beside(stage: Stage, room: str, what: str, progress: Progress) -> Lines:
    """The three costs, beside whatever waits."""
    progress.step(f"publishing, coming due and a restart beside {what}")
    arrivals = Arrivals("/later")
    stage.sink.read(arrivals)
    publishing = Run()
    with stage.window() as window:
        tally = stage.load(
            room=room, messages=_PROBES * 5, connections=_CONNECTIONS, batch=_BATCH,
            due_in_s=2 * _WEEK_S, due_per_s=_PER_S,
        ).tally()  # fmt: skip
    window.enter(publishing, done=tally.messages)
    publishing.values["per_s"] = tally.per_s
    first = Run()
    late_ms = _burst(stage, room, arrivals)
    first.values |= {f"{name}_ms": value for name, value in percentiles(late_ms).items()}
    first.values["samples"] = len(late_ms)
    restart = Run()
    restart.values["down for s"], restart.values["until the next delivery s"] = _restarted(
        stage, room
    )
    first.verified.append(
        f"after kill -9 of everything: ready in {restart.values['down for s']:.1f} s, and one published then came after "
        f"{restart.values['until the next delivery s']:.1f} s"
    )
    return {f"publishing beside {what}": publishing, f"first due beside {what}": first}


def _burst(stage: Stage, room: str, arrivals: Arrivals) -> list[float]:
    """Return the delays of messages that were due a few seconds after publishing."""
    before = len(stage.sink.read(arrivals).latencies_ms.get("/later", ()))
    stage.load(
        room=room, messages=_PROBES, connections=_CONNECTIONS, batch=_BATCH,
        due_in_s=_SOON_S, due_per_s=_PER_S,
    ).tally()  # fmt: skip
    stage.await_arrivals(arrivals, len(arrivals.webhooks) + _PROBES)
    return arrivals.latencies_ms.get("/later", [])[before:]


def _restarted(stage: Stage, room: str) -> tuple[float, float]:
    """Seconds until everything is ready again after `kill -9`, and until a message that is published then has come."""
    arrivals = stage.sink.read(Arrivals("/later"))
    began = time.monotonic()
    stage.service.restart()
    ready = time.monotonic()
    expected = len(stage.sink.read(arrivals).webhooks) + 1
    stage.load(room=room, messages=1, connections=1).tally()
    stage.await_arrivals(arrivals, expected)
    return ready - began, time.monotonic() - ready
