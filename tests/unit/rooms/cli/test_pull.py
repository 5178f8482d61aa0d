"""Test `rooms pull`: no message is acknowledged before it was written."""

import json

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen, problem
from tests.support.sleep_recorder import recorded_pauses


@pytest.fixture(autouse=True)
def queue(fake: FakeRooms) -> str:
    fake.subscriptions.append({"id": fake.identity(1), "name": "queue", "status": "active"})
    return fake.identity(1)


def wait(fake: FakeRooms, count: int) -> None:
    for number in range(count):
        fake.waiting.append(
            {
                "ack_id": f"a{number}",
                "delivery_id": fake.identity(700 + number),
                "message_id": fake.identity(100 + number),
                "attempt": number,
                "event_type": "paid",
                "version": 1,
                "correlation_id": "c",
                "published_at": "2026-01-31T12:00:00Z",
                "payload": {"n": number, "text": "ü\x1b[2J"},
            }
        )


def test_messages_are_shown_and_acknowledged(
    terminal: Terminal, fake: FakeRooms, queue: str
) -> None:
    wait(fake, 3)
    found = terminal.lines("pull", queue)
    assert [message["payload"]["n"] for message in found] == [0, 1, 2]
    assert fake.acknowledged == ["a0", "a1", "a2"]
    assert fake.sent("POST", ".*/pull")[0].body == {"max_messages": 10, "wait_ms": 0}


def test_for_people(terminal: Terminal, fake: FakeRooms, queue: str) -> None:
    wait(fake, 2)
    lines = terminal.done("pull", queue).splitlines()
    assert lines[0] == f"2026-01-31T12:00:00Z  paid v1  {fake.identity(100)}"
    assert lines[1] == '  {"n": 0, "text": "\\u00fc\\u001b[2J"}'
    assert lines[2].endswith("attempt 1")


def test_an_empty_queue_is_named_to_people(terminal: Terminal, queue: str) -> None:
    assert terminal.run("pull", queue).stderr == "no message is due\n"
    assert terminal.run("--json", "pull", queue).output == ""


def test_people_see_keys_and_replays(terminal: Terminal, fake: FakeRooms, queue: str) -> None:
    wait(fake, 2)
    fake.waiting[0] |= {"ordering_key": "a\x1b[2Jb", "sequence": 7, "business_key": "b"}
    fake.waiting[1] |= {"ordering_key": "k", "replayed": True}
    lines = terminal.done("pull", queue).splitlines()
    assert lines[0].endswith("  key a\\x1b[2Jb #7  business key b")
    assert lines[2].endswith("attempt 1  key k  replayed")


def test_no_more_than_asked_for(terminal: Terminal, fake: FakeRooms, queue: str) -> None:
    wait(fake, 250)
    assert len(terminal.lines("pull", queue, "--max", "210", "--lease-ms", "1000")) == 210
    assert [seen.body["max_messages"] for seen in fake.sent("POST", ".*/pull")] == [100, 100, 10]
    assert fake.sent("POST", ".*/pull")[0].body["lease_ms"] == 1000
    assert len(fake.acknowledged) == 210


def test_without_acknowledging(terminal: Terminal, fake: FakeRooms, queue: str) -> None:
    wait(fake, 1)
    assert len(terminal.lines("pull", queue, "--no-ack")) == 1
    assert fake.acknowledged == []


def test_a_payload_stays_as_it_was_published(
    terminal: Terminal, fake: FakeRooms, queue: str
) -> None:
    wait(fake, 1)
    fake.waiting[0]["payload"] = {"large": 12345678901234567890, "z": 1.0, "a": 1e2}
    line = terminal.done("--json", "pull", queue)
    assert '{"large": 12345678901234567890, "z": 1.0, "a": 100.0}' in line
    assert len(line.splitlines()) == 1


def test_follow_retries_transient_errors(
    terminal: Terminal, fake: FakeRooms, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = recorded_pauses(monkeypatch, "rooms.cli.pull")
    answers: list[Answer | None] = [
        None,
        problem(503, "Try again soon", ""),
        (200, {"messages": []}),
        None,
    ]
    fake.interfere = lambda seen: answers.pop(0) if seen.path.endswith("/pull") else None
    wait(fake, 3)
    first, second, third = fake.waiting
    fake.waiting.clear()
    fake.waiting.extend([first])

    def more(seen: Seen) -> Answer | None:
        if seen.path.endswith("/pull"):
            if len(answers) == 1:
                fake.waiting.extend([second, third])
            return answers.pop(0)
        return None

    fake.interfere = more
    result = terminal.run("--json", "pull", queue, "--follow", "--max", "3")
    assert result.exit_code == 0
    assert [json.loads(line)["payload"]["n"] for line in result.stdout.splitlines()] == [0, 1, 2]
    assert "Try again soon; retrying" in result.stderr
    assert pauses == [1.0]
    assert fake.acknowledged == ["a0", "a1", "a2"]
    assert fake.sent("POST", ".*/pull")[0].body["wait_ms"] == 20_000


def test_follow_stops_at_permanent_errors(terminal: Terminal, fake: FakeRooms, queue: str) -> None:
    fake.interfere = lambda seen: (
        problem(403, "The key lacks the scope", "") if "pull" in seen.path else None
    )
    result = terminal.run("pull", queue, "--follow")
    assert result.exit_code == 1
    assert "The key lacks the scope (403)" in result.stderr


def test_late_acknowledgements_are_only_noted(
    terminal: Terminal, fake: FakeRooms, queue: str
) -> None:
    wait(fake, 1)
    fake.interfere = lambda seen: (
        problem(409, "Conflict with the present state", "late") if "ack" in seen.path else None
    )
    result = terminal.run("--json", "pull", queue)
    assert result.exit_code == 0
    assert "may be delivered again" in result.stderr
