"""Check the cost of hot statements with any backlog: by plans and by pages read, never by time."""

import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

import pytest

from delivery.brokers.postgres import PostgresConsumer
from rooms.db.connection import connect
from rooms.db.leases import ack
from rooms.db.pg_arrays import literal_array
from rooms.db.queue import claims, delivery_properties, holds, outcomes
from rooms.db.writer import _PLANNER_SETTINGS
from rooms.domain.ids import SubscriptionId, first_id
from tests.conftest import administer, at
from tests.support.installation import ROOM, Installation, ago, installed, now_ms

MANY: Final = 1_000_000
BATCH: Final = 500
DAY_MS: Final = 86_400_000
READERS: Final = {
    "Index Scan",
    "Index Only Scan",
    "Tid Scan",
    "CTE Scan",
    "Function Scan",
    "Subquery Scan",
    "Values Scan",
}


@pytest.fixture(scope="module")
def saturated_database(postgres_url: str, template: str) -> Iterator[str]:
    """A database of its own, as crowded as a test likes."""
    name = "crowded"
    administer(postgres_url, "CREATE DATABASE {} TEMPLATE {}", name, template)
    yield at(postgres_url, name)
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture
async def saturated(saturated_database: str) -> AsyncIterator[Installation]:
    """A million copies that wait, of every priority, due one a millisecond until now, all of one message."""
    async with installed(saturated_database) as installation:
        if await installation.value("SELECT count(*) FROM messages") == 0:
            subscription = await installation.subscribe()
            (copy,) = await installation.publish(subscription)
            await wait_in_line(installation, copy.message_id, MANY)
        yield installation


async def wait_in_line(installation: Installation, message: str, count: int) -> None:
    await installation.rows(
        """
        INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at)
        SELECT %s, lpad(to_hex(n), 32, '0')::uuid, %s, lpad(to_hex(n %% 1000), 32, '0')::uuid, 0, n %% 10, 0, 0,
            now() - (%s - n) * interval '1 ms'
        FROM generate_series(1, %s::int8) AS n
        """,
        ROOM, message, count, count,
    )  # fmt: skip
    await installation.rows("VACUUM ANALYZE outbox")


async def explained(url: str, statement: str, values: dict[str, str]) -> dict[str, Any]:
    """The generic plan of a hot statement as a writer's session runs it, with what it touched.

    Rolled back.
    """
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", statement)))
    prepared = re.sub(r"%\((\w+)\)s", lambda found: f"${names.index(found[1]) + 1}", statement)
    connection = await connect(url, name="test plans")
    try:
        await connection.execute(_PLANNER_SETTINGS)
        await connection.execute(f"PREPARE hot AS {prepared}")  # type: ignore[arg-type, unused-ignore]
        await connection.execute("BEGIN")
        every = {"push": "0", "pull": "1", "lookahead": "4611686018427387904"} | values
        given = f" ({', '.join(every[name] for name in names)})" if names else ""
        cursor = await connection.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE hot{given}"
        )  # type: ignore[arg-type, unused-ignore]
        row = await cursor.fetchone()
        assert row is not None
        await connection.execute("ROLLBACK")
    finally:
        await connection.close()
    found = row[0] if not isinstance(row[0], str) else json.loads(row[0])
    plan: dict[str, Any] = found[0]["Plan"]
    return plan


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for inner in plan.get("Plans", ()):
        yield from nodes(inner)


def pages(plan: dict[str, Any]) -> int:
    """Return how many pages the statement read, cached or not."""
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def taken(plan: dict[str, Any]) -> int:
    """Return how many rows the claim marked."""
    (update,) = [
        node
        for node in nodes(plan)
        if node["Node Type"] == "ModifyTable" and node["Relation Name"] == "outbox"
    ]
    return int(update["Actual Rows"])


def assert_found_by_key(plan: dict[str, Any]) -> None:
    readers = {node["Node Type"] for node in nodes(plan) if "Scan" in node["Node Type"]}
    assert readers <= READERS, readers


async def claim(
    url: str,
    *,
    low: Sequence[int] = (0,) * 10,
    excluded: Sequence[str] = (),
    organisations: Sequence[str] = (),
    ended: Sequence[str] = (),
) -> dict[str, Any]:
    values = {
        "low": f"'{literal_array(low)}'",
        "dead": "'{}'",
        "excluded": f"'{literal_array(excluded)}'",
        "limit": str(BATCH),
        "claim_s": "60",
        "writer": "1",
        "first": f"'{first_id(now_ms() - DAY_MS)}'",
        "last": f"'{first_id(now_ms() + DAY_MS)}'",
    }
    if not organisations:
        return await explained(url, claims._CLAIM, values)
    values["organisations"] = f"'{literal_array(organisations)}'"
    values["ended"] = f"'{literal_array(ended)}'"
    return await explained(url, claims._CLAIM_OF_OTHERS, values)


async def test_a_claim_opens_the_days_around_now_alone(
    saturated: Installation, database: str
) -> None:
    """There may be a month of others, and messages that a claim brings are of today as a rule."""
    plan = await claim(database)
    (days,) = [
        node
        for node in nodes(plan)
        if node["Node Type"] == "Append"
        and node["Plans"][0].get("Relation Name", "").startswith("messages_")
    ]
    every = await saturated.value(
        "SELECT count(*) FROM pg_inherits WHERE inhparent = 'messages'::regclass"
    )
    assert days["Subplans Removed"] + len(days["Plans"]) == every
    assert len(days["Plans"]) <= 4  # yesterday, or the partition for what has none, today, tomorrow
    assert days["Subplans Removed"] >= 5


async def test_sequence_numbers_are_read_by_key_in_the_days_of_their_deliveries(
    saturated: Installation,
) -> None:
    """A claim itself opens no delivery, and these are the only ones."""
    ids = await saturated.rows("SELECT room_id, id::text FROM deliveries")
    values = {
        "room": f"'{literal_array(row['room_id'] for row in ids)}'",
        "id": f"'{literal_array(row['id'] for row in ids)}'",
        "first": f"'{ids[0]['id']}'",
        "last": f"'{ids[0]['id']}'",
    }
    plan = await explained(saturated.url, delivery_properties._SEQUENCES, values)
    assert_found_by_key(plan)
    (days,) = [
        node
        for node in nodes(plan)
        if node["Node Type"] == "Append"
        and node["Plans"][0].get("Relation Name", "").startswith("deliveries_")
    ]
    assert days["Subplans Removed"] >= 5
    claimed = await claim(saturated.url)
    opened = {node.get("Relation Name", "") for node in nodes(claimed)}
    assert not {name for name in opened if name.startswith("deliveries")}


async def test_a_claim_reads_what_it_takes_however_much_waits(
    saturated: Installation, database: str
) -> None:
    async with installed(database) as small:
        subscription = await small.subscribe()
        (copy,) = await small.publish(subscription)
        await wait_in_line(small, copy.message_id, 20_000)
        few = await claim(small.url)
    many = await claim(saturated.url)
    assert taken(few) == taken(many) == BATCH
    for plan in (few, many):
        assert_found_by_key(plan)
        assert {
            node.get("Index Name") for node in nodes(plan) if node.get("Relation Name") == "outbox"
        } <= {
            "outbox_push",
            None,
        }
    assert pages(many) <= 1.5 * pages(few) + 100
    assert pages(many) <= 20 * BATCH


async def test_asking_what_comes_due_next_reads_a_few_pages(saturated: Installation) -> None:
    now_us = time.time_ns() // 1000
    plan = await explained(saturated.url, claims._NEXT_DUE, {"after": str(now_us)})
    assert_found_by_key(plan)
    assert pages(plan) <= 100


async def test_the_claims_of_an_old_snapshot_stay_as_cheap_as_the_first(
    saturated: Installation,
) -> None:
    """An old snapshot keeps every row in the index that is settled meanwhile.

    The watermarks step over them; a scan of the whole queue shows their cost.
    """
    async with (
        installed(saturated.url) as old,
        PostgresConsumer(saturated.url, credit=1 << 30, claim_s=60) as consumer,
    ):
        before = await claim(saturated.url)
        async with old.connection.transaction():
            await old.rows("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await old.value("SELECT count(*) FROM rooms")
            for _ in range(60):
                found = await consumer._claim(BATCH, time.monotonic())
                assert len(found.tasks) == BATCH
                await saturated.rows("DELETE FROM outbox WHERE claimed_until > now()")
            turn = consumer._turns.next()
            after = await claim(saturated.url, low=turn.watermarks.lower_bounds(frozenset()))
            whole = await claim(saturated.url)
    assert taken(before) == taken(after) == taken(whole) == BATCH
    assert pages(after) <= 2 * pages(before)
    assert pages(whole) > 3 * pages(before)
    assert examined(after) <= 2 * BATCH


def examined(plan: dict[str, Any]) -> int:
    """Return how many rows of the queue the scan read."""
    scans = [node for node in nodes(plan) if node.get("Index Name") == "outbox_push"]
    return sum(
        int(node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)))
        for node in scans
    )


async def test_a_busy_subscription_with_a_backlog_is_scanned_once(database: str) -> None:
    """While it is passed over, a claim for the others starts above its backlog.

    Once admitted, it is seen again.
    """
    async with installed(database) as installation:
        busy, free = await installation.subscribe(), await installation.subscribe()
        await installation.publish_many(busy, 20_000, due=ago(60))
        await installation.rows("VACUUM ANALYZE outbox")
        async with PostgresConsumer(database, credit=1 << 30, claim_s=60, poll_s=600) as consumer:
            consumer.exclude(frozenset({busy}))
            assert not (await consumer._claim(BATCH, time.monotonic())).tasks
            first = await claim(database, excluded=[busy])
            await installation.publish_many(free, 10, due=await installation.value("SELECT now()"))
            plan = await claim(
                database,
                low=consumer._turns.next().watermarks.lower_bounds(frozenset({busy})),
                excluded=[busy],
            )
            assert taken(plan) == 10
            assert examined(first) == 20_000
            assert examined(plan) == 10
            assert {
                copy.subscription_id
                for copy in (await consumer._claim(BATCH, time.monotonic())).tasks
            } == {free}
            consumer.exclude(frozenset[SubscriptionId]())
            found = (await consumer._claim(BATCH, time.monotonic())).tasks
            assert {copy.subscription_id for copy in found} == {busy}
            assert len(found) == BATCH


@pytest.mark.parametrize("text", [outcomes._DECIDE, outcomes._DELIVER], ids=["decide", "deliver"])
async def test_a_decision_finds_its_rows_by_key(database: str, text: str) -> None:
    """Over all partitions there are, it opens those of its deliveries, and none of the others even for a moment."""
    async with installed(database) as installation:
        subscription = await installation.subscribe()
        await installation.publish_many(subscription, 5000)
        await installation.rows("VACUUM ANALYZE deliveries, outbox, messages, held")
        found = await installation.rows(
            "SELECT id::text, message_id::text FROM deliveries LIMIT 200"
        )
        count = len(found)
        first, last = (end(row["id"] for row in found) for end in (min, max))
        removed, opened = await days_between(installation, first, last)
        columns: dict[str, Sequence[object]] = {
            "room": [ROOM] * count,
            "id": [row["id"] for row in found],
            "message": [row["message_id"] for row in found],
            "subscription": [subscription] * count,
            "generation": [0] * count,
            "attempt": [0] * count,
            "priority": [4] * count,
            "state": ["delivered", "queued"] * (count // 2),
            "reason": [None] * count,
            "delay": [1000] * count,
            "tried": [True] * count,
            "status": [204] * count,
            "error": [None] * count,
            "detail": [None] * count,
            "latency": [1.0] * count,
            "head": [None] * count,
            "host": ["h"] * count,
            "type": ["t"] * count,
            "version": [1] * count,
            "correlation": ["c"] * count,
            "policy": [1] * count,
            "waited": [0] * count,
            "abandoned": [None] * count,
        }
        values = {name: f"'{literal_array(column)}'" for name, column in columns.items()}
        values |= {
            "first": f"'{first}'",
            "last": f"'{last}'",
            "again": "false",
            "worker": "1",
            "worker_host": "'h'",
            "writer": "1",
            "seq": "1",
            "count": str(count),
        }
        plan = await explained(
            database, text.replace("SELECT %(writer)s,", "SELECT %(writer)s::int4,"), values
        )
    assert_found_by_key(plan)
    assert pages(plan) <= 60 * count
    assert_days_alone(plan, removed, opened)


async def test_an_ack_opens_the_days_of_its_deliveries_alone(database: str) -> None:
    async with installed(database) as installation:
        await installation.publish_many(await installation.subscribe(), 500)
        await installation.rows("VACUUM ANALYZE deliveries, messages")
        found = [
            row["id"]
            for row in await installation.rows("SELECT id::text FROM deliveries LIMIT 100")
        ]
        removed, opened = await days_between(installation, min(found), max(found))
        text = re.sub(r"\$(\d+)", r"%(\1)s", ack._ACK)
        none = "00000000-0000-0000-0000-000000000000"
        lists: Sequence[Sequence[object]] = (
            [ROOM],
            [none],
            [none],
            [1] * len(found),
            found,
            [0] * len(found),
        )
        values = {str(n): f"'{literal_array(column)}'" for n, column in enumerate(lists, 1)}
        values |= {"7": f"'{min(found)}'", "8": f"'{max(found)}'", "9": "1", "10": "1"}
        plan = await explained(database, text, values)
    assert_found_by_key(plan)
    assert_days_alone(plan, removed, opened)


async def days_between(installation: Installation, first: str, last: str) -> tuple[int, int]:
    """Return how many partitions have no delivery between these ids, and how many have some."""
    every = await installation.value(
        "SELECT count(*) FROM pg_inherits WHERE inhparent = 'deliveries'::regclass"
    )
    days = "SELECT count(DISTINCT tableoid) FROM deliveries WHERE id BETWEEN %s AND %s"
    some = await installation.value(days, first, last)
    return every - some, some


def assert_days_alone(plan: dict[str, Any], removed: int, opened: int) -> None:
    """The look-up of deliveries was spared so many partitions before it began, and goes by the key in the others."""
    by_key = re.compile(r"\(room_id = \w+\.room_id\) AND \(id = \w+\.id\)")
    (days,) = [
        node
        for node in nodes(plan)
        if node["Node Type"] == "Append"
        and node["Plans"][0].get("Relation Name", "").startswith("deliveries_")
    ]
    assert (days["Subplans Removed"], len(days["Plans"])) == (removed, opened)
    assert [
        node["Index Cond"] for node in days["Plans"] if not by_key.search(node["Index Cond"])
    ] == []


async def test_releasing_reads_only_what_it_releases(database: str) -> None:
    async with installed(database) as installation:
        wanted, other = await installation.subscribe(), await installation.subscribe()
        await installation.rows(
            """
            INSERT INTO held (room_id, id, subscription_id, priority, delay_ms, reason)
            SELECT %s, lpad(to_hex(n), 32, '0')::uuid, CASE WHEN n > 49900 THEN %s::uuid ELSE %s::uuid END, 4, 0, 'paused'
            FROM generate_series(1, 50000) AS n
            """,
            ROOM, wanted, other,
        )  # fmt: skip
        await installation.rows("VACUUM ANALYZE held")
        values = {
            "room": str(ROOM),
            "subscription": f"'{wanted}'",
            "reason": "'paused'",
            "limit": "50",
            "writer": "1",
            "seq": "1",
            "worker_host": "'h'",
        }
        statement = holds._RELEASE_HELD.replace("SELECT %(writer)s,", "SELECT %(writer)s::int4,")
        plan = await explained(database, statement, values)
        start = {"after": f"'{first_id(0)}'", "after_reason": "''", "limit": "1000"}
        looked_up = await explained(database, holds._LIST_HELD, start)
    assert_found_by_key(plan)
    assert pages(plan) <= 40 * 50
    assert pages(looked_up) <= 100


async def test_the_backlog_of_another_organisation_is_scanned_once(database: str) -> None:
    """A claim that skips an organisation hashes its subscriptions, and then starts above its rows."""
    async with installed(database) as installation:
        large, small = await installation.subscribe(), await installation.subscribe()
        await installation.publish_many(large, 20_000, due=ago(60))
        other = await installation.value(
            "INSERT INTO organisations (id, name) VALUES (gen_random_uuid(), 'o') RETURNING id::text"
        )
        await installation.rows(
            "UPDATE subscriptions SET organisation_id = %s WHERE id = %s", other, small
        )
        await installation.rows("VACUUM ANALYZE outbox")
        async with PostgresConsumer(database, credit=1 << 30, claim_s=60, poll_s=600) as consumer:
            assert len((await consumer._claim(BATCH, time.monotonic())).tasks) == BATCH
            assert not (await consumer._claim(BATCH, time.monotonic())).tasks
            turns = consumer._turns
            assert len((await consumer._claim(BATCH, time.monotonic())).tasks) == BATCH
            await installation.publish_many(small, 10, due=await installation.value("SELECT now()"))
            turn = turns.next()
            low = turn.watermarks.lower_bounds(frozenset())
            others = list(turn.excluded)
            first = await claim(database, organisations=others)
            plan = await claim(database, low=low, organisations=others)
            # That of a deleted subscription is in no index of organisations.
            await installation.rows(
                "UPDATE subscriptions SET status = 'deleted' WHERE id = %s", large
            )
            unknown = await claim(database, organisations=others)
            known = await claim(database, organisations=others, ended=[large])
    assert (taken(first), taken(plan)) == (10, 10)
    assert (taken(unknown), taken(known)) == (BATCH, 10)
    assert "hashed" in json.dumps(known)
    assert examined(first) > 19_000
    assert examined(plan) == 10
    assert "hashed" in json.dumps(plan)
