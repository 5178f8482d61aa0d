"""A farm of webhooks whose hosts fail in a known pattern, under load; the analysis has to name the pattern.

Eight hosts (addresses of loopback), each with a subscription in two of four rooms; one of them fails again and again, two
take turns in an outage, two are out at once, one after the other they come back. Afterwards `rooms analyze` and `rooms report`
are run on what the service logged, as an operator would: the incidents must be the outages, their causes the hosts. The report and
its picture are kept (`farm-report.html` and `farm-report.png` in `--data FOLDER`, or in the working folder).
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.bench.service import EVENT_TYPE, BenchError, Service, running
from tests.support.webhook_sink import Arrival, Reply, Sink, sinking

HOSTS: Final = tuple(f"127.0.0.{number}" for number in range(11, 19))
ROOMS: Final = 4
_A_SECOND: Final = 5
"""Messages, over all rooms."""
_FLAKY: Final = 0.02
"""Share of calls that fail at any host at any time."""
_WELL: Final = 0.12
"""Share of calls that the chronic host takes."""
_SETTLE_S: Final = 120.0
_CHRONIC: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """From one minute of the pattern to another all calls of these hosts (by number) get this answer."""

    begin: float
    end: float
    hosts: tuple[int, ...]
    status: int


PATTERN: Final = (
    Outage(begin=2.0, end=5.0, hosts=(0,), status=503),
    Outage(begin=8.0, end=11.5, hosts=(1, 2), status=502),
    Outage(begin=13.0, end=17.0, hosts=(0,), status=503),
    Outage(begin=16.2, end=21.0, hosts=(3,), status=500),
)
"""Apart by more than incidents bridge or put together: three minutes."""
_MINUTES: Final = 23


class _Farm:
    """The hosts and what they answer, by the clock."""

    def __init__(self, sinks: Mapping[int, Sink]) -> None:
        self._began = time.monotonic()
        self._dice = random.Random(7)
        self.sinks = sinks
        for host, sink in sinks.items():
            for room in range(ROOMS):
                sink.behave(f"/{room}", partial(self.answer, host))

    @property
    def minute(self) -> float:
        """Where in the pattern the farm is."""
        return (time.monotonic() - self._began) / 60

    def answer(self, host: int, _: Arrival) -> Reply:
        """Return the current answer of this host."""
        now = self.minute
        for outage in PATTERN:
            if host in outage.hosts and outage.begin <= now < outage.end:
                return Reply(status=outage.status)
        if host == _CHRONIC and self._dice.random() >= _WELL:
            return Reply(status=429)
        return (
            Reply(status=500)
            if self._dice.random() < _FLAKY
            else Reply(after_s=self._dice.uniform(0.002, 0.03))
        )

    @property
    def began(self) -> float:
        """When the pattern began, in seconds since 1970."""
        return time.time() - (time.monotonic() - self._began)


def farm(plan: Plan) -> Iterator[Lines]:
    """Once, however many runs are asked for, and never quicker: incidents go by minutes."""
    folder = plan.keep
    with ExitStack() as stack:
        sinks = {number: stack.enter_context(sinking(host)) for number, host in enumerate(HOSTS)}
        settings = {"ROOMS_ALLOW_TARGETS": "127.0.0.0/8", "ROOMS_LOG_LEVEL": "WARNING"}
        service = stack.enter_context(running(plan.folder, settings=settings))
        hosts = _subscribe(service, sinks)
        stage = _Farm(sinks)
        published = _publish(service, hosts.rooms, stage)
        _settle(service)
        run = Run(values={"each": float(published)})
        kept = {"--to": folder / "farm-report.html", "--picture": folder / "farm-report.png"}
        _rooms(service, "analyze")
        reported = _rooms(service, "incidents")
        _rooms(service, "report", *(str(part) for pair in kept.items() for part in pair))
        _judge(run, reported["items"], hosts.ids, stage.began)
        run.verified.append(
            f"{published:,} messages; {', '.join(str(path) for path in kept.values())}"
        )
        yield {"farm": run}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subscribed:
    rooms: list[str]
    ids: Mapping[int, frozenset[str]]
    """Subscriptions by number of the host."""


def _subscribe(service: Service, sinks: Mapping[int, Sink]) -> _Subscribed:
    policy = {"delivery_delay_ms": 1000, "delivery_delay_multiplier": 2, "delivery_attempts": 3}
    rooms = []
    for number in range(ROOMS):
        rooms.append(str(service.post("/rooms", {"name": f"farm-{number}", **policy})["id"]))
        service.post(f"/rooms/{rooms[-1]}/event-types", {"name": EVENT_TYPE})
    ids = {}
    for host, sink in sinks.items():
        of_host = (host % ROOMS, (host + 1) % ROOMS)
        ids[host] = frozenset(
            service.push(rooms[room], f"host-{host}-{room}", sink.url(f"/{room}"))
            for room in of_host
        )
    return _Subscribed(rooms=rooms, ids=ids)


def _publish(service: Service, rooms: list[str], stage: _Farm) -> int:
    """Messages at an even rate until the pattern is over; how many."""
    count, began, pause = 0, time.monotonic(), threading.Event()
    while stage.minute < _MINUTES:
        service.post(
            f"/rooms/{rooms[count % ROOMS]}/messages",
            {"event_type": EVENT_TYPE, "payload": {"n": count}},
        )
        count += 1
        pause.wait(max(began + count / _A_SECOND - time.monotonic(), 0))
    return count


def _settle(service: Service) -> None:
    """Until nothing waits for a retry any more."""
    import psycopg

    until, pause = time.monotonic() + _SETTLE_S, threading.Event()
    with psycopg.connect(service.database_url, autocommit=True) as connection:
        while connection.execute("SELECT count(*) FROM outbox").fetchone() != (0,):
            if time.monotonic() > until:
                raise BenchError("deliveries are still under way")
            pause.wait(0.5)


def _rooms(service: Service, *command: str) -> Any:
    """A command as its user starts it."""
    environment = {**os.environ, "ROOMS_DATA": str(service.data), "ROOMS_URL": service.url}
    done = subprocess.run(
        [sys.executable, "-m", "rooms", "--json", *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"rooms {' '.join(command)}: {done.stderr[-1500:]}")
    return json.loads(done.stdout)


def _judge(
    run: Run, items: list[dict[str, Any]], ids: Mapping[int, frozenset[str]], began: float
) -> None:
    """Check that each outage is an incident of exactly its subscriptions, explained by its hosts."""
    from datetime import datetime

    for outage in PATTERN:
        wanted = sorted(frozenset[str]().union(*(ids[host] for host in outage.hosts)))
        middle = began + (outage.begin + outage.end) / 2 * 60
        met = [
            item
            for item in items
            if datetime.fromisoformat(item["began"]).timestamp()
            <= middle
            <= datetime.fromisoformat(item["ended"]).timestamp()
            and item["kind"] == "shared"
        ]
        name = f"hosts {', '.join(HOSTS[host] for host in outage.hosts)} with {outage.status}"
        exact = [item for item in met if item["subscriptions"] == wanted]
        if not exact:
            run.faults.append(
                f"{name}: no incident of {wanted}; there were {[item['subscriptions'] for item in met]}"
            )
            continue
        causes = {(cause["attribute"], str(cause["value"])) for cause in exact[0]["causes"]}
        known = ("http_status", str(outage.status)) in causes
        hosts = [value for attribute, value in causes if attribute == "target_host"]
        if len(outage.hosts) == 1:
            known = known and any(HOSTS[outage.hosts[0]] in value for value in hosts)
        (run.verified if known else run.faults).append(
            f"{name}: named, with its causes {sorted(causes)}"
        )
    chronic = {one for item in items if item["kind"] == "chronic" for one in item["subscriptions"]}
    if chronic != ids[_CHRONIC]:
        run.faults.append(
            f"chronic are {sorted(ids[_CHRONIC])}, and the report has {sorted(chronic)}"
        )
