"""Start processes and commands while PostgreSQL recovers: they wait with one line."""

import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from rooms.cli.database import create_key
from rooms.db.readiness import wait_for_postgres
from rooms.domain.state_machine import Scope
from rooms.errors import StorageUnavailableError
from rooms.local.services import free_port
from tests.conftest import administer
from tests.support.polling import until
from tests.support.process_group import Crew
from tests.support.recovering_postgres import STARTING, Recovering, recovering
from tests.support.service import ROOT, START_S, environment_of

AWAY = "PostgreSQL is away: "
BACK = "PostgreSQL is back after "
NOWHERE = "stomp://user:password@127.0.0.1:1"


@pytest.fixture
def server(database: str) -> Iterator[Recovering]:
    with recovering(database) as found:
        yield found


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("serve", ()),
        ("worker", ()),
        ("relay", ()),
        ("upkeep", ()),
        ("standalone", ()),
        ("standalone", ("--standby",)),
    ],
)
def test_a_process_waits_until_postgresql_has_recovered(
    server: Recovering, tmp_path: Path, command: str, options: tuple[str, ...]
) -> None:
    """One line when it begins to wait, and one when it continues. No traceback, no exit."""
    broker = {"BROKER_URL": NOWHERE} if command == "relay" else {}
    # `serve` is awaited by the crew itself, so it is started as the others are.
    crew = Crew(url="", folder=tmp_path, _database_url=server.url, broker=broker)
    log = tmp_path / "process.log"
    with log.open("wb") as writing:
        process = subprocess.Popen(
            [sys.executable, "-m", "rooms", command, *options],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            cwd=ROOT,
            env=crew._environment(free_port()),
        )
    try:
        until(
            lambda: AWAY in log.read_text(),
            "the line that says what it waits for",
            within_s=START_S,
        )
        refused = server.refused
        until(lambda: server.refused >= refused + 3, "more tries")
        assert process.poll() is None
        server.over.set()
        until(
            lambda: BACK in log.read_text(), "the line that says that it goes on", within_s=START_S
        )
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        crew.end()
    reported = log.read_text()
    assert "Traceback" not in reported
    (line,) = [line for line in reported.splitlines() if AWAY in line]
    assert STARTING in line
    assert reported.count(BACK) == 1


def environment(folder: Path, url: str, wait_s: int) -> dict[str, str]:
    return {
        **environment_of(folder, free_port()),
        "DATABASE_URL": url,
        "ROOMS_START_WAIT_S": str(wait_s),
    }


@pytest.mark.parametrize("command", ["serve", "worker", "upkeep", "standalone"])
def test_process_gives_up_after_the_configured_time(
    server: Recovering, tmp_path: Path, command: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rooms", command],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(tmp_path, server.url, 1),
        timeout=START_S,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: PostgreSQL did not take writes within 1 s: ")
    assert STARTING in last


def test_waiting_process_ends_on_signal(server: Recovering, tmp_path: Path) -> None:
    log = tmp_path / "process.log"
    with log.open("wb") as writing:
        process = subprocess.Popen(
            [sys.executable, "-m", "rooms", "worker"],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            cwd=ROOT,
            env=environment(tmp_path, server.url, 3600),
        )
    try:
        until(lambda: AWAY in log.read_text(), "it to wait", within_s=START_S)
        process.terminate()
        assert process.wait(START_S) == 0
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    "words", [("key", "list"), ("secret-key", "status"), ("migrate",), ("retention",), ("doctor",)]
)
def test_a_command_waits_until_postgresql_has_recovered(
    server: Recovering, database: str, tmp_path: Path, words: tuple[str, ...]
) -> None:
    create_key(database, "default", "first", [Scope.ADMIN])
    process = subprocess.Popen(
        [sys.executable, "-m", "rooms", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={
            **environment(tmp_path, server.url, 60),
            "ROOMS_SECRET_KEY": b64encode(bytes(range(32))).decode(),
        },
    )
    try:
        until(lambda: server.refused >= 2, "the command to try again", within_s=START_S)
        server.over.set()
        _, errors = process.communicate(timeout=START_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert errors.count(AWAY) == 1


def test_command_does_not_wait_for_a_missing_server(tmp_path: Path) -> None:
    """A wrong address is reported at once."""
    done = subprocess.run(
        [sys.executable, "-m", "rooms", "key", "list"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(tmp_path, "postgresql://127.0.0.1:1/nothing", 3600),
        timeout=START_S,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: the database: ")


async def test_process_waits_for_a_read_only_server(database: str) -> None:
    """A standby that was not promoted yet is read-only."""
    name = database.rpartition("/")[2].partition("?")[0]
    administer(
        database, "ALTER DATABASE {} SET search_path = {}, public, pg_catalog", name, "lying"
    )
    import psycopg

    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA lying")
        connection.execute(
            "CREATE FUNCTION lying.pg_is_in_recovery() RETURNS bool LANGUAGE sql AS 'SELECT true'"
        )
    with pytest.raises(
        StorageUnavailableError, match="within 0 s: PostgreSQL is in recovery and takes no writes"
    ):
        await wait_for_postgres(database, within_s=0)
    administer(database, "ALTER DATABASE {} RESET search_path", name)
    await wait_for_postgres(database, within_s=0)
