"""Test `rooms queue` and its requests, and the target of `rooms handlers`."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen

QUEUE: dict[str, Any] = {
    "name": "orders",
    "magazine": "orders",
    "sideline": "orders_SIDELINE",
    "active": True,
}

FAILED: dict[str, Any] = {
    "id": "m-1",
    "reason": "handler_failed",
    "error": "KeyError: 'amount'",
    "payload": {"n": 1},
}


@pytest.fixture
def asked(fake: FakeRooms) -> list[tuple[str, str, Any]]:
    """Return the requests that the service received."""
    seen: list[tuple[str, str, Any]] = []

    def answer(request: Seen) -> Answer | None:
        seen.append((request.method, request.path.removeprefix("/v1"), request.body))
        if request.path.endswith("/messages/batch"):
            return 202, {
                "messages": [{"id": f"m-{n}"} for n in range(len(request.body["messages"]))]
            }
        if request.path.endswith("/sideline/purge"):
            return 200, {"purged": 10, "more": len(seen) < 3}
        if request.path.endswith("/sideline"):
            return 200, {"items": [FAILED], "next_cursor": None}
        if request.path.startswith("/v1/magazines"):
            return 200, {"depth": len(request.path)}
        if request.path == "/v1/queues" and request.method == "GET":
            return 200, {"items": [QUEUE], "next_cursor": None}
        return 200, QUEUE

    fake.interfere = answer
    return seen


def test_queue_is_created_with_the_given_options(terminal: Terminal, asked: list[Any]) -> None:
    terminal.done(
        "queue",
        "create",
        "orders",
        "--concurrency",
        "3",
        "--shovel-interval-s",
        "60",
        "--batch-size",
        "5",
    )
    terminal.done("queue", "create", "orders", "--no-shovel", "--shards", "1")
    assert asked == [
        (
            "POST",
            "/queues",
            {
                "name": "orders",
                "concurrency": 3,
                "shovel": {"interval_s": 60},
                "batching": {"max_size": 5},
            },
        ),
        ("POST", "/queues", {"name": "orders", "shards": 1, "shovel": None}),
    ]


def test_a_queue_is_changed(terminal: Terminal, asked: list[Any]) -> None:
    terminal.done("queue", "set", "orders", "--one-shot", "--clear", "batching")
    assert asked == [("PATCH", "/queues/orders", {"shovel": {"one_shot": True}, "batching": None})]
    assert terminal.run("queue", "set", "orders").exit_code == 2
    assert terminal.run("queue", "set", "orders", "--batch-wait-ms", "5").exit_code == 2


def test_queues_are_listed_and_shown_with_their_depths(
    terminal: Terminal, asked: list[Any]
) -> None:
    assert "orders" in terminal.done("queue", "list")
    shown = terminal.json("queue", "show", "orders")
    assert (shown["magazine_depth"], shown["sideline_depth"]) == (len("/v1/magazines/orders"), 29)
    assert [path for _, path, _ in asked] == [
        "/queues",
        "/queues/orders",
        "/magazines/orders",
        "/magazines/orders_SIDELINE",
    ]


def test_deletion_asks_for_confirmation(
    terminal: Terminal, fake: FakeRooms, asked: list[Any]
) -> None:
    assert terminal.run("queue", "delete", "orders").exit_code == 1
    assert asked == []
    terminal.done("queue", "delete", "orders", "--yes")
    assert fake.requests[-1].query == {"confirm": "orders"}


def test_messages_are_sent_from_the_line_and_from_files(
    terminal: Terminal, asked: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "one.json").write_text('{"n": 2}')
    sent = terminal.json("queue", "send", "orders", '{"n": 1}', f"@{tmp_path / 'one.json'}")
    assert [item["id"] for item in sent["items"]] == ["m-0", "m-1"]
    terminal.done("queue", "send", "orders", "3", "--id", "mine")
    assert [body for _, _, body in asked] == [
        {"messages": [{"payload": {"n": 1}}, {"payload": {"n": 2}}]},
        {"messages": [{"id": "mine", "payload": 3}]},
    ]
    assert terminal.run("queue", "send", "orders", "1", "2", "--id", "x").exit_code == 2
    assert terminal.run("queue", "send", "orders", "{").exit_code == 2


def test_lines_of_standard_input_are_payloads(
    terminal: Terminal, asked: list[Any], tmp_path: Path
) -> None:
    """A line names no file: it may come from another program."""
    (tmp_path / "key.json").write_text('{"d": "secret"}')
    terminal.done("queue", "send", "orders", stdin='{"n": 1}\n\n"two"\n')
    (sent,) = asked
    assert sent[2] == {"messages": [{"payload": {"n": 1}}, {"payload": "two"}]}
    for wrong in (f"1\n@{tmp_path / 'key.json'}", b"1\n\xff\n", "1\n" + "[" * 100_000):
        result = terminal.run("queue", "send", "orders", stdin=wrong)
        assert result.exit_code == 2
        assert "line 2 is not JSON" in result.stderr
    assert len(asked) == 1


@pytest.mark.parametrize("wrong", ['{"n":1e400}', "NaN", "Infinity", r'"\ud800"', "{"])
def test_what_no_json_has_is_found_before_anything_is_sent(
    terminal: Terminal, asked: list[Any], wrong: str
) -> None:
    """Python's own decoder takes some of these; their batch would fail after earlier ones."""
    lines = "".join(f"{n}\n" for n in range(1, 1500))
    result = terminal.run("queue", "send", "orders", stdin=f"{lines}{wrong}\n")
    assert (result.exit_code, asked) == (2, [])
    assert "line 1500 is not JSON" in result.stderr
    result = terminal.run("queue", "send", "orders", *map(str, range(1, 1500)), wrong)
    assert (result.exit_code, asked) == (2, [])
    assert "payload 1500 is not JSON" in result.stderr


def test_a_payload_is_sent_as_it_was_written(terminal: Terminal, fake: FakeRooms) -> None:
    bodies: list[bytes] = []

    def answer(request: Seen) -> Answer | None:
        bodies.append(request.raw)
        return 202, {"messages": [{"id": "m"}]}

    fake.interfere = answer
    terminal.done("queue", "send", "orders", stdin=' {"b":1.10, "a":12345678901234567890} \n')
    assert bodies == [b'{"messages":[{"payload":{"b":1.10, "a":12345678901234567890}}]}']


@pytest.mark.parametrize("status", [409, 413, 429])
def test_a_refused_batch_names_what_was_accepted_and_how_to_go_on(
    terminal: Terminal, fake: FakeRooms, status: int
) -> None:
    batches: list[list[Any]] = []

    def answer(request: Seen) -> Answer | None:
        batches.append([one["payload"] for one in request.body["messages"]])
        if len(batches) == 2:
            return status, {"title": "Refused"}
        return 202, {"messages": [{"id": f"m-{n}"} for n in batches[-1]]}

    fake.interfere = answer
    lines = "".join(f"{n}\n" for n in range(1, 2501))
    result = terminal.run("queue", "send", "orders", stdin=lines)
    assert result.exit_code == 1
    assert "lines 1001 to 2000 were not accepted" in result.stderr
    assert "1000 messages before them were accepted" in result.stderr
    assert "--from-line 1001" in result.stderr
    terminal.done("queue", "send", "orders", "--from-line", "1001", stdin=lines)
    assert [len(batch) for batch in batches] == [1000, 1000, 1000, 500]
    assert batches[2][0] == 1001


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_what_may_have_been_accepted_is_not_called_refused(
    terminal: Terminal, fake: FakeRooms, status: int
) -> None:
    def answer(request: Seen) -> Answer | None:
        if len(fake.requests) == 2:
            return status, {"title": "Magazine unavailable"}
        return 202, {"messages": [{"id": "m"} for _ in request.body["messages"]]}

    fake.interfere = answer
    lines = "".join(f"{n}\n" for n in range(1, 2501))
    result = terminal.run("queue", "send", "orders", stdin=lines)
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "it is not known whether lines 1001 to 2000 were accepted: Magazine unavailable" in said
    assert "1000 messages before them were accepted" in said
    assert "--from-line 1001" in said
    assert "may be handled twice" in said


def test_nothing_is_in_doubt_where_no_service_was_reached(terminal: Terminal) -> None:
    result = terminal.run("--url", "http://127.0.0.1:1", "queue", "send", "orders", "1")
    assert result.exit_code == 1
    assert "payloads 1 to 1 were not accepted" in result.stderr


def test_stopped_sending_names_what_was_accepted(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []

    def stop(*_: object, **fields: object) -> object:
        sent.append(fields)
        if len(sent) == 2:
            raise KeyboardInterrupt
        return {"messages": [{"id": "m"}] * 1000}

    monkeypatch.setattr("rooms.cli.client.ApiClient.call", stop)
    lines = "".join(f"{n}\n" for n in range(1, 2501))
    result = terminal.run("queue", "send", "orders", stdin=lines)
    assert result.exit_code != 0
    said = " ".join(result.stderr.split())
    assert "it is not known whether lines 1001 to 2000 were accepted" in said
    assert "1000 messages before them were accepted" in said
    assert "--from-line 1001" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No module named"),
        ("handlers = 3", "has no handlers"),
        ("from delivery.handlers import Handlers\nhandlers = Handlers()", "has no handlers"),
    ],
)
def test_target_without_handlers_is_refused(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str
) -> None:
    name = f"shop_{len(text or '')}"
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = terminal.run("handlers", f"{name}:handlers")
    assert result.exit_code == 1
    assert said in result.stderr


def test_sideline_is_listed_and_purged_completely(terminal: Terminal, asked: list[Any]) -> None:
    assert "KeyError" in terminal.done("queue", "sideline", "orders")
    assert terminal.run("queue", "purge", "orders", stdin="n\n").exit_code == 1
    assert [path for _, path, _ in asked] == ["/queues/orders/sideline"]
    assert terminal.json("queue", "purge", "orders", "--yes") == {"purged": 20}
    assert [path for _, path, _ in asked[1:]] == ["/queues/orders/sideline/purge"] * 2
