"""Check the log as written and as read: steps that always come together are one row, which readers do not see."""

import asyncio
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine

import migrations
from rooms.db.queue.outcomes import DeliveryOutcome, OutcomeQueries
from rooms.db.writer import LogWriter
from rooms.domain.state_machine import State
from tests.support.installation import Installation
from tests.support.publisher import House, open_desk
from tests.support.push_worker import OK
from tests.support.sqlalchemy_urls import sqlalchemy_url

BODY = b'{"event_type":"order.created","payload":1}'
NAMED = "SELECT relname FROM pg_class WHERE relname LIKE %s AND relkind IN ('r', 'p', 'i', 'I') ORDER BY 1"
DELIVERIES = """
SELECT d.message_id::text, d.subscription_id::text, d.id::text, s.version FROM deliveries d JOIN subscriptions s ON s.id = d.subscription_id
"""


@pytest.mark.parametrize("fanout", [0, 1, 3, 400])
async def test_a_publish_is_one_row_that_shows_each_of_its_deliveries(
    database: str, fanout: int
) -> None:
    """400: its row is too wide for a page."""
    house = House(database)
    room = house.room()
    house.event_type(room)
    for n in range(fanout):
        house.subscription(room, ("PUSH", "PULL")[n % 2], version=2**31 - 1 - n)
    async with open_desk(database) as desk:
        await asyncio.gather(
            *[desk.publisher.publish(house.principal, room, BODY, None) for _ in range(3)]
        )
    assert house.count("log_entries") == 3
    found = house.run(
        "SELECT message_id::text, subscription_id::text, delivery_id::text, policy_version FROM delivery_log WHERE kind = 'enqueued'"
    )
    assert len(found) == 3 * fanout
    assert sorted(found) == sorted(house.run(DELIVERIES))
    reported = house.run(
        "SELECT kind, message_id, writer_seq, fanout, xid, ts FROM delivery_log ORDER BY writer_seq"
    )
    assert [row[0] for row in reported] == ["published", *["enqueued"] * fanout] * 3
    assert [row[2] for row in reported] == list(range(1, 3 * (1 + fanout) + 1))
    for at in range(0, len(reported), 1 + fanout):
        assert len({(row[1], *row[4:]) for row in reported[at : at + 1 + fanout]}) == 1
        assert reported[at][3] == fanout


async def test_a_success_is_one_row_that_shows_its_attempt(
    installation: Installation, writer: LogWriter
) -> None:
    subscription = await installation.subscribe()
    copies = [copy for _ in range(3) for copy in await installation.publish(subscription)]
    for copy in copies:
        await installation.queue(copy)
    await OutcomeQueries(writer).decide(
        [DeliveryOutcome(task=copy, state=State.DELIVERED, result=OK) for copy in copies], worker=1
    )
    assert (
        await installation.value("SELECT count(*) FROM log_entries WHERE writer_id = %s", writer.id)
        == 3
    )
    reported = await installation.rows(
        "SELECT kind, writer_seq FROM delivery_log WHERE writer_id = %s ORDER BY 2", writer.id
    )
    assert reported == [
        {"kind": kind, "writer_seq": n} for n, kind in enumerate(["attempted", "delivered"] * 3, 1)
    ]


async def test_a_journey_is_read_by_its_key(database: str) -> None:
    """No branch of the view reads more of the log than the message's rows."""
    house = House(database)
    room = house.room()
    house.event_type(room)
    house.subscription(room)
    async with open_desk(database) as desk:
        await asyncio.gather(
            *[desk.publisher.publish(house.principal, room, BODY, None) for _ in range(2000)]
        )
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE log_entries")
    [(message,)] = house.run("SELECT id FROM messages LIMIT 1")
    shown = house.run(
        "EXPLAIN SELECT * FROM delivery_log WHERE room_id = %s AND message_id = %s ORDER BY ts",
        room,
        message,
    )
    plan = "\n".join(line for (line,) in shown)
    assert plan.count("Index Cond: ((room_id =") == 3
    assert "Seq Scan" not in plan


def steps(url: str, log: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        cursor = connection.execute(f"SELECT * FROM {log} ORDER BY writer_id, writer_seq")
        names = [column.name for column in cursor.description or ()]
        return [
            tuple(value for name, value in zip(names, row, strict=True) if name != "enqueued")
            for row in cursor
        ]


async def test_going_back_gives_every_step_a_row_of_its_own(
    database: str, installation: Installation, writer: LogWriter
) -> None:
    """And forward again leaves them as they are."""
    subscription = await installation.subscribe()
    (copy,) = await installation.publish(subscription)
    await installation.queue(copy)
    await OutcomeQueries(writer).decide(
        [DeliveryOutcome(task=copy, state=State.DELIVERED, result=OK, target_host="h")], worker=1
    )
    house = House(database)
    room = house.room()
    house.event_type(room)
    for _ in range(3):
        house.subscription(room)
    async with open_desk(database) as desk:
        await desk.publisher.publish(house.principal, room, BODY, None)
        later = b'{"event_type":"order.created","payload":1,"delay_ms":60000}'
        await desk.publisher.publish(house.principal, room, later, None)
    before = steps(database, "delivery_log")
    assert len(before) == 2 + 4 + 4
    assert len(steps(database, "log_entries")) == 3
    names = house.run(NAMED, "log_entries%")
    sends = house.run("SELECT * FROM published_messages ORDER BY delivery_id")
    engine = create_engine(sqlalchemy_url(database))
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    try:
        with engine.connect() as connection:
            config.attributes["connection"] = connection
            command.downgrade(config, "0018")
            connection.commit()
            assert steps(database, "delivery_log") == before
            assert not house.run(NAMED, "log_entries%")
            assert house.run("SELECT * FROM published_messages ORDER BY delivery_id") == sends
            command.upgrade(config, "head")
            connection.commit()
    finally:
        engine.dispose()
    assert house.run(NAMED, "log_entries%") == names
    assert steps(database, "delivery_log") == before == steps(database, "log_entries")
