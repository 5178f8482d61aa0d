"""Measure restart times and the recovery of lost work.

Each process is killed by `kill -9` with work in progress, and a lease expires. Tests prove that the work returns;
the times are promised, so they are measured here.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

import httpx

from rooms.local import process_table
from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.bench.service import EVENT_TYPE, BenchError, Service
from tests.bench.sink import Arrivals
from tests.bench.stage import Stage, staged

MOST_RESTART_S: Final = 2.0
"""From the kill of a process to the start of the next one."""
MOST_COMPLETE_S: Final = 5.0
"""From the moment at which every part is up again to the last delivery of what was accepted before."""
MOST_FIRST_START_S: Final = 60.0
MOST_START_S: Final = 5.0
"""From the command to readiness, with a sink of the bench's own beside the first one."""
MOST_LEASE_S: Final = 1.0
"""From the end of a lease to the end of its message's absence."""
_KILLED: Final = ("serve", "worker", "upkeep", "postgres")
_MESSAGES: Final = 5_000
_BATCH: Final = 500
_LEASES: Final = 20
_LEASE_MS: Final = 1000
_PATIENCE_S: Final = 60.0
_LOOK_S: Final = 0.005

_T = TypeVar("_T")


def returns(plan: Plan) -> Iterator[Lines]:
    """Starts, leases one after another, and every process in turn, each under a load of its own."""
    for _ in range(plan.runs):
        began = time.monotonic()
        with staged(plan.folder) as stage:
            start = _started(stage.service, time.monotonic() - began)
            over = _leases(
                stage.service, plan.some(_LEASES)
            )  # before the kills: who publishes right after one has to ask again
            yield {"start": start, "lease over": over} | {
                f"killed {name}": _killed(stage, name, plan.some(_MESSAGES)) for name in _KILLED
            }


def _started(service: Service, first_s: float) -> Run:
    """On an empty folder, and again on the same data after a `kill -9` of everything, until it is ready."""
    run, began = Run(), time.monotonic()
    service.restart()
    run.values |= {"first s": first_s, "again s": time.monotonic() - began}
    run.verified.append(
        "it was ready after its first start, and after one on what a kill of everything left"
    )
    _hold(run, "first s", MOST_FIRST_START_S)
    _hold(run, "again s", MOST_START_S)
    return run


def _killed(stage: Stage, name: str, count: int) -> Run:
    run, service, path = Run(), stage.service, f"/{stage.fresh()}"
    room = service.room(path.strip("/"))
    service.push(room, "hook", stage.sink.url(path))
    pid = _await(lambda: _pid(service, name), f"{name} to run")
    accepted: list[str] = []
    while len(accepted) < count:
        batch = [
            {"event_type": EVENT_TYPE, "payload": number}
            for number in range(min(_BATCH, count - len(accepted)))
        ]
        answer = service.post(f"/rooms/{room}/messages/batch", {"messages": batch})
        accepted += [message["message_id"] for message in answer["messages"]]
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    _await(lambda: (_pid(service, name) or pid) != pid, f"another {name}")
    run.values["restarted s"] = time.monotonic() - killed
    _await(lambda: _whole(service), "every part to be up")
    whole = time.monotonic()
    run.values["ready s"] = whole - killed
    arrivals = Arrivals(path)
    stage.await_arrivals(arrivals, count)
    run.values["complete s"] = max(0.0, time.monotonic() - whole)
    if (lost := len(set(accepted) - arrivals.messages.get(path, set()))) or len(accepted) != count:
        run.faults.append(f"{lost} of {count:,} accepted messages did not come")
    else:
        run.verified.append(f"{count:,} messages were accepted before the kill, and all came")
    _hold(run, "restarted s", MOST_RESTART_S)
    _hold(run, "complete s", MOST_COMPLETE_S)
    return run


def _leases(service: Service, count: int) -> Run:
    """By the log's times: from the end of each lease, as it was asked for, to its message's return to the queue."""
    run = Run()
    room = service.room("leases")
    queue = service.pull(room, "queue")
    late: list[float] = []
    for number in range(count):
        message = service.post(
            f"/rooms/{room}/messages", {"event_type": EVENT_TYPE, "payload": number}
        )["message_id"]
        _pull(service, queue, _LEASE_MS)
        leased = _pull(service, queue, 600_000)
        service.post(f"/subscriptions/{queue}/ack", {"ack_ids": [leased["ack_id"]]})
        steps = {step["kind"]: step for step in reversed(_journey(service, message))}
        late.append(_at(steps["lease_ended"]) - _at(steps["leased"]) - _LEASE_MS / 1000)
    run.values |= {"leases": count, "longest absence after it s": max(late)}
    run.verified.append(f"{count} leases ran out, and each message was pulled again")
    _hold(run, "longest absence after it s", MOST_LEASE_S)
    return run


def _pull(service: Service, queue: str, lease_ms: int) -> Mapping[str, Any]:
    """The one message of the queue, as soon as it is there."""
    (found,) = service.post(
        f"/subscriptions/{queue}/pull", {"wait_ms": 25_000, "lease_ms": lease_ms}
    )["messages"]
    leased: Mapping[str, Any] = found
    return leased


def _hold(run: Run, value: str, most_s: float) -> None:
    if run.values[value] > most_s:
        run.faults.append(f"{value}: {run.values[value]:.2f} where {most_s:g} are promised")


def _pid(service: Service, name: str) -> int | None:
    seen = process_table.read_pid_file(service.data / "run" / f"{name}.pid")
    return (
        seen.pid
        if seen is not None and process_table.start_token(seen.pid) == seen.started
        else None
    )


def _whole(service: Service) -> bool:
    try:
        answer = service.api.get("/health/ready")
    except httpx.TransportError:
        return False
    return answer.status_code == httpx.codes.OK and not answer.json()["degraded"]


def _journey(service: Service, message: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = service.api.get(f"/v1/messages/{message}/journey").json()[
        "items"
    ]
    return found


def _at(step: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(step["ts"]).timestamp()


def _await(look: Callable[[], _T | None], what: str) -> _T:
    pause, until = threading.Event(), time.monotonic() + _PATIENCE_S
    while not (found := look()):
        if time.monotonic() > until:
            raise BenchError(f"waited {_PATIENCE_S:.0f} s in vain for {what}")
        pause.wait(_LOOK_S)
    return found
