"""Where a scenario plays: a service, a sink, and the window in which CPU time counts."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rooms.domain.state_machine import State
from tests.bench import processes
from tests.bench.figures import Run
from tests.bench.load import Loading, loading
from tests.bench.profiles import profiling
from tests.bench.ratio import Bare, measured
from tests.bench.service import ROOT, BenchError, Service, running
from tests.bench.sink import Arrivals, Sink, sinking
from tests.support.local_servers import make_artemis
from tests.support.local_servers import run_server as own_running

PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.05
_HEAP_MIB: Final = 2048
_DELIVERED: Final = ("rooms_attempts_total", 'outcome="delivered"')


@dataclass(slots=True)
class Window:
    """Measure resource use while it is open."""

    cpu_s: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    others_cores: float = 0.0

    def enter(self, run: Run, *, done: int) -> None:
        run.cost(self.cpu_s, done=done)
        run.values["others_cores"] = self.others_cores
        run.values["cores"] = sum(self.cpu_s.values()) / self.wall_s


@dataclass(slots=True)
class Stage:
    """One service with one sink, both new; `folder` for whatever is written."""

    folder: Path
    service: Service
    sink: Sink
    profile: bool = False
    _number: int = 0

    def fresh(self) -> str:
        """A name for a room, or a path of the sink, that was not used before."""
        self._number += 1
        return f"run-{self._number}"

    def load(self, **order: Any) -> Loading:
        return loading(self.service, self.folder, **order)

    def bare(self, sends: int, *, slots: int = 32) -> Bare:
        """The bare sender loop against this sink, now."""
        return measured(self.sink.url("/bare"), sends=sends, slots=slots)

    @contextmanager
    def window(self, *, title: str = "") -> Iterator[Window]:
        """Counts CPU from here to the end of the block; profiles it where that is wanted and it has a title."""
        window = Window()
        profiled = (
            profiling(self.service, self.folder, title) if self.profile and title else nullcontext()
        )
        with profiled:
            busy, ours, before = processes.busy_s(), _ours_s(), self.service.usage()
            yield window
            after = self.service.usage()
            window.cpu_s, window.wall_s = after.since(before), after.at - before.at
            foreign = processes.busy_s() - busy - (_ours_s() - ours)
            window.others_cores = max(0.0, foreign / window.wall_s)

    def delivered(self) -> int:
        """Deliveries that the service says it has made."""
        return int(self.service.count(*_DELIVERED))

    def await_arrivals(
        self, arrivals: Arrivals, expected: int, load: Loading | None = None
    ) -> None:
        """Wait until so many different webhooks have come (and the load has ended); a minute without any is the end."""
        seen, since = -1, time.monotonic()
        while len(self.sink.read(arrivals).webhooks) < expected or (
            load is not None and not load.done()
        ):
            if load is not None and load.done() and load.process.returncode:
                return
            if arrivals.requests != seen:
                seen, since = arrivals.requests, time.monotonic()
            elif time.monotonic() > since + PATIENCE_S:
                return
            time.sleep(_POLL_S)

    def await_delivered(self, expected: int) -> int:
        """Wait until the service's own count says so, too; the count."""
        until, pause_s = time.monotonic() + PATIENCE_S, 0.1
        while True:
            # Asking costs the API some milliseconds, so seldom.
            time.sleep(pause_s)
            count = self.delivered()
            if count >= expected or time.monotonic() > until:
                return count
            pause_s = min(1.0, pause_s * 1.5)

    def verify(
        self,
        run: Run,
        *,
        arrivals: Arrivals,
        ids: Sequence[str],
        paths: Sequence[str],
        reported: int,
    ) -> None:
        """Every accepted message reached every path; the service's count agrees."""
        accepted, expected = set(ids), len(ids) * len(paths)
        missing = sum(len(accepted - arrivals.messages.get(path, set())) for path in paths)
        unique = len(arrivals.webhooks)
        if missing or unique != expected:
            run.faults.append(
                f"{missing} of {expected:,} never arrived; {unique:,} different webhooks did"
            )
        if reported != expected:
            run.faults.append(
                f"GET /metrics reports {reported:,} deliveries where {expected:,} were to be made"
            )
        if not run.faults:
            run.verified.append(
                f"{len(ids):,} accepted message ids x {len(paths)} endpoints = {expected:,}: all came to the {self.sink.kind} sink, "
                f"each with a webhook-id of its own, {arrivals.requests - unique} came twice; GET /metrics says the same"
            )

    def verify_states(self, run: Run, subscriptions: Sequence[str]) -> None:
        """Within a minute no delivery of these subscriptions is anything but delivered."""
        until = time.monotonic() + PATIENCE_S
        left = [
            (state, one) for state in State if state is not State.DELIVERED for one in subscriptions
        ]
        while left := [(state, one) for state, one in left if self._any(one, state)]:
            if time.monotonic() > until:
                run.faults.append(f"deliveries stand in other states than delivered: {left}")
                return
            time.sleep(0.5)
        run.verified.append("the API knows no delivery of theirs in any state but delivered")

    def _any(self, subscription: str, state: State) -> bool:
        reported = {"state": state.value, "limit": 1}
        answer = self.service.api.get(
            f"/v1/subscriptions/{subscription}/deliveries", params=reported
        )
        if not answer.is_success:
            raise BenchError(f"GET deliveries: {answer.status_code} {answer.text[:300]}")
        return bool(answer.json()["items"])


def _ours_s() -> float:
    """CPU seconds of this process and everything it has started."""
    return sum(process.cpu_s for process in processes.under(os.getpid()))


@contextmanager
def staged(
    folder: Path,
    *,
    own_sink: bool = False,
    profile: bool = False,
    artemis: bool = False,
    checkout: Path = ROOT,
    **settings: str,
) -> Iterator[Stage]:
    """A new service and a new sink; `artemis`: on a new Artemis; `checkout`: of another version.

    Settings are by their names in the environment.
    """
    with ExitStack() as stack:
        sink = stack.enter_context(sinking(folder, own=own_sink))
        broker = None
        if artemis:
            place = Path(tempfile.mkdtemp(prefix="artemis-", dir=folder))
            # As an operator runs it: with both of Java's compilers.
            broker = stack.enter_context(
                own_running(make_artemis(place, heap_mib=_HEAP_MIB, fast_start=False))
            )
        service = stack.enter_context(
            running(folder, artemis=broker, settings=settings, checkout=checkout)
        )
        yield Stage(folder=folder, service=service, sink=sink, profile=profile)
