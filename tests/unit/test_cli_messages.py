"""Messages that are due later, by the command line: which requests they become, and what is shown of the answers."""

import pytest

from tests.fake_rooms import FakeRooms
from tests.terminal import Terminal

ROOM = "/v1/rooms/1000"


@pytest.fixture(autouse=True)
def orders(fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.messages.append({"id": fake.identity(100), "caller_id": "order/7", "event_type": "paid"})


def test_a_message_is_published_for_later_under_its_own_id(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done("publish", "orders", "paid", "1", "--delay-ms", "5000", "--business-key", "customer 5", "--id", "a")
    sent = {"event_type": "paid", "delay_ms": 5000, "business_key": "customer 5", "id": "a", "payload": 1}
    assert fake.requests[-1].body == sent
    terminal.done("publish", "orders", "paid", "1", "--deliver-at", "2030-01-01T00:00:00Z")
    assert fake.requests[-1].body["deliver_at"] == "2030-01-01T00:00:00Z"


def test_an_id_is_of_one_message_not_of_a_file(terminal: Terminal) -> None:
    result = terminal.run("publish", "orders", "paid", "--file", "-", "--id", "a")
    assert result.exit_code == 2
    assert "one message's" in result.stderr


@pytest.mark.parametrize("own", [False, True])
def test_a_message_goes_by_our_id_or_its_publisher_s(terminal: Terminal, fake: FakeRooms, *, own: bool) -> None:
    reference = "orders/order/7" if own else fake.identity(100)
    assert terminal.json("message", "show", reference)["status"] == "waiting"
    lines = terminal.done("message", "withdraw", reference).splitlines()
    assert lines[-1].split() == [fake.identity(700), fake.identity(1), "withdrawn"]
    lines = terminal.done("message", "move", reference, "--delay-ms", "0").splitlines()
    assert lines[0] == "due 2030-01-01T00:00:00Z, expires never"
    assert lines[-1].split()[-1] == "moved"
    assert fake.sent("PATCH", "/v1/messages/.*")[-1].body == {"delay_ms": 0}
    assert terminal.json("message", "withdraw", reference)["deliveries"][0]["result"] == "withdrawn"


def test_what_is_wrong_is_told_before_anything_is_asked(terminal: Terminal, fake: FakeRooms) -> None:
    assert "one of them" in terminal.run("message", "move", fake.identity(100)).stderr
    assert "no id" in terminal.run("message", "show", "nonsense").stderr
    assert fake.requests == []
    result = terminal.run("message", "show", "orders/other")
    assert result.exit_code == 1
    assert "no message that its publisher called 'other'" in result.stderr


def test_messages_are_listed_by_what_their_publisher_called_them(terminal: Terminal, fake: FakeRooms) -> None:
    terminal.done("messages", "orders", "--business-key", "customer 5", "--id", "order/7")
    assert fake.requests[-1].query == {"business_key": "customer 5", "id": "order/7", "limit": "50"}


def test_the_number_of_buckets_is_shown_and_changed(terminal: Terminal, fake: FakeRooms) -> None:
    assert terminal.json("buckets") == {"count": 8, "used": True}
    assert terminal.json("buckets", "32") == {"count": 32, "used": True}
    assert fake.requests[-1].body == {"count": 32}
    assert terminal.run("buckets", "257").exit_code == 2
