"""Measure the lag of `rooms analyze --follow` beside a service under an even load.

For each delivery the time from its row in the log to the first answer of the API that counts it, once in the books
(`/v1/analysis/reconciliation`) and once in the rollups (`/v1/analysis/rollups`). Only those count that were delivered after the
first round was there to be read: the start of Spark is not part of the lag.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Final

import psycopg

from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.bench.service import EVENT_TYPE, BenchError, Service
from tests.bench.stage import Stage, staged

MOST_S: Final = 60.0
_TABLES: Final = ("reconciliation", "rollups")
_A_SECOND: Final = 20
_LOAD_S: Final = 120.0
"""Of load after the first round."""
_QUICK_LOAD_S: Final = 45.0
_LOOK_S: Final = 0.25
_PATIENCE_S: Final = 180.0
_INTERRUPTED: Final = 130
_TIMES: Final = """
SELECT extract(epoch FROM ts)::float8 FROM delivery_log WHERE kind = 'delivered' AND room_id = %s ORDER BY ts
"""


@dataclass(slots=True)
class _Seen:
    """Record the delivery counts of a table and their times; both ascend."""

    counts: list[int] = field(default_factory=lambda: [0])
    since: list[float] = field(default_factory=lambda: [0.0])

    def look(self, count: int) -> None:
        """Return the current count."""
        if count > self.counts[-1]:
            self.counts.append(count)
            self.since.append(time.time())

    def lags(self, times: list[float]) -> list[float]:
        """Seconds from each of these times to the first look that counted so many; of those after the first round."""
        ranked = [
            (at, self.since[bisect_left(self.counts, rank)]) for rank, at in enumerate(times, 1)
        ]
        return [seen - at for at, seen in ranked if at > self.since[1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Following:
    """Run the command and read its results for a room from the API."""

    service: Service
    room: str
    process: subprocess.Popen[bytes]
    output: Path
    seen: dict[str, _Seen] = field(default_factory=lambda: {table: _Seen() for table in _TABLES})

    def watch(self, until: Callable[[], bool]) -> None:
        """Look at the tables again and again. BenchError where that has no end."""
        latest = time.monotonic() + _PATIENCE_S
        while not until():
            if self.process.poll() is not None or time.monotonic() > latest:
                raise BenchError(
                    f"nothing follows any more: {self.output.read_text(errors='replace')[-1500:]}"
                )
            for table, seen in self.seen.items():
                seen.look(self._reported(table))
            time.sleep(_LOOK_S)

    def whole(self, count: int) -> bool:
        """Return whether every table has counted this many."""
        return all(seen.counts[-1] >= count for seen in self.seen.values())

    def _reported(self, table: str) -> int:
        answer = self.service.api.get(
            f"/v1/analysis/{table}", params={"room_id": self.room, "limit": 100}
        )
        if not answer.is_success:
            raise BenchError(f"GET {table}: {answer.status_code} {answer.text[:300]}")
        return sum(int(item["delivered"]) for item in answer.json()["items"])


def follow(plan: Plan) -> Iterator[Lines]:
    """Each run on a service of its own, with the defaults that a user has."""
    for _ in range(plan.runs):
        with staged(plan.folder) as stage:
            yield _followed(stage, _QUICK_LOAD_S if plan.quick else _LOAD_S)


def _followed(stage: Stage, load_s: float) -> Lines:
    service, path = stage.service, f"/{stage.fresh()}"
    room = service.room(path.strip("/"))
    service.push(room, "hook", stage.sink.url(path))
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(_publish, service, room, over)
        try:
            stage.await_delivered(1)
            with _followed_by_command(service, room) as following:
                following.watch(until=lambda: following.whole(1))
                end = time.monotonic() + load_s
                following.watch(until=lambda: time.monotonic() >= end)
                over.set()
                published = publishing.result()
                following.watch(until=lambda: following.whole(published))
        finally:
            over.set()
    with psycopg.connect(service.database_url) as connection:
        times = [at for (at,) in connection.execute(_TIMES, [room])]
    return {f"follow {table}": _run(seen.lags(times)) for table, seen in following.seen.items()}


def _run(lags: list[float]) -> Run:
    cuts, most = quantiles(lags, n=100, method="inclusive"), max(lags)
    run = Run(values={"p50 s": cuts[49], "p99 s": cuts[98], "max s": most, "each": len(lags)})
    if most > MOST_S:
        run.faults.append(f"{most:.1f} s behind now, where {MOST_S:g} are promised")
    else:
        run.verified.append(
            f"of {len(lags):,} deliveries half are reported {cuts[49]:.1f} s later, all {most:.1f} s later"
        )
    return run


def _publish(service: Service, room: str, over: threading.Event) -> int:
    """Messages at an even rate until it is over; how many."""
    count, began = 0, time.monotonic()
    while not over.wait(max(began + count / _A_SECOND - time.monotonic(), 0)):
        service.post(
            f"/rooms/{room}/messages", {"event_type": EVENT_TYPE, "payload": {"number": count}}
        )
        count += 1
    return count


@contextmanager
def _followed_by_command(service: Service, room: str) -> Iterator[_Following]:
    """The command as its user starts it, and Ctrl-C in the end."""
    output = service.data.with_suffix(".follow")
    environment = {**os.environ, "ROOMS_DATA": str(service.data)}
    with output.open("wb") as writing:
        process = subprocess.Popen(
            [sys.executable, "-m", "rooms", "analyze", "--follow"],
            env=environment,
            stdout=writing,
            stderr=writing,
        )
    try:
        yield _Following(service=service, room=room, process=process, output=output)
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(_PATIENCE_S)
    if code != _INTERRUPTED:
        raise BenchError(
            f"rooms analyze --follow ended with {code}: {output.read_text(errors='replace')[-1500:]}"
        )
