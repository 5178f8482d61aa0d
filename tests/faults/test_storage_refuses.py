"""PostgreSQL is there and takes nothing: what was accepted waits, what is refused is said to be, and all goes on after."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psycopg
import pytest
from psycopg import sql

from tests.support.polling import until
from tests.support.process_group import Crew, Process
from tests.support.room import EVENT_TYPE, Place
from tests.support.webhook_sink import Sink

DETACHED = "SELECT relid::regclass::text FROM pg_partition_tree('messages') WHERE isleaf"
BOUNDS = "SELECT pg_get_expr(relpartbound, oid) FROM pg_class WHERE oid = %s::regclass"
CUT = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


def administer(crew: Crew, *statements: sql.Composed | str) -> None:
    with psycopg.connect(crew.database_url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode() if isinstance(statement, str) else statement)


@contextmanager
def read_only(crew: Crew, *, cut: bool) -> Iterator[None]:
    """Nothing can be written, as after a fail-over to a standby; with `cut` the connections of before are gone too."""
    administer(
        crew, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()"
    )
    try:
        until(lambda: crew.rows("SHOW default_transaction_read_only") == [("on",)], "the setting")
        if cut:
            administer(crew, CUT)
        yield
    finally:
        administer(
            crew, "ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()"
        )
        until(lambda: crew.rows("SHOW default_transaction_read_only") == [("off",)], "the setting")


@contextmanager
def without_partitions(crew: Crew) -> Iterator[None]:
    """No message can be kept, because no partition takes it; those that there are stay on the side."""
    tables = [str(row[0]) for row in crew.rows(DETACHED)]
    bounds = {table: str(crew.rows(BOUNDS, table)[0][0]) for table in tables}
    for table in tables:
        administer(
            crew, sql.SQL("ALTER TABLE messages DETACH PARTITION {}").format(sql.Identifier(table))
        )
    try:
        yield
    finally:
        for table, bound in bounds.items():
            attach = sql.SQL("ALTER TABLE messages ATTACH PARTITION {} ").format(
                sql.Identifier(table)
            )
            administer(crew, sql.Composed([attach, sql.SQL(bound)]))


def refused(answer: httpx.Response) -> None:
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["content-type"] == "application/problem+json"


def alive(*processes: Process) -> bool:
    return all(process.process.poll() is None for process in processes)


@pytest.mark.parametrize("cut", [False, True], ids=["sessions kept", "sessions cut"])
def test_a_database_that_only_reads_refuses_every_write_and_loses_nothing(
    crew: Crew, place: Place, sink: Sink, *, cut: bool
) -> None:
    """Every call that would write gets 503 with Retry-After, every read goes on, readiness says so, no process ends.

    Afterwards what was accepted before is delivered, what was refused never was, and the same requests are taken.
    """
    # It fails until the test ends the fault, however long that takes.
    hook = place.push(delivery_delay_ms=300, delivery_delay_multiplier=1, delivery_attempts=1000)
    queue = place.queue()
    worker, upkeep = crew.start("worker"), crew.start("upkeep")
    sink.script(hook.path, then=500)
    before = place.publish("before")["message_id"]
    (leased,) = place.pull(queue)
    sink.wait(hook.path)
    calls: list[Callable[[], httpx.Response]] = [
        lambda: place.try_publish("refused", key="again"),
        lambda: crew.call(
            "POST",
            f"{place.at}/messages/batch",
            {"messages": [{"event_type": EVENT_TYPE, "payload": "refused"}]},
        ),
        lambda: place.settle(queue, "ack", leased["ack_id"]),
        lambda: place.settle(queue, "nack", leased["ack_id"]),
        lambda: crew.call("POST", f"/subscriptions/{queue}/pull", {}),
        lambda: crew.call("POST", f"{place.at}/event-types", {"name": "another"}),
        lambda: crew.call("POST", f"/subscriptions/{hook.id}/pause"),
        lambda: crew.call("DELETE", f"/subscriptions/{queue}"),
    ]
    with read_only(crew, cut=cut):
        for call in calls:
            refused(call())
        refused(place.try_publish("refused", key="again"))
        assert crew.get(place.at)["id"] == place.id
        assert place.delivery(before, queue)["state"] == "leased"
        assert crew.http.get("/health/ready").status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert alive(worker, upkeep)
    sink.script(hook.path)
    until(
        lambda: crew.http.get("/health/ready").status_code == httpx.codes.OK,
        "the service to be ready",
    )
    again = place.try_publish("after", key="again")
    assert again.status_code == httpx.codes.ACCEPTED, again.text
    assert place.settle(queue, "ack", leased["ack_id"]).status_code == httpx.codes.OK
    for message in (before, again.json()["message_id"]):
        place.await_state(message, hook.id, "delivered")
    assert {arrival.body for arrival in sink.arrivals(hook.path)} == {b'"before"', b'"after"'}
    assert [message["payload"] for message in place.pull(queue)] == ["after"]
    assert alive(worker, upkeep)


def test_a_day_without_partitions_refuses_publishes_and_loses_nothing(
    crew: Crew, place: Place, sink: Sink
) -> None:
    """503 with Retry-After, one by one and in batches, nothing half written; what was accepted before is delivered after."""
    hook = place.push()
    before = place.publish("before")["message_id"]
    rows: list[tuple[Any, ...]] = []
    tables = ("deliveries", "outbox", "delivery_log", "idempotency_keys")
    with without_partitions(crew):
        counts = {
            table: crew.rows(f"SELECT count(*) FROM {table} WHERE room_id = %s", place.id)
            for table in tables
        }
        refused(place.try_publish("refused", key="again"))
        batch = {"messages": [{"event_type": EVENT_TYPE, "payload": "refused"}] * 3}
        refused(crew.call("POST", f"{place.at}/messages/batch", batch))
        for table, rows in counts.items():
            assert crew.rows(f"SELECT count(*) FROM {table} WHERE room_id = %s", place.id) == rows
    after = place.publish("after", key="again")["message_id"]
    crew.start("worker")
    for message in (before, after):
        place.await_state(message, hook.id, "delivered")
    assert sorted(arrival.body for arrival in sink.arrivals(hook.path)) == [b'"after"', b'"before"']
