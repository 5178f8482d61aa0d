"""Give headers of webhooks to the command line, as arguments and by a file."""

import os
from pathlib import Path

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms

SECRET = "Bearer s3cret=="
CREATE = ("subscription", "create", "orders", "new", "--push-url", "http://x.test/")


@pytest.fixture(autouse=True)
def orders(fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.subscriptions.append(
        {"id": fake.identity(1), "name": "crm", "type": "PUSH", "status": "active"}
    )


def test_headers_of_a_file_are_added_to_those_of_arguments(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    file = tmp_path / "headers"
    file.write_text(f"Authorization={SECRET}\n\n X-Team = a b \n")
    terminal.done(*CREATE, "--header", "X-Open=1", "--headers-file", str(file))
    made = fake.sent("POST", ".*/subscriptions")[0].body
    assert made["headers"] == {"X-Open": "1", "Authorization": SECRET, "X-Team": " a b"}
    assert "headers_of_file" not in made


def test_headers_of_standard_input_replace_the_present_ones(
    terminal: Terminal, fake: FakeRooms
) -> None:
    terminal.done(
        "subscription", "update", "orders/crm", "--headers-file", "-",
        stdin=f"Authorization={SECRET}\n",
    )  # fmt: skip
    assert fake.sent("PATCH", ".*")[0].body == {"headers": {"Authorization": SECRET}}


@pytest.mark.parametrize("option", ["--header", "--headers-file"])
def test_a_malformed_header_is_not_repeated_in_the_error(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, option: str
) -> None:
    file = tmp_path / "headers"
    file.write_text("A=1\nAuthorization: s3cret\n")
    given = ("--header", "A=1", "--header", "Authorization: s3cret")
    answer = terminal.run(*CREATE, *(given if option == "--header" else (option, str(file))))
    assert answer.exit_code == 2
    assert "number 2" in answer.stderr
    assert "s3cret" not in answer.output
    assert not fake.sent("POST", ".*/subscriptions")


@pytest.mark.parametrize("content", [None, b"\xff\xfe=1"])
def test_a_file_that_cannot_be_read_is_a_usage_error(
    terminal: Terminal, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "headers"
    if content is not None:
        file.write_bytes(content)
    assert terminal.run(*CREATE, "--headers-file", str(file)).exit_code == 2


def test_a_file_that_is_too_large_is_refused_not_cut(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    file = tmp_path / "headers"
    file.write_text(f"X-Long={'x' * 70_000}\nAuthorization={SECRET}\n")
    answers = [
        terminal.run(*CREATE, "--headers-file", str(file)),
        terminal.run(*CREATE, "--headers-file", "-", stdin=file.read_text()),
    ]
    for answer, name in zip(answers, ("headers", "standard input"), strict=True):
        assert answer.exit_code == 2
        assert f"{name} has more than 65536 bytes" in " ".join(answer.stderr.split())
    assert not fake.sent("POST", ".*/subscriptions")


def test_a_fifo_without_a_writer_is_not_waited_for_without_end(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.cli.input_files.WRITER_S", 0.01)
    fifo = tmp_path / "headers"
    os.mkfifo(fifo)
    answer = terminal.run(*CREATE, "--headers-file", str(fifo))
    assert answer.exit_code == 2
    assert "no process wrote to it" in " ".join(answer.stderr.split())
