"""Check what an older installation has after an upgrade, and after a downgrade."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import create_engine

import migrations
from rooms.db.secrets import Cipher
from tests.support.sqlalchemy_urls import sqlalchemy_url

OWN, TENANT = (f"00000000-0000-7000-8000-00000000000{number}" for number in "ab")
KEYS = {
    "rooms-dev": (OWN, ["admin"]),
    "rooms-dev of before": (OWN, ["admin"]),
    "ci": (OWN, ["publish"]),
    "admin": (TENANT, ["admin"]),
}


@contextmanager
def alembic(url: str) -> Iterator[Config]:
    engine = create_engine(sqlalchemy_url(url))
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    try:
        with engine.connect() as connection:
            config.attributes["connection"] = connection
            yield config
            connection.commit()
    finally:
        engine.dispose()


def run(url: str, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        cursor = connection.execute(statement.encode(), parameters)
        return cursor.fetchall() if cursor.description else []


def test_the_key_of_make_run_gets_the_platform_scope_and_no_other_does(database: str) -> None:
    with alembic(database) as config:
        command.downgrade(config, "0020")
    for identity, name in ((OWN, "default"), (TENANT, "rooms-dev")):
        run(database, "INSERT INTO organisations (id, name) VALUES (%s, %s)", identity, name)
    for number, (name, (owner, granted)) in enumerate(KEYS.items()):
        run(
            database,
            "INSERT INTO api_keys (id, organisation_id, name, key_hash, scopes) VALUES (%s, %s, %s, %s, %s)",
            f"00000000-0000-7000-8000-0000000001{number:02}",
            owner,
            name,
            bytes([number]),
            granted,
        )
    # A tenant's key of that name is a tenant's.
    run(database, "UPDATE api_keys SET name = 'rooms-dev' WHERE name = 'admin'")
    with alembic(database) as config:
        command.upgrade(config, "head")
    found = run(database, "SELECT organisation_id::text, name, scopes FROM api_keys ORDER BY id")
    assert found == [
        (OWN, "rooms-dev", ["admin", "platform"]),
        (OWN, "rooms-dev of before", ["admin"]),
        (OWN, "ci", ["publish"]),
        (TENANT, "rooms-dev", ["admin"]),
    ]
    run(database, "UPDATE api_keys SET scopes = '{platform}' WHERE name = 'ci'")
    with alembic(database) as config:
        command.downgrade(config, "0020")
    assert sorted(
        run(
            database,
            "SELECT name, scopes, revoked_at IS NULL FROM api_keys WHERE organisation_id = %s",
            OWN,
        )
    ) == [
        ("ci", [], False),
        ("rooms-dev", ["admin"], True),
        ("rooms-dev of before", ["admin"], True),
    ]


def test_a_handler_queue_keeps_its_name_and_its_magazines(database: str) -> None:
    """Going back too: then each queue has the name that it has in the store."""
    with alembic(database) as config:
        command.downgrade(config, "0020")
    for identity, name in ((OWN, "default"), (TENANT, "tenant")):
        run(database, "INSERT INTO organisations (id, name) VALUES (%s, %s)", identity, name)
    run(
        database,
        "INSERT INTO queues (name, organisation_id, settings) VALUES ('orders', %s, '{}')",
        TENANT,
    )
    with alembic(database) as config:
        command.upgrade(config, "head")
    assert run(database, "SELECT name, display_name, organisation_id::text FROM queues") == [
        ("orders", None, TENANT)
    ]
    add = "INSERT INTO queues (name, display_name, organisation_id, settings) VALUES (%s, 'orders', %s, '{}')"
    run(database, add, "queue-1", OWN)
    with pytest.raises(psycopg.errors.UniqueViolation):
        run(database, add, "queue-2", TENANT)
    with alembic(database) as config:
        command.downgrade(config, "0020")
    assert sorted(run(database, "SELECT name FROM queues")) == [("orders",), ("queue-1",)]


def test_an_older_version_opens_secrets_and_does_not_call_without_headers(database: str) -> None:
    cipher, owner = Cipher(bytes(32)), "00000000-0000-7000-8000-0000000000ff"
    run(database, "INSERT INTO organisations (id, name) VALUES (%s, 'ours')", owner)
    run(
        database,
        "INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms, delivery_delay_multiplier, delivery_attempts)"
        " VALUES (7, %s, 'room', 1, 1, 1)",
        owner,
    )
    for number, headers in enumerate((None, b"sealed")):
        run(
            database,
            "INSERT INTO subscriptions (room_id, id, name, type, organisation_id, push_url, secret, previous_secret,"
            " sealed_headers) VALUES (7, %s, %s, 'PUSH', %s, 'https://e.test/', %s, %s, %s)",
            f"00000000-0000-7000-8000-00000000000{number}", str(number), owner,
            cipher.encrypt(b"new"), cipher.encrypt(b"old"), headers,
        )  # fmt: skip
    with alembic(database) as config:
        command.downgrade(config, "0023")
    rows = run(
        database,
        "SELECT status, status_reason, secret, previous_secret FROM subscriptions ORDER BY id",
    )
    assert [row[0] for row in rows] == ["active", "paused"]
    assert "set them again" in rows[1][1]
    key = AESGCM(bytes(32))
    for _, _, *secrets in rows:
        assert [key.decrypt(one[:12], one[12:], b"") for one in secrets] == [b"new", b"old"]
    with alembic(database) as config:
        command.upgrade(config, "head")
    assert (
        run(database, "SELECT header_names, sealed_headers FROM subscriptions") == [([], None)] * 2
    )
