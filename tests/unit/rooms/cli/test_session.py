"""Test `rooms sign-in` and `rooms session`."""

from collections.abc import Sequence

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms, Seen

SESSION = "01900000-0000-7000-8000-0000000000a1"
ORGANISATION = "01900000-0000-7000-8000-0000000000b2"
PATH = "/console/sign-in?token=rooms_x"


def serve(fake: FakeRooms, scopes: Sequence[str]) -> None:
    """Answer as a service whose key has these scopes."""

    def interfere(seen: Seen) -> tuple[int, object] | None:
        match seen.method, seen.path:
            case "GET", "/v1/whoami":
                return 200, {"scopes": scopes, "organisation": {"id": ORGANISATION}}
            case "POST", "/v1/sign-in-links":
                return 201, {"path": PATH, "name": seen.body["name"], "scopes": ["view"]}
            case "POST", "/v1/portal-links":
                return 201, {"path": PATH, **seen.body}
            case "GET", "/v1/sessions":
                item = {"id": SESSION, "name": "Ada", "scopes": ["view"], "is_own": False}
                return 200, {"items": [item], "next_cursor": None}
            case "GET", "/v1/people":
                person = {"name": "Ada", "by": "oidc", "roles": ["viewer"], "sessions": 2}
                return 200, {"items": [person], "next_cursor": None}
            case "POST", "/v1/people/end-sessions":
                return 200, {"ended": 2}
            case "DELETE", _:
                return 204, b""
        return None

    fake.interfere = interfere


@pytest.mark.parametrize(
    ("scopes", "roles"),
    [(["admin", "platform"], ["platform", "owner"]), (["admin"], ["owner"])],
)
def test_sign_in_prints_a_link_with_all_that_the_key_may_give(
    terminal: Terminal, fake: FakeRooms, scopes: list[str], roles: list[str]
) -> None:
    serve(fake, scopes)
    assert terminal.done("sign-in") == f"{fake.url}{PATH}\n"
    body = fake.requests[-1].body
    assert body["roles"] == roles
    assert body["name"]
    assert "expires_s" not in body


def test_sign_in_sends_what_is_given(terminal: Terminal, fake: FakeRooms) -> None:
    serve(fake, ["admin"])
    roles = ("--role", "viewer", "--role", "auditor", "--role", "viewer")
    found = terminal.json("sign-in", "--name", "ada@example.com", *roles, "--expires", "60")
    assert (found["link"], found["path"]) == (f"{fake.url}{PATH}", PATH)
    (asked,) = fake.requests
    expected = {"name": "ada@example.com", "roles": ["viewer", "auditor"], "expires_s": 60}
    assert asked.body == expected
    assert terminal.run("sign-in", "--role", "root").exit_code == 2
    assert terminal.run("sign-in", "--expires", "9").exit_code == 2


def test_sessions_are_listed_and_ended(terminal: Terminal, fake: FakeRooms) -> None:
    serve(fake, ["admin"])
    assert "Ada" in terminal.done("session", "list")
    assert terminal.done("session", "end", SESSION, "x/y").splitlines() == [
        f"ended {SESSION}",
        "ended x/y",
    ]
    sent = [seen.path for seen in fake.sent("DELETE", ".*")]
    assert sent == [f"/v1/sessions/{SESSION}", "/v1/sessions/x%2Fy"]


def test_a_link_to_a_portal(terminal: Terminal, fake: FakeRooms) -> None:
    fake.subscriptions.append({"id": SESSION, "name": "billing", "room_id": 1})
    serve(fake, ["manage"])
    lasting = ("--expires", "60", "--session", "61")
    found = terminal.json("portal-link", SESSION, "--access", "operate", *lasting)
    assert found["link"] == f"{fake.url}{PATH}"
    body = fake.requests[-1].body
    assert body.pop("name")
    expected = {"subscription_ids": [SESSION], "access": "operate", "expires_s": 60}
    assert body == {**expected, "session_s": 61}
    assert terminal.run("portal-link", "--session", "86401").exit_code == 2
    assert terminal.done("portal-link", "--name", "Ada") == f"{fake.url}{PATH}\n"
    body = fake.requests[-1].body
    assert body == {"organisation_id": ORGANISATION, "name": "Ada", "access": "read"}


def test_people_are_listed_and_signed_out(terminal: Terminal, fake: FakeRooms) -> None:
    serve(fake, ["admin"])
    listed = terminal.done("session", "people")
    assert "Ada" in listed
    assert "oidc" in listed
    assert terminal.json("session", "end", "--person", "Ada") == {"ended": 2}
    assert fake.requests[-1].body == {"name": "Ada"}
    assert terminal.run("session", "end").exit_code == 2
    assert terminal.run("session", "end", SESSION, "--person", "Ada").exit_code == 2
