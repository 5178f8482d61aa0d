"""Test the commands that search, browse a queue, and list all sidelines."""

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen

MESSAGE: dict[str, object] = {
    "kind": "message",
    "field": "business_key",
    "id": "01900000-0000-7000-8000-0000000000aa",
    "name": "paid",
    "room_id": 1000,
    "room": "orders",
    "at": "2026-01-01T00:00:00Z",
}
WAITING = {
    "delivery_id": "01900000-0000-7000-8000-0000000000bb",
    "event_type": "paid",
    "priority": 4,
    "due_at": "2026-01-01T00:00:00Z",
    "leased_until": None,
    "attempt": 0,
    "ordering_key": "customer-1",
}
SIDELINE = {
    "subscription_id": "01900000-0000-7000-8000-0000000000cc",
    "room": "orders",
    "name": "crm",
    "sidelined": 3,
    "oldest_at": "2026-01-01T00:00:00Z",
    "last_status": 410,
    "last_error": "status: gone",
}
ANSWERS: dict[str, dict[str, object]] = {"search": MESSAGE, "queue": WAITING, "sidelines": SIDELINE}


@pytest.fixture(autouse=True)
def orders(fake: FakeRooms) -> None:
    def answer(seen: Seen) -> Answer | None:
        found = ANSWERS.get(seen.path.rsplit("/", 1)[-1])
        return None if found is None else (200, {"items": [found], "next_cursor": None})

    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.subscriptions.append({"id": fake.identity(1), "name": "crm", "type": "PULL"})
    fake.interfere = answer


def test_a_text_is_searched(terminal: Terminal, fake: FakeRooms) -> None:
    lines = terminal.done("search", "case 1").splitlines()
    assert "business_key" in lines[-1]
    assert str(MESSAGE["id"]) in lines[-1]
    assert fake.requests[-1].query == {"q": "case 1"}


@pytest.mark.parametrize("leased", [False, True])
def test_a_queue_is_browsed(terminal: Terminal, fake: FakeRooms, *, leased: bool) -> None:
    lines = terminal.done("browse", "orders/crm", *(["--leased"] if leased else [])).splitlines()
    assert "customer-1" in lines[-1]
    assert fake.requests[-1].query.get("state") == ("leased" if leased else None)


def test_all_sidelines_are_listed(terminal: Terminal) -> None:
    lines = terminal.done("sideline", "overview").splitlines()
    assert "status: gone" in lines[-1]


def test_consumers_are_listed(terminal: Terminal, fake: FakeRooms) -> None:
    consumer = {"key_id": "k", "key_name": "billing", "leases": 7, "oldest_at": None}
    ends = {"first_end": "2026-03-01T12:00:00Z", "last_end": "2026-03-01T12:05:00Z"}
    answer = {"items": [consumer | ends], "oldest_due_at": None, "complete": False}
    fake.interfere = lambda seen: (200, answer) if seen.path.endswith("/consumers") else None
    done = terminal.run("subscription", "consumers", "orders/crm")
    assert done.exit_code == 0, done.stderr
    assert "billing" in done.stdout
    assert "12:05" in done.stdout
    assert "nothing waits" in done.stderr
    assert "more than 10,000 leases" in done.stderr
    assert terminal.json("subscription", "consumers", "orders/crm")["items"] == answer["items"]
