"""Creations of subscriptions: 10,000 in one room by 16 clients, each of which waits for its answers."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Final

import psycopg

from tests.bench.figures import Run
from tests.bench.plan import Lines, Plan
from tests.bench.service import Service, running
from tests.bench.wire import Connection, post, post_head

_COUNT: Final = 10_000
_CLIENTS: Final = 16
_WARM: Final = 200
MOST_S: Final = 20.0
_CREATED: Final = 201
_ALL: Final = "SELECT count(*) FROM subscriptions WHERE room_id = %(room)s"
_TRANSACTIONS: Final = "SELECT plan_version FROM rooms WHERE id = %(room)s"
_WITHOUT_ENTRIES: Final = """
    SELECT count(*) FROM subscriptions s WHERE s.room_id = %(room)s AND NOT (
        EXISTS (SELECT FROM subscription_history h WHERE h.room_id = s.room_id AND h.subscription_id = s.id)
        AND EXISTS (SELECT FROM journal j WHERE j.object = '/v1/subscriptions/' || s.id))
"""


def creations(plan: Plan) -> Iterator[Lines]:
    """Create `_COUNT` by `_CLIENTS` in a limited time, and a tenth by one client."""
    count = plan.some(_COUNT)
    for _ in range(plan.runs):
        with running(plan.folder) as service:
            yield {
                f"{number} creations, {clients} clients": asyncio.run(
                    _create(service, number, clients)
                )
                for clients, number in ((1, count // 10), (_CLIENTS, count))
            }


async def _create(service: Service, count: int, clients: int) -> Run:
    run = Run()
    # Imports, caches and prepared statements are not what a creation costs.
    await _load(service, service.room(f"warm-{clients}"), _WARM, clients)
    room = service.room(f"creations-{clients}")
    first, before = service.usage(), _count(service, _TRANSACTIONS, room)
    began = time.monotonic()
    refused = await _load(service, room, count, clients)
    took_s = time.monotonic() - began
    run.cost(service.usage().since(first), done=count)
    transactions = _count(service, _TRANSACTIONS, room) - before
    run.values |= {"per_s": count / took_s, "transactions": transactions}
    run.verified.append("each is there, with its entries in history and journal")
    if refused or _count(service, _ALL, room) != count or _count(service, _WITHOUT_ENTRIES, room):
        run.faults.append(f"{refused} were refused, or some are missing or without their entries")
    if count == _COUNT and took_s > MOST_S:
        run.faults.append(f"{count} took {took_s:.1f} s, and may take {MOST_S:g} s")
    return run


async def _load(service: Service, room: str, count: int, clients: int) -> int:
    """Create so many; return how many were refused."""
    head = post_head("127.0.0.1", service.port, f"/rooms/{room}/subscriptions", service.key)
    numbers = iter(range(count))

    async def client() -> int:
        connection = await Connection.open("127.0.0.1", service.port)
        refused = 0
        for number in numbers:
            body = json.dumps({"name": f"s{number}", "type": "PULL"}).encode()
            status, _ = await connection.exchange(post(head, body))
            refused += status != _CREATED
        connection.close()
        return refused

    return sum(await asyncio.gather(*(client() for _ in range(clients))))


def _count(service: Service, statement: str, room: str) -> int:
    with psycopg.connect(service.database_url) as connection:
        found = connection.execute(statement.encode(), {"room": int(room)}).fetchone()
    return int(found[0]) if found else 0
