"""Test `rooms govstack`: the calls that it shows, and the endpoint that it registers."""

import json
from typing import Any

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen

OWNER = "01900000-0000-7000-8000-00000000000a"
ROOM: dict[str, Any] = {"id": 7, "name": "orders", "organisation_id": OWNER, "govstack": True}


class Service:
    """Answer for one room and its organisation."""

    def __init__(self, fake: FakeRooms) -> None:
        self.member_id: str | None = "EE/GOV/1"
        self.application: str | None = None
        self.room = dict(ROOM)
        self.seen: list[Seen] = []
        fake.interfere = self.answer

    def answer(self, request: Seen) -> Answer | None:
        """Answer in place of the fake service."""
        self.seen.append(request)
        match request.method, request.path:
            case "GET", "/v1/whoami":
                organisation = {"id": OWNER, "name": "o", "member_id": self.member_id}
                return 200, {"organisation": organisation, "application": self.application}
            case "GET", "/v1/rooms/7":
                return 200, self.room
            case "PATCH", "/v1/rooms/7":
                self.room |= request.body
                return 200, self.room
            case (("GET" | "PUT"), "/v1/push-template"):
                return 200, request.body or {"template": None}
            case "DELETE", "/v1/push-template":
                return 204, None
        return None


@pytest.fixture
def service(fake: FakeRooms) -> Service:
    return Service(fake)


def test_enable_shows_a_line_for_each_call(terminal: Terminal, service: Service) -> None:
    done = terminal.run("govstack", "enable", "7")
    assert done.exit_code == 0, done.stderr
    assert service.seen[1].body == {"govstack": True}
    lines = [line for line in done.stdout.splitlines() if line.startswith("curl")]
    assert len(lines) == 8
    assert all("-H 'X-GovStack-Client: EE/GOV/1/app'" in line for line in lines)
    assert any("-X POST" in line and "/r1/EE/GOV/1/orders/pub/v1/" in line for line in lines)
    assert "/rooms/EE%2FGOV%2F1/orders/publish" in done.stdout


def test_the_calls_for_programs(terminal: Terminal, service: Service) -> None:
    service.application = "billing"
    done = terminal.run("--json", "govstack", "show", "7")
    found = json.loads(done.stdout)
    assert found["client"] == "EE/GOV/1/billing"
    assert {call["method"] for call in found["calls"]} == {"GET", "POST", "DELETE"}


def test_disable(terminal: Terminal, service: Service) -> None:
    assert terminal.run("govstack", "disable", "7").exit_code == 0
    assert service.seen[-1].body == {"govstack": False}
    refused = terminal.run("govstack", "show", "7")
    assert refused.exit_code == 1
    assert "rooms govstack enable orders" in refused.stderr


def test_a_room_without_an_address_says_what_to_do(terminal: Terminal, service: Service) -> None:
    service.member_id = None
    missing = terminal.run("govstack", "show", "7")
    assert missing.exit_code == 1
    assert "--member-id" in missing.stderr
    service.member_id = "EE/GOV/1"
    service.room["organisation_id"] = "another"
    foreign = terminal.run("govstack", "show", "7")
    assert foreign.exit_code == 1
    assert "another organisation" in foreign.stderr


def test_the_endpoint(terminal: Terminal, service: Service) -> None:
    template = "https://ss.example.com/{memberCode}/{eventType}"
    done = terminal.run("govstack", "endpoint", "set", template)
    assert done.exit_code == 0, done.stderr
    assert service.seen[-1].body == {"template": template}
    assert terminal.run("govstack", "endpoint", "show").exit_code == 0
    assert terminal.run("govstack", "endpoint", "clear").exit_code == 0
    assert service.seen[-1].method == "DELETE"
