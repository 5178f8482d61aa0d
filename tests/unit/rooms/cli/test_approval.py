"""Test what a room's owner decides at the command line, and lists of subscriptions."""

from typing import Any

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms

OWNER, NORTH, SOUTH = "owner", "north", "south"


def subscription(number: int, organisation: str, **more: Any) -> dict[str, Any]:
    return {
        "id": f"01900000-0000-7000-8000-{number:012x}",
        "name": "crm",
        "organisation": organisation,
        "organisation_id": organisation,
        "type": "PUSH",
        "status": "pending",
        "version": 4,
        "target": "https://crm.example",
        "push_url": None,
        "event_types": [{"name": "paid"}],
        "filtered": False,
        "proposal": None,
        **more,
    }


@pytest.fixture(autouse=True)
def orders(fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders", "organisation_id": OWNER})


def test_approve_shows_what_it_approves_and_sends_that_version(
    terminal: Terminal, fake: FakeRooms
) -> None:
    fake.subscriptions.append(subscription(1, NORTH, backfill=True))
    result = terminal.run("--json", "approve", "orders/crm", "--reason", "agreed")
    assert result.exit_code == 0
    assert fake.requests[-1].body == {"version": 4, "reason": "agreed"}
    assert fake.requests[-1].path.endswith("/approve")
    assert result.stderr.splitlines() == [
        "approving crm, version 4:",
        "  organisation: north",
        "  type: PUSH",
        "  target: https://crm.example",
        '  event_types: [{"name": "paid"}]',
        "  backfill: true",
        "  filter: no",
    ]


def test_approve_of_a_change_shows_both_values(terminal: Terminal, fake: FakeRooms) -> None:
    change = {"target": "https://\x1b[2Jnew.example", "filter": "payload.big"}
    fake.subscriptions.append(subscription(1, NORTH, status="active", proposal=change))
    result = terminal.run("subscription", "approve", "orders/crm")
    assert result.stderr.splitlines() == [
        "approving a change of crm, version 4:",
        "  target: https://\\x1b[2Jnew.example instead of https://crm.example",
        "  filter: payload.big",
    ]
    assert fake.requests[-1].body == {"version": 4}


def test_approve_sends_the_version_that_is_given(terminal: Terminal, fake: FakeRooms) -> None:
    fake.subscriptions.append(subscription(1, NORTH))
    result = terminal.run("approve", "orders/crm", "--version", "3")
    assert result.stderr == ""
    assert fake.requests[-1].body == {"version": 3}


def test_decisions_are_about_the_subscription_of_another_organisation(
    terminal: Terminal, fake: FakeRooms
) -> None:
    own, foreign = subscription(1, OWNER, status="active"), subscription(2, NORTH)
    fake.subscriptions += [own, foreign]
    terminal.done("reject", "orders/crm", "--reason", "no contract")
    assert fake.requests[-1].path == f"/v1/subscriptions/{foreign['id']}/reject"
    assert fake.requests[-1].body == {"reason": "no contract"}
    for action in ("suspend", "reinstate"):
        terminal.done("subscription", action, "orders/crm")
        assert fake.requests[-1].path == f"/v1/subscriptions/{foreign['id']}/{action}"
        assert fake.requests[-1].body == {}
    terminal.done("subscription", "pause", "orders/crm")
    assert fake.requests[-1].path == f"/v1/subscriptions/{own['id']}/pause"


def test_a_name_that_two_organisations_use_is_refused(terminal: Terminal, fake: FakeRooms) -> None:
    first, second = subscription(1, NORTH), subscription(2, SOUTH)
    fake.subscriptions += [first, second]
    result = terminal.run("approve", "orders/crm")
    assert result.exit_code == 1
    assert f"{first['id']} (north), {second['id']} (south)" in result.stderr
    assert fake.sent("POST", ".*") == []
    terminal.done("approve", second["id"])
    assert fake.requests[-1].path == f"/v1/subscriptions/{second['id']}/approve"


def test_a_name_means_the_subscription_that_has_not_ended(
    terminal: Terminal, fake: FakeRooms
) -> None:
    ended = subscription(1, NORTH, status="terminated")
    fake.subscriptions.append(ended)
    terminal.done("subscription", "history", "orders/crm")
    assert fake.requests[-1].path == f"/v1/subscriptions/{ended['id']}/history"
    new = subscription(2, NORTH)
    fake.subscriptions.append(new)
    terminal.done("subscription", "history", "orders/crm")
    assert fake.requests[-1].path == f"/v1/subscriptions/{new['id']}/history"


def test_the_history_of_a_deleted_subscription_is_read_by_its_id(
    terminal: Terminal, fake: FakeRooms
) -> None:
    deleted = subscription(1, NORTH)["id"]
    fake.history.append({"at": "2026-01-01T00:00:00Z", "action": "deleted"})
    assert "deleted" in terminal.done("subscription", "history", deleted.upper())
    assert fake.requests[-1].path == f"/v1/subscriptions/{deleted}/history"


def test_terminate_asks_first(terminal: Terminal, fake: FakeRooms) -> None:
    fake.subscriptions.append(subscription(1, NORTH, status="active"))
    refused = terminal.run("subscription", "terminate", "orders/crm", stdin="n\n")
    assert (refused.exit_code, fake.sent("POST", ".*")) == (1, [])
    terminal.done("subscription", "terminate", "orders/crm", "--yes", "--reason", "over")
    assert fake.requests[-1].path.endswith("/terminate")
    assert fake.requests[-1].body == {"reason": "over"}


def test_history_and_counts_and_a_change_that_is_taken_back(
    terminal: Terminal, fake: FakeRooms
) -> None:
    fake.subscriptions.append(subscription(1, NORTH, status="active"))
    fake.history.append(
        {"at": "2026-01-01T00:00:00Z", "action": "approved", "organisation": "owner", "reason": "x"}
    )
    assert "approved" in terminal.done("subscription", "history", "orders/crm")
    assert terminal.json("subscription", "counts", "orders/crm") == {"waiting": 3}
    terminal.done("subscription", "cancel-change", "orders/crm")
    assert fake.requests[-1].method == "DELETE"
    assert fake.requests[-1].path.endswith("/proposal")


def test_what_waits_is_listed(terminal: Terminal, fake: FakeRooms) -> None:
    fake.subscriptions.append(subscription(1, NORTH))
    fake.subscriptions.append(
        subscription(2, SOUTH, status="active", proposal={"filter": "payload.big"})
    )
    shown = terminal.done("subscription", "list", "orders", "--status", "pending")
    assert fake.requests[-1].path == "/v1/rooms/1000/subscriptions"
    assert fake.requests[-1].query["status"] == "pending"
    assert "active, change waits" in shown
    assert "https://crm.example" in shown
    terminal.done("subscription", "list")
    assert fake.requests[-1].path == "/v1/subscriptions"
    assert "status" not in fake.requests[-1].query


def test_a_subscription_may_ask_for_what_is_published_until_approval(
    terminal: Terminal, fake: FakeRooms
) -> None:
    options = ("--event-type", "a.*", "--start-at", "2020-01-01T00:00:00Z")
    terminal.done("subscription", "create", "orders", "crm", "--backfill", *options)
    assert fake.requests[-1].body == {
        "name": "crm",
        "type": "PULL",
        "event_types": [{"name": "a.*"}],
        "backfill": True,
        "start_at": "2020-01-01T00:00:00Z",
    }


def test_a_room_says_who_may_join(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done(
        *("room", "create", "permits", "--visibility", "listed", "--transparent"),
        *("--subscription-policy", "approval", "--reapprove-on", "filter"),
    )
    body = fake.requests[-1].body
    assert body["visibility"] == "listed"
    assert body["subscription_policy"] == "approval"
    assert body["reapprove_on"] == ["filter"]
    assert body["transparent"] is True
    terminal.done("room", "update", "permits", "--reapprove-on", "none", "--not-transparent")
    assert fake.requests[-1].body == {"reapprove_on": [], "transparent": False}
    both = terminal.run(
        "room", "update", "permits", "--reapprove-on", "none", "--reapprove-on", "filter"
    )
    assert both.exit_code == 2
    fake.shared.append({"id": 5, "name": "births"})
    assert [room["id"] for room in terminal.json("room", "list", "--shared")["items"]] == [5]
