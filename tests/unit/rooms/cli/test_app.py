"""Test the root command: lazy loading, exit codes, and the sources of its options."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rooms.cli.address import is_local, local_url
from rooms.cli.app import COMMANDS, CommandSpec, RootGroup
from rooms.cli.errors import CliError, ProblemError
from rooms.cli.output import format_cell
from rooms.safe_text import terminal_safe
from rooms.settings import read_settings
from tests.support.cli_runner import Terminal
from tests.support.fake_api import KEY, FakeRooms, Seen

HEAVY = (
    "litestar",
    "sqlalchemy",
    "psycopg",
    "httpx",
    "rich",
    "msgspec",
    "uvicorn",
    "alembic",
    "asyncio",
)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["publish", "--help"],
        ["dev", "--help"],
        ["key", "create", "--help"],
        ["sideline", "shovel", "--help"],
        ["doctor", "--help"],
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = textwrap.dedent(f"""
        import sys
        from rooms.cli import main
        sys.argv = ["rooms", *{arguments!r}]
        try:
            main()
        except SystemExit as end:
            code = end.code
        print([name for name in {HEAVY!r} if name in sys.modules], code)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
    assert "Usage: rooms" in done.stdout


@pytest.mark.parametrize("mount", COMMANDS, ids=lambda mount: mount.name)
def test_every_command_loads_and_takes_the_global_options(mount: CommandSpec) -> None:
    command = mount.load()
    assert command.name == mount.name
    commands = command.commands.values() if isinstance(command, click.Group) else [command]
    for one in commands:
        assert one.help, f"{mount.name} {one.name} does not say what it does"
        names = [option for parameter in one.params for option in parameter.opts]
        assert {"--url", "--key", "--json"} <= set(names)
        assert len(names) == len(set(names))
        assert len({parameter.name for parameter in one.params}) == len(one.params)


def test_commands_can_be_added() -> None:
    mounted = RootGroup(
        "rooms", [CommandSpec("lint", f"{__name__}:extra", "Only a test.", "Testing")]
    )
    result = CliRunner().invoke(mounted, ["--help"])
    assert "Testing:" in result.stdout
    assert "Only a test." in result.stdout
    assert CliRunner().invoke(mounted, ["lint"]).stdout == "mounted\n"


def test_a_misspelt_command_is_corrected(terminal: Terminal) -> None:
    result = terminal.run("publsh")
    assert result.exit_code == 2
    assert "No such command 'publsh'." in result.stderr
    assert "'publish'" in result.stderr


@click.command()
def extra() -> None:
    click.echo("mounted")


@click.command()
@click.argument("how")
def ending(how: str) -> None:
    match how:
        case "interrupt":
            raise KeyboardInterrupt
        case "pipe":
            raise BrokenPipeError
        case "problem":
            errors = [{"field": "messages[3].payload", "message": "is\x1b[31m red"}]
            raise ProblemError(422, {"title": "Wrong", "detail": "look", "errors": errors})
        case _:
            raise CliError("it did not work")


def end(how: str, *options: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(
        RootGroup("rooms", [CommandSpec("end", f"{__name__}:ending", "", "")]),
        [*options, "end", how],
    )
    return result.exit_code, result.stdout, result.stderr


def test_ctrl_c_is_130_without_a_traceback() -> None:
    code, stdout, stderr = end("interrupt")
    assert (code, stdout, stderr.strip()) == (130, "", "")


def test_a_closed_pipe_is_silent() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "from rooms.cli.output import Output; import rooms.cli.app as g, click\n"
    code += "@click.command()\ndef much():\n"
    code += "    [Output(as_json=False).line('x' * 1000) for _ in range(1000)]\n"
    code += "import sys; sys.modules['much'] = sys.modules['__main__']\n"
    code += "g.RootGroup('rooms', [g.CommandSpec('much', 'much:much', '', '')]).main(['much'])"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
    assert end("pipe")[0] == 1


def test_problems_are_shown_with_every_field() -> None:
    code, stdout, stderr = end("problem")
    assert (code, stdout) == (1, "")
    assert stderr.splitlines() == [
        "Error: Wrong (422)",
        "  look",
        r"  messages[3].payload: is\x1b[31m red",
    ]


def test_problem_of_a_field_is_shown_once() -> None:
    problem = {"title": "Wrong", "detail": "name: is missing; type: is none", "errors": [
        {"field": "name", "message": "is missing"}, {"field": "type", "message": "is none"},
    ]}  # fmt: skip
    assert ProblemError(422, problem).lines() == [
        "Wrong (422)",
        "name: is missing",
        "type: is none",
    ]


def test_problems_are_json_for_programs() -> None:
    code, stdout, stderr = end("problem", "--json")
    assert (code, stdout) == (1, "")
    assert json.loads(stderr)["errors"][0]["field"] == "messages[3].payload"
    assert json.loads(end("other", "--json")[2]) == {"title": "it did not work"}


def test_usage_errors_are_2(terminal: Terminal) -> None:
    for arguments in (
        ["nonsense"],
        ["room", "create"],
        ["publish", "orders"],
        ["pull", "no-slash"],
        ["timeline", "x"],
    ):
        result = terminal.run(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""


def test_usage_error_has_two_lines(terminal: Terminal) -> None:
    reported = terminal.run("room", "create").stderr.splitlines()
    assert reported == [
        "Error: Missing argument 'NAME'.",
        "  `rooms room create --help` shows its usage",
    ]


@pytest.mark.parametrize("number", ["inf", "nan"])
def test_nan_and_inf_are_refused(terminal: Terminal, fake: FakeRooms, number: str) -> None:
    result = terminal.run("room", "create", "a", "--delivery-delay-multiplier", number)
    assert result.exit_code == 2
    assert "delivery_delay_multiplier: inf and nan are not JSON numbers" in result.stderr
    assert not fake.sent("POST", "/v1/rooms")


@pytest.mark.parametrize("url", ["nonsense", "ftp://127.0.0.1", "127.0.0.1:8080"])
def test_an_address_needs_its_scheme(terminal: Terminal, url: str) -> None:
    result = terminal.run("--url", url, "room", "list")
    assert result.exit_code == 2
    assert f"--url: '{url}' must begin with http:// or https://" in result.stderr


def test_data_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    result = Terminal(in_the_way / "data").run("dev")
    assert result.exit_code == 1
    assert "set ROOMS_DATA to another folder" in result.stderr


def test_every_invalid_setting_is_reported(terminal: Terminal) -> None:
    result = terminal.run("room", "list", ROOMS_LISTEN="nowhere", ROOMS_LANE_CONCURRENCY="many")
    assert result.exit_code == 2
    assert "ROOMS_LISTEN" in result.stderr
    assert "ROOMS_LANE_CONCURRENCY" in result.stderr


def test_relay_is_refused_with_postgresql_as_broker(terminal: Terminal) -> None:
    result = terminal.run("relay", BROKER_URL="", DATABASE_URL="postgresql://nowhere/rooms")
    assert result.exit_code == 1
    assert "no relay is needed" in result.stderr


@pytest.mark.parametrize("place", [0, 1, 2])
def test_global_options_work_in_every_place(fake: FakeRooms, tmp_path: Path, place: int) -> None:
    words = ["room", "list"]
    arguments = [*words[:place], "--url", fake.url, "--key", KEY, "--json", *words[place:]]
    result = Terminal(tmp_path, {"ROOMS_URL": "http://127.0.0.1:1", "ROOMS_API_KEY": "other"}).run(
        *arguments
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"items": [], "next_cursor": None}


def test_the_environment_names_service_and_key(terminal: Terminal, fake: FakeRooms) -> None:
    assert terminal.json("room", "list")["items"] == []
    assert fake.requests[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("given", ["", " "])
@pytest.mark.parametrize("place", [0, 1, None])
def test_an_empty_key_is_not_that_of_the_data_folder(
    fake: FakeRooms, tmp_path: Path, place: int | None, given: str
) -> None:
    """`ROOMS_API_KEY=$(cat FILE)` is empty without the file, and must not act as the admin."""
    (tmp_path / "api-key").write_text(KEY)
    words = ["room", "list"]
    if place is None:
        terminal = Terminal(tmp_path, {"ROOMS_API_KEY": given})
    else:
        words[place:place] = ["--key", given]
        terminal = Terminal(tmp_path)
    result = terminal.run(*words, ROOMS_URL=fake.url, ROOMS_LISTEN=fake.url.removeprefix("http://"))
    assert result.exit_code == 2, result.output
    assert "--key or ROOMS_API_KEY is empty" in result.stderr
    assert "unset the variable" in result.stderr
    assert not fake.requests


def test_a_key_that_is_given_wins_over_an_empty_variable(fake: FakeRooms, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, {"ROOMS_URL": fake.url, "ROOMS_API_KEY": ""})
    assert terminal.json("room", "list", "--key", KEY)["items"] == []
    assert terminal.run("--help").exit_code == 0, "it needs no key"


def test_the_key_is_found_in_the_data_folder(fake: FakeRooms, tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text(f"{KEY}\n")
    listen = fake.url.removeprefix("http://")
    assert Terminal(tmp_path).json("room", "list", ROOMS_LISTEN=listen)["items"] == []


def test_key_of_this_machine_is_sent_only_to_it(tmp_path: Path) -> None:
    (tmp_path / "api-key").write_text(KEY)
    result = Terminal(tmp_path).run("--url", "http://rooms.invalid:1", "room", "list")
    assert result.exit_code == 1
    assert "no API key for http://rooms.invalid:1" in result.stderr


def test_unreachable_service_is_reported_with_advice(terminal: Terminal) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        result = terminal.run("--url", url, "room", "list")
    assert result.exit_code == 1
    assert f"no answer at {url}" in result.stderr
    assert "make run" in result.stderr


def test_other_service_is_reported(terminal: Terminal, fake: FakeRooms) -> None:
    fake.interfere = lambda _: (502, "a proxy's page")
    result = terminal.run("room", "list")
    assert result.exit_code == 1
    assert "(502)" in result.stderr
    assert terminal.run("--url", "nonsense://x", "room", "list").exit_code == 2


def test_lists_are_paginated(terminal: Terminal, fake: FakeRooms) -> None:
    fake.rooms = [{"id": number, "name": f"r{number}"} for number in range(450)]
    assert len(terminal.json("room", "list", "--limit", "3")["items"]) == 3
    second = terminal.json("room", "list", "--limit", "3", "--cursor", "3")
    assert [room["id"] for room in second["items"]] == [3, 4, 5]
    whole = terminal.json("room", "list", "--all")
    assert len(whole["items"]) == 450
    assert whole["next_cursor"] is None


def test_a_table_shows_ids_whole(terminal: Terminal, fake: FakeRooms) -> None:
    fake.rooms = [
        {"id": 7, "name": "n" * 128, "description": "d" * 300, "message_expiration_ms": None}
    ]
    line = terminal.done("room", "list").splitlines()[-1]
    assert "n" * 128 in line
    assert "d" * 300 in line
    result = terminal.run("room", "list", "--limit", "1")
    assert "more:" not in result.stderr


def test_control_characters_are_escaped() -> None:
    assert terminal_safe("a\x1b[2Jb\x07\x9b\u202e\nü\t") == "a\\x1b[2Jb\\x07\\x9b\\u202e\\nü\t"
    values: list[object] = [None, True, [], {"a": 1}, 1.5]
    assert [format_cell(value) for value in values] == ["-", "yes", "-", '{"a": 1}', "1.5"]


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("0.0.0.0:80", "http://127.0.0.1:80"),
        ("[::]:80", "http://[::1]:80"),
        ("10.0.0.1:9", "http://10.0.0.1:9"),
    ],
)
def test_the_service_is_reached_from_its_own_machine(listen: str, url: str) -> None:
    settings = read_settings({"ROOMS_LISTEN": listen})
    assert local_url(settings) == url
    assert is_local(url, settings)
    assert not is_local("http://10.0.0.2:9", settings)


def test_python_m_rooms_can_be_interrupted(fake: FakeRooms, tmp_path: Path) -> None:
    # The pull hangs in the fake until the process is gone, which is when the request can end.
    fake.subscriptions.append({"id": fake.identity(1), "name": "s", "status": "active"})
    reading, writing = os.pipe()

    def hang(seen: Seen) -> None:
        if seen.path.endswith("/pull"):
            process.send_signal(signal.SIGINT)
            os.read(reading, 1)

    fake.interfere = hang
    environment = {
        **os.environ,
        "ROOMS_URL": fake.url,
        "ROOMS_API_KEY": KEY,
        "ROOMS_DATA": str(tmp_path),
    }
    # A test run in the background ignores interrupts, and its children would inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "rooms", "pull", "--follow", fake.identity(1)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        stdout, stderr = process.communicate(timeout=60)
    finally:
        os.close(writing)
        process.kill()
        process.wait()
        os.close(reading)
    assert (process.returncode, stdout, stderr.strip()) == (130, "", "")
