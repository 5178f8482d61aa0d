"""Measure the takeover of a hung instance by a standby: its API answers, due messages are delivered, it runs maintenance.

Two `rooms standalone --standby`; whichever is in charge is stopped by SIGSTOP at a random moment, twenty times, with the
election in PostgreSQL and in ZooKeeper. Five seconds are promised.
"""

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx

from rooms.cli.database import create_key
from rooms.db.schema import migrate
from rooms.domain.state_machine import Scope
from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.support.local_servers import temporary_postgres, temporary_zookeeper
from tests.support.polling import until
from tests.support.process_group import Crew, Process
from tests.support.room import EVENT_TYPE, Place
from tests.support.webhook_sink import Sink, sinking

MOST_S: Final = 5.0
"""From the hang to everything."""
_TAKEOVERS: Final = 20
_DUTY: Final = "upkeep/jobs is assigned to this process"
_STANDING_BY: Final = "standing by"
_DUE_MS: Final = 500
_LOOK_S: Final = 0.01
_ANSWER_S: Final = 0.5


def takeovers(plan: Plan) -> Iterator[Lines]:
    """Once, with the election in each store; with --quick twice each."""
    for scheme in ("postgresql", "zookeeper"):
        folder = plan.folder / f"takeovers-{scheme}"
        folder.mkdir()
        yield {f"take-over, {scheme}": _measured(folder, scheme, plan.some(_TAKEOVERS))}


def _measured(folder: Path, scheme: str, count: int) -> Run:
    data = folder / "postgres"
    data.mkdir()
    with temporary_postgres(data) as url, sinking() as sink:
        migrate(url)
        if scheme == "postgresql":
            return _take_over(folder, url, sink, {}, count)
        with temporary_zookeeper(folder / "zookeeper") as election_url:
            return _take_over(folder, url, sink, {"ELECTION_URL": election_url}, count)


def _take_over(folder: Path, url: str, sink: Sink, stores: dict[str, str], count: int) -> Run:
    _, key = create_key(url, "default", "takeovers", [Scope.ADMIN])
    crew = Crew(url="", folder=folder, _database_url=url, broker=stores)
    crew.http.headers["authorization"] = f"Bearer {key}"
    try:
        active = crew.start("standalone", options=["--standby"])
        until(lambda: _live(active), "the first to be in charge")
        crew.http.base_url = active.url
        place = Place.open(crew, sink)
        hook = place.push()
        until(lambda: _lines(active, _DUTY), "the first to have its duties")
        standby = crew.start("standalone", options=["--standby"])
        until(lambda: _lines(standby, _STANDING_BY), "the second to stand by")
        run = Run(values={"take-overs": count})
        late: dict[str, list[float]] = {"api": [], "webhook": [], "upkeep": []}
        for number in range(count):
            crew.http.base_url = active.url
            answer = crew.call(
                "POST",
                f"{place.at}/messages",
                {"event_type": EVENT_TYPE, "payload": number, "delay_ms": _DUE_MS},
            )
            assert answer.status_code == httpx.codes.ACCEPTED, answer.text
            threading.Event().wait(random.uniform(0, 0.4))
            for what, took_s in _taken_over(active, standby, sink, hook.path, number + 1).items():
                late[what].append(took_s)
            active, standby = standby, active
    finally:
        crew.end()
    for what, seconds in late.items():
        run.values |= {
            f"{what} median s": sorted(seconds)[len(seconds) // 2],
            f"{what} longest s": max(seconds),
        }
        if max(seconds) > MOST_S:
            run.faults.append(f"{what}: {max(seconds):.2f} s where {MOST_S:g} are promised")
    run.verified.append(f"{count} times the one in charge hung, and all that was accepted came")
    return run


def _taken_over(
    active: Process, standby: Process, sink: Sink, path: str, calls: int
) -> dict[str, float]:
    """Stop one process and let the other take over; the seconds that each part of it took."""
    duties, stood_by = _lines(standby, _DUTY), _lines(active, _STANDING_BY)
    active.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    found = _await_all(
        {
            "api": lambda: _live(standby),
            "webhook": lambda: len(sink.arrivals(path)) >= calls,
            "upkeep": lambda: _lines(standby, _DUTY) > duties,
        }
    )
    active.process.send_signal(signal.SIGCONT)
    until(lambda: _lines(active, _STANDING_BY) > stood_by, "the one that hung to stand by")
    return {what: at - began for what, at in found.items()}


def _await_all(looks: dict[str, Callable[[], bool]]) -> dict[str, float]:
    """The moment of each, as they come."""
    found: dict[str, float] = {}

    def all_there() -> bool:
        for what, look in looks.items():
            if what not in found and look():
                found[what] = time.monotonic()
        return len(found) == len(looks)

    until(all_there, lambda: f"{sorted(looks.keys() - found.keys())} of a standby", pause_s=_LOOK_S)
    return found


def _live(process: Process) -> bool:
    with suppress(httpx.TransportError):
        return (
            httpx.get(f"{process.url}/health/live", timeout=_ANSWER_S).status_code == httpx.codes.OK
        )
    return False


def _lines(process: Process, text: str) -> int:
    return process.log.read_text(errors="replace").count(text)
