"""S5, idle and steady: from publish to arrival, while other endpoints hang, while nothing else goes on, and under a light load."""

# ruff: noqa: T201 what a bench measures is printed

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.bench.figures import Run
from tests.bench.load import Loading, Tally, percentiles
from tests.bench.plan import Lines, Plan, Scenario
from tests.bench.sink import Arrivals, sinking
from tests.bench.stage import Stage, staged

_HEALTHY: Final = "healthy.happened"
_SUBSCRIPTIONS: Final = 10
_HANG_S: Final = 5.0
_SECONDS: Final = 15
_WARM_UP_S: Final = 6
_CONNECTIONS: Final = 8
_STEADY_PER_S: Final = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Load `per_s` messages a second to ten subscriptions beside hanging endpoints.

    Hanging endpoints answer after `hang_s`. A single one is one of the ten, more are beside them. They get every
    message, or, with `apart_per_s`, that many a second each from a room of their own.

    `pull`: unread queues instead of endpoints, so that rows are written and no webhook is called. `alone` and `control`: the
    lines whose p99 is the denominator: the ten by themselves, and the same load without hanging endpoints.
    """

    line: str
    more: int = 0
    hang_s: float = 0.0
    pull: bool = False
    per_s: float = 100.0
    apart_per_s: float | None = None
    alone: str = ""
    control: str = ""

    @property
    def measured(self) -> int:
        return _SUBSCRIPTIONS - (1 if self.more == 1 else 0)


_ALONE: Final = "S5 alone"
_FASTER: Final = "S5 alone, 200/s"
_APART: Final = "S5 beside 100 healthy, 1/s each"
_EVERY: Final = "S5 beside 100 PULL queues, every message"
_CASES: Final = (
    _Case(line=_ALONE),
    _Case(line="S5 beside 1 hanging", more=1, hang_s=_HANG_S, alone=_ALONE),
    _Case(line=_APART, more=100, apart_per_s=1.0, alone=_ALONE),
    _Case(
        line="S5 beside 100 hanging, 1/s each",
        more=100,
        hang_s=_HANG_S,
        apart_per_s=1.0,
        alone=_ALONE,
        control=_APART,
    ),
    _Case(line=_FASTER, per_s=200.0),
    _Case(line="S5 beside 1 hanging, 200/s", more=1, hang_s=_HANG_S, per_s=200.0, alone=_FASTER),
    # A hundred healthy ones would get 10,000 a second, which two cores cannot do: what was measured
    # would be the backlog.
    _Case(line=_EVERY, more=100, pull=True, alone=_ALONE),
    _Case(
        line="S5 beside 100 hanging, every message",
        more=100,
        hang_s=_HANG_S,
        alone=_ALONE,
        control=_EVERY,
    ),
)


def _stalls(plan: Plan, *, cases: tuple[_Case, ...] = _CASES) -> Iterator[Lines]:
    """Run rounds of all cases; every second round is reversed, so that no case always follows the same one."""
    seconds = max(5, plan.some(_SECONDS))
    chosen = _chosen(plan.only, cases)
    for number in range(plan.runs):
        lines: dict[str, Run] = {}
        for case in chosen if number % 2 == 0 else chosen[::-1]:
            # What hangs leaves a backlog behind, so each case has a service of its own.
            with staged(plan.folder, own_sink=True, profile=plan.profile) as stage:
                lines[case.line] = _stall(stage, case, seconds)
            reported = lines[case.line].values
            print(
                f"    {case.line}: p50 {reported.get('p50_ms', 0):.1f} ms, p99 {reported.get('p99_ms', 0):.1f} ms",
                flush=True,
            )
        _compare(chosen, lines)
        yield {case.line: lines[case.line] for case in chosen}


def _chosen(only: str, cases: tuple[_Case, ...]) -> tuple[_Case, ...]:
    """The cases whose names hold `only`, and those they are compared with."""
    named = [case for case in cases if only in case.line]
    wanted = {line for case in named for line in (case.line, case.alone, case.control)}
    return tuple(case for case in cases if case.line in wanted)


def _compare(cases: Sequence[_Case], lines: Mapping[str, Run]) -> None:
    for case in cases:
        p99 = lines[case.line].values.get("p99_ms")
        for field, line in (("to_alone", case.alone), ("to_control", case.control)):
            other = lines[line].values.get("p99_ms") if line in lines else None
            if p99 is not None and other:
                lines[case.line].values[field] = p99 / other


def _stall(stage: Stage, case: _Case, seconds: int) -> Run:
    run, room = Run(), stage.service.room("ten", event_types=(_HEALTHY,))
    paths = [f"/healthy/{number}" for number in range(case.measured)]
    targets = [
        stage.service.push(room, f"healthy-{number}", stage.sink.url(path), event_type=_HEALTHY)
        for number, path in enumerate(paths)
    ]
    with _beside(stage, case, room, seconds) as others:
        warm, count = Arrivals("/healthy/"), int(_WARM_UP_S * case.per_s)
        stage.await_arrivals(
            warm, count * len(paths), loading := _paced(stage, room, case.per_s, count)
        )
        loading.tally()
        arrivals, count = Arrivals("/healthy/"), int(seconds * case.per_s)
        with stage.window(title=case.line) as window:
            load = _paced(stage, room, case.per_s, count)
            stage.await_arrivals(arrivals, count * len(paths), load)
        tally = load.tally()
    latencies = [one for path in paths for one in arrivals.latencies_ms.get(path, ())]
    window.enter(run, done=len(latencies))
    _latencies(run, latencies, tally)
    _verify(run, arrivals, load.ids(), paths, tally)
    stage.verify_states(run, targets[:1])
    if case.more and not case.pull:
        kind = "hanging" if case.hang_s else "healthy"
        run.values["others_requests"] = others.requests
        run.verified.append(
            f"{others.requests:,} webhooks went to {case.more} {kind} endpoint(s) more meanwhile"
        )
        if not others.requests:
            run.faults.append("nothing was sent to the others")
    return run


@contextmanager
def _beside(stage: Stage, case: _Case, room: str, seconds: int) -> Iterator[Arrivals]:
    arrivals = Arrivals("/others/")
    if not case.more:
        yield arrivals
        return
    if case.pull:
        for number in range(case.more):
            stage.service.pull(room, f"queue-{number}")
        yield arrivals
        return
    apart = (
        None if case.apart_per_s is None else stage.service.room("apart", event_types=(_HEALTHY,))
    )
    with sinking(stage.folder, own=True, hang_s=case.hang_s) as sink:
        for number in range(case.more):
            # A host of its own each, as real ones are.
            url = sink.url(f"/others/{number}", host=f"127.0.1.{number + 1}")
            stage.service.push(apart or room, f"other-{number}", url, event_type=_HEALTHY)
        beside: Loading | None = None
        if apart is not None and case.apart_per_s is not None:
            count = int((seconds + _WARM_UP_S) * case.apart_per_s)
            beside = _paced(stage, apart, case.apart_per_s, count)
        yield arrivals
        sink.read(arrivals)
        if beside is not None:
            beside.tally()


def _paced(stage: Stage, room: str, per_s: float, count: int) -> Loading:
    return stage.load(
        room=room, event_type=_HEALTHY, messages=count, connections=_CONNECTIONS, rate_per_s=per_s
    )


def _latencies(run: Run, latencies: list[float], tally: Tally) -> None:
    run.values |= {f"{name}_ms": value for name, value in percentiles(latencies).items()}
    run.values["samples"] = len(latencies)
    run.values |= {f"publish_{name}_ms": value for name, value in tally.latency_ms.items()}


def _verify(run: Run, arrivals: Arrivals, ids: list[str], paths: list[str], tally: Tally) -> None:
    missing = sum(len(set(ids) - arrivals.messages.get(path, set())) for path in paths)
    if missing or tally.refused:
        run.faults.append(
            f"{missing} of {len(ids) * len(paths)} never arrived; other answers: {tally.refused}"
        )
    else:
        doubles = arrivals.requests - len(arrivals.webhooks)
        run.verified.append(
            f"all {len(ids):,} messages x {len(paths)} endpoints arrived, {doubles} came twice"
        )


def idle(plan: Plan) -> Iterator[Lines]:
    """One webhook after each second of silence."""
    times = 5 if plan.quick else 20
    with staged(plan.folder, own_sink=True) as stage:
        room = stage.service.room("idle", event_types=(_HEALTHY,))
        target = stage.service.push(room, "only", stage.sink.url("/idle"), event_type=_HEALTHY)
        for _ in range(plan.runs):
            run, arrivals = Run(), Arrivals("/idle")
            with stage.window() as window:
                load = _paced(stage, room, 1.0, times)
                stage.await_arrivals(arrivals, times, load)
            tally = load.tally()
            latencies = arrivals.latencies_ms.get("/idle", [])
            window.enter(run, done=len(latencies))
            _latencies(run, latencies, tally)
            _verify(run, arrivals, load.ids(), ["/idle"], tally)
            stage.verify_states(run, [target])
            yield {"idle, first webhook": run}


def steady(plan: Plan) -> Iterator[Lines]:
    """One webhook for each of forty messages a second: each wakes up a service that has nothing else to do."""
    seconds = max(5, plan.some(_SECONDS))
    for artemis in (False, True) if plan.artemis else (False,):
        with staged(plan.folder, own_sink=True, profile=plan.profile, artemis=artemis) as stage:
            room = stage.service.room("steady", event_types=(_HEALTHY,))
            target = stage.service.push(
                room, "only", stage.sink.url("/steady"), event_type=_HEALTHY
            )
            warm, count = Arrivals("/steady"), int(_WARM_UP_S * _STEADY_PER_S)
            stage.await_arrivals(warm, count, loading := _paced(stage, room, _STEADY_PER_S, count))
            loading.tally()
            for _ in range(plan.runs):
                line = "steady, 40/s on Artemis" if artemis else "steady, 40/s"
                run, arrivals, count = Run(), Arrivals("/steady"), int(seconds * _STEADY_PER_S)
                with stage.window(title=line) as window:
                    load = _paced(stage, room, _STEADY_PER_S, count)
                    stage.await_arrivals(arrivals, count, load)
                tally = load.tally()
                latencies = arrivals.latencies_ms.get("/steady", [])
                window.enter(run, done=len(latencies))
                _latencies(run, latencies, tally)
                _verify(run, arrivals, load.ids(), ["/steady"], tally)
                stage.verify_states(run, [target])
                yield {line: run}


LATENCIES: Final[dict[str, Scenario]] = {"S5": partial(_stalls), "idle": idle, "steady": steady}
