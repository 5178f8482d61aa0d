"""Test the commands for keys over the service; tests/e2e/test_cli.py has those in the database."""

from typing import Any

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms


def key(number: int, name: str, **more: Any) -> dict[str, Any]:
    return {
        "id": f"01900000-0000-7000-8000-{number:012x}",
        "name": name,
        "kind": "key",
        "prefix": f"rooms_{number:08}",
        "scopes": ["publish"],
        "revoked_at": None,
        **more,
    }


@pytest.fixture(autouse=True)
def things(fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders", "organisation_id": "o"})
    fake.subscriptions.append({"id": fake.identity(1), "name": "crm", "organisation_id": "o"})
    fake.keys += [
        key(1, "ci"),
        key(2, "old", revoked_at="2026-01-01T00:00:00Z"),
        key(3, "old"),
        key(4, "twin"),
        key(5, "twin"),
    ]


def test_a_key_is_created_with_every_restriction(terminal: Terminal, fake: FakeRooms) -> None:
    made = terminal.json(
        *("key", "create", "--name", "ci", "--scope", "publish", "--scope", "publish"),
        *("--room", "orders", "--room", "7", "--event-type", "order.*", "--application", "web"),
        *("--subscription", "orders/crm", "--network", "192.0.2.0/24", "--network", "2001:db8::1"),
        *("--expires-at", "2036-01-01T00:00:00Z"),
    )
    assert made["key"] == "rooms_new"
    assert fake.requests[-1].body == {
        "name": "ci",
        "scopes": ["publish"],
        "rooms": [1000, 7],
        "event_types": ["order.*"],
        "application": "web",
        "subscriptions": [fake.identity(1)],
        "networks": ["192.0.2.0/24", "2001:db8::1"],
        "expires_at": "2036-01-01T00:00:00Z",
    }


def test_a_client_is_a_key_without_a_text(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done(*("key", "create", "--name", "tls", "--scope", "publish", "--client"))
    assert fake.requests[-1].body == {"name": "tls", "scopes": ["publish"], "kind": "client"}


@pytest.mark.parametrize(
    "wrong",
    [
        ("--network", "192.0.2.1/24"),
        ("--network", "office"),
        ("--event-type", "*.paid"),
        ("--expires-at", "2036-01-01"),
        ("--scope", "everything"),
    ],
)
def test_wrong_restrictions_are_refused_before_a_request(
    terminal: Terminal, fake: FakeRooms, wrong: tuple[str, str]
) -> None:
    result = terminal.run("key", "create", "--name", "x", "--scope", "publish", *wrong)
    assert result.exit_code == 2
    assert fake.requests == []


@pytest.mark.parametrize("reference", ["ci", "rooms_00000001", "rooms_00000001-and-the-secret"])
def test_a_key_goes_by_name_or_by_the_start_of_its_text(
    terminal: Terminal, fake: FakeRooms, reference: str
) -> None:
    assert terminal.json("key", "show", reference)["id"] == fake.keys[0]["id"]
    assert all("secret" not in seen.search for seen in fake.requests)


def test_of_several_keys_the_active_one_is_meant(terminal: Terminal, fake: FakeRooms) -> None:
    assert terminal.json("key", "revoke", "old") == {"revoked": [fake.keys[2]["id"]]}
    assert fake.sent("DELETE", ".*")[0].path == f"/v1/keys/{fake.keys[2]['id']}"
    result = terminal.run("key", "revoke", "twin")
    assert result.exit_code == 1
    assert fake.keys[3]["id"] in result.stderr
    assert len(fake.sent("DELETE", ".*")) == 1
    missing = terminal.run("key", "revoke", "unknown")
    assert "there is no key 'unknown'" in missing.stderr


def test_update_sends_only_what_changes(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done("key", "update", "ci", "--room", "orders", "--clear", "expires-at")
    assert fake.sent("PATCH", ".*")[0].body == {"rooms": [1000], "expires_at": None}
    assert terminal.run("key", "update", "ci").exit_code == 2
    assert terminal.run("key", "update", "ci", "--room", "7", "--clear", "rooms").exit_code == 2


def test_rotate_shows_the_new_text(terminal: Terminal, fake: FakeRooms) -> None:
    assert terminal.json("key", "rotate", "ci", "--overlap-s", "60") == {"key": "rooms_new"}
    assert fake.requests[-1].body == {"overlap_s": 60}
    terminal.done("key", "rotate", "ci")
    assert fake.requests[-1].body == {}


def test_the_list_shows_prefixes_and_filters(terminal: Terminal, fake: FakeRooms) -> None:
    assert "rooms_00000001" in terminal.done("key", "list")
    found = terminal.json("key", "list", "--prefix", "rooms_00000003and-more")["items"]
    assert [one["id"] for one in found] == [fake.keys[2]["id"]]


def test_an_organisation_is_a_matter_of_the_database(terminal: Terminal, fake: FakeRooms) -> None:
    result = terminal.run("key", "list", "--organisation", "north")
    assert result.exit_code == 1
    assert "DATABASE_URL" in result.stderr
    assert fake.requests == []
