"""Check that indexes of tables that are written to all the time are built without stopping it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import psycopg
import pytest
from alembic import command
from sqlalchemy import text

from tests.migrations.test_upgrades import alembic, run
from tests.support.polling import until

_INDEX = (
    "CREATE INDEX held_subscription ON public.held USING btree"
    " (subscription_id, reason, priority DESC, id)"
)
_BEFORE = "CREATE INDEX held_subscription ON public.held USING btree (subscription_id, reason, id)"
_LEFTOVER = "held_subscription_by_priority"


def indexes(url: str, table: str) -> dict[str, str]:
    return dict(run(url, "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s", table))


def to_revision(url: str, revision: str) -> None:
    with alembic(url) as config:
        command.downgrade(config, revision)


def to_head(url: str) -> None:
    with alembic(url) as config:
        command.upgrade(config, "head")


@contextmanager
def upgrading(url: str) -> Iterator[threading.Thread]:
    """Upgrade to the newest revision during the block."""
    thread = threading.Thread(target=to_head, args=(url,), daemon=True)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()


def waits_for_a_lock(url: str, *, for_s: float = 0) -> bool:
    return bool(
        run(
            url,
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event_type = 'Lock' AND pid <> pg_backend_pid()"
            " AND query_start <= now() - %s * interval '1 s'",
            for_s,
        )
    )


@pytest.mark.parametrize(
    ("revision", "table", "locked"), [("0040", "held", "held"), ("0033", "journal", "leases")]
)
def test_others_write_while_an_index_is_built(
    database: str, revision: str, table: str, locked: str
) -> None:
    expected = {name: indexes(database, name) for name in (table, locked)}
    to_revision(database, revision)
    with psycopg.connect(database) as writer, psycopg.connect(database) as other:
        writer.execute(f"LOCK TABLE {table} IN ROW EXCLUSIVE MODE")
        with upgrading(database):
            until(
                lambda: waits_for_a_lock(database), "the build to wait for the writer", within_s=20
            )
            other.execute("SET LOCAL lock_timeout = '500ms'")
            for name in (table, locked):
                other.execute(f"LOCK TABLE {name} IN ROW EXCLUSIVE MODE")
            other.commit()
            writer.commit()
    assert {name: indexes(database, name) for name in (table, locked)} == expected


def test_subscriptions_are_read_while_ended_ones_are_marked(database: str) -> None:
    expected = indexes(database, "subscriptions")
    to_revision(database, "0042")
    with psycopg.connect(database) as history, psycopg.connect(database) as reader:
        history.execute("LOCK TABLE subscription_history IN ACCESS EXCLUSIVE MODE")
        with upgrading(database):
            until(lambda: waits_for_a_lock(database), "the marking to wait", within_s=20)
            reader.execute("SET LOCAL lock_timeout = '500ms'")
            reader.execute("SELECT FROM subscriptions LIMIT 1")
            reader.commit()
            history.commit()
    assert indexes(database, "subscriptions") == expected


def test_a_build_takes_longer_than_statements_of_the_role_may(database: str) -> None:
    """It would be ended each time, and begin anew with each try."""
    to_revision(database, "0040")
    limit = "statement_timeout%3D300ms"
    with psycopg.connect(database) as writer:
        writer.execute("LOCK TABLE held IN ROW EXCLUSIVE MODE")
        with upgrading(f"{database}&options=-c%20{limit}"):
            until(lambda: waits_for_a_lock(database, for_s=1), "a long build", within_s=20)
            writer.commit()
    assert indexes(database, "held")["held_subscription"] == _INDEX


def test_after_a_build_the_time_outs_are_those_of_before(database: str) -> None:
    to_revision(database, "0040")
    limits = "-c statement_timeout=60s -c lock_timeout=2s"
    with alembic(f"{database}&options={quote(limits)}") as config:
        command.upgrade(config, "head")
        connection = config.attributes["connection"]
        assert [
            connection.scalar(text(f"SHOW {name}"))
            for name in ("statement_timeout", "lock_timeout")
        ] == ["1min", "2s"]


def test_an_invalid_index_of_an_interrupted_build_is_replaced(database: str) -> None:
    to_revision(database, "0040")
    assert indexes(database, "held")["held_subscription"] == _BEFORE
    with (
        psycopg.connect(database) as writer,
        psycopg.connect(database, autocommit=True) as builder,
    ):
        writer.execute("LOCK TABLE held IN ROW EXCLUSIVE MODE")
        builder.execute("SET lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            builder.execute(f"CREATE INDEX CONCURRENTLY {_LEFTOVER} ON held (id)")
    to_head(database)
    found = indexes(database, "held")
    assert found["held_subscription"] == _INDEX
    assert _LEFTOVER not in found


def test_a_completed_index_is_not_built_again(database: str) -> None:
    to_revision(database, "0040")
    run(database, _INDEX.replace("held_subscription", _LEFTOVER))
    (built,) = run(database, "SELECT to_regclass(%s)::oid", _LEFTOVER)
    to_head(database)
    assert run(database, "SELECT 'held_subscription'::regclass::oid") == [built]
    assert _LEFTOVER not in indexes(database, "held")


def test_a_downgrade_brings_the_former_index_back(database: str) -> None:
    to_revision(database, "0040")
    assert set(indexes(database, "held")) == {"held_pkey", "held_subscription"}
    assert indexes(database, "held")["held_subscription"] == _BEFORE
