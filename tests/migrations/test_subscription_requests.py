"""Check which subscriptions of an older version count as ended before their approval."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from alembic import command
from sqlalchemy.exc import OperationalError

from tests.migrations.test_concurrent_indexes import upgrading, waits_for_a_lock
from tests.migrations.test_upgrades import OWN, TENANT, alembic, run
from tests.support.polling import until

ROOM = 41
BATCH = 5_000
LAST = 2 * BATCH + 1
# By name: its status, and those in its history.
SUBSCRIPTIONS = {
    "rejected": ("rejected", ["pending", "rejected"]),
    "withdrawn": ("terminated", ["pending", "pending", "terminated"]),
    "deleted": ("deleted", ["pending", "pending"]),
    "pending": ("pending", ["pending"]),
    "approved": ("terminated", ["pending", "active", "terminated"]),
    "approved, suspended": ("deleted", ["pending", "suspended", "suspended"]),
    "granted": ("deleted", ["active", "active"]),
    "without a history": ("terminated", []),
}


def identity(number: int) -> str:
    return f"00000000-0000-7000-8000-0000000001{number:02}"


def marked(url: str) -> list[str]:
    found = run(url, "SELECT name FROM subscriptions WHERE never_approved ORDER BY id")
    return [name for (name,) in found]


def create_room(database: str) -> None:
    """Go back to the version before, with a room of an organisation."""
    with alembic(database) as config:
        command.downgrade(config, "0042")
    for owner, name in ((OWN, "own"), (TENANT, "tenant")):
        run(database, "INSERT INTO organisations (id, name) VALUES (%s, %s)", owner, name)
    run(
        database,
        "INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms,"
        " delivery_delay_multiplier, delivery_attempts) VALUES (%s, %s, 'room', 1000, 2, 5)",
        ROOM,
        OWN,
    )


@contextmanager
def stopping_at_the_last(database: str) -> Iterator[psycopg.Connection]:
    """Create two batches and one more, whose marking waits for the session of the block."""
    create_room(database)
    run(
        database,
        "INSERT INTO subscriptions (room_id, id, name, type, organisation_id, status)"
        " SELECT %s, ('00000000-0000-7000-8000-' || lpad(n::text, 12, '0'))::uuid, n::text,"
        " 'PULL', %s, 'rejected' FROM generate_series(1, %s) AS n",
        ROOM,
        TENANT,
        LAST,
    )
    run(
        database,
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END $$",
    )
    run(
        database,
        "CREATE TRIGGER wait BEFORE UPDATE ON subscriptions FOR EACH ROW"
        f" WHEN (NEW.name = '{LAST}') EXECUTE FUNCTION wait()",
    )
    with psycopg.connect(database, autocommit=True) as holder:
        holder.execute("SELECT pg_advisory_lock(1)")
        yield holder


def count_marked(database: str) -> int:
    ((count,),) = run(database, "SELECT count(*) FROM subscriptions WHERE never_approved")
    return int(count)


def test_requests_that_ended_before_are_marked(database: str) -> None:
    create_room(database)
    for number, (name, (status, steps)) in enumerate(SUBSCRIPTIONS.items()):
        run(
            database,
            "INSERT INTO subscriptions (room_id, id, name, type, organisation_id, status)"
            " VALUES (%s, %s, %s, 'PULL', %s, %s)",
            ROOM,
            identity(number),
            name,
            TENANT,
            status,
        )
        for step in steps:
            run(
                database,
                "INSERT INTO subscription_history"
                " (room_id, subscription_id, action, status, snapshot)"
                " VALUES (%s, %s, 'changed', %s, '{}')",
                ROOM,
                identity(number),
                step,
            )
    with alembic(database) as config:
        command.upgrade(config, "head")
    assert marked(database) == ["rejected", "withdrawn", "deleted"]
    with alembic(database) as config:
        command.downgrade(config, "0042")
        command.upgrade(config, "head")
    assert marked(database) == ["rejected", "withdrawn", "deleted"]


def test_each_batch_of_marks_ends_with_its_locks(database: str) -> None:
    with stopping_at_the_last(database) as holder, upgrading(database):
        until(lambda: waits_for_a_lock(database), "the last mark to wait", within_s=20)
        assert count_marked(database) == 2 * BATCH
        holder.execute("SELECT FROM subscriptions WHERE name <> %s FOR UPDATE NOWAIT", [str(LAST)])
        holder.execute("SELECT pg_advisory_unlock(1)")
    assert count_marked(database) == LAST


def test_a_second_try_marks_only_what_is_not_marked(database: str) -> None:
    marks = "SELECT id, xmin::text FROM subscriptions WHERE never_approved ORDER BY id"
    with stopping_at_the_last(database):
        with (
            pytest.raises(OperationalError, match="lock timeout"),
            alembic(f"{database}&options=-c%20lock_timeout%3D300ms") as config,
        ):
            command.upgrade(config, "head")
        before = run(database, marks)
        assert len(before) == 2 * BATCH
    with alembic(database) as config:
        command.upgrade(config, "head")
    after = run(database, marks)
    assert len(after) == LAST
    assert after[:-1] == before
