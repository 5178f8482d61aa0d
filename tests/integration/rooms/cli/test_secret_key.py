"""Rotate the secret key by commands: what they refuse, and what they leave."""

import asyncio
import os
import signal
import socket
import stat
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import Result

from rooms.app.stores import process_registration
from rooms.cli import key_takeover, secret_key
from rooms.cli.errors import CliError
from rooms.db import secret_rotation
from rooms.db.connection import open_connection, open_engine, transaction
from rooms.db.receipt_keys import current_key
from rooms.db.secrets import (
    KEY_FILE,
    MAX_KEYS,
    PRUNED_FILE,
    Cipher,
    key_id,
    open_cipher,
    read_secret_keys,
    replace_key_file,
)
from rooms.settings import read_settings
from tests.support.cli_runner import Terminal
from tests.support.installation import SECRET, Installation, until

OLD, NEW = bytes(32), bytes(range(32))
TEXTS = {key: b64encode(key).decode() for key in (OLD, NEW)}
PROCESS = (
    "INSERT INTO processes (name, kind, host, pid, broker, election, magazines, farm, client,"
    " secret_keys) VALUES (%s, %s, %s, 7, '', '', '', '', '', %s)"
)
HERE = socket.gethostname()


@pytest.fixture
def terminal(installation: Installation, tmp_path: Path) -> Terminal:
    replace_key_file(tmp_path, [OLD])
    return Terminal(tmp_path, {"DATABASE_URL": installation.url})


async def run(terminal: Terminal, *arguments: str, **environment: str) -> Result:
    result = await asyncio.to_thread(terminal.run, "secret-key", *arguments, **environment)
    for key in (*TEXTS.values(), *(terminal.data / KEY_FILE).read_text().split()):
        assert key not in result.output
    return result


def names(terminal: Terminal) -> list[str]:
    return [key_id(key) for key in read_secret_keys(None, terminal.data)]


async def create_receipt_key(installation: Installation, cipher: Cipher) -> str:
    """Create the key of receipts, as the first receipt does, and return its `kid`."""
    engine = open_engine(installation.url, size=1)
    try:
        async with transaction(engine) as connection:
            return (await current_key(connection, cipher, os.urandom)).public.kid
    finally:
        await engine.dispose()


@asynccontextmanager
async def worker(installation: Installation, terminal: Terminal) -> AsyncIterator[Cipher]:
    """Keep a worker on record that reads the file, and yield its cipher."""
    cipher = open_cipher(None, terminal.data)
    given = read_settings({})
    async with process_registration(given, installation.url, "worker", cipher=cipher):

        async def on_record() -> bool:
            query = "SELECT FROM processes WHERE kind = 'worker'"
            async with open_connection(installation.url, name="test") as connection:
                return await (await connection.execute(query)).fetchone() is not None

        await until(on_record, "the worker to be on record")
        yield cipher


async def test_the_key_of_receipts_is_sealed_again(
    installation: Installation, terminal: Terminal
) -> None:
    kid = await create_receipt_key(installation, Cipher(OLD))
    result = await run(terminal, "rotate")
    assert result.exit_code == 0, result.stderr
    assert "0 subscriptions and the key of receipts were sealed again" in result.stdout
    assert (await run(terminal, "prune")).exit_code == 0
    (only,) = read_secret_keys(None, terminal.data)
    assert await create_receipt_key(installation, Cipher(only)) == kid, "it signs as before"
    again = await asyncio.to_thread(terminal.json, "secret-key", "rotate")
    assert (again["sealed_again"], again["receipt_keys_sealed_again"], again["left"]) == (0, 1, 0)


async def test_a_key_of_receipts_that_does_not_open_is_named(
    installation: Installation, terminal: Terminal
) -> None:
    """All else is sealed again, and the remedy lets the next rotation end."""
    await create_receipt_key(installation, Cipher(OLD))
    await installation.subscribe()
    with psycopg.connect(installation.url) as connection:
        connection.execute(
            "UPDATE receipt_keys SET encrypted_key = overlay(encrypted_key PLACING '\\x00' FROM length(encrypted_key))"
        )
    result = await run(terminal, "rotate")
    assert result.exit_code == 1
    assert "1 values are left; no key opens the key of receipts" in result.stderr
    assert "rooms receipt-key rotate --replace-lost" in result.stderr
    replaced = await asyncio.to_thread(terminal.run, "receipt-key", "rotate", "--replace-lost")
    assert replaced.exit_code == 0
    again = await run(terminal, "rotate")
    assert again.exit_code == 0, again.stderr


async def test_a_file_is_rotated_and_pruned(installation: Installation, terminal: Terminal) -> None:
    await installation.subscribe()
    assert (await run(terminal, "rotate")).exit_code == 0
    new, old = names(terminal)
    assert old == key_id(OLD)
    assert stat.S_IMODE((terminal.data / KEY_FILE).stat().st_mode) == 0o600
    status = await asyncio.to_thread(terminal.json, "secret-key", "status")
    assert status["keys"] == [
        {"key": new, "role": "seals", "values": 1},
        {"key": old, "role": "opens", "values": 0},
    ]
    sealed = await installation.value("SELECT secret FROM subscriptions")
    cipher = Cipher(*read_secret_keys(None, terminal.data)[:1])
    assert cipher.decrypt(sealed).decode() == SECRET
    pruned = await run(terminal, "prune")
    assert old in pruned.stdout
    assert names(terminal) == [new]
    assert "nothing to remove" in (await run(terminal, "prune")).stdout


async def test_a_finished_rotation_is_followed_by_another(
    installation: Installation, terminal: Terminal
) -> None:
    await installation.subscribe()
    for count in (2, 3):
        assert (await run(terminal, "rotate")).exit_code == 0
        assert len(names(terminal)) == count


async def test_prune_keeps_a_key_that_is_needed(
    installation: Installation, terminal: Terminal
) -> None:
    await installation.subscribe()
    replace_key_file(terminal.data, [NEW, OLD])
    refused = await run(terminal, "prune")
    assert (refused.exit_code, len(names(terminal))) == (1, 2)
    assert "secret-key rotate" in refused.stderr


async def test_processes_on_other_hosts_must_share_the_file(
    installation: Installation, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await installation.rows(PROCESS, "one", "upkeep", "elsewhere", None)
    assert (await run(terminal, "rotate")).exit_code == 0
    before = names(terminal)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    async with worker(installation, terminal):
        monkeypatch.undo()
        refused = await run(terminal, "rotate")
        assert refused.exit_code == 1
        assert "elsewhere" in refused.stderr
        assert names(terminal) == before
        assert (await run(terminal, "rotate", "--file-is-shared")).exit_code == 0


async def test_a_host_with_a_file_of_its_own_is_found_out(
    installation: Installation, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes never read the new key, whatever the operator says."""
    monkeypatch.setattr(key_takeover, "_WAIT_S", 0.3)
    await installation.rows(PROCESS, "other", "serve", "elsewhere", [key_id(OLD)])
    refused = await run(terminal, "rotate", "--file-is-shared")
    assert (refused.exit_code, names(terminal)) == (1, [key_id(OLD)])
    assert f"serve 7 on elsewhere (has {key_id(OLD)})" in refused.stderr


@pytest.mark.parametrize("has", [[key_id(OLD)], None])
async def test_nothing_changes_while_a_process_lacks_the_new_key(
    has: list[str] | None,
    installation: Installation,
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_takeover, "_WAIT_S", 0.3)
    await installation.subscribe(secret=Cipher(OLD).encrypt(b"whsec_x"))
    await installation.rows(PROCESS, "one", "worker", HERE, has)
    refused = await run(terminal, "rotate")
    assert refused.exit_code == 1
    assert f"worker 7 on {HERE}" in refused.stderr
    assert "removed again" in refused.stderr
    assert names(terminal) == [key_id(OLD)]
    sealed = await installation.value("SELECT secret FROM subscriptions")
    assert sealed.startswith(Cipher(OLD).prefix)
    await installation.rows("UPDATE processes SET seen_at = now() - interval '1 min'")
    assert (await run(terminal, "rotate")).exit_code == 0, "a process that died does not count"


async def test_nothing_is_sealed_again_while_a_process_seals_with_the_former_key(
    installation: Installation, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_takeover, "_WAIT_S", 0.3)
    await installation.subscribe(secret=Cipher(OLD).encrypt(b"whsec_x"))
    await installation.rows(PROCESS, "one", "worker", HERE, [key_id(OLD), key_id(NEW)])
    both = f"{TEXTS[NEW]},{TEXTS[OLD]}"
    refused = await run(terminal, "rotate", ROOMS_SECRET_KEY=both)
    assert refused.exit_code == 1
    assert f"do not seal with {key_id(NEW)}" in refused.stderr
    assert "ROOMS_SECRET_KEY" in refused.stderr
    sealed = await installation.value("SELECT secret FROM subscriptions")
    assert sealed.startswith(Cipher(OLD).prefix)


async def test_a_running_process_takes_part_in_a_rotation(
    installation: Installation, terminal: Terminal
) -> None:
    await installation.subscribe()
    async with worker(installation, terminal) as cipher:
        assert (await run(terminal, "rotate")).exit_code == 0
        assert list(cipher.key_ids) == names(terminal)
        assert (await run(terminal, "prune")).exit_code == 0


async def test_prune_keeps_a_key_with_which_a_process_seals(
    installation: Installation, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not read the new file: what it seals later would be lost."""
    monkeypatch.setattr(key_takeover, "_WAIT_S", 0.3)
    replace_key_file(terminal.data, [NEW, OLD])
    await installation.rows(PROCESS, "one", "serve", HERE, [key_id(OLD)])
    refused = await run(terminal, "prune")
    assert (refused.exit_code, len(names(terminal))) == (1, 2)
    assert f"serve 7 on {HERE}" in refused.stderr


async def test_prune_puts_a_key_back_that_sealed_something_meanwhile(
    installation: Installation, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = await installation.subscribe(secret=Cipher(NEW).encrypt(b"whsec_x"))
    replace_key_file(terminal.data, [NEW, OLD])

    def replaced(data: Path, keys: Sequence[bytes], **named: Any) -> None:
        replace_key_file(data, keys, **named)
        with psycopg.connect(installation.url) as other:
            late = Cipher(OLD).encrypt(b"whsec_late")
            other.execute("UPDATE subscriptions SET secret = %s WHERE id = %s", (late, identity))

    monkeypatch.setattr(secret_key, "replace_key_file", replaced)
    refused = await run(terminal, "prune")
    assert (refused.exit_code, names(terminal)) == (1, [key_id(NEW), key_id(OLD)])
    assert "secret-key rotate" in refused.stderr


class Killed(BaseException):
    """Stand for the death of the process: nothing is put in order."""


def content_of(data: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.glob("secret-key*")}


def kill_at(monkeypatch: pytest.MonkeyPatch, wait: str, call: int, data: Path) -> None:
    """Let the command die at this call of `wait`: what it changes in the folder after it is lost."""
    real, calls, left = getattr(secret_key, wait), 0, dict[str, bytes]()

    async def dies(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            left.update(content_of(data))
            raise Killed
        return await real(*given, **named)

    def run_killed(*given: Any) -> Any:
        try:
            return run_command(*given)
        except Killed:
            for path in data.glob("secret-key*"):
                path.unlink()
            for name, content in left.items():
                (data / name).write_bytes(content)
            raise CliError("killed") from None

    run_command = secret_key._run
    monkeypatch.setattr(secret_key, wait, dies)
    monkeypatch.setattr(secret_key, "_run", run_killed)


async def test_a_prune_that_is_killed_leaves_every_key(
    installation: Installation,
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A value that was sealed late with a key that it had removed would be lost."""
    identity = await installation.subscribe(secret=Cipher(NEW).encrypt(b"whsec_x"))
    replace_key_file(terminal.data, [NEW, OLD])
    (terminal.data / KEY_FILE).chmod(0o640)
    with monkeypatch.context() as patch:
        kill_at(patch, "_refuse_left", 2, terminal.data)
        assert (await run(terminal, "prune")).exit_code == 1
    assert names(terminal) == [key_id(NEW)]
    open_cipher(None, terminal.data)
    assert "interrupted" in caplog.text
    await installation.change(identity, secret=Cipher(OLD).encrypt(b"whsec_late"))
    refused = await run(terminal, "prune")
    assert "secret-key rotate" in refused.stderr
    assert (refused.exit_code, names(terminal)) == (1, [key_id(NEW), key_id(OLD)])
    assert not (terminal.data / PRUNED_FILE).exists()
    assert (await run(terminal, "rotate")).exit_code == 0
    assert (await run(terminal, "prune")).exit_code == 0
    assert names(terminal) == [key_id(NEW)]
    assert [path.name for path in terminal.data.glob("secret-key*")] == [KEY_FILE]


async def test_the_copy_of_a_prune_has_the_access_of_the_file(
    installation: Installation, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_key_file(terminal.data, [NEW, OLD])
    (terminal.data / KEY_FILE).chmod(0o640)
    modes: list[int] = []
    real = secret_key._refuse_left

    async def observed(*given: Any) -> None:
        modes.extend(path.stat().st_mode & 0o777 for path in terminal.data.glob("*.pruned"))
        await real(*given)

    monkeypatch.setattr(secret_key, "_refuse_left", observed)
    assert (await run(terminal, "prune")).exit_code == 0
    assert modes == [0o640]


async def test_rotations_that_are_killed_leave_one_key_for_the_next(
    installation: Installation, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left another one, until the file was full."""
    await installation.subscribe(secret=Cipher(OLD).encrypt(b"whsec_x"))
    for _ in range(MAX_KEYS):
        with monkeypatch.context() as patch:
            kill_at(patch, "await_takeover", 1, terminal.data)
            assert (await run(terminal, "rotate")).exit_code == 1
    old, pending = names(terminal)
    assert old == key_id(OLD)
    assert (await run(terminal, "rotate")).exit_code == 0
    assert names(terminal) == [pending, old]
    assert (await run(terminal, "rotate")).exit_code == 0
    newest, *others = names(terminal)
    assert others == [pending, old], "a former key is never the new one"
    assert newest not in {pending, old}
    assert [path.name for path in terminal.data.glob("secret-key*")] == [KEY_FILE]


async def test_sigterm_puts_the_file_in_order(
    installation: Installation, terminal: Terminal
) -> None:
    await installation.rows(PROCESS, "one", "worker", HERE, [key_id(OLD)])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rooms", "secret-key", "rotate"),
        env={**os.environ, "DATABASE_URL": installation.url, "ROOMS_DATA": str(terminal.data)},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while b"waiting until" not in (line := await process.stderr.readline()):
            assert line, "it ended"
        assert len(names(terminal)) == 2
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 128 + signal.SIGTERM
    assert names(terminal) == [key_id(OLD)]
    assert [path.name for path in terminal.data.glob("secret-key*")] == [KEY_FILE]


async def test_a_rotation_needs_the_present_schema(
    installation: Installation, terminal: Terminal
) -> None:
    await installation.rows("ALTER TABLE processes DROP COLUMN secret_keys")
    refused = await run(terminal, "rotate")
    assert (refused.exit_code, names(terminal)) == (1, [key_id(OLD)])
    assert "rooms migrate" in refused.stderr


async def test_a_full_file_takes_no_further_key(
    installation: Installation, terminal: Terminal
) -> None:
    """The last of its keys was dropped, whatever it still opened."""
    replace_key_file(terminal.data, [bytes([number]) * 32 for number in range(MAX_KEYS)])
    before = names(terminal)
    refused = await run(terminal, "rotate")
    assert (refused.exit_code, names(terminal)) == (1, before)
    assert "secret-key prune" in refused.stderr


async def test_the_environment_takes_two_keys(
    installation: Installation, terminal: Terminal
) -> None:
    await installation.subscribe()
    refused = await run(terminal, "rotate", ROOMS_SECRET_KEY=TEXTS[OLD])
    assert "OLD,NEW" in refused.stderr
    both = f"{TEXTS[NEW]},{TEXTS[OLD]}"
    assert (await run(terminal, "rotate", ROOMS_SECRET_KEY=both)).exit_code == 0
    assert (await run(terminal, "prune", ROOMS_SECRET_KEY=both)).exit_code == 1
    sealed = await installation.value("SELECT secret FROM subscriptions")
    assert Cipher(NEW).decrypt(sealed).decode() == SECRET
    assert names(terminal) == [key_id(OLD)]


async def test_no_key_is_made_where_the_service_has_none(
    installation: Installation, tmp_path: Path
) -> None:
    data = tmp_path / "elsewhere"
    data.mkdir()
    terminal = Terminal(data, {"DATABASE_URL": installation.url})
    result = await asyncio.to_thread(terminal.run, "secret-key", "rotate")
    assert result.exit_code == 1
    assert "ROOMS_DATA" in result.stderr
    assert not list(data.iterdir())


async def test_a_missing_key_is_put_back_first(
    installation: Installation, terminal: Terminal
) -> None:
    await installation.subscribe(secret=Cipher(NEW).encrypt(b"whsec_x"))
    refused = await run(terminal, "rotate")
    assert refused.exit_code == 1
    assert key_id(NEW) in refused.stderr
    assert names(terminal) == [key_id(OLD)]
    assert "missing" in (await run(terminal, "status")).stdout


async def test_one_rotation_at_a_time(installation: Installation, terminal: Terminal) -> None:
    await installation.rows("SELECT pg_advisory_lock(%s)", secret_key._LOCK)
    refused = await run(terminal, "rotate")
    assert refused.exit_code == 1
    assert "another" in refused.stderr


async def test_what_a_process_still_seals_with_the_old_key_is_reported(
    installation: Installation, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was not restarted seals after the last pass."""
    identity = await installation.subscribe()
    late = Cipher(OLD).encrypt(b"whsec_late")
    count = secret_rotation.count_by_key
    calls = 0

    async def counts(connection: Any) -> dict[str | None, int]:
        nonlocal calls
        calls += 1
        if calls == 2:
            with psycopg.connect(installation.url) as other:
                other.execute(
                    "UPDATE subscriptions SET secret = %s WHERE id = %s", (late, identity)
                )
        return await count(connection)

    monkeypatch.setattr(secret_key, "count_by_key", counts)
    result = await run(terminal, "rotate")
    assert result.exit_code == 1
    assert "meanwhile" in result.stderr
    again = await run(terminal, "rotate")
    assert again.exit_code == 0
    assert "continuing" in again.stderr


async def test_a_transaction_that_began_before_is_waited_for(
    installation: Installation, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may commit what it sealed with the former key."""
    identity = await installation.subscribe()
    waited = asyncio.Event()
    loop = asyncio.get_running_loop()
    ended = secret_rotation.writers_ended

    async def observed(connection: Any, since: int) -> bool:
        loop.call_soon_threadsafe(waited.set)
        return await ended(connection, since)

    monkeypatch.setattr(secret_key, "writers_ended", observed)
    await installation.rows("BEGIN")
    await installation.rows("UPDATE rooms SET updated_at = now()")
    rotating = asyncio.create_task(run(terminal, "rotate"))
    await waited.wait()
    await installation.change(identity, secret=Cipher(OLD).encrypt(b"whsec_late"))
    await installation.rows("COMMIT")
    result = await rotating
    assert result.exit_code == 0, result.stderr
    sealed = await installation.value("SELECT secret FROM subscriptions")
    cipher = Cipher(*read_secret_keys(None, terminal.data)[:1])
    assert cipher.decrypt(sealed) == b"whsec_late"


async def test_a_transaction_that_does_not_end_ends_the_command(
    installation: Installation, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_key, "_WRITERS_WAIT_S", 0.2)
    await installation.rows("BEGIN")
    await installation.rows("UPDATE rooms SET updated_at = now()")
    result = await run(terminal, "rotate")
    await installation.rows("ROLLBACK")
    assert result.exit_code == 1
    assert "run this again" in result.stderr
