"""A broker's records lost while 50,000 deliveries wait: how long until all that it had is with it again.

They wait for a PULL subscription without consumers: due, retried, due within the look-ahead; beside them some that are
leased, and some due beyond the look-ahead, which the broker never had. Then all that is due is pulled, and must come once.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import psycopg

from rooms.domain.ids import IdGenerator, RoomId
from rooms.domain.work_location import WorkLocation
from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.bench.progress import Progress
from tests.bench.service import Service
from tests.bench.stage import Stage, staged

_DELIVERIES: Final = 50_000
_QUICK: Final = 2_500
_LOOKAHEAD_S: Final = 3600
_PATIENCE_S: Final = 600.0
_BATCH: Final = 10_000
_POLL: Final = 1000
_PAYLOAD: Final = b'{"pad":"' + b"x" * 200 + b'"}'
_KINDS: Final = {
    "due": (0.5, 0, 0),
    "retried": (0.2, 2, 0),
    "due within the look-ahead": (0.15, 0, _LOOKAHEAD_S // 2),
    "due beyond it": (0.05, 0, _LOOKAHEAD_S * 10),
    "leased": (0.1, 0, 0),
}
"""The waiting rows: their share, attempt, and seconds until they are due."""

_INSERT: Final = """
WITH v AS MATERIALIZED (
    SELECT * FROM unnest(%(messages)s::uuid[], %(deliveries)s::uuid[]) AS v (message, id)
), m AS (
    INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, correlation_id, payload)
    SELECT %(room)s, message, 'order.created', 1, 4, 1, message::text, %(payload)s FROM v
), d AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, attempt, attempts, due_at)
    SELECT %(room)s, id, message, %(subscription)s, %(state)s::delivery_state, %(attempt)s, %(attempt)s,
        now() + %(due_s)s * interval '1 s' FROM v
), l AS (
    INSERT INTO leases (room_id, id, subscription_id, generation, until)
    SELECT %(room)s, id, %(subscription)s, 0, now() + interval '1 day' FROM v WHERE %(state)s = 'leased'
)
INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at)
SELECT %(room)s, id, message, %(subscription)s, %(kind)s, 4, 0, %(attempt)s, now() + %(due_s)s * interval '1 s' FROM v
WHERE %(state)s <> 'leased'
"""
_STEPS: Final = "SELECT id::text, kind, generation, attempt, due_at FROM outbox"
_SENT: Final = f"SELECT count(*) FROM outbox WHERE kind = {WorkLocation.PULL_AT_BROKER:d}"


def recover(plan: Plan) -> Iterator[Lines]:
    """Each run on a service and an Artemis of its own."""
    for _ in range(plan.runs):
        with staged(plan.folder, artemis=True, ROOMS_BROKER_LOOKAHEAD_S=str(_LOOKAHEAD_S)) as stage:
            yield {"recover": _once(stage, _QUICK if plan.quick else _DELIVERIES)}


def _once(stage: Stage, count: int) -> Run:
    run, service, progress = Run(), stage.service, Progress("recover")
    assert service.artemis is not None
    room = service.room("recovered")
    target = service.pull(room, "waiting")
    with psycopg.connect(service.database_url, autocommit=True) as connection:
        counts = _furnish(connection, int(room), target, count)
        had = sum(
            number for name, number in counts.items() if name not in {"leased", "due beyond it"}
        )
        run.values["carried in s"] = _await(connection, had, progress, "carried to the broker")
        before = _steps(connection)
        progress.step("the broker loses its records")
        service.artemis.kill()
        service.artemis.erase()
        service.artemis.start()
        began = time.monotonic()
        job = service.post("/recover", {})["job_id"]
        reported = _finished(service, job, progress)
        run.values["job s"] = time.monotonic() - began
        _await(connection, had, progress, "with the broker again")
        run.values["with the broker again s"] = time.monotonic() - began
        after = _steps(connection)
    run.values |= {
        "deliveries": count,
        "had by the broker": had,
        "sent again by the job": reported["result"]["sent_again"],
    }
    wrong = [
        name
        for name, (kind, _, attempt, due) in before.items()
        if _kept(after.get(name)) != (kind, attempt, due)
    ]
    still = [
        name
        for name, (kind, generation, *_) in after.items()
        if kind != WorkLocation.PULL_SCHEDULED and not generation
    ]
    due = counts["due"] + counts["retried"]
    pulled = _pull(service, target, progress, due)
    if wrong or still or len(before) != len(after):
        run.faults.append(
            f"{len(wrong)} rows are not as they were, {len(still)} were not sent again"
        )
    elif len(pulled) != due or len(set(pulled)) != due:
        run.faults.append(
            f"{len(pulled):,} came, {len(set(pulled)):,} of them different, where {due:,} were due; "
            f"{_journey(service, pulled)}"
        )
    else:
        run.verified.append(
            f"{had:,} of {count:,} were in the broker and are again; {due:,} were due and came, each once"
        )
    return run


def _kept(row: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return None if row is None else (row[0], row[2], row[3])


def _furnish(
    connection: "psycopg.Connection[tuple[Any, ...]]", room: int, target: str, count: int
) -> dict[str, int]:
    make, at_ms, counts = IdGenerator(random.getrandbits), time.time_ns() // 1_000_000, {}
    for name, (share, attempt, due_s) in _KINDS.items():
        counts[name] = int(count * share)
        state = "leased" if name == "leased" else "scheduled" if due_s > _LOOKAHEAD_S else "queued"
        for done in range(0, counts[name], _BATCH):
            some = min(_BATCH, counts[name] - done)
            connection.execute(
                _INSERT,
                {
                    "messages": [make.generate(RoomId(room), at_ms) for _ in range(some)],
                    "deliveries": [make.generate(RoomId(room), at_ms) for _ in range(some)],
                    "room": room,
                    "subscription": target,
                    "payload": _PAYLOAD,
                    "state": state,
                    "attempt": attempt,
                    "due_s": due_s,
                    "kind": int(
                        WorkLocation.PULL_SCHEDULED
                        if state == "scheduled"
                        else WorkLocation.PULL_TO_RELAY
                    ),
                },
            )
    return counts


def _steps(connection: "psycopg.Connection[tuple[Any, ...]]") -> dict[str, tuple[Any, ...]]:
    return {row[0]: row[1:] for row in connection.execute(_STEPS)}


def _await(
    connection: "psycopg.Connection[tuple[Any, ...]]", count: int, progress: Progress, what: str
) -> float:
    """Until the broker has so many; the seconds it took. TimeoutError."""
    began, pause, found = time.monotonic(), threading.Event(), -1
    while found != count:
        if time.monotonic() - began > _PATIENCE_S:
            raise TimeoutError(f"{found} of {count} were sent after {_PATIENCE_S:.0f} s")
        ((found,),) = connection.execute(_SENT.encode())
        progress.count(what, found, count)
        pause.wait(0.1)
    return time.monotonic() - began


def _finished(service: Service, job: str, progress: Progress) -> dict[str, Any]:
    began, pause = time.monotonic(), threading.Event()
    while True:
        found: dict[str, Any] = service.api.get(f"/v1/jobs/{job}").json()
        if found["state"] not in {"queued", "running"}:
            return found
        progress.count("the job", found["done"], found["total"] or 0)
        if time.monotonic() - began > _PATIENCE_S:
            raise TimeoutError(f"the job stands at {found}")
        pause.wait(0.1)


def _pull(service: Service, target: str, progress: Progress, due: int) -> list[str]:
    """The messages that come until none does for five seconds."""
    names: list[str] = []
    while True:
        body = {"max_messages": _POLL, "wait_ms": 5000, "lease_ms": 3_600_000}
        some = service.post(f"/subscriptions/{target}/pull", body)["messages"]
        if not some:
            return names
        names += [one["message_id"] for one in some]
        progress.count("pulled", len(names), due)


def _journey(service: Service, pulled: Sequence[str]) -> str:
    """Return the log of the first message that arrived twice."""
    twice = [name for name, times in Counter(pulled).items() if times > 1]
    if not twice:
        return "none of them twice"
    steps = service.api.get(f"/v1/messages/{twice[0]}/journey").json()["items"]
    return f"{twice[0]}: " + ", ".join(
        f"{step['kind']} {step['generation']} {step['ts']}" for step in steps
    )
