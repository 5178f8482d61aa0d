"""Retries that wait in Artemis: its memory, how long it takes to be back after `kill -9`, and how late each call is.

The rows are made by hand, as a worker leaves them after an attempt that failed; the way through relay, broker and worker is
the service's own. For the choice of the look-ahead it also measures what it costs in PostgreSQL to let a delivery wait there
and to have it sent when the look-ahead reaches it.
"""

import asyncio
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final

import psycopg

from rooms.db.queue.lookahead import HASH_SLOTS, stage_due
from rooms.db.writer import LogWriter
from rooms.domain.ids import IdGenerator, RoomId, SubscriptionId
from rooms.domain.work_location import WorkLocation, relayed_mode
from tests.bench import processes
from tests.bench.figures import MIB, Run
from tests.bench.load import percentiles
from tests.bench.plan import Lines, Plan
from tests.bench.sink import Arrivals
from tests.bench.stage import Stage, staged

_RETRIES: Final = 100_000
_QUICK: Final = 5_000
_PAYLOAD: Final = b'{"pad":"' + b"x" * 1000 + b'"}'
_LOOKAHEAD_S: Final = 3600
_SPREAD_PER_S: Final = 500
"""Messages due a second: few enough for one worker, so that a delay never means a missing worker."""
_CARRIED_PER_S: Final = 500
"""Minimum relayed a second: the first message is due when all are in the broker and it is back."""
_RESTART_S: Final = 30
_PATIENCE_S: Final = 300.0
_MOVE: Final = 1000
_TOLD: Final = (
    "carried in s",
    "heap MiB per 10,000",
    "restart s",
    "sent again s",
    "to spare before the first is due s",
)

_INSERT: Final = """
WITH v AS MATERIALIZED (
    SELECT *, now() + %(first)s * interval '1 s' + n / %(per_s)s::float8 * interval '1 s' AS due
    FROM unnest(%(messages)s::uuid[], %(deliveries)s::uuid[]) WITH ORDINALITY AS v (message, id, n)
), m AS (
    INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, correlation_id, payload)
    SELECT %(room)s, message, 'order.created', 1, 4, 1, message::text, %(payload)s FROM v
), d AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, attempt, attempts, due_at)
    SELECT %(room)s, id, message, %(subscription)s, %(state)s::delivery_state, 1, 1, due FROM v
)
INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, delay_ms, due_at)
SELECT %(room)s, id, message, %(subscription)s, %(kind)s, 4, 0, 1, 60000, due FROM v
"""
_DUE: Final = (
    "SELECT id::text, extract(epoch FROM due_at)::float8 FROM outbox WHERE subscription_id = %s"
)
_SENT: Final = "SELECT count(*) FROM outbox WHERE subscription_id = %s AND kind = 4"
_SENT_AGAIN: Final = f"{_SENT} AND generation = 1"
"""The broker has them in memory only, so all are sent again after its restart."""
_DELIVERED: Final = "SELECT count(*) FROM deliveries WHERE subscription_id = %s AND state = 'delivered' AND attempts = 2"


def _rows(
    connection: "psycopg.Connection[tuple[object, ...]]", *, count: int, **fields: object
) -> None:
    room, make, at_ms = (
        RoomId(int(str(fields["room"]))),
        IdGenerator(random.getrandbits),
        time.time_ns() // 1_000_000,
    )
    for done in range(0, count, 10_000):
        some = min(10_000, count - done)
        ids = {
            name: [make.generate(room, at_ms) for _ in range(some)]
            for name in ("messages", "deliveries")
        }
        first = float(str(fields["first"])) + done / _SPREAD_PER_S
        connection.execute(
            _INSERT, {"payload": _PAYLOAD, "per_s": _SPREAD_PER_S, **fields, **ids, "first": first}
        )


def _await(
    what: str,
    connection: "psycopg.Connection[tuple[object, ...]]",
    query: str,
    name: str,
    count: int,
) -> float:
    """Until a count is reached; the seconds it took. TimeoutError."""
    began, pause = time.monotonic(), threading.Event()
    while True:
        ((found,),) = connection.execute(query.encode(), [name])
        if int(str(found)) >= count:
            return time.monotonic() - began
        if time.monotonic() - began > _PATIENCE_S:
            raise TimeoutError(f"{found} of {count} {what} after {_PATIENCE_S:.0f} s")
        pause.wait(0.2)


def _resident(stage: Stage) -> tuple[float, float]:
    """MiB of Artemis: its heap in use after a full collection, and its resident size."""
    assert stage.service.artemis is not None
    pid = stage.service.artemis.pid
    return _heap_mib(pid), processes.memory(processes.under(pid)).rss


def _heap_mib(pid: int) -> float:
    """The live objects, as `jcmd` counts them after a collection; 0 where there is no `jcmd`."""
    if shutil.which("jcmd") is None:
        return 0.0
    reported = subprocess.run(
        ["jcmd", str(pid), "GC.class_histogram"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    last = reported.stdout.rstrip().splitlines()[-1].split() if reported.stdout else []
    return int(last[2]) / (1 << 20) if last[:1] == ["Total"] else 0.0


async def _moving(url: str, count: int) -> float:
    """Seconds to have `count` deliveries sent that waited beyond the look-ahead."""
    async with LogWriter(
        url, kind="upkeep", broker_mode=relayed_mode(lookahead_ms=_LOOKAHEAD_S * 1000 * 100)
    ) as writer:
        began, moved = time.monotonic(), 0
        while moved < count:
            moved += (await stage_due(writer, shards=range(HASH_SLOTS), limit=_MOVE)).staged
        return time.monotonic() - began


def retries(plan: Plan) -> Iterator[Lines]:
    """Each run on a service and an Artemis of its own."""
    count = _QUICK if plan.quick else _RETRIES
    for _ in range(plan.runs):
        with staged(plan.folder, artemis=True, ROOMS_BROKER_LOOKAHEAD_S=str(_LOOKAHEAD_S)) as stage:
            yield _once(stage, count)


def _once(stage: Stage, count: int) -> Lines:
    run, service = Run(), stage.service
    assert service.artemis is not None
    room = service.room("retries")
    target = SubscriptionId(service.push(room, "sink", stage.sink.url("/retries/1")))
    heap, resident = _resident(stage)
    with psycopg.connect(service.database_url, autocommit=True) as connection:
        first = count / _CARRIED_PER_S + _RESTART_S
        common = {"room": room, "subscription": target}
        _rows(
            connection,
            count=count,
            first=first,
            kind=int(WorkLocation.PUSH_TO_RELAY),
            state="queued",
            **common,
        )
        due = {str(name): float(str(at)) for name, at in connection.execute(_DUE, [target])}
        run.values["carried in s"] = _await("carried", connection, _SENT, target, count)
        full, resident_full = _resident(stage)
        run.values |= {
            f"{MIB}heap start": heap,
            f"{MIB}heap end": full,
            f"{MIB}resident start": resident,
            f"{MIB}resident end": resident_full,
            "heap MiB per 10,000": (full - heap) / count * 10_000,
        }
        began = time.monotonic()
        service.artemis.restart()
        run.values["restart s"] = time.monotonic() - began
        run.values["sent again s"] = _await("sent again", connection, _SENT_AGAIN, target, count)
        run.values["to spare before the first is due s"] = min(due.values()) - time.time()
        arrivals = Arrivals("/retries/")
        stage.await_arrivals(arrivals, count)
        _await("delivered", connection, _DELIVERED, target, count)
        late = _Late(due)
        late.read(stage)
        run.values |= {f"{name}_ms": value for name, value in percentiles(late.late_ms).items()}
        run.values["samples"] = len(late.late_ms)
        if late.calls != count or len(late.names) != count or late.names != set(due):
            run.faults.append(
                f"{late.calls:,} calls for {len(late.names):,} of {count:,} deliveries"
            )
        elif min(late.late_ms) < -1:
            run.faults.append(f"one came {-min(late.late_ms):.0f} ms early")
        else:
            run.verified.append(
                f"{count:,} retries, each called once, none early, over a kill -9 of the broker"
            )
        run.verified.append(", ".join(f"{name} {run.values[name]:.1f}" for name in _TOLD))
        moving = Run(values=_cost(stage, connection, common, min(count, 10_000)))
        moving.verified.append(
            ", ".join(f"{name} {value:.2f}" for name, value in moving.values.items())
        )
    return {"retries": run, "lookahead": moving}


def _cost(
    stage: Stage,
    connection: "psycopg.Connection[tuple[object, ...]]",
    common: Mapping[str, object],
    count: int,
) -> dict[str, float]:
    """Return the cost of 10,000 deliveries that wait in PostgreSQL first: seconds, and CPU seconds of PostgreSQL."""
    later = {
        "kind": int(WorkLocation.PUSH_SCHEDULED),
        "state": "scheduled",
        "first": _LOOKAHEAD_S * 10,
    }
    _rows(connection, count=count, **later, **common)
    before = stage.service.usage()
    took_s = asyncio.run(_moving(stage.service.database_url, count))
    cpu_s = stage.service.usage().since(before)["postgres"]
    return {
        "moved in s per 10,000": took_s / count * 10_000,
        "CPU s of PostgreSQL per 10,000": cpu_s / count * 10_000,
    }


class _Late:
    """Compute how late each delivery was called: `late_ms`, from the log of arrivals."""

    def __init__(self, due: dict[str, float]) -> None:
        self._due = due
        self.late_ms: list[float] = []
        self.names: set[str] = set()
        self.calls = 0

    def read(self, stage: Stage) -> None:
        """Everything that came."""
        for line in stage.sink.log.path.read_text(encoding="ascii").splitlines():
            at_s, path, name, *_ = line.split(" ")
            if not path.startswith("/retries/"):
                continue
            self.calls += 1
            self.names.add(name)
            if name in self._due:
                self.late_ms.append((float(at_s) - self._due[name]) * 1000)
