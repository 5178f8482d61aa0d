"""Test the command line with a real database: keys, the schema, and the files of `rooms dev`."""

import asyncio
import json
import os
import pty
import pwd
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from rooms.cli import database as cli_database
from rooms.cli.dev import (
    ADMIN_KEY_NAME,
    LOOPBACK,
    DevContext,
    banner,
    children,
    children_environment,
    command_name,
    sign_in_command,
)
from rooms.db.catalog.api_keys import hash_key
from rooms.db.catalog.organisations import resolve_organisation
from rooms.db.connection import open_engine, transaction
from rooms.db.journal import read_chain, verify_chain
from rooms.domain.journal import ActorKind, ChainedEntry
from rooms.domain.state_machine import Scope
from rooms.local import Started
from rooms.settings import read_settings
from tests.support.cli_runner import Terminal


@pytest.fixture
def keyring(tmp_path: Path, database: str) -> Terminal:
    """Return a terminal with a database of its own."""
    return Terminal(tmp_path, {"DATABASE_URL": database})


def living(url: str) -> list[str]:
    return [key.name for key in cli_database.list_keys(url, "default") if key.revoked_at is None]


def test_a_key_is_made_shown_once_and_revoked(keyring: Terminal) -> None:
    made = keyring.json(
        "key", "create", "--name", "ci", "--scope", "publish", "--scope", "subscribe"
    )
    assert made["key"].startswith("rooms_")
    assert made["scopes"] == ["publish", "subscribe"]
    listed = keyring.json("key", "list")["items"]
    assert [key["id"] for key in listed] == [made["id"]]
    assert "key" not in listed[0]
    assert made["key"] not in keyring.done("key", "list")
    assert keyring.json("key", "revoke", made["id"]) == {"revoked": [made["id"]]}
    assert keyring.json("key", "list")["items"][0]["revoked_at"] is not None


def test_keys_are_revoked_by_name(keyring: Terminal, database: str) -> None:
    for name in ("ci", "ci", "other"):
        keyring.done("key", "create", "--name", name, "--scope", "publish")
    assert len(keyring.json("key", "revoke", "ci")["revoked"]) == 2
    assert living(database) == ["other"]
    again = keyring.run("key", "revoke", "ci")
    assert again.exit_code == 1
    assert "no active key 'ci'" in again.stderr


def test_organisations_do_not_see_each_other(keyring: Terminal) -> None:
    made = keyring.json(
        *("key", "create", "--organisation", "one", "--create-organisation"),
        *("--name", "ci", "--scope", "admin"),
    )
    assert keyring.run("key", "list", "--organisation", "two").exit_code == 1
    keyring.done(
        *("key", "create", "--organisation", "two", "--create-organisation"),
        *("--name", "x", "--scope", "admin"),
    )
    assert keyring.run("key", "revoke", made["id"], "--organisation", "two").exit_code == 1
    assert keyring.json("key", "list", "--organisation", "one")["items"][0]["revoked_at"] is None


def test_a_misspelt_organisation_is_not_created(keyring: Terminal) -> None:
    create = ("key", "create", "--name", "ci", "--scope", "publish")
    unknown = keyring.run(*create, "--organisation", "shop")
    assert unknown.exit_code == 1
    assert "there is no organisation 'shop': --create-organisation" in unknown.stderr
    assert "meant" not in unknown.stderr
    keyring.done(*create, "--organisation", "shop", "--create-organisation")
    for command in (create, ("key", "list"), ("key", "revoke", "ci")):
        misspelt = keyring.run(*command, "--organisation", "shpo")
        assert misspelt.exit_code == 1
        assert "is shop meant?" in misspelt.stderr
    # With the option a known one is used as it is.
    keyring.done(*create, "--organisation", "shop", "--create-organisation")
    assert len(keyring.json("key", "list", "--organisation", "shop")["items"]) == 2
    keyring.done("key", "create", "--name", "first", "--scope", "admin")
    assert [key["name"] for key in keyring.json("key", "list")["items"]] == ["first"]


@pytest.mark.parametrize(
    "options", [[], ["--organisation", "shop", "--client"]], ids=["no organisation", "client"]
)
def test_an_organisation_is_created_only_by_name_and_with_a_key(
    keyring: Terminal, options: list[str]
) -> None:
    create = ("key", "create", "--create-organisation", "--name", "ci", "--scope", "publish")
    assert keyring.run(*create, *options).exit_code == 2
    assert keyring.run("key", "list", "--organisation", "shop").exit_code == 1


def test_a_key_in_the_database_takes_every_restriction(keyring: Terminal) -> None:
    subscription = "01900000-0000-7000-8000-000000000001"
    made = keyring.json(
        *("key", "create", "--name", "ci", "--scope", "publish", "--room", "7"),
        *("--event-type", "order.*", "--subscription", subscription, "--application", "web"),
        *("--network", "192.0.2.0/24", "--expires-at", "2036-01-01T00:00:00Z"),
    )
    restrictions = {
        "rooms": [7],
        "event_types": ["order.*"],
        "subscriptions": [subscription],
        "application": "web",
        "networks": ["192.0.2.0/24"],
        "expires_at": "2036-01-01T00:00:00+00:00",
    }
    assert made.items() >= restrictions.items()
    (listed,) = keyring.json("key", "list", "--prefix", made["key"])["items"]
    assert listed.items() >= restrictions.items()
    assert keyring.json("key", "list", "--name", "other")["items"] == []
    for wrong in (["--room", "orders"], ["--room", "0"], ["--subscription", "orders/crm"]):
        refused = keyring.run("key", "create", "--name", "x", "--scope", "publish", *wrong)
        assert refused.exit_code == 2
    assert len(keyring.json("key", "list")["items"]) == 1


def journal_of(url: str, organisation: str) -> list[ChainedEntry]:
    """Return an organisation's journal, oldest entry first; it is whole."""

    async def read() -> list[ChainedEntry]:
        engine = open_engine(url, size=1)
        try:
            async with transaction(engine) as connection:
                member = await resolve_organisation(connection, organisation)
                assert member is not None
                found = list(await read_chain(connection, member.id, after=0, limit=100))
            assert (await verify_chain(engine, member.id)).broken is None
            return found
        finally:
            await engine.dispose()

    return asyncio.run(read())


def test_changes_in_the_database_are_in_the_journal(keyring: Terminal, database: str) -> None:
    create = ["key", "create", "--organisation", "north", "--scope", "publish", "--room", "7"]
    made = keyring.json(*create, "--name", "ci", "--create-organisation")
    keyring.done("key", "revoke", "ci", "--organisation", "north")
    keyring.done(*create, "--name", "second")
    entries = [chained.entry for chained in journal_of(database, "north")]
    assert [entry.action for entry in entries] == [
        "create_organisation",
        "create_key",
        "revoke_key",
        "create_key",
    ]
    assert {entry.actor_kind for entry in entries} == {ActorKind.OPERATOR}
    assert {entry.actor_name for entry in entries} == {pwd.getpwuid(os.getuid()).pw_name}
    assert [entry.object for entry in entries[1:3]] == [f"/v1/keys/{made['id']}"] * 2
    assert entries[1].after == {"name": "ci", "scopes": ["publish"], "rooms": [7]}
    assert made["key"] not in str(entries)


def test_a_change_that_fails_is_not_in_the_journal(keyring: Terminal, database: str) -> None:
    keyring.done("key", "create", "--name", "first", "--scope", "publish")
    # The name is valid at the command line, and no value of the column.
    failed = keyring.run("key", "create", "--name", "\0", "--scope", "publish")
    assert failed.exit_code == 1
    assert [chained.entry.action for chained in journal_of(database, "default")] == [
        "create_organisation",
        "create_key",
    ]


def test_key_needs_a_known_scope(keyring: Terminal) -> None:
    assert keyring.run("key", "create", "--name", "x").exit_code == 2
    assert keyring.run("key", "create", "--name", "x", "--scope", "everything").exit_code == 2


def test_the_embedded_database_is_found_while_it_runs(tmp_path: Path, database: str) -> None:
    terminal = Terminal(tmp_path)
    missing = terminal.run("key", "list")
    assert missing.exit_code == 1
    assert "make run" in missing.stderr
    ground = DevContext(tmp_path, shared_memory=tmp_path)
    ground.prepare(database)
    assert [key["name"] for key in terminal.json("key", "list")["items"]] == [ADMIN_KEY_NAME]
    ground.clean_up()
    assert terminal.run("key", "list").exit_code == 1
    assert not ground.metrics.exists()


def test_an_empty_database_is_migrated(tmp_path: Path, empty_database: str) -> None:
    terminal = Terminal(tmp_path, {"DATABASE_URL": empty_database})
    assert terminal.run("key", "create", "--name", "x", "--scope", "admin").exit_code == 1
    assert terminal.json("migrate") == {"migrated": True}
    terminal.done("migrate")
    terminal.done("key", "create", "--name", "x", "--scope", "admin")


def test_missing_database_is_reported_without_a_traceback(tmp_path: Path) -> None:
    terminal = Terminal(
        tmp_path, {"DATABASE_URL": f"postgresql://rooms@/rooms?host={tmp_path}&port=5432"}
    )
    for command in (["migrate"], ["key", "list"]):
        result = terminal.run("--json", *command)
        assert result.exit_code == 1
        assert json.loads(result.stderr)["title"].startswith("the database: ")


def test_admin_key_is_kept_while_valid(tmp_path: Path, database: str) -> None:
    ground = DevContext(tmp_path, shared_memory=tmp_path)
    ground.prepare(database)
    first = ground.key
    assert (tmp_path / "api-key").read_text() == f"{first}\n"
    for name in ("api-key", "run/database-url"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    ground.prepare(database)
    assert ground.key == first
    (tmp_path / "api-key").unlink()
    ground.prepare(database)
    second = ground.key
    assert second != first
    assert living(database) == [ADMIN_KEY_NAME]
    (tmp_path / "api-key").write_text("rooms_of_another_database")
    ground.prepare(database)
    assert ground.key not in {first, second}
    assert living(database) == [ADMIN_KEY_NAME]


def test_a_key_of_fewer_scopes_is_no_admin_key(tmp_path: Path, database: str) -> None:
    _, text = cli_database.create_key(database, "default", "ci", [Scope.PUBLISH])
    (tmp_path / "api-key").write_text(text)
    ground = DevContext(tmp_path, shared_memory=tmp_path)
    ground.prepare(database)
    assert ground.key != text
    assert sorted(living(database)) == ["ci", ADMIN_KEY_NAME]


def test_counters_of_ended_processes_are_removed(tmp_path: Path, database: str) -> None:
    ground = DevContext(tmp_path, shared_memory=tmp_path)
    ground.metrics.mkdir(parents=True)
    (ground.metrics / "counter_1.db").write_bytes(b"x")
    ground.prepare(database)
    assert list(ground.metrics.iterdir()) == []


def test_another_supervisor_keeps_its_files(tmp_path: Path, database: str) -> None:
    DevContext(tmp_path, shared_memory=tmp_path).prepare(database)
    DevContext(tmp_path, shared_memory=tmp_path).clean_up()
    assert (tmp_path / "run/database-url").exists()


def test_children_may_call_this_machine_and_share_their_metrics(tmp_path: Path) -> None:
    ground = DevContext(tmp_path, shared_memory=tmp_path)
    given = children_environment({"ROOMS_ALLOW_TARGETS": "10.0.0.0/8", "HOME": "/"}, ground)
    settings = read_settings(given)
    assert [str(network) for network in settings.allow_targets] == [
        "10.0.0.0/8",
        *LOOPBACK.split(","),
    ]
    assert given["PROMETHEUS_MULTIPROC_DIR"] == str(ground.metrics)
    assert settings.data == tmp_path
    assert children_environment({}, ground)["ROOMS_ALLOW_TARGETS"] == LOOPBACK
    assert [child.argv[1:] for child in children(settings)] == [
        ["-m", "rooms", name] for name in ("serve", "worker", "upkeep")
    ]


def test_a_command_is_named_as_another_terminal_can_call_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "a clone" / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", os.fspath(program))
    monkeypatch.setattr("shutil.which", lambda name: None if name == "rooms" else name)
    monkeypatch.chdir(tmp_path / "a clone")
    assert command_name() == ".venv/bin/rooms"
    monkeypatch.chdir(tmp_path.parent)
    assert command_name() == shlex.quote(f"{tmp_path.name}/a clone/.venv/bin/rooms")
    monkeypatch.chdir("/usr")
    assert command_name() == f"'{program.parent}/rooms'"
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert command_name() == "rooms"


@pytest.fixture
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooms.cli.dev.command_name", lambda: "rooms")


@pytest.mark.usefixtures("_on_path")
def test_banner_shows_address_key_and_next_step(tmp_path: Path) -> None:
    ground = DevContext(tmp_path, shared_memory=tmp_path, key="rooms_k")
    settings = read_settings({"ROOMS_LISTEN": "127.0.0.1:1234"})
    started = Started(database_url="", log_dir=tmp_path / "log", took_s=1.0)
    text = "\n".join(content for _, content in banner(settings, ground, started, with_key=True))
    for needed in (
        "http://127.0.0.1:1234/schema",
        "rooms_k",
        str(tmp_path / "api-key"),
        str(tmp_path / "log"),
        LOOPBACK,
    ):
        assert needed in text
    assert "rooms listen" in text
    # What goes to a file or a pipe is kept and read by others.
    kept = "\n".join(content for _, content in banner(settings, ground, started, with_key=False))
    assert "rooms_k" not in kept
    assert kept == text.replace("rooms_k  (in ", "in ").replace("api-key)\n", "api-key\n")
    command = f"ROOMS_DATA={tmp_path} ROOMS_URL=http://127.0.0.1:1234 rooms sign-in"
    assert f"{command}   (prints" in kept
    ground.sign_in = "/console/sign-in?token=rooms_t"
    for with_key in (True, False):
        text = "\n".join(row for _, row in banner(settings, ground, started, with_key=with_key))
        assert ("http://127.0.0.1:1234/console/sign-in?token=rooms_t" in text) is with_key
        assert command in text
        assert os.fspath(tmp_path) in text


@pytest.mark.usefixtures("_on_path")
def test_the_command_to_sign_in_names_only_what_is_not_usual(tmp_path: Path) -> None:
    usual = read_settings({})
    assert sign_in_command(usual, usual.data.absolute()) == "rooms sign-in"
    spaced = tmp_path / "my data"
    assert sign_in_command(usual, spaced) == f"ROOMS_DATA='{spaced}' rooms sign-in"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_link_to_sign_in_is_made_only_for_a_terminal(
    tmp_path: Path, database: str, *, on_terminal: bool
) -> None:
    context = DevContext(tmp_path, shared_memory=tmp_path, on_terminal=on_terminal)
    context.prepare(database)
    with psycopg.connect(database) as connection:
        links = connection.execute(
            "SELECT l.scopes, k.name, l.token_hash, l.expires_at - now() FROM sign_in_links l"
            " JOIN api_keys k ON k.id = l.created_by AND k.organisation_id = l.organisation_id"
        ).fetchall()
        rows = connection.execute("SELECT after::text FROM journal").fetchall()
    assert bool(context.sign_in) is on_terminal
    if on_terminal:
        ((scopes, maker, digest, left),) = links
        assert (scopes, maker) == (["admin", "platform"], ADMIN_KEY_NAME)
        assert 890 < left.total_seconds() <= 900
        token = context.sign_in.partition("token=")[2]
        assert digest == hash_key(token.encode())
        assert token not in str(rows)
    else:
        assert links == []


# The processes of the service have tests of their own; here it is about what surrounds them.
ALONE = """
import rooms.cli.dev
rooms.cli.dev.children = lambda *_: []
from rooms.cli import main
main()
"""


def test_dev_starts_a_database_says_where_and_leaves_nothing_behind(memory: Path) -> None:
    environment = {**os.environ, "ROOMS_DATA": str(memory / "d"), "ROOMS_LISTEN": "127.0.0.1:1"}
    environment.pop("DATABASE_URL", None)
    keys = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", ALONE, "--json", "dev"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            reported = json.loads(process.stdout.readline())
            assert reported["url"] == "http://127.0.0.1:1"
            terminal = Terminal(memory / "d")
            assert len(terminal.json("key", "list")["items"]) == 1
            keys.append(Path(reported["key_file"]).read_text())
            second = subprocess.run(
                [sys.executable, "-c", ALONE, "dev"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert second.returncode == 1
            assert "in use by another supervisor" in second.stderr
            assert "Traceback" not in second.stderr
            assert (memory / "d/run/database-url").exists()
        finally:
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
        assert not (memory / "d/run/database-url").exists()
    assert keys[0] == keys[1]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_admin_key_is_printed_to_a_terminal_only(memory: Path, *, terminal: bool) -> None:
    environment = {**os.environ, "ROOMS_DATA": str(memory / "d"), "ROOMS_LISTEN": "127.0.0.1:1"}
    environment.pop("DATABASE_URL", None)
    ours, theirs = pty.openpty() if terminal else os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE, "dev"],
        env=environment,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    said = b""
    try:
        while b"Ctrl-C stops it." not in said:
            chunk = os.read(ours, 65536)
            assert chunk, said
            said += chunk
        path = memory / "d/api-key"
        assert str(path) in said.decode()
        assert (path.read_text().strip() in said.decode()) is terminal
    finally:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        os.close(ours)
    assert process.returncode == 0, stderr
