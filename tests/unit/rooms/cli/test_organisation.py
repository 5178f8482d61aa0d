"""Test the commands for organisations, and `rooms whoami`."""

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms, Seen

NORTH = "01900000-0000-7000-8000-0000000000a1"


@pytest.fixture(autouse=True)
def organisations(fake: FakeRooms) -> None:
    fake.organisations += [
        {"id": NORTH, "name": "north", "member_id": "SE/GOV/1", "status": "active"},
        {"id": fake.identity(2), "name": "south", "member_id": None, "status": "active"},
    ]


def test_an_organisation_is_created_with_what_is_given(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done("organisation", "create", "east", "--member-id", "SE/GOV/3")
    assert fake.requests[-1].body == {"name": "east", "member_id": "SE/GOV/3"}


@pytest.mark.parametrize("reference", [NORTH, NORTH.upper(), "north", "SE/GOV/1"])
def test_an_organisation_goes_by_id_name_or_member_id(terminal: Terminal, reference: str) -> None:
    assert terminal.json("organisation", "show", reference)["id"] == NORTH


def test_a_missing_organisation_is_reported(terminal: Terminal) -> None:
    result = terminal.run("organisation", "show", "west")
    assert result.exit_code == 1
    assert "there is no organisation 'west'" in result.stderr


def test_the_list_is_filtered(terminal: Terminal, fake: FakeRooms) -> None:
    (found,) = terminal.json("organisation", "list", "--name", "south")["items"]
    assert found["name"] == "south"
    assert "SE/GOV/1" in terminal.done("organisation", "list")
    assert "member_id" not in fake.requests[-1].query


def test_update_sends_only_the_given_fields(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done("organisation", "update", "north", "--contact", "duty", "--clear", "member-id")
    assert fake.requests[-1].body == {"contact": "duty", "member_id": None}
    assert terminal.run("organisation", "update", "north").exit_code == 2


def test_suspend_gives_the_reason_and_resume_lifts(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done("organisation", "suspend", "north", "--reason", "left")
    assert fake.requests[-1].path == f"/v1/organisations/{NORTH}/suspend"
    assert fake.requests[-1].body == {"reason": "left"}
    terminal.done("organisation", "resume", "north")
    assert fake.requests[-1].path == f"/v1/organisations/{NORTH}/resume"


def test_delete_asks_and_confirms_by_the_name(terminal: Terminal, fake: FakeRooms) -> None:
    refused = terminal.run("organisation", "delete", NORTH, stdin="n\n")
    assert (refused.exit_code, fake.sent("DELETE", ".*")) == (1, [])
    assert terminal.json("organisation", "delete", NORTH, "--yes")["state"] == "queued"
    assert fake.requests[-1].query == {"confirm": "north"}


def test_a_first_key_may_name_rooms_that_the_platform_does_not_see(
    terminal: Terminal, fake: FakeRooms
) -> None:
    made = terminal.json(
        *("organisation", "key", "create", "north", "--name", "first", "--scope", "admin"),
        *("--room", "7", "--network", "192.0.2.0/24"),
    )
    assert fake.requests[-1].path == f"/v1/organisations/{NORTH}/keys"
    assert made == {
        "name": "first",
        "scopes": ["admin"],
        "rooms": [7],
        "networks": ["192.0.2.0/24"],
    }
    assert fake.sent("GET", "/v1/rooms.*") == []


def test_whoami_shows_organisation_and_key(terminal: Terminal, fake: FakeRooms) -> None:
    caller = {
        "organisation": {"id": NORTH, "name": "north", "member_id": None, "status": "active"},
        "key_name": "ci",
        "scopes": ["publish"],
        "rooms": None,
    }

    def interfere(seen: Seen) -> tuple[int, object] | None:
        return (200, caller) if seen.path == "/v1/whoami" else None

    fake.interfere = interfere
    assert terminal.json("whoami") == caller
    lines = terminal.done("whoami").splitlines()
    assert lines[0].split() == ["organisation", "north"]
    assert ["key_name", "ci"] in [line.split() for line in lines]
