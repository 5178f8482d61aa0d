"""Test what a subscriber in another organisation's room reads of a large backlog, by the plans.

Oracle: `EXPLAIN (ANALYZE, BUFFERS)` of each statement that a call makes, and the rows read by it.
"""

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.db.connection import open_engine, transaction
from rooms.db.queries import deliveries, message_list, pull_queue, scan_bound, subscription_counts
from rooms.db.queries.message_scope import find_scope
from rooms.db.queries.messages import ListFilter
from rooms.domain.ids import KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from tests.integration.rooms.db.scenarios.test_console_plans import rows_read

_BACKLOG: Final = 30_000
_KNOWN: Final = 40
_PAGE: Final = 20
_SCANNED: Final = scan_bound.MAX_SCANNED + _PAGE + 1
_LARGE: Final = ("messages", "deliveries", "outbox", "held")
_ROOM: Final = RoomId(1)
_OWN, _OTHER = (OrganisationId(str(uuid.UUID(int=one))) for one in (1, 2))
_SUBSCRIPTION: Final = SubscriptionId("01a20a90-7e59-7000-8000-000100000001")
_SETTING: Final = """
INSERT INTO organisations (id, name) VALUES (%(own)s, 'own'), (%(other)s, 'other');
INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms, delivery_delay_multiplier, delivery_attempts)
VALUES (1, %(owner)s, 'room', 1, 1, 1);
INSERT INTO subscriptions (room_id, id, organisation_id, name, type, status, status_since)
VALUES (1, %(subscription)s, %(own)s, 'sub', 'PULL', %(status)s, now() - interval '1 hour');
"""
# The first ones were published before the suspension, and sent; the backlog is of half an hour.
_FILL: Final = f"""
CREATE TEMPORARY TABLE made AS
SELECT n, n > {_KNOWN} AS late, CASE WHEN n > {_KNOWN} THEN now() - interval '30 min' ELSE now() - interval '2 h' END AS at,
    lpad(to_hex((extract(epoch FROM now() - CASE WHEN n > {_KNOWN} THEN interval '30 min' ELSE interval '2 h' END) * 1000)::int8 + n), 12, '0') AS ms
FROM generate_series(1, {_KNOWN} + %(backlog)s) n;
INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, published_at, correlation_id, payload, due_at)
SELECT 1, (ms || '70008000000100000001')::uuid, 'paid', 1, 0, 1, at, 'c', '{{}}',
    CASE WHEN late THEN now() + %(delay)s::interval ELSE at END FROM made;
INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, attempts, due_at)
SELECT 1, (ms || '70008000000200000001')::uuid, (ms || '70008000000100000001')::uuid, %(subscription)s,
    CASE WHEN NOT late THEN 'delivered' WHEN %(delay)s::interval > '0' THEN 'scheduled' ELSE 'queued' END::delivery_state,
    CASE WHEN late THEN 0 ELSE 1 END, CASE WHEN late THEN now() + %(delay)s::interval END FROM made;
INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, attempts)
SELECT 1, (ms || '70008000000400000001')::uuid, (ms || '70008000000100000001')::uuid, gen_random_uuid(), 'delivered', 1 FROM made;
INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at)
SELECT 1, (ms || '70008000000200000001')::uuid, (ms || '70008000000100000001')::uuid, %(subscription)s,
    1, 0, 0, 0, now() + %(delay)s::interval + n * interval '1 ms' - interval '1 min' FROM made WHERE late;
INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)
SELECT 1, (ms || '70008000000300000001')::uuid, %(subscription)s, 0, 0, 'suspended' FROM made WHERE late AND %(suspended)s;
ANALYZE
"""
Calls = dict[str, Callable[[AsyncConnection], Awaitable[Any]]]


class Reader:
    """Call a query, and explain each of its statements."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.statements: list[str] = []
        self._seen: list[tuple[str, Any]] = []
        event.listen(engine.sync_engine, "before_cursor_execute", self._note)

    def _note(self, _c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        self._seen.append((statement, parameters))

    async def read(self, call: Callable[[AsyncConnection], Awaitable[Any]]) -> tuple[Any, int]:
        """Return the answer, and how many rows of large tables its statements read."""
        async with transaction(self._engine) as connection:
            self._seen.clear()
            answer = await call(connection)
            statements, total = list(self._seen), 0.0
            self.statements = [statement for statement, _ in statements]
            for statement, parameters in statements:
                explained = await connection.exec_driver_sql(
                    f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {statement}", parameters
                )
                (plan,) = explained.scalar_one()
                total += sum(sum(rows_read(plan["Plan"], table)) for table in tables(plan))
        return answer, round(total)


def tables(plan: Any) -> set[str]:
    """Return the large tables of a plan, by the names of their partitions."""
    if isinstance(plan, list):
        return set().union(*(tables(one) for one in plan))
    if not isinstance(plan, dict):
        return set()
    name = plan.get("Relation Name", "")
    own = {name} if name.startswith(_LARGE) else set()
    return own | tables(list(plan.values()))


def fill(url: str, *, own_room: bool = False, status: str = "active", delay: str = "0 s") -> None:
    """Make a subscription with a backlog."""
    parameters: dict[str, Any] = {
        "own": _OWN,
        "other": _OTHER,
        "owner": _OWN if own_room else _OTHER,
        "subscription": _SUBSCRIPTION,
        "status": status,
        "suspended": status == "suspended",
        "delay": delay,
        "backlog": _BACKLOG,
    }
    with psycopg.ClientCursor(psycopg.connect(url, autocommit=True)) as cursor:
        cursor.execute((_SETTING + _FILL).encode(), parameters)
        cursor.connection.close()


def days(url: str) -> int:
    """Return how many partitions have deliveries."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT count(DISTINCT tableoid) FROM deliveries").fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
async def reader(database: str) -> AsyncIterator[Reader]:
    engine = open_engine(database, size=1)
    yield Reader(engine)
    await engine.dispose()


def pages(before: str | None = None) -> Calls:
    """Return the calls that list the subscription, newest first."""
    principal = Principal(key_id=KeyId(_OWN), organisation_id=_OWN, scopes=frozenset())

    async def list_deliveries(connection: AsyncConnection) -> Any:
        return await deliveries.deliveries_of_subscription(
            connection,
            _ROOM,
            _SUBSCRIPTION,
            ListFilter(),
            due_only=False,
            before=before,
            limit=_PAGE,
        )

    async def list_messages(connection: AsyncConnection, of: SubscriptionId | None) -> Any:
        scope = await find_scope(connection, principal, _ROOM)
        return await message_list.list_messages(
            connection,
            scope,
            ListFilter(),
            message_list.PublisherFilter(),
            subscription=of,
            before=before,
            limit=_PAGE,
        )

    return {
        "deliveries": list_deliveries,
        "messages": lambda connection: list_messages(connection, None),
        "messages of it": lambda connection: list_messages(connection, _SUBSCRIPTION),
    }


async def count(connection: AsyncConnection) -> Any:
    return await subscription_counts.count_deliveries(connection, _ROOM, _SUBSCRIPTION, own=True)


async def list_queue(connection: AsyncConnection, after: str | None = None) -> Any:
    return await pull_queue.list_waiting(
        connection, _ROOM, _SUBSCRIPTION, due_only=False, after=after, limit=_PAGE
    )


async def list_consumers(connection: AsyncConnection) -> Any:
    return await pull_queue.list_consumers(connection, _ROOM, _SUBSCRIPTION, _OWN)


async def test_nothing_of_a_suspensions_backlog_is_read_for_counts_and_queue(
    database: str, reader: Reader
) -> None:
    fill(database, status="suspended")
    counts, read = await reader.read(count)
    assert (counts.waiting, counts.held, read) == (0, {}, 0)
    queue, read = await reader.read(list_queue)
    assert (list(queue.found), queue.further, read) == ([], None, 0)
    consumers, read = await reader.read(list_consumers)
    assert (consumers.oldest_due_at, read) == (None, 0)


@pytest.mark.parametrize("name", pages())
async def test_a_page_during_a_suspension_starts_before_it(
    database: str, reader: Reader, name: str
) -> None:
    fill(database, status="suspended")
    page, read = await reader.read(pages()[name])
    assert len(page.found) == _PAGE
    assert read < 20 * _PAGE


@pytest.mark.parametrize("name", pages())
async def test_a_page_reads_a_bounded_part_of_what_is_scheduled(
    database: str, reader: Reader, name: str
) -> None:
    """Check that the list goes on behind it, down to what was delivered before."""
    fill(database, delay="1 day")
    found: list[Any] = []
    before: str | None = None
    calls = 0
    while True:
        page, read = await reader.read(pages(before)[name])
        assert read <= 4 * _SCANNED
        found += page.found
        calls += 1
        if page.further is None or len(page.found) == _PAGE:
            break
        before = page.further
    assert len(found) == _PAGE
    assert _BACKLOG / _SCANNED <= calls <= 2 * _BACKLOG / _SCANNED + 1


async def test_a_queue_reads_a_bounded_part_of_what_is_scheduled(
    database: str, reader: Reader
) -> None:
    fill(database, delay="1 day")
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "UPDATE outbox SET attempt = 1 WHERE (room_id, id) IN ("
            "SELECT room_id, id FROM outbox ORDER BY id DESC LIMIT 3)"
        )
    found: list[Any] = []
    after: str | None = None
    while True:
        queue, read = await reader.read(lambda connection: list_queue(connection, after))  # noqa: B023
        assert read <= 2 * (pull_queue.MAX_WAITING_SCANNED + 2 * _PAGE)
        found += queue.found
        if queue.further is None:
            break
        after = queue.further
    assert [one.attempt for one, _ in found] == [1, 1, 1]
    counts, read = await reader.read(count)
    assert counts.waiting == 3
    assert read <= _BACKLOG


async def test_own_rooms_are_asked_nothing_more(database: str, reader: Reader) -> None:
    """Check the statements of the owner's own subscriptions: no condition about what is hidden."""
    fill(database, own_room=True, status="paused", delay="1 day")
    for call in (count, list_queue, list_consumers, *pages().values()):
        page, _ = await reader.read(call)
        assert getattr(page, "further", None) is None
        *_, statement = (one for one in reader.statements if "outbox" in one or "deliv" in one)
        assert "suspended" not in statement
        assert "kept_" not in statement
        assert "random()" not in statement
    page, read = await reader.read(pages()["deliveries"])
    assert len(page.found) == _PAGE
    # Shortly after midnight the rows are of two days: a merge also reads the first row of the other.
    assert read <= 2 * _PAGE + days(database) - 1
