"""Give headers of webhooks to the command line, as arguments and by a file."""

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
