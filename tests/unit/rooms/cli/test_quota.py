"""Test `rooms quota`: whose quotas, and what is sent."""

from functools import partial
from typing import Any

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen

FOUND: dict[str, Any] = {
    "limits": {"messages_per_s": 5, "messages_per_day": None},
    "used": {"messages_per_day": None, "subscriptions": 3},
}


@pytest.fixture
def asked(fake: FakeRooms) -> list[Seen]:
    """Answer every request for quotas; return these requests."""
    seen: list[Seen] = []

    def interfere(request: Seen) -> Answer | None:
        if not request.path.endswith("/quotas"):
            return None
        seen.append(request)
        return 200, FOUND

    fake.interfere = interfere
    return seen


def test_show_the_own_quotas(terminal: Terminal, asked: list[Seen]) -> None:
    done = terminal.run("quota", "show")
    assert done.exit_code == 0, done.stderr
    assert asked[-1].path == "/v1/quotas"
    assert "messages_per_s" in done.stdout


def test_set_and_clear_those_of_a_room(
    terminal: Terminal, asked: list[Seen], fake: FakeRooms
) -> None:
    room = terminal.done("--json", "room", "create", "orders")
    assert room
    done = terminal.run(
        "quota", "set", "--room", "orders", "--messages-per-s", "5", "--clear", "bytes-per-day"
    )
    assert done.exit_code == 0, done.stderr
    assert asked[-1].method == "PATCH"
    assert asked[-1].path.startswith("/v1/rooms/")
    assert asked[-1].body == {"messages_per_s": 5, "bytes_per_day": None}


def test_whose_quotas_must_be_named(terminal: Terminal, asked: list[Seen]) -> None:
    assert terminal.run("quota", "set", "--messages-per-s", "5").exit_code == 2
    both = terminal.run("quota", "show", "--room", "a", "--organisation", "b")
    assert both.exit_code == 2
    assert asked == []


@pytest.mark.parametrize(
    ("flag", "least"), [("messages-per-s", 1), ("payload-bytes", 1), ("expiration-ms", 1000)]
)
def test_a_limit_that_is_too_small_names_the_way_to_remove_it(
    terminal: Terminal, asked: list[Seen], flag: str, least: int
) -> None:
    done = terminal.run("quota", "set", "--room", "orders", f"--{flag}", str(least - 1))
    assert done.exit_code == 2
    assert f"x>={least}" in done.stderr
    assert f"use --clear {flag}" in done.stderr
    assert asked == []


def _answer(found: dict[str, Any], _: Seen) -> Answer:
    return 200, found


def test_stored_messages_at_their_limit_may_be_more(terminal: Terminal, fake: FakeRooms) -> None:
    for used, shown in ((4, " 4"), (5, " 5 or more")):
        found = {"limits": {"stored_messages": 5}, "used": {"stored_messages": used}}
        fake.interfere = partial(_answer, found)
        assert terminal.done("quota", "show").splitlines()[-1].rstrip().endswith(shown)
