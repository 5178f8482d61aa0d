"""Test that a standby finds out at its start, and not when it takes over, that it could not."""

import asyncio
import errno
import logging
import socket
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from rooms.app import standalone, standby_checks
from rooms.app.standby_checks import checked_standby
from rooms.app.stores import process_registration
from rooms.db.connection import Connection, open_connection
from rooms.errors import SettingsError
from rooms.metrics import Metrics
from rooms.settings import Settings, read_settings
from tests.support.installation import SEAL, Installation, until

OTHER_KEY = b64encode(b"o" * 32).decode()


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """A port that something else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def settings_of(folder: Path, **more: str) -> Settings:
    listen = {"ROOMS_LISTEN": f"127.0.0.1:{free_port()}"}
    return read_settings({"ROOMS_DATA": str(folder), **listen, **more})


async def check(settings: Settings, url: str) -> None:
    async with checked_standby(settings, url):
        pass


async def problem_of(settings: Settings, url: str) -> str:
    with pytest.raises(SettingsError) as caught:
        await check(settings, url)
    return str(caught.value)


async def test_a_standby_that_could_take_over_stands_by(database: str, tmp_path: Path) -> None:
    await check(settings_of(tmp_path), database)


async def test_the_checks_come_before_the_lock(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_standby(*_: object) -> None:
        pytest.fail("it stands by")

    monkeypatch.setattr(standalone, "_run_standby", run_standby)
    settings = settings_of(tmp_path, ROOMS_SECRET_KEY="no key")
    with pytest.raises(SettingsError, match="ROOMS_SECRET_KEY is not base64"):
        await standalone._run(settings, database, Metrics(), standby=True)


async def test_another_secret_key_is_a_problem(
    database: str, installation: Installation, tmp_path: Path
) -> None:
    await installation.subscribe()
    settings = settings_of(tmp_path, ROOMS_SECRET_KEY=OTHER_KEY)
    assert SEAL.key_ids[0] in await problem_of(settings, database)
    await check(settings_of(tmp_path, ROOMS_SECRET_KEY=OTHER_KEY, ROOMS_UNKNOWN_SECRET_KEYS="hold"), database)  # fmt: skip


async def test_a_missing_file_of_tls_is_a_problem(database: str, tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        ROOMS_TLS_LISTEN=f"127.0.0.1:{free_port()}",
        ROOMS_TLS_CERT=str(tmp_path / "none.pem"),
        ROOMS_TLS_KEY=str(tmp_path / "none.key"),
    )
    assert "none" in await problem_of(settings, database)


async def test_an_address_in_use_is_a_problem_unless_the_active_process_has_it(
    database: str,
    installation: Installation,
    tmp_path: Path,
    port: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings_of(tmp_path, ROOMS_LISTEN=f"127.0.0.1:{port.getsockname()[1]}")
    monkeypatch.setattr(standby_checks, "_RECORD_WAIT_S", 0.1)
    assert "ROOMS_LISTEN: cannot listen on" in await problem_of(settings, database)
    async with process_registration(settings, database, "serve"):

        async def is_there() -> bool:
            return bool(await installation.value("SELECT count(*) FROM processes"))

        await until(is_there, "the active process")
        await check(settings, database)


@pytest.mark.parametrize("address", ["192.0.2.1:8080", "rooms.invalid:8080"])
async def test_an_address_that_only_the_active_machine_has_is_logged(
    address: str, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one that keepalived moves; and names may not be resolved yet when a machine boots."""
    caplog.set_level(logging.WARNING)
    await check(settings_of(tmp_path, ROOMS_LISTEN=address), database)
    (line,) = caplog.messages
    assert f"ROOMS_LISTEN: cannot listen on {address}" in line
    assert "must have it when it takes over" in line


async def test_an_address_that_this_process_may_not_use_is_a_problem(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(standby_checks, "_bind", refuse)
    problem = await problem_of(settings_of(tmp_path), database)
    assert "ROOMS_LISTEN: cannot listen on" in problem
    assert "Permission denied" in problem


async def test_the_active_process_may_be_on_record_again_after_an_outage_of_postgresql(
    database: str,
    installation: Installation,
    tmp_path: Path,
    port: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = settings_of(tmp_path, ROOMS_LISTEN=f"127.0.0.1:{port.getsockname()[1]}")
    monkeypatch.setattr(standby_checks, "_RECORD_WAIT_S", 60.0)
    looked = asyncio.Event()
    is_served_here = standby_checks._is_served_here

    async def observed(connection: Connection) -> bool:
        found = await is_served_here(connection)
        looked.set()
        return found

    monkeypatch.setattr(standby_checks, "_is_served_here", observed)
    checking = asyncio.create_task(check(settings, database))
    await looked.wait()
    async with process_registration(settings, database, "serve"):
        await asyncio.wait_for(checking, 60)


async def test_an_address_may_come_free_while_the_record_is_waited_for(
    database: str, tmp_path: Path, port: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(tmp_path, ROOMS_LISTEN=f"127.0.0.1:{port.getsockname()[1]}")
    monkeypatch.setattr(standby_checks, "_RECORD_WAIT_S", 60.0)

    async def closes(_: Connection) -> bool:
        port.close()
        return False

    monkeypatch.setattr(standby_checks, "_is_served_here", closes)
    await asyncio.wait_for(check(settings, database), 60)


async def test_a_schema_that_is_missing_or_older_is_a_problem_and_a_newer_one_is_none(
    empty_database: str, database: str, tmp_path: Path
) -> None:
    settings = settings_of(tmp_path)
    assert "is missing" in await problem_of(settings, empty_database)
    for version, is_older in (("0040", True), ("9999", False)):
        with psycopg.connect(database) as connection:
            connection.execute("UPDATE alembic_version SET version_num = %s", (version,))
        if is_older:
            assert "run `rooms migrate`" in await problem_of(settings, database)
        else:
            await check(settings, database)


async def test_a_standby_starts_while_postgresql_is_away_and_is_checked_later(
    database: str,
    installation: Installation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(standby_checks, "_RETRY_S", 0.01)
    monkeypatch.setattr(standby_checks, "KEY_CHECK_S", 0.01)
    await installation.subscribe()
    urls = [f"postgresql://127.0.0.1:{free_port()}/rooms", database]
    monkeypatch.setattr(
        standby_checks,
        "open_connection",
        lambda _url, name: open_connection(urls.pop(0) if len(urls) > 1 else urls[0], name=name),
    )
    settings = settings_of(tmp_path, ROOMS_SECRET_KEY=OTHER_KEY)
    async with checked_standby(settings, database):

        async def is_logged() -> bool:
            return "this process could not take over" in caplog.text

        await until(is_logged, "the keys to be checked")
        await asyncio.sleep(0.1)
    assert caplog.text.count("are checked later") == 1
    assert caplog.text.count("this process could not take over") == 1, "not at every check"
