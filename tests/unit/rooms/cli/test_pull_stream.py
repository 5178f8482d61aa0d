"""Test `rooms stream`: acknowledgements after output, and reconnects."""

import json
from urllib.parse import parse_qsl

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import FakeRooms, problem
from tests.support.sleep_recorder import recorded_pauses


@pytest.fixture(autouse=True)
def queues(fake: FakeRooms) -> list[str]:
    for number, name in enumerate(("queue", "archive"), 1):
        fake.subscriptions.append({"id": fake.identity(number), "name": name, "status": "active"})
    return [fake.identity(1), fake.identity(2)]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the delays before new requests."""
    return recorded_pauses(monkeypatch, "rooms.cli.pull")


def event(queue: str, number: int, payload: str = "1") -> bytes:
    head = {
        "subscription_id": queue,
        "ack_id": f"a{number}",
        "message_id": f"m{number}",
        "attempt": number,
        "event_type": "paid",
        "version": 1,
        "published_at": "2026-01-31T12:00:00Z",
    }
    text = json.dumps(head)[:-1] + f', "payload": {payload}}}'
    return b"event: message\ndata: " + text.replace("\n", "\ndata: ").encode() + b"\n\n"


def end(reason: str) -> bytes:
    return b'event: end\ndata: {"reason":"%b"}\n\n' % reason.encode()


def acks(fake: FakeRooms) -> list[tuple[str, list[str]]]:
    """Return the acknowledged ids, one list per request."""
    return [(seen.path.split("/")[3], seen.body["ack_ids"]) for seen in fake.sent("POST", ".*/ack")]


def test_messages_of_several_subscriptions_are_shown_and_acknowledged_one_by_one(
    terminal: Terminal, fake: FakeRooms, queues: list[str]
) -> None:
    one, two = queues
    fake.streams.append(
        b"retry: 1000\n\n" + event(one, 0) + b":\n\n" + event(two, 1) + event(one, 2) + end("over")
    )
    found = terminal.lines(
        "stream", one, two, "--credit", "7", "--header", "tenant:7", "--header", "kind:x"
    )
    assert [message["ack_id"] for message in found] == ["a0", "a1", "a2"]
    assert acks(fake) == [(one, ["a0"]), (two, ["a1"]), (one, ["a2"])]
    (asked,) = fake.sent("GET", "/v1/stream")
    assert sorted(parse_qsl(asked.search)) == [
        ("credit", "7"),
        ("header", "kind:x"),
        ("header", "tenant:7"),
        ("subscription", one),
        ("subscription", two),
    ]


def test_a_payload_stays_as_it_was_published_over_lines_too(
    terminal: Terminal, fake: FakeRooms, queues: list[str]
) -> None:
    fake.streams.append(
        event(queues[0], 0, '{"large": 12345678901234567890,\n"z": 1.0, "a": 1e2}') + end("over")
    )
    line = terminal.done("--json", "stream", queues[0])
    assert '{"large": 12345678901234567890, "z": 1.0, "a": 1e2}' in line
    assert len(line.splitlines()) == 1


def test_for_people(terminal: Terminal, fake: FakeRooms, queues: list[str]) -> None:
    fake.streams.append(event(queues[0], 2, '{"n": 1}') + end("deleted"))
    lines = terminal.done("stream", queues[0]).splitlines()
    assert lines == ["2026-01-31T12:00:00Z  paid v1  m2  attempt 2", '  {"n": 1}']


def test_browse_and_no_ack_acknowledge_nothing(
    terminal: Terminal, fake: FakeRooms, queues: list[str]
) -> None:
    for option in ("--browse", "--no-ack"):
        fake.streams.append(event(queues[0], 0) + end("over"))
        assert len(terminal.lines("stream", queues[0], option)) == 1
    assert acks(fake) == []
    assert [seen.query.get("browse") for seen in fake.sent("GET", "/v1/stream")] == ["true", None]


def test_stream_ends_after_max_messages(
    terminal: Terminal, fake: FakeRooms, queues: list[str]
) -> None:
    fake.streams.append(b"".join(event(queues[0], number) for number in range(5)))
    assert len(terminal.lines("stream", queues[0], "--max", "2")) == 2
    assert fake.acknowledged == ["a0", "a1"]


def test_interrupted_stream_is_requested_again(
    terminal: Terminal, fake: FakeRooms, queues: list[str], pauses: list[float]
) -> None:
    queue = queues[0]
    fake.streams.extend(
        [event(queue, 0), event(queue, 1) + end("shutdown"), end("unavailable"), event(queue, 2)]
    )
    refused = [None, problem(503, "Try again soon", ""), None, None, None]
    fake.interfere = lambda seen: refused.pop(0) if seen.path == "/v1/stream" else None
    result = terminal.run("--json", "stream", queue, "--max", "3")
    assert result.exit_code == 0
    assert [json.loads(line)["ack_id"] for line in result.stdout.splitlines()] == ["a0", "a1", "a2"]
    for reported in ("cut off", "Try again soon", "(shutdown)", "(unavailable)"):
        assert f"{reported}; retrying" in result.stderr
    assert pauses == [1.0] * 4


def test_stream_ends_at_permanent_errors(
    terminal: Terminal, fake: FakeRooms, queues: list[str], pauses: list[float]
) -> None:
    fake.interfere = lambda seen: (
        problem(403, "The key lacks the scope", "") if seen.path == "/v1/stream" else None
    )
    result = terminal.run("stream", queues[0])
    assert result.exit_code == 1
    assert "The key lacks the scope (403)" in result.stderr
    assert pauses == []
