"""Test the commands for scheduled messages, and the former names of commands."""

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen, problem

ROOM = "/v1/rooms/1000"


@pytest.fixture(autouse=True)
def orders(fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.messages.append({"id": fake.identity(100), "caller_id": "order/7", "event_type": "paid"})


def test_a_message_is_published_for_later_under_its_own_id(
    terminal: Terminal, fake: FakeRooms
) -> None:
    terminal.done(
        "publish",
        "orders",
        "paid",
        "1",
        "--delay-ms",
        "5000",
        "--business-key",
        "customer 5",
        "--id",
        "a",
    )
    sent = {
        "event_type": "paid",
        "delay_ms": 5000,
        "business_key": "customer 5",
        "id": "a",
        "payload": 1,
    }
    assert fake.requests[-1].body == sent
    terminal.done("publish", "orders", "paid", "1", "--deliver-at", "2030-01-01T00:00:00Z")
    assert fake.requests[-1].body["deliver_at"] == "2030-01-01T00:00:00Z"


def test_an_id_is_of_one_message_not_of_a_file(terminal: Terminal) -> None:
    result = terminal.run("publish", "orders", "paid", "--file", "-", "--id", "a")
    assert result.exit_code == 2
    assert "a single message" in result.stderr


@pytest.mark.parametrize("own", [False, True])
def test_message_is_found_by_either_id(terminal: Terminal, fake: FakeRooms, *, own: bool) -> None:
    reference = "orders/order/7" if own else fake.identity(100)
    assert terminal.json("message", "show", reference)["status"] == "waiting"
    lines = terminal.done("message", "cancel", reference).splitlines()
    assert lines[-1].split() == [fake.identity(700), fake.identity(1), "withdrawn"]
    lines = terminal.done("message", "reschedule", reference, "--delay-ms", "0").splitlines()
    assert lines[0] == "due 2030-01-01T00:00:00Z, expires never"
    assert lines[-1].split()[-1] == "moved"
    path = f"{ROOM}/messages/by-id/order%2F7" if own else f"/v1/messages/{fake.identity(100)}"
    assert fake.sent("PATCH", path)[-1].body == {"delay_ms": 0}
    assert not fake.sent("GET", f"{ROOM}/messages")
    assert terminal.json("message", "cancel", reference)["deliveries"][0]["result"] == "withdrawn"


@pytest.mark.parametrize("command", [("timeline",), ("receipt", "get")])
def test_an_unknown_id_of_a_publisher_names_what_finds_a_message(
    terminal: Terminal, fake: FakeRooms, command: tuple[str, ...]
) -> None:
    fake.messages.clear()
    result = terminal.run(*command, "orders/order-9")
    assert result.exit_code == 1
    assert "no message with the publisher's id 'order-9'" in result.stderr
    assert "`rooms messages orders` lists them" in result.stderr
    assert "`rooms search`" in result.stderr


def test_wrong_usage_sends_no_request(terminal: Terminal, fake: FakeRooms) -> None:
    assert (
        "one of --delay-ms and --deliver-at"
        in terminal.run("message", "reschedule", fake.identity(100)).stderr
    )
    assert "not an id" in terminal.run("message", "show", "nonsense").stderr
    assert fake.requests == []
    result = terminal.run("message", "show", "orders/other")
    assert result.exit_code == 1
    assert "published no message with this id" in result.stderr


def test_messages_are_listed_by_business_key_and_id(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done("messages", "orders", "--business-key", "customer 5", "--id", "order/7")
    assert fake.requests[-1].query == {
        "business_key": "customer 5",
        "id": "order/7",
        "limit": "50",
        "with_states": "true",
    }
    organisation, subscription = fake.identity(3), fake.identity(100)
    of = ("--publisher", organisation, "--application", "billing", "--subscription", subscription)
    fake.subscriptions.append({"id": subscription, "name": "one", "room_id": 1})
    terminal.done("messages", "orders", *of)
    assert fake.requests[-1].query == {
        "publisher_organisation_id": organisation,
        "application": "billing",
        "subscription_id": subscription,
        "limit": "50",
        "with_states": "true",
    }


def test_number_of_shards_is_shown_and_changed(terminal: Terminal, fake: FakeRooms) -> None:
    assert terminal.json("cluster", "shards") == {"count": 8, "used": True}
    assert terminal.json("cluster", "shards", "32") == {"count": 32, "used": True}
    assert fake.requests[-1].body == {"count": 32}
    assert terminal.run("cluster", "shards", "257").exit_code == 2


@pytest.mark.parametrize(
    ("old", "new", "arguments"),
    [
        ("buckets", "cluster shards", ("32",)),
        ("journey", "timeline", ("orders/order/7",)),
        ("message withdraw", "message cancel", ("orders/order/7",)),
        ("message move", "message reschedule", ("orders/order/7", "--delay-ms", "0")),
        ("subscription try-filter", "filter test", ("orders/mail", "{}")),
        ("subscription keys", "ordering keys", ("orders/mail", "--parked")),
        ("subscription skip", "ordering skip", ("orders/mail", "k")),
        ("recover", "broker resend", ()),
    ],
)
def test_a_former_name_runs_the_command_and_names_the_new_one(
    terminal: Terminal, fake: FakeRooms, old: str, new: str, arguments: tuple[str, ...]
) -> None:
    """The former name sends the same requests, prints the same, and adds one line to stderr."""
    expected = terminal.run(*new.split(), *arguments)
    requests = [(one.method, one.path, one.query, one.body) for one in fake.requests]
    fake.requests.clear()
    result = terminal.run(*old.split(), *arguments)
    assert result.stderr == f"`rooms {old}` is now `rooms {new}`\n{expected.stderr}"
    assert (result.stdout, result.exit_code) == (expected.stdout, expected.exit_code)
    assert [(one.method, one.path, one.query, one.body) for one in fake.requests] == requests


def test_former_names_are_not_listed(terminal: Terminal) -> None:
    helps = [terminal.done(*group, "--help") for group in ((), ("message",), ("subscription",))]
    for former in ("buckets", "journey", "advise", "recover", "withdraw", "move ", "try-filter"):
        assert f"  {former}" not in "".join(helps)


@pytest.mark.parametrize(
    ("state", "attempt", "status", "advised"),
    [
        (None, None, 404, "`rooms subscription retry SUBSCRIPTION` sends at once"),
        ("queued", 3, 409, "it waits for a retry: `rooms subscription retry "),
        ("scheduled", 1, 409, "it waits for a retry: `rooms subscription retry "),
        ("queued", 0, 409, None),
        ("delivered", 1, 409, None),
    ],
)
def test_what_waits_for_a_retry_is_sent_by_another_command(
    terminal: Terminal,
    fake: FakeRooms,
    *,
    state: str | None,
    attempt: int | None,
    status: int,
    advised: str | None,
) -> None:
    def answer(seen: Seen) -> Answer | None:
        if seen.method == "POST":
            return problem(status, "Conflict", f"it is {state}")
        found = {"state": state, "attempt": attempt, "subscription_id": fake.identity(1)}
        return 200, found

    fake.interfere = answer
    refused = terminal.run("redeliver", fake.identity(700))
    assert refused.exit_code == 1
    assert "it is" in refused.stderr
    if advised is None:
        assert "rooms subscription retry" not in refused.stderr
    else:
        assert advised in refused.stderr
        assert (fake.identity(1) in refused.stderr) is (status == 409)
    assert "rooms subscription retry" in terminal.done("redeliver", "--help")
