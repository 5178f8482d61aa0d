"""Measure order per key: its cost, and the effect of a failing key on other keys.

The order is checked from outside, under four workers, failures and kills.

Each key is published by one connection, one request after the other, so that its numbers say what its order is.
"""

# ruff: noqa: T201 what a bench measures is printed

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from tests.bench.figures import Run
from tests.bench.load import percentiles
from tests.bench.plan import Lines, Plan
from tests.bench.service import EVENT_TYPE, ROOT, BenchError, Service, running
from tests.bench.turns import Turns, turning
from tests.bench.wire import Connection, post, post_head

_WORKERS: Final = 4
_KEYS: Final = 256
_MESSAGES: Final = 12_800
_BATCH: Final = 64
_CONNECTIONS: Final = 4
_FAILS: Final = 0.1
_KILLS: Final = 3
_FEW_KEYS: Final = 50
_PER_S: Final = 100.0
_SECONDS: Final = 15
_PAIRS: Final = 3
_FACTOR: Final = 1.5
_SLACK_MS: Final = 10.0
_STUCK: Final = "k0"
_ACCEPTED: Final = 202
_PATIENCE_S: Final = 60.0
_ROOM: Final = {"delivery_delay_ms": 100, "delivery_delay_multiplier": 1, "delivery_attempts": 1000}
_FILLING: Final = "x" * 960


@dataclass(slots=True)
class Workers:
    """Workers beside the one that the service has."""

    service: Service
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> None:
        environment = {
            **self.service.environment,
            "DATABASE_URL": self.service.database_url,
            "ROOMS_ALLOW_TARGETS": "127.0.0.0/8",
        }
        command = [sys.executable, "-m", "rooms", "worker"]
        with (self.service.data / "workers.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)
            )

    def kill(self) -> None:
        """One of them dies, another one comes."""
        victim = self.processes.pop(0)
        victim.kill()
        victim.wait()
        self.start()


def ordered(plan: Plan) -> Iterator[Lines]:
    """Rounds of all of it, in an order that turns."""
    margins: list[float] = []
    for number in range(1 if plan.quick else _PAIRS):
        with crewed(plan, _WORKERS) as workers:
            lines, first = {}, number % 2 == 0
            for is_ordered in (False, True) if first else (True, False):
                name = f"{'ordered' if is_ordered else 'unordered'}, {_KEYS} keys"
                lines[name] = _flood(plan, workers, is_ordered=is_ordered)
            share = (
                lines[f"ordered, {_KEYS} keys"].values["per_s"]
                / lines[f"unordered, {_KEYS} keys"].values["per_s"]
            )
            lines["ordered, failures and kills"] = _flood(
                plan, workers, is_ordered=True, fails=_FAILS, kills=_KILLS
            )
            found = {
                stuck: _paced(plan, workers, stuck=stuck)
                for stuck in (("", _STUCK) if first else (_STUCK, ""))
            }
        alone, beside = (found[stuck].values["p99_ms"] for stuck in ("", _STUCK))
        bound = _FACTOR * alone + _SLACK_MS
        margins.append(beside - bound)
        print(
            f"  round {number + 1}: ordered goes at {share:.2f} of the unordered rate; p99 of the other keys {alone:.1f} ms"
            f" while none fails, {beside:.1f} ms beside one that does: {beside / alone:.2f} times; bound {bound:.1f}",
            flush=True,
        )
        if number + 1 == _PAIRS and statistics.median(margins) > 0:
            found[_STUCK].faults.append(
                f"the median is {statistics.median(margins):.1f} ms above its bound"
            )
        yield {
            **lines,
            "ordered, no key fails": found[""],
            "ordered, other keys than one that fails": found[_STUCK],
        }


@contextmanager
def crewed(plan: Plan, count: int) -> Iterator[Workers]:
    """A new service with so many workers."""
    with running(plan.folder) as service:
        workers = Workers(service)
        try:
            for _ in range(count - 1):
                workers.start()
            yield workers
        finally:
            for process in workers.processes:
                process.kill()
                process.wait()


def _flood(
    plan: Plan, workers: Workers, *, is_ordered: bool, fails: float = 0.0, kills: int = 0
) -> Run:
    """As fast as it goes; the rate is that of arrivals, from the first request to the last success."""
    run, count = Run(), plan.some(_MESSAGES) // _KEYS
    keys = [f"k{number}" for number in range(_KEYS)]
    with (
        turning(plan.folder, fails=fails) as turns,
        _subscribed(workers.service, turns, is_ordered=is_ordered) as room,
    ):
        began = time.time()
        asyncio.run(publish(workers.service, room, keys, count, batch=_BATCH))
        for number in range(kills):
            wait(
                turns,
                lambda share=(number + 1) / (kills + 1): len(turns.done) >= share * count * _KEYS,  # type: ignore[misc]
            )
            workers.kill()
        wait(turns, lambda: len(turns.done) == count * _KEYS)
        run.values["per_s"] = len(turns.done) / (turns.last_at - began)
        _verify(run, turns, count * _KEYS, is_ordered=is_ordered)
    return run


def _paced(plan: Plan, workers: Workers, *, stuck: str) -> Run:
    """At a rate that leaves room; the latencies are those of all keys but the one that fails."""
    run, keys = Run(), [f"k{number}" for number in range(_FEW_KEYS)]
    count = int(max(5, plan.some(_SECONDS)) * _PER_S) // _FEW_KEYS
    others = [key for key in keys if key != _STUCK]
    with (
        turning(plan.folder, stuck=stuck) as turns,
        _subscribed(workers.service, turns, is_ordered=True) as room,
    ):
        asyncio.run(publish(workers.service, room, keys, count, batch=1, per_s=_PER_S))
        wait(turns, lambda: sum(key != _STUCK for key, _ in turns.done) == count * len(others))
        latencies = [one for key in others for one in turns.latencies_ms[key]]
        run.values |= {f"{name}_ms": value for name, value in percentiles(latencies).items()}
        run.values["samples"] = len(latencies)
        if stuck and set(turns.numbers[stuck]) != {0}:
            run.faults.append(
                f"of the key that fails came {sorted(set(turns.numbers[stuck]))}, not its first alone"
            )
        _verify(run, turns, count * len(keys if not stuck else others), is_ordered=True)
    return run


def _verify(run: Run, turns: Turns, expected: int, *, is_ordered: bool) -> None:
    if len(turns.done) != expected:
        run.faults.append(f"{len(turns.done):,} of {expected:,} were delivered")
    if is_ordered and (wrong := turns.disorder()):
        run.faults.append(f"{len(wrong)} keys went back: {wrong[:5]}")
    if not run.faults:
        reported = (
            "each key's came in its order" if is_ordered else "in no order that means anything"
        )
        run.verified.append(
            f"all {expected:,} were delivered in {turns.requests:,} calls, {reported}"
        )


@contextmanager
def _subscribed(service: Service, turns: Turns, *, is_ordered: bool) -> Iterator[str]:
    """A room of its own whose one webhook is this sink; the subscription goes with the block."""
    room = str(service.post("/rooms", {"name": f"turns-{turns.port}", **_ROOM})["id"])
    service.post(f"/rooms/{room}/event-types", {"name": EVENT_TYPE})
    reported = {"name": "turns", "type": "PUSH", "push_url": turns.url, "ordered": is_ordered}
    subscription = service.post(f"/rooms/{room}/subscriptions", reported)["id"]
    yield room
    service.api.delete(f"/v1/subscriptions/{subscription}").raise_for_status()


async def publish(
    service: Service,
    room: str,
    keys: Sequence[str],
    count: int,
    *,
    batch: int,
    per_s: float | None = None,
) -> None:
    """So many of each key; a connection has keys of its own, and goes round them.

    A key that begins with '-' is none.
    """
    began = time.monotonic()

    async def one(share: Sequence[str]) -> None:
        head = post_head("127.0.0.1", service.port, f"/rooms/{room}/messages/batch", service.key)
        connection = await Connection.open("127.0.0.1", service.port)
        turns = [(key, number) for number in range(count) for key in share]
        for start in range(0, len(turns), batch):
            if per_s is not None:
                await asyncio.sleep(
                    began + start / (per_s * len(share) / len(keys)) - time.monotonic()
                )
            messages = ",".join(
                _message(key, number) for key, number in turns[start : start + batch]
            )
            status, answer = await connection.exchange(
                post(head, f'{{"messages":[{messages}]}}'.encode())
            )
            if status != _ACCEPTED:
                raise BenchError(f"a batch was answered {status}: {answer[:300]!r}")
        connection.close()

    async with asyncio.TaskGroup() as group:
        for index in range(_CONNECTIONS):
            group.create_task(one(keys[index::_CONNECTIONS]))


def _message(key: str, number: int) -> str:
    payload = f'{{"sent":{time.time_ns()},"turn":"{key}/{number}","note":"{_FILLING}"}}'
    order = "" if key.startswith("-") else f'"ordering_key":"{key}",'
    return f'{{"event_type":"{EVENT_TYPE}",{order}"payload":{payload}}}'


def wait(turns: Turns, done: Callable[[], bool]) -> None:
    """Until it is so; a minute without any call is the end."""
    seen, since = -1, time.monotonic()
    while not done():
        time.sleep(0.02)
        turns.read()
        if turns.requests != seen:
            seen, since = turns.requests, time.monotonic()
        elif time.monotonic() > since + _PATIENCE_S:
            return
