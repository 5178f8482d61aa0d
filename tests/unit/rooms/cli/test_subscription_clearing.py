"""Test the commands that end what waits for a subscription: what is asked, and what is sent."""

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms


@pytest.fixture(autouse=True)
def crm(fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.subscriptions.append({"id": fake.identity(1), "name": "crm", "room_id": 1000})
    job = {"id": fake.identity(8), "kind": "clear_subscription", "state": "done", "error": None}
    fake.jobs.extend([job] * 3)


@pytest.mark.parametrize("action", ["clear", "skip-to-now"])
def test_the_name_or_a_yes_is_needed(terminal: Terminal, fake: FakeRooms, action: str) -> None:
    fake.interfere = lambda seen: (
        (202, {"job_id": fake.identity(8), "kind": "x", "state": "queued"})
        if seen.method == "POST"
        else None
    )
    path = f"/v1/subscriptions/{fake.identity(1)}/{action}"
    refused = terminal.run("subscription", action, "orders/crm", "--confirm", "other")
    assert refused.exit_code == 1
    assert "nothing was changed" in refused.stderr
    assert terminal.run("subscription", action, "orders/crm", stdin="n\n").exit_code != 0
    assert fake.sent("POST", path) == []
    for options in (("--confirm", "crm"), ("--yes",)):
        found = terminal.json("subscription", action, "orders/crm", *options)
        assert found["id"] == fake.identity(8)
    assert [seen.query for seen in fake.sent("POST", path)] == [{"confirm": "crm"}] * 2
