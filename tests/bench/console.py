"""Console: the time and size of every page over 10,000 rooms, 100,000 subscriptions and 10 million messages, and the cost of an open page."""

# ruff: noqa: T201 - what a bench measures is printed

import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import httpx
import psycopg

from rooms.console.app import PAGES
from rooms.console.page import DOWNLOAD
from rooms.db.catalog.sign_in_links import PORTAL_ENTRY_PATH
from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.bench.service import BenchError, Service, running

_ROOMS: Final = 10_000
_SUBSCRIPTIONS: Final = 100_000
_MESSAGES: Final = 10_000_000
_BATCH: Final = 250_000
_TRIES: Final = 20
_WARM: Final = 3
MOST_MS: Final = 100.0
MOST_BYTES: Final = 150 * 1024
_TURNS: Final = 6
_TURN_S: Final = 25.0
_BEGIN_S: Final = 2.0
"""A page reads all of its parts when it is opened, which is not what it costs while it is open."""
_SETTLE_S: Final = 600.0
MOST_CORE: Final = 0.01
_EXPECTED: Final = frozenset({200, 303})
"""A payload is shown after a click only; before, its page leads back to the message."""
_PARAMETER: Final = re.compile(r"\{([a-z_]+)(?::[a-z]+)?\}")

_ID: Final = (
    "(lpad(to_hex({ms}), 12, '0') || '7' || lpad(to_hex({n} >> 30), 3, '0')"
    " || to_hex(2147483648 + ({n} & 1073741823)) || lpad(to_hex({room}), 8, '0'))::uuid"
)
"""An id as `rooms.domain.ids` makes it, of number `n` at `ms` in a room."""
_NOW_MS: Final = "(extract(epoch FROM now()) * 1000)::int8"
_ROOMS_SQL: Final = """
INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms, delivery_delay_multiplier, delivery_attempts)
SELECT 1000000 + n, %(owner)s, 'room-' || lpad(n::text, 6, '0'), 1000, 2, 10 FROM generate_series(1, %(count)s) n
"""
_TYPES_SQL: Final = f"""
WITH made AS (
    INSERT INTO event_types (room_id, id, name) SELECT r.id, {_ID.format(ms=_NOW_MS, n="1", room="r.id")}, 'order.paid'
    FROM rooms r WHERE r.id > 1000000 RETURNING room_id, id)
INSERT INTO event_type_versions (room_id, id, event_type_id, version) SELECT room_id, gen_random_uuid(), id, 1 FROM made
"""
_SUBSCRIPTIONS_SQL: Final = f"""
INSERT INTO subscriptions (room_id, id, name, type, push_url, secret, organisation_id, approved_at)
SELECT r.room, {_ID.format(ms=_NOW_MS, n="n::int8", room="r.room")}, 'subscription-' || n, 'PUSH', 'http://127.0.0.1:9999/', t.secret, %(owner)s, now()
FROM generate_series(1, %(count)s) n, LATERAL (SELECT 1000001 + (n % %(rooms)s)::int4 AS room) r,
    (SELECT secret FROM subscriptions WHERE id = %(template)s) t
"""
_MESSAGES_SQL: Final = f"""
WITH n AS (
    SELECT n, 1000001 + CASE WHEN n %% 2 = 0 THEN 0 ELSE (n %% %(rooms)s)::int4 END AS room, {_NOW_MS} - n %% 3600000 AS ms
    FROM generate_series(%(first)s::int8, %(last)s::int8) n
), ids AS (
    SELECT room, {_ID.format(ms="ms", n="n * 2", room="room")} AS message, {_ID.format(ms="ms", n="n * 2 + 1", room="room")} AS delivery,
        to_timestamp(ms / 1000.0) AS at, n FROM n
), m AS (
    INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, published_at, publisher_id, correlation_id, payload, due_at, business_key)
    SELECT room, message, 'order.paid', 1, 4, 1, at, NULL, message::text, '{{"amount":1}}', at, 'order-' || n FROM ids
), d AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, attempt, attempts, last_status, due_at, updated_at)
    SELECT i.room, i.delivery, i.message, s.id, 'delivered', 0, 1, 204, i.at, i.at FROM ids i JOIN %(first_of)s s ON s.room_id = i.room
), l AS (
    INSERT INTO log_entries (room_id, message_id, writer_id, writer_seq, ts, kind, subscription_id, delivery_id, generation, attempt, http_status, latency_ms, correlation_id)
    SELECT i.room, i.message, %(writer)s, i.n, i.at, 'delivered', s.id, i.delivery, 0, 0, 204, 3.5, i.message::text
    FROM ids i JOIN %(first_of)s s ON s.room_id = i.room
) SELECT count(*) FROM ids
"""


@dataclass(frozen=True, kw_only=True)
class _Filled:
    """Hold an id for each parameter of a page."""

    ids: dict[str, str]


def console(plan: Plan) -> Iterator[Lines]:
    """Fill an installation, and read each page."""
    with running(plan.folder) as service:
        filled = _fill(service, plan)
        key = _session(service)
        yield {**_pages(service, filled, key), "console, one page open": _open(service, key)}


def _fill(service: Service, plan: Plan) -> _Filled:
    """Make rooms, subscriptions and messages by statements; a few things by the API."""
    rooms, subscriptions = plan.some(_ROOMS), plan.some(_SUBSCRIPTIONS)
    messages = plan.some(_MESSAGES)
    small = service.room("small")
    template = service.post(
        f"/rooms/{small}/subscriptions",
        {"name": "template", "type": "PUSH", "push_url": "http://127.0.0.1:9999/"},
    )["id"]
    owner = _whoami(service)["organisation"]["id"]
    with psycopg.connect(service.database_url, autocommit=True) as connection:
        connection.execute(_ROOMS_SQL, {"owner": owner, "count": rooms})
        connection.execute(_TYPES_SQL)
        connection.execute(
            _SUBSCRIPTIONS_SQL.replace("n % %", "n %% %"),
            {"owner": owner, "count": subscriptions, "rooms": rooms, "template": template},
        )
        connection.execute(
            "CREATE TABLE first_of AS SELECT DISTINCT ON (room_id) room_id, id FROM subscriptions WHERE room_id > 1000000"
        )
        writer = connection.execute(
            "INSERT INTO writers (kind, host, pid) VALUES ('bench', 'bench', 1) RETURNING id"
        ).fetchone()
        assert writer is not None
        statement = _MESSAGES_SQL.replace("%(first_of)s", "first_of")
        for first in range(1, messages + 1, _BATCH):
            last = min(first + _BATCH - 1, messages)
            values = {"first": first, "last": last, "rooms": rooms, "writer": writer[0]}
            connection.execute(statement.encode(), values)
            print(f"  {last:,} of {messages:,} messages", flush=True)
        connection.execute("DROP TABLE first_of")
        connection.execute("VACUUM (ANALYZE)")
        big = connection.execute(
            "SELECT s.id::text, d.message_id::text, d.id::text FROM subscriptions s JOIN deliveries d ON d.room_id = s.room_id AND d.subscription_id = s.id"
            " WHERE s.room_id = 1000001 LIMIT 1"
        ).fetchone()
        assert big is not None
    job = service.post(f"/subscriptions/{template}/replay", {"since": "2020-01-01T00:00:00Z"})
    queue = service.post("/queues", {"name": "queue"})
    service.post(f"/queues/{queue['name']}/messages", {"payload": {"amount": 1}})
    return _Filled(
        ids={
            "room_id": "1000001",
            "subscription_id": big[0],
            "message_id": big[1],
            "delivery_id": big[2],
            "job_id": job.get("job_id") or job["id"],
            "key_id": _whoami(service)["key_id"],
            "organisation_id": owner,
            "queue": queue["name"],
            "name": "order.paid",
            "version": "1",
            "magazine": queue["magazine"],
        }
    )


def _whoami(service: Service) -> dict[str, Any]:
    found: dict[str, Any] = service.api.get("/v1/whoami").json()
    return found


def _session(service: Service) -> dict[str, str]:
    """Sign in to the console and to the portal, and return the cookies."""
    body = {"name": "bench", "roles": ["platform", "owner"]}
    token = httpx.URL(service.post("/sign-in-links", body)["path"]).params["token"]
    answer = httpx.post(
        f"{service.url}/console/sign-in",
        data={"token": token},
        headers={"Origin": service.url, "Sec-Fetch-Site": "same-origin"},
    )
    assert answer.status_code == 303, answer.text
    own = _whoami(service)["organisation"]["id"]
    body = {"name": "bench", "access": "manage", "organisation_id": own}
    entered = httpx.get(service.url + service.post("/portal-links", body)["path"])
    assert entered.status_code == 303, entered.text
    return {**answer.cookies, **entered.cookies}


def _pages(service: Service, filled: _Filled, cookies: dict[str, str]) -> dict[str, Run]:
    """Read each page some times; a page that is slow or large is a fault."""
    found: dict[str, Run] = {}
    with httpx.Client(base_url=service.url, cookies=cookies, timeout=60) as client:
        for handler in PAGES:
            if "GET" not in handler.http_methods:
                continue
            for path in sorted(handler.paths - {PORTAL_ENTRY_PATH}):
                filled_path = _PARAMETER.sub(lambda one: filled.ids[one[1]], path)
                found[f"console {path}"] = _page(
                    client, filled_path, is_page=DOWNLOAD not in handler.opt
                )
    return found


def _page(client: httpx.Client, path: str, *, is_page: bool) -> Run:
    """Read a page, or a file, for which there are no limits."""
    run = Run()
    took: list[float] = []
    size = 0
    for number in range(_WARM + _TRIES):
        began = time.perf_counter()
        answer = client.get(path)
        if number >= _WARM:
            took.append((time.perf_counter() - began) * 1000)
        size = len(answer.content)
        if answer.status_code not in _EXPECTED:
            run.faults.append(f"{path} was answered with {answer.status_code}")
            return run
    run.values |= {"p50_ms": statistics.median(took), "max_ms": max(took), "bytes": size}
    if is_page and statistics.median(took) > MOST_MS:
        run.faults.append(f"{path} took {statistics.median(took):.0f} ms")
    if is_page and size > MOST_BYTES:
        run.faults.append(f"{path} has {size:,} bytes")
    return run


def _open(service: Service, cookies: dict[str, str]) -> Run:
    """Open the first page, live, and close it, in turns; what all processes use more with it counts.

    It begins when what was written is counted: that work of its own comes and goes.
    """
    run = Run()
    _await_counted(service)
    more = []
    for turn in range(_TURNS):
        used = {}
        # Either is first in turns, as what else the service does comes and goes.
        for is_open in (turn % 2 == 1, turn % 2 == 0):
            with _opened(service, cookies) if is_open else nullcontext():
                time.sleep(_BEGIN_S)
                used[is_open] = _cores(service)
        more.append(used[True] - used[False])
    run.values |= {"cores": statistics.fmean(more), "max_cores": max(more)}
    print("  an open page, in turns: " + ", ".join(f"{one:.4f}" for one in more), flush=True)
    if run.values["cores"] > MOST_CORE:
        run.faults.append(f"an open page costs {run.values['cores']:.3f} of a core")
    return run


@contextmanager
def _opened(service: Service, cookies: dict[str, str]) -> Iterator[None]:
    """Keep the page live; what comes fits into the buffers of the connection."""
    with (
        httpx.Client(base_url=service.url, cookies=cookies, timeout=60) as client,
        client.stream("GET", "/console/live", params={"path": "/console"}) as answer,
    ):
        assert answer.status_code == 200, answer.status_code
        yield


def _await_counted(service: Service) -> None:
    """Wait until usage is complete up to now. BenchError: it is not after ten minutes."""
    until = time.monotonic() + _SETTLE_S
    with psycopg.connect(service.database_url, autocommit=True) as connection:
        row = connection.execute("SELECT now()").fetchone()
        assert row is not None
        while not connection.execute(
            "SELECT 1 FROM usage_mark WHERE complete_until >= %s", row
        ).fetchone():
            if time.monotonic() > until:
                raise BenchError("usage is not counted after ten minutes")
            time.sleep(1)


def _cores(service: Service) -> float:
    first, began = service.usage(), time.monotonic()
    time.sleep(_TURN_S)
    return sum(service.usage().since(first).values()) / (time.monotonic() - began)
