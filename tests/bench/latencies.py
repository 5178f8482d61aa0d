"""S5 and idle: from publish to arrival, while other endpoints hang and while nothing else goes on."""

from collections.abc import Iterator
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
_SECONDS: Final = 20
_WARM_UP_S: Final = 6
_CONNECTIONS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """`per_s` messages a second to the ten subscriptions. One that hangs is one of the ten, a hundred stand beside them;
    these get every message, or where `apart_per_s` is given so many a second each, from a room of their own.
    """

    line: str
    hanging: int = 0
    per_s: float = 100.0
    apart_per_s: float | None = None

    @property
    def healthy(self) -> int:
        return _SUBSCRIPTIONS - (1 if self.hanging == 1 else 0)


_CASES: Final = (
    _Case(line="S5 alone"),
    _Case(line="S5 beside 1 hanging", hanging=1),
    _Case(line="S5 beside 1 hanging, 200/s", hanging=1, per_s=200.0),
    _Case(line="S5 beside 100 hanging, 1/s each", hanging=100, apart_per_s=1.0),
    _Case(line="S5 beside 100 hanging, every message", hanging=100),
)


def _stalls(plan: Plan, *, cases: tuple[_Case, ...] = _CASES) -> Iterator[Lines]:
    seconds = max(5, plan.some(_SECONDS))
    for _ in range(plan.runs):
        lines = {}
        for case in cases:
            # What hangs leaves a backlog behind, so each case has a service of its own.
            with staged(plan.folder, own_sink=True, profile=plan.profile) as stage:
                lines[case.line] = _stall(stage, case, seconds)
        yield lines


def _stall(stage: Stage, case: _Case, seconds: int) -> Run:
    run, room = Run(), stage.service.room("ten", event_types=(_HEALTHY,))
    paths = [f"/healthy/{number}" for number in range(case.healthy)]
    targets = [
        stage.service.push(room, f"healthy-{number}", stage.sink.url(path), event_type=_HEALTHY)
        for number, path in enumerate(paths)
    ]
    with _hanging(stage, case, room, seconds) as hung:
        warm, count = Arrivals("/healthy/"), int(_WARM_UP_S * case.per_s)
        stage.await_arrivals(warm, count * len(paths), loading := _paced(stage, room, case.per_s, count))
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
    if case.hanging:
        run.values["hanging_requests"] = hung.requests
        run.verified.append(f"{hung.requests:,} webhooks went to {case.hanging} hanging endpoint(s) meanwhile")
        if not hung.requests:
            run.faults.append("nothing was sent to what hangs")
    return run


@contextmanager
def _hanging(stage: Stage, case: _Case, room: str, seconds: int) -> Iterator[Arrivals]:
    arrivals = Arrivals("/hanging/")
    if not case.hanging:
        yield arrivals
        return
    apart = None if case.apart_per_s is None else stage.service.room("apart", event_types=(_HEALTHY,))
    with sinking(stage.folder, own=True, hang_s=_HANG_S) as sink:
        for number in range(case.hanging):
            # A host of its own each, as real ones are.
            url = sink.url(f"/hanging/{number}", host=f"127.0.1.{number + 1}")
            stage.service.push(apart or room, f"hanging-{number}", url, event_type=_HEALTHY)
        beside: Loading | None = None
        if apart is not None and case.apart_per_s is not None:
            count = int((seconds + _WARM_UP_S) * case.apart_per_s)
            beside = _paced(stage, apart, case.apart_per_s, count)
        yield arrivals
        sink.read(arrivals)
        if beside is not None:
            beside.tally()


def _paced(stage: Stage, room: str, per_s: float, count: int) -> Loading:
    return stage.load(room=room, event_type=_HEALTHY, messages=count, connections=_CONNECTIONS, rate_per_s=per_s)


def _latencies(run: Run, latencies: list[float], tally: Tally) -> None:
    run.values |= {f"{name}_ms": value for name, value in percentiles(latencies).items()}
    run.values["samples"] = len(latencies)
    run.values |= {f"publish_{name}_ms": value for name, value in tally.latency_ms.items()}


def _verify(run: Run, arrivals: Arrivals, ids: list[str], paths: list[str], tally: Tally) -> None:
    missing = sum(len(set(ids) - arrivals.messages.get(path, set())) for path in paths)
    if missing or tally.refused:
        run.faults.append(f"{missing} of {len(ids) * len(paths)} never arrived; other answers: {tally.refused}")
    else:
        doubles = arrivals.requests - len(arrivals.webhooks)
        run.verified.append(f"all {len(ids):,} messages x {len(paths)} endpoints arrived, {doubles} came twice")


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


LATENCIES: Final[dict[str, Scenario]] = {"S5": partial(_stalls), "idle": idle}
