"""Test the commands for grants, the directory, and rooms of other organisations."""

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms, Seen, problem


@pytest.fixture(autouse=True)
def orders(fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})


def listed(number: int, name: str, owner: str) -> dict[str, object]:
    return {
        "room_id": number,
        "name": name,
        "owner": owner,
        "event_types": [{"name": "paid", "version": 1, "schema": True}],
        "event_type_count": 3,
        "how_to_join": "ask the owner for a grant",
        "description": None,
    }


def test_a_grant_has_a_kind_an_organisation_and_bounds(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done(
        *("grant", "create", "orders", "publish", "SE/GOV/1", "--event-type", "order.*"),
        *("--from", "2026-01-01T00:00:00Z", "--until", "2027-01-01T00:00:00+01:00"),
    )
    assert fake.requests[-1].body == {
        "organisation_id": "SE/GOV/1",
        "kind": "publish",
        "event_types": ["order.*"],
        "starts_at": "2026-01-01T00:00:00Z",
        "until": "2027-01-01T00:00:00+01:00",
    }
    terminal.done("grant", "create", "orders", "subscribe", "*")
    assert fake.requests[-1].body == {"organisation_id": "*", "kind": "subscribe"}


@pytest.mark.parametrize("until", ["tomorrow", "2027-01-01", "2027-01-01T00:00:00"])
def test_a_time_needs_an_offset(terminal: Terminal, fake: FakeRooms, until: str) -> None:
    result = terminal.run("grant", "create", "orders", "publish", "north", "--until", until)
    assert result.exit_code == 2
    assert "2026-01-31T12:00:00Z" in result.stderr
    assert fake.requests == []


def test_grants_are_listed_and_revoked(terminal: Terminal, fake: FakeRooms) -> None:
    fake.grants.append(
        {"id": fake.identity(3), "organisation": "north", "organisation_id": "x", "kind": "publish"}
    )
    options = ["--kind", "publish", "--organisation", fake.identity(9), "--ended"]
    assert "north" in terminal.done("grant", "list", "orders", *options)
    query = fake.requests[-1].query
    assert (query["kind"], query["organisation_id"], query["ended"]) == (
        "publish",
        fake.identity(9),
        "true",
    )
    terminal.done("grant", "list")
    assert fake.requests[-1].path == "/v1/grants"
    assert terminal.json("grant", "revoke", "orders", fake.identity(3)) == {
        "revoked": [fake.identity(3)]
    }
    assert fake.sent("DELETE", ".*")[0].path == f"/v1/rooms/1000/grants/{fake.identity(3)}"
    assert terminal.run("grant", "revoke", "orders", "../x").exit_code == 2


def test_the_directory_says_how_to_join(terminal: Terminal, fake: FakeRooms) -> None:
    fake.directory.append(listed(2000, "permits", "north"))
    shown = terminal.done("directory")
    assert "paid, 2 more" in shown
    assert "ask the owner for a grant" in shown
    assert terminal.json("directory", "--owner", "north")["items"] == fake.directory
    assert fake.requests[-1].query["owner"] == "north"


def test_a_name_is_an_own_room_then_a_shared_one_then_one_of_the_directory(
    terminal: Terminal, fake: FakeRooms
) -> None:
    fake.shared += [{"id": 2000, "name": "permits"}, {"id": 2001, "name": "orders"}]
    fake.directory += [listed(3000, "permits", "north"), listed(3001, "births", "north")]
    assert terminal.json("room", "show", "orders")["id"] == 1000
    assert terminal.json("room", "show", "permits")["id"] == 2000

    def interfere(seen: Seen) -> tuple[int, object] | None:
        return (200, {"id": 3001, "name": "births"}) if seen.path == "/v1/rooms/3001" else None

    fake.interfere = interfere
    result = terminal.run("room", "show", "births")
    assert result.stderr == "room 3001, births, of north\n"
    assert "3001" in result.stdout


def test_a_name_that_several_owners_use_is_refused(terminal: Terminal, fake: FakeRooms) -> None:
    fake.directory += [listed(3000, "births", "north"), listed(3001, "births", "south")]
    result = terminal.run("subscription", "create", "births", "q")
    assert result.exit_code == 1
    assert "name one by its id: 3000 (north), 3001 (south)" in result.stderr
    assert fake.sent("POST", ".*") == []


def test_a_refused_grant_shows_its_field(terminal: Terminal, fake: FakeRooms) -> None:
    def interfere(seen: Seen) -> tuple[int, object] | None:
        if seen.method != "POST":
            return None
        return problem(422, "Fields are wrong", "", [("organisation_id", "there is none such")])

    fake.interfere = interfere
    result = terminal.run("grant", "create", "orders", "publish", "nowhere")
    assert result.exit_code == 1
    assert "organisation_id: there is none such" in result.stderr
