"""Test the command that retries what waits: it asks nothing, and shows the job."""

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms


@pytest.mark.parametrize("options", [(), ("--follow",)])
def test_the_job_is_requested_and_shown(
    terminal: Terminal, fake: FakeRooms, options: tuple[str, ...]
) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.subscriptions.append({"id": fake.identity(1), "name": "crm", "room_id": 1000})
    job = {
        "id": fake.identity(8),
        "kind": "retry_waiting",
        "state": "done",
        "error": None,
        "result": {"retried": 7},
    }
    fake.jobs.extend([job] * 3)
    fake.interfere = lambda seen: (
        (202, {"job_id": fake.identity(8), "kind": "retry_waiting", "state": "queued"})
        if seen.method == "POST"
        else None
    )
    found = terminal.json("subscription", "retry", "orders/crm", *options)
    assert found["result"] == {"retried": 7}
    (sent,) = fake.sent("POST", f"/v1/subscriptions/{fake.identity(1)}/retry")
    assert (sent.body, sent.query) == (None, {})


def test_a_refusal_says_what_to_do(terminal: Terminal, fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.subscriptions.append({"id": fake.identity(1), "name": "crm", "room_id": 1000})
    problem = {"status": 409, "title": "Conflict", "detail": "it is paused: resume it first"}
    fake.interfere = lambda seen: (409, problem) if seen.method == "POST" else None
    refused = terminal.run("subscription", "retry", "orders/crm")
    assert refused.exit_code != 0
    assert "resume it first" in refused.stderr
