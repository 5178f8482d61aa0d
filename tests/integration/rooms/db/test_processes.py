"""Test the records of processes: which are kept, how long, and the warning about other stores."""

import asyncio
import dataclasses
import logging
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rooms.app.stores import process_registration
from rooms.backends import DATABASE, VARIABLES, Backends, ProcessRecord
from rooms.cli.backends import environment_installation
from rooms.cli.context import DATABASE_URL_FILE, CliSession
from rooms.db.connection import open_connection
from rooms.db.processes import RUNNING_S, STOPPED_KEPT_S, heartbeat, mark_stopped, read_processes
from rooms.db.secrets import key_id, open_cipher, replace_key_file
from rooms.local.pidfile import write_private
from rooms.settings import Settings, read_settings
from tests.support.installation import until

OURS = Backends(
    broker=DATABASE, election=DATABASE, magazines=DATABASE, farm="rooms", client="default"
)
NOWHERE = "postgresql://none@127.0.0.1:1/none"


def process(name: str, backends: Backends = OURS) -> ProcessRecord:
    return ProcessRecord(name=name, kind="worker", host="h", pid=1, running=True, backends=backends)


def settings(**environment: str) -> Settings:
    return read_settings(environment)


async def found(url: str) -> Sequence[ProcessRecord]:
    async with open_connection(url, name="test") as connection:
        return await read_processes(connection)


async def entered(url: str, *processes: ProcessRecord) -> None:
    async with open_connection(url, name="test") as connection:
        for one in processes:
            await heartbeat(connection, one)


async def aged(url: str, name: str, seconds: float) -> None:
    async with open_connection(url, name="test") as connection:
        await connection.execute(
            "UPDATE processes SET seen_at = now() - %s * interval '1 s' WHERE name = %s",
            [seconds, name],
        )


@asynccontextmanager
async def registered_there(url: str, kind: str, given: Settings) -> AsyncIterator[None]:
    """Return a registration that is recorded by now."""
    async with process_registration(given, url, kind, interval_s=0.05):
        await until(lambda: on_record(url, kind), f"{kind} to be on record")
        yield


async def on_record(url: str, kind: str) -> bool:
    return any(one.kind == kind and one.running for one in await found(url))


async def test_a_process_is_on_record_while_it_runs_and_the_last_one_stays(database: str) -> None:
    async with registered_there(
        database, "serve", settings(MAGAZINE_URL="aerospike://u:s3cret@127.0.0.1:1/ns?tls=false")
    ):
        (one,) = await found(database)
        assert (one.kind, one.running) == ("serve", True)
        assert one.backends == dataclasses.replace(OURS, magazines="aerospike://***@127.0.0.1:1/ns")
    (one,) = await found(database)
    assert (one.kind, one.running) == ("serve", False)


async def test_no_password_is_on_record(database: str) -> None:
    given = settings(
        BROKER_URL="stomp://u:s3cret@127.0.0.1:1", ELECTION_URL="zookeeper://u:s3cret@127.0.0.1:2",
        MAGAZINE_URL="aerospike://u:s3cret@127.0.0.1:3/ns",
    )  # fmt: skip
    async with (
        registered_there(database, "serve", given),
        open_connection(database, name="test") as connection,
    ):
        rows = await (await connection.execute("SELECT p::text FROM processes p")).fetchall()
    assert len(rows) == 1
    assert "s3cret" not in rows[0][0]
    assert "127.0.0.1:2" in rows[0][0]


async def test_process_without_recent_heartbeat_is_not_running(database: str) -> None:
    await entered(database, process("dead"), process("alive"))
    await aged(database, "dead", RUNNING_S + 1)
    assert [one.name for one in await found(database)] == ["alive"]
    await aged(database, "alive", RUNNING_S + 2)
    (last,) = await found(database)
    assert (last.name, last.running) == ("dead", False)
    await entered(database, process("dead"))
    assert [(one.name, one.running) for one in await found(database)] == [("dead", True)]


async def test_records_of_long_ended_processes_are_deleted(
    database: str,
) -> None:
    await entered(database, process("old"), process("recent"))
    await aged(database, "old", STOPPED_KEPT_S + 1)
    async with open_connection(database, name="test") as connection:
        await mark_stopped(connection, "recent")
        await heartbeat(connection, process("alive"))
        names = await (await connection.execute("SELECT name FROM processes ORDER BY 1")).fetchall()
    assert names == [("alive",), ("recent",)]


async def test_process_on_other_stores_warns_once_and_continues(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    await entered(
        database, process("one", dataclasses.replace(OURS, broker="stomp://***@127.0.0.1:1"))
    )
    with caplog.at_level(logging.WARNING, "rooms.app.stores"):
        async with registered_there(database, "serve", settings()):

            async def confirmed_again() -> bool:
                async with open_connection(database, name="test") as connection:
                    row = await (
                        await connection.execute(
                            "SELECT seen_at > since FROM processes WHERE kind = 'serve'"
                        )
                    ).fetchone()
                return row == (True,)

            await until(confirmed_again, "a second confirmation")
    (warning,) = [
        record.getMessage()
        for record in caplog.records
        if "different stores" in record.getMessage()
    ]
    assert "BROKER_URL is postgresql here and stomp://***@127.0.0.1:1 there" in warning
    assert "worker 1 on h" in warning


async def test_process_runs_although_it_cannot_be_recorded(
    database: str, empty_database: str
) -> None:
    for url in (NOWHERE, empty_database):
        async with process_registration(settings(), url, "serve", interval_s=0.01):
            await asyncio.sleep(0)
    async with open_connection(database, name="test") as connection:
        await connection.execute("ALTER TABLE processes RENAME TO away")
        async with process_registration(settings(), database, "serve", interval_s=0.01):
            await connection.execute("ALTER TABLE away RENAME TO processes")
            await until(
                lambda: on_record(database, "serve"), "the process to be on record after all"
            )


async def test_a_process_started_in_a_second_terminal_joins_what_runs_here(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make run-full` writes its addresses to full.env, with passwords.

    The environment of the second terminal has none of them.
    """
    broker, election = "stomp://rooms:s3cret@127.0.0.1:61613", "zookeeper://127.0.0.1:2181"
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("ROOMS_DATA", str(tmp_path))
    write_private(tmp_path / DATABASE_URL_FILE, database)
    urls = {"DATABASE_URL": database, "BROKER_URL": broker, "ELECTION_URL": election}
    write_private(
        tmp_path / "full.env", "".join(f"{name}={shlex.quote(url)}\n" for name, url in urls.items())
    )
    await entered(
        database,
        process(
            "one",
            dataclasses.replace(OURS, broker="stomp://***@127.0.0.1:61613", election=election),
        ),
    )
    joined = await asyncio.to_thread(environment_installation, CliSession())
    assert (joined.settings.broker_url, joined.settings.election_url) == (broker, election)
    assert joined.settings.uses_relay
    assert joined.logs["broker"] == str(tmp_path / "full/log/artemis.log")

    monkeypatch.setenv("DATABASE_URL", database)
    alone = await asyncio.to_thread(environment_installation, CliSession())
    assert alone.settings.broker_url is None, "a changeover begins with a process that differs"


async def test_a_process_records_its_keys_and_soon_a_change_of_them(
    database: str, tmp_path: Path
) -> None:
    """Long before it confirms its record: a rotation waits for it."""
    old, new = bytes(32), bytes(range(32))
    replace_key_file(tmp_path, [old])
    cipher = open_cipher(None, tmp_path)

    async def has(*keys: bytes) -> bool:
        recorded = await found(database)
        return [one.secret_keys for one in recorded] == [tuple(map(key_id, keys))]

    async with process_registration(
        settings(), database, "serve", cipher=cipher, interval_s=3600.0
    ):
        await until(lambda: has(old), "the key")
        replace_key_file(tmp_path, [new, old])
        await until(lambda: has(new, old), "both keys")
    async with process_registration(settings(), database, "upkeep"):
        await until(lambda: on_record(database, "upkeep"), "the other")
        assert {one.kind: one.secret_keys for one in await found(database)}["upkeep"] is None
