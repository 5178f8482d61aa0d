"""Test the commands for rooms, event types, subscriptions, messages, deliveries and jobs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms, problem
from tests.support.sleep_recorder import recorded_pauses


@pytest.fixture(autouse=True)
def orders(fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.subscriptions.append(
        {"id": fake.identity(1), "name": "crm", "type": "PUSH", "status": "active"}
    )


def test_a_room_is_created_with_a_policy_that_can_be_left_out(
    terminal: Terminal, fake: FakeRooms
) -> None:
    made = terminal.json(
        "room", "create", "bills", "--delivery-delay-ms", "250", "--description", "due"
    )
    assert made["id"] == 1001
    assert fake.requests[-1].body == {
        "name": "bills",
        "description": "due",
        "delivery_delay_ms": 250,
        "delivery_delay_multiplier": 2.0,
        "delivery_attempts": 5,
    }


def test_rooms_and_subscriptions_are_searched_and_counted(
    terminal: Terminal, fake: FakeRooms
) -> None:
    assert terminal.json("room", "counts", "orders") == {"waiting": 3}
    terminal.done("room", "list", "--contains", "ord")
    assert fake.requests[-1].query["contains"] == "ord"
    terminal.done("subscription", "list", "--contains", "cr", "--type", "pull")
    assert fake.requests[-1].query["contains"] == "cr"
    assert fake.requests[-1].query["type"] == "PULL"


def test_name_conflict_is_reported(terminal: Terminal) -> None:
    result = terminal.run("room", "create", "orders")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "Error: Conflict with the present state (409)",
        "  there is a room of this name",
    ]


@pytest.mark.parametrize("reference", ["1000", "orders"])
def test_a_room_goes_by_id_or_name(terminal: Terminal, reference: str) -> None:
    assert terminal.json("room", "show", reference) == {"id": 1000, "name": "orders"}
    assert terminal.done("room", "show", reference).splitlines() == ["id    1000", "name  orders"]


def test_room_name_may_consist_of_digits(terminal: Terminal, fake: FakeRooms) -> None:
    fake.rooms.append({"id": 5, "name": "2026"})
    fake.rooms.append({"id": 6, "name": "99999999999"})
    assert terminal.json("room", "show", "2026")["id"] == 5
    assert terminal.json("room", "show", "99999999999")["id"] == 6


def test_missing_room_is_reported(terminal: Terminal) -> None:
    for reference in ("404", "nowhere"):
        result = terminal.run("room", "show", reference)
        assert result.exit_code == 1
        assert f"there is no room '{reference}'" in result.stderr


def test_update_sends_only_the_given_fields(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done(
        "room", "update", "orders", "--delivery-attempts", "0", "--clear", "delivery-max-delay-ms"
    )
    assert fake.sent("PATCH", ".*")[0].body == {
        "delivery_attempts": 0,
        "delivery_max_delay_ms": None,
    }
    assert terminal.run("room", "update", "orders").exit_code == 2
    both = ["--description", "x", "--clear", "description"]
    assert terminal.run("room", "update", "orders", *both).exit_code == 2


def test_a_room_is_deleted_by_its_name_after_a_question(
    terminal: Terminal, fake: FakeRooms
) -> None:
    refused = terminal.run("room", "delete", "orders", stdin="n\n")
    assert (refused.exit_code, fake.sent("DELETE", ".*")) == (1, [])
    unanswered = terminal.run("room", "delete", "orders", stdin="")
    assert (unanswered.exit_code, fake.sent("DELETE", ".*")) == (1, [])
    job = json.loads(terminal.run("room", "delete", "1000", "--json", stdin="y\n").stdout)
    assert job["kind"] == "delete_room"
    assert terminal.json("room", "delete", "orders", "--yes")["state"] == "queued"
    assert fake.sent("DELETE", ".*")[0].query == {"confirm": "orders"}


def test_event_types_take_their_schema_from_a_file(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    assert (
        terminal.json("event-type", "create", "orders", "paid", "--schema", f"@{schema}")[
            "latest_version"
        ]
        == 1
    )
    assert fake.requests[-1].body == {"name": "paid", "schema": {"type": "object"}}
    assert (
        terminal.json("event-type", "add-version", "orders", "paid", "--schema", "true")["version"]
        == 2
    )
    assert fake.requests[-1].path == "/v1/rooms/1000/event-types/paid/versions"
    assert terminal.json("event-type", "list", "orders")["items"][0]["name"] == "paid"
    assert terminal.run("event-type", "create", "orders", "x", "--schema", "{").exit_code == 2
    assert (
        terminal.run(
            "event-type", "create", "orders", "x", "--schema", f"@{tmp_path}/none"
        ).exit_code
        == 1
    )


def test_names_cannot_leave_their_place_in_a_path(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.run("event-type", "show", "orders", "../../subscriptions?x")
    shown, listed = fake.requests[-2:]
    assert shown.path == "/v1/rooms/1000/event-types/..%2F..%2Fsubscriptions%3Fx"
    assert listed.path == "/v1/rooms/1000/event-types"


def test_a_push_subscription(terminal: Terminal, fake: FakeRooms) -> None:
    options = [
        "--push-url=http://127.0.0.1:9000/x",
        "--event-type=paid",
        "--event-type=sent:1,2",
        "--header=X-A=b=c",
    ]
    options += ["--terminal-status=404", "--delivery-attempts=0"]
    options += ["--delivery-max-delay-ms=60000", "--delivery-jitter=0.5"]
    options += ["--message-expiration-ms=5000"]
    made = terminal.json("subscription", "create", "orders", "hook", *options)
    assert made["secret"] == "whsec_fake"
    assert fake.requests[-1].body == {
        "name": "hook",
        "type": "PUSH",
        "push_url": "http://127.0.0.1:9000/x",
        "event_types": [{"name": "paid"}, {"name": "sent", "versions": [1, 2]}],
        "headers": {"X-A": "b=c"},
        "terminal_statuses": [404],
        "delivery_attempts": 0,
        "delivery_max_delay_ms": 60_000,
        "delivery_jitter": 0.5,
        "message_expiration_ms": 5_000,
    }


def test_without_a_push_url_it_is_pull(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.json("subscription", "create", "orders", "queue", "--max-receives", "3")
    assert fake.requests[-1].body == {"name": "queue", "type": "PULL", "max_receives": 3}


@pytest.mark.parametrize(
    "option", [["--header", "no-equals"], ["--event-type", ":1"], ["--event-type", "a:x"]]
)
def test_options_that_cannot_be_read(terminal: Terminal, option: list[str]) -> None:
    assert terminal.run("subscription", "create", "orders", "s", *option).exit_code == 2


def test_a_subscription_goes_by_id_or_by_room_and_name(terminal: Terminal, fake: FakeRooms) -> None:
    for reference in (fake.identity(1), fake.identity(1).upper(), "orders/crm", "1000/crm"):
        assert terminal.json("subscription", "show", reference)["name"] == "crm"
    assert "no subscription 'other'" in terminal.run("subscription", "show", "orders/other").stderr
    assert "crm" in terminal.done("subscription", "list", "orders")


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        (["subscription", "show", "orders/crn"], ["`rooms subscription list orders`", "crm"]),
        (["room", "show", "ordres"], ["`rooms room list`", "orders"]),
        (["event-type", "show", "orders", "pait"], ["`rooms event-type list orders`", "paid"]),
        (
            ["event-type", "add-version", "orders", "pait", "--schema", "1"],
            ["list orders`", "paid"],
        ),
        (["event-type", "delete", "orders", "pait"], ["`rooms event-type list orders`", "paid"]),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_and_the_command_that_lists_them(
    terminal: Terminal, fake: FakeRooms, command: list[str], texts: list[str]
) -> None:
    fake.event_types.append({"id": fake.identity(900), "name": "paid", "latest_version": 1})
    fake.interfere = lambda seen: (
        problem(404, "Not found", "there is no event type pait") if "/pait" in seen.path else None
    )
    done = terminal.run(*command)
    assert done.exit_code == 1
    assert texts[0] in done.stderr
    assert f"is {texts[1]} meant?" in done.stderr


def test_names_that_may_not_be_listed_are_not_suggested(
    terminal: Terminal, fake: FakeRooms
) -> None:
    fake.interfere = lambda seen: (
        problem(403, "Forbidden", "") if "/event-types" in seen.path else None
    )
    done = terminal.run("event-type", "show", "orders", "pait")
    assert done.exit_code == 1
    assert "Forbidden" in done.stderr
    assert "meant" not in done.stderr


def test_a_message_of_an_unknown_event_type_is_answered_with_the_command_that_lists_them(
    terminal: Terminal, fake: FakeRooms
) -> None:
    fake.interfere = lambda seen: (
        problem(422, "Fields of the request are wrong", "", [("event_type", "is unknown")])
        if seen.path.endswith("/messages")
        else None
    )
    done = terminal.run("publish", "orders", "pait", "{}")
    assert "event_type: is unknown" in done.stderr
    assert "`rooms event-type list orders` shows them" in done.stderr


def test_a_publish_that_is_refused_for_another_reason_gets_no_advice(
    terminal: Terminal, fake: FakeRooms
) -> None:
    fake.interfere = lambda seen: (
        problem(404, "Not found", "there is no such room")
        if seen.path.endswith("/messages")
        else None
    )
    done = terminal.run("publish", "orders", "paid", "{}")
    assert "there is no such room" in done.stderr
    assert "event-type list" not in done.stderr


def test_a_subscription_is_changed(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done(
        "subscription", "update", "orders/crm", "--clear", "headers", "--clear", "delivery-delay-ms"
    )
    assert fake.requests[-1].body == {"headers": None, "delivery_delay_ms": None}
    terminal.done(
        "subscription", "update", "orders/crm", "--no-cloud-events", "--timeout-ms", "500"
    )
    assert fake.requests[-1].body == {"cloud_events": False, "timeout_ms": 500}


@pytest.mark.parametrize(
    ("verb", "reported"),
    [
        ("pause", {"status": "paused"}),
        ("resume", {"status": "active"}),
        ("rotate-secret", {"secret": "whsec_new"}),
        ("test", {"status": 200, "latency_ms": 1.5, "error": None}),
    ],
)
def test_actions_of_a_subscription(
    terminal: Terminal, fake: FakeRooms, verb: str, reported: dict[str, object]
) -> None:
    answer = terminal.json("subscription", verb, "orders/crm")
    assert answer | reported == answer
    assert fake.requests[-1].path == f"/v1/subscriptions/{fake.identity(1)}/{verb}"


def test_overlap_of_the_old_secret(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done("subscription", "rotate-secret", "orders/crm", "--overlap-s", "60")
    assert fake.requests[-1].body == {"overlap_s": 60}


def test_a_subscription_is_deleted_after_a_question(terminal: Terminal, fake: FakeRooms) -> None:
    assert terminal.run("subscription", "delete", "orders/crm", stdin="n\n").exit_code == 1
    assert fake.sent("DELETE", ".*") == []
    terminal.done("subscription", "delete", "orders/crm", "--yes")
    assert len(fake.sent("DELETE", ".*")) == 1


def test_deliveries_and_redelivery(terminal: Terminal, fake: FakeRooms) -> None:
    table = terminal.done(
        "deliveries", "orders/crm", "--state", "sidelined", "--event-type", "paid"
    )
    assert r"\x1b[2Jno" in table
    assert fake.requests[-1].query == {"state": "sidelined", "event_type": "paid", "limit": "50"}
    assert terminal.run("deliveries", "orders/crm", "--state", "nonsense").exit_code == 2
    assert terminal.json("redeliver", fake.identity(700))["state"] == "queued"


def test_messages_and_a_timeline(terminal: Terminal, fake: FakeRooms) -> None:
    fake.messages.append({"id": fake.identity(100), "event_type": "paid"})
    assert fake.identity(100) in terminal.done(
        "messages", "orders", "--correlation-id", "c", "--since", "2026-01-01T00:00:00+01:00"
    )
    assert fake.requests[-1].query == {
        "correlation_id": "c",
        "since": "2026-01-01T00:00:00+01:00",
        "limit": "50",
        "with_states": "true",
    }
    lines = terminal.done("timeline", fake.identity(100)).splitlines()
    assert lines[0].startswith(f"paid {fake.identity(100)}, 2026-01-31")
    assert [line.split()[:3] for line in lines[3:]] == [
        ["+0.000", "s", "published"],
        ["+1.500", "s", "attempted"],
        ["+1.500", "s", "retry_scheduled"],
    ]
    assert "503" in lines[4]
    assert "12.2" in lines[4]
    assert "due in 1000 ms, 503" in lines[5]
    assert len(terminal.json("timeline", fake.identity(100))["items"]) == 3


def test_timeline_names_existing_subscriptions(terminal: Terminal, fake: FakeRooms) -> None:
    steps = [
        {"ts": "2026-01-31T12:00:00Z", "kind": "enqueued", "subscription_id": fake.identity(number)}
        for number in (1, 2, 1)
    ]
    fake.interfere = lambda seen: (
        (200, {"items": steps, "next_cursor": None}) if seen.path.endswith("/journey") else None
    )
    lines = terminal.done("timeline", fake.identity(100)).splitlines()
    assert [line.split()[3] for line in lines[3:]] == ["crm", f"…{fake.identity(2)[14:28]}…", "crm"]
    assert len(fake.sent("GET", f"/v1/subscriptions/{fake.identity(1)}")) == 1


def test_a_job_is_followed_to_its_end(
    terminal: Terminal, fake: FakeRooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = recorded_pauses(monkeypatch, "rooms.cli.job")
    states = ["queued", "running", "running", "done"]
    fake.jobs.extend(
        {"id": fake.identity(8), "state": state, "done": 1, "total": 2} for state in states
    )
    assert terminal.json("job", fake.identity(8), "--follow")["state"] == "done"
    assert len(pauses) == 3


def test_a_job_that_failed_is_an_error(terminal: Terminal, fake: FakeRooms) -> None:
    fake.jobs.append({"id": fake.identity(8), "state": "failed", "error": "disk full"})
    result = terminal.run("job", fake.identity(8))
    assert result.exit_code == 1
    assert "the job failed: disk full" in result.stderr


SET: dict[str, Any] = {
    "id": "01900000-0000-7000-8000-000000000009",
    "application": None,
    "filtered": False,
    "name": "crm",
    "event_types": [],
    "ordered": False,
    "delivery_jitter": 0.0,
    "headers": {},
    "status": "active",
    "secret": "whsec_x",
    "login": None,
}


def test_a_subscription_is_shown_as_it_was_set_and_its_secret_apart(
    terminal: Terminal, fake: FakeRooms
) -> None:
    fake.interfere = lambda seen: (200, SET) if "subscriptions" in seen.path else None
    made = terminal.run("subscription", "create", "orders", "crm")
    assert made.stdout.splitlines() == [
        f"id               {SET['id']}",
        "name             crm",
        "ordered          no",
        "delivery_jitter  0.0",
        "status           active",
        "",
        "secret  whsec_x",
    ]
    assert "shown only now" in made.stderr
    assert terminal.json("subscription", "create", "orders", "crm") == SET
    for command in ("show", "update", "approve", "pause", "suspend"):
        given = ("--name", "crm") if command == "update" else ()
        asked = ("subscription", command, str(SET["id"]), *given)
        if command == "approve":
            asked = (*asked, "--version", "1")
        assert "application" not in terminal.done(*asked), command
    every = terminal.done("subscription", "show", str(SET["id"]), "--all").splitlines()
    assert [line.split()[0] for line in every] == list(SET)


def test_a_room_is_shown_as_it_was_set(terminal: Terminal, fake: FakeRooms) -> None:
    room = {"id": 1000, "name": "orders", "description": None, "transparent": False}
    fake.interfere = lambda _: (200, room)
    brief, every = (
        terminal.done("room", "show", "1000", *given).splitlines() for given in ((), ("--all",))
    )
    assert brief == ["id    1000", "name  orders"]
    assert len(every) == 4
    assert terminal.done("room", "update", "1000", "--name", "orders").splitlines() == brief
    assert terminal.done("room", "create", "orders").splitlines() == brief
