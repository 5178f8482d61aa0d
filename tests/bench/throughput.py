"""S1, S2, S3, publishing and pulling: how much a second, and a CPU-second of everything behind the API."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from tests.bench.figures import Run
from tests.bench.load import Tally
from tests.bench.plan import Lines, Plan, Scenario
from tests.bench.ratio import Bare
from tests.bench.sink import Arrivals
from tests.bench.stage import Stage, Window, staged

_BARE_SENDS: Final = 40_000
_WARM_UP: Final = 1_000


def _rate(run: Run, window: Window, *, per_s: float, done: int, bare: Bare) -> None:
    window.enter(run, done=done)
    run.values |= {"per_s": per_s, "bare_per_cpu_s": bare.per_cpu_s}
    run.values["ratio"] = run.values["per_cpu_s"] / bare.per_cpu_s


def _asked(run: Run, tally: Tally) -> None:
    run.values |= {"per_s": tally.per_s, "load_cpu_s": tally.cpu_s}
    run.values |= {f"{name}_ms": value for name, value in tally.latency_ms.items()}


def _refusals(run: Run, tally: Tally, ordered: int) -> None:
    if tally.refused or tally.messages != ordered:
        run.faults.append(
            f"{tally.messages:,} of {ordered:,} were answered as they should; other answers: {tally.refused}"
        )


def _push(
    stage: Stage, plan: Plan, *, subscriptions: int, messages: int, connections: int, title: str
) -> tuple[Run, Run]:
    """One run; its deliveries and its publishes."""
    deliveries, publishes = Run(), Run()
    bare = stage.bare(plan.some(_BARE_SENDS))
    prefix = stage.fresh()
    paths = [f"/{prefix}/{number}" for number in range(subscriptions)]
    room = stage.service.room(prefix)
    targets = [
        stage.service.push(room, f"sink-{number}", stage.sink.url(path))
        for number, path in enumerate(paths)
    ]
    arrivals = Arrivals(f"/{prefix}/")
    expected, before = messages * subscriptions, stage.delivered()
    with stage.window(title=title) as window:
        load = stage.load(room=room, messages=messages, connections=connections)
        stage.await_arrivals(arrivals, expected, load)
        reported = stage.await_delivered(before + expected) - before
    tally = load.tally()
    took_s = arrivals.last_at - tally.began
    _rate(deliveries, window, per_s=arrivals.requests / took_s, done=expected, bare=bare)
    # The CPU of the same window holds the deliveries, so these have no figure a CPU-second.
    _asked(publishes, tally)
    publishes.values["others_cores"] = window.others_cores
    _refusals(publishes, tally, messages)
    stage.verify(deliveries, arrivals=arrivals, ids=load.ids(), paths=paths, reported=reported)
    stage.verify_states(deliveries, targets)
    return deliveries, publishes


def _warm_up(stage: Stage, plan: Plan, subscriptions: int) -> None:
    _push(
        stage,
        plan,
        subscriptions=subscriptions,
        messages=plan.some(_WARM_UP),
        connections=8,
        title="",
    )


def _pushes(
    plan: Plan, *, name: str, subscriptions: int, messages: int, connections: int
) -> Iterator[Lines]:
    """With PostgreSQL as the broker, and then with Artemis."""
    for artemis in (False, True) if plan.artemis else (False,):
        where = " on Artemis" if artemis else ""
        with staged(plan.folder, profile=plan.profile, artemis=artemis) as stage:
            _warm_up(stage, plan, subscriptions)
            for _ in range(plan.runs):
                deliveries, publishes = _push(
                    stage,
                    plan,
                    subscriptions=subscriptions,
                    messages=plan.some(messages),
                    connections=connections,
                    title=f"{name}{where}",
                )
                yield {
                    f"{name} deliveries{where}": deliveries,
                    f"{name} publishes{where}": publishes,
                }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """`batch` 0: one message a request."""

    line: str
    clients: int
    batch: int
    messages: int


_PUBLISHES: Final = (
    _Case(line="publish, 1 client", clients=1, batch=0, messages=3_000),
    _Case(line="publish, 16 clients", clients=16, batch=0, messages=20_000),
    _Case(line="publish, 64 clients", clients=64, batch=0, messages=30_000),
    _Case(line="publish, 4 clients, batches of 100", clients=4, batch=100, messages=60_000),
    _Case(line="publish, 16 clients, batches of 100", clients=16, batch=100, messages=60_000),
    _Case(line="publish, 64 clients, batches of 100", clients=64, batch=100, messages=60_000),
)
_PULLS: Final = (
    _Case(line="pull + ack of 100, 1 client", clients=1, batch=100, messages=40_000),
    _Case(line="pull + ack of 100, 4 clients", clients=4, batch=100, messages=40_000),
)


def _exchanges(
    plan: Plan, *, cases: tuple[_Case, ...], play: Callable[[Stage, _Case, int, Bare], Run]
) -> Iterator[Lines]:
    with staged(plan.folder, profile=plan.profile) as stage:
        bare = stage.bare(plan.some(_BARE_SENDS))
        for _ in range(plan.runs):
            yield {case.line: play(stage, case, plan.some(case.messages), bare) for case in cases}


def _publish(stage: Stage, case: _Case, messages: int, bare: Bare) -> Run:
    """Publishes into a PULL subscription, so that nothing is delivered meanwhile."""
    run, name = Run(), stage.fresh()
    room = stage.service.room(name)
    subscription = stage.service.pull(room, "later")
    with stage.window(title=case.line) as window:
        load = stage.load(room=room, messages=messages, connections=case.clients, batch=case.batch)
        tally = load.tally()
    _rate(run, window, per_s=tally.per_s, done=tally.messages, bare=bare)
    _asked(run, tally)
    _refusals(run, tally, messages)
    accepted = load.ids()
    drain = stage.load(subscription=subscription, messages=len(accepted), connections=4, batch=100)
    drain.tally()
    pulled = set(drain.ids())
    if pulled != set(accepted) or len(pulled) != len(accepted):
        run.faults.append(
            f"{len(accepted):,} accepted, of which {len(pulled & set(accepted)):,} could be pulled"
        )
    else:
        run.verified.append(
            f"{len(accepted):,} accepted message ids, all different, each pulled and acknowledged later"
        )
    return run


def _pull(stage: Stage, case: _Case, messages: int, bare: Bare) -> Run:
    """Pulls and acknowledges what was published before."""
    run, name = Run(), stage.fresh()
    room = stage.service.room(name)
    subscription = stage.service.pull(room, "now")
    published = stage.load(room=room, messages=messages, connections=4, batch=100)
    _refusals(run, published.tally(), messages)
    ids = published.ids()
    with stage.window(title=case.line) as window:
        load = stage.load(
            subscription=subscription, messages=len(ids), connections=case.clients, batch=case.batch
        )
        tally = load.tally()
    _rate(run, window, per_s=tally.per_s, done=tally.messages, bare=bare)
    _asked(run, tally)
    pulled = load.ids()
    if tally.refused or set(pulled) != set(ids):
        run.faults.append(
            f"{len(set(ids) - set(pulled)):,} of {len(ids):,} never came; other answers: {tally.refused}"
        )
    else:
        run.verified.append(
            f"{len(ids):,} published, all pulled and acknowledged, {len(pulled) - len(set(pulled))} twice"
        )
    stage.verify_states(run, [subscription])
    return run


THROUGHPUT: Final[dict[str, Scenario]] = {
    "S1": partial(_pushes, name="S1", subscriptions=1, messages=20_000, connections=32),
    "S2": partial(_pushes, name="S2", subscriptions=10, messages=3_000, connections=32),
    "S3": partial(_pushes, name="S3", subscriptions=1, messages=20_000, connections=64),
    "publish": partial(_exchanges, cases=_PUBLISHES, play=_publish),
    "pull": partial(_exchanges, cases=_PULLS, play=_pull),
}
