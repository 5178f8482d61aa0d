"""Test commands that act on several subscriptions, as after an outage of one host."""

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms

NAMES = ("orders/crm", "orders/mail", "orders/billing")


@pytest.fixture
def paths(fake: FakeRooms) -> list[str]:
    """Create the subscriptions; return the path of each."""
    fake.rooms.append({"id": 1000, "name": "orders"})
    for number, name in enumerate(NAMES):
        entry = {"id": fake.identity(number), "name": name.partition("/")[2], "room_id": 1000}
        fake.subscriptions.append(entry)
    return [f"/v1/subscriptions/{fake.identity(number)}" for number in range(len(NAMES))]


@pytest.mark.parametrize("options", [(), ("--follow",)])
def test_several_subscriptions_are_retried_by_one_command(
    terminal: Terminal, fake: FakeRooms, paths: list[str], options: tuple[str, ...]
) -> None:
    jobs = {path: fake.identity(10 + number) for number, path in enumerate(paths)}
    fake.jobs.extend(
        {"id": identity, "kind": "retry_waiting", "state": "done", "error": None, "result": {}}
        for identity in jobs.values()
    )
    fake.interfere = lambda seen: (
        (202, {"job_id": jobs[seen.path.removesuffix("/retry")], "state": "queued"})
        if seen.method == "POST"
        else None
    )
    found = terminal.json("subscription", "retry", *NAMES, *options)["items"]
    assert [(one["subscription"], one["state"]) for one in found] == [
        (name, "done") for name in NAMES
    ]
    assert [seen.path for seen in fake.requests if seen.method == "POST"] == [
        f"{path}/retry" for path in paths
    ]


def test_several_subscriptions_are_resumed_by_one_command(
    terminal: Terminal, fake: FakeRooms, paths: list[str]
) -> None:
    fake.interfere = lambda seen: (
        (200, {"status": "active", "status_reason": None}) if seen.method == "POST" else None
    )
    lines = terminal.done("subscription", "resume", *NAMES).splitlines()
    shown = [line.split()[:2] for line in lines]
    assert [line for line in shown if line and line[0] in NAMES] == [
        [name, "active"] for name in NAMES
    ]
    assert [seen.path for seen in fake.requests if seen.method == "POST"] == [
        f"{path}/resume" for path in paths
    ]


@pytest.mark.parametrize("action", ["retry", "resume"])
def test_a_wrong_name_among_several_changes_nothing(
    terminal: Terminal, fake: FakeRooms, paths: list[str], action: str
) -> None:
    refused = terminal.run("subscription", action, NAMES[0], "orders/crmm")
    assert refused.exit_code != 0
    assert "crmm" in refused.stderr
    assert paths
    assert not [seen for seen in fake.requests if seen.method == "POST"]
