"""Test publishing by the command line: one message, and files that are interrupted."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rooms.cli.bulk_publish import (
    MAX_BATCH_BYTES,
    MAX_LINE_BYTES,
    RETRIES,
    LineError,
    PublishBatch,
    Upload,
    parse_message_line,
    payload_parser,
    read_batches,
    scan_file,
)
from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen, problem
from tests.support.sleep_recorder import recorded_pauses


@pytest.fixture(autouse=True)
def orders(fake: FakeRooms) -> None:
    fake.rooms.append({"id": 1000, "name": "orders"})


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return recorded_pauses(monkeypatch, "rooms.cli.publish")


def messages(count: int) -> bytes:
    return b"".join(
        b'{"event_type":"paid","payload":{"n":%d}}\n' % number for number in range(count)
    )


def published(fake: FakeRooms) -> list[int]:
    return [message["payload"]["n"] for message in fake.messages]


def test_a_message_is_only_checked(terminal: Terminal, fake: FakeRooms) -> None:
    answer = terminal.json("publish", "orders", "paid", "1", "--check", "--idempotency-key=k")
    assert answer == {"destination_count": 1}
    seen = fake.requests[-1]
    assert seen.path == "/v1/rooms/1000/messages/check"
    assert "idempotency-key" not in seen.headers
    assert fake.messages == []
    refused = terminal.run("publish", "orders", "--file=-", "--check")
    assert (refused.exit_code, fake.messages) == (2, [])


def test_one_message(terminal: Terminal, fake: FakeRooms) -> None:
    options = [
        "--version=2",
        "--priority=9",
        "--ttl-ms=5000",
        "--correlation-id=c",
        "--header=A=b",
        "--to=d1",
        "--to=d2",
    ]
    answer = terminal.json("publish", "orders", "paid", '{"n": 1}', *options, "--idempotency-key=k")
    assert answer["message_id"] == fake.identity(100)
    seen = fake.requests[-1]
    assert seen.headers["idempotency-key"] == "k"
    assert seen.body == {
        "event_type": "paid",
        "version": 2,
        "priority": 9,
        "ttl_ms": 5000,
        "correlation_id": "c",
        "headers": {"A": "b"},
        "destinations": ["d1", "d2"],
        "payload": {"n": 1},
    }


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_a_payload_from_standard_input_keeps_its_bytes(
    terminal: Terminal, fake: FakeRooms, arguments: list[str]
) -> None:
    payload = '{ "b": 1.50, "a": 12345678901234567890,\n "ü": "\\u00fc" }'
    terminal.done("publish", "orders", "paid", *arguments, stdin=f"{payload}\n".encode())
    assert payload.encode() in fake.requests[-1].raw


@pytest.mark.parametrize("option", ["--file", "@"])
def test_process_substitution_is_a_file(terminal: Terminal, fake: FakeRooms, option: str) -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"n": 0}\n')
    os.close(writer)
    path = f"/dev/fd/{reader}"
    try:
        terminal.done(
            "publish", "orders", "paid", *((f"@{path}",) if option == "@" else (option, path))
        )
    finally:
        os.close(reader)
    assert published(fake) == [0]


def test_a_fifo_without_a_writer_is_refused(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooms.cli.input_files.WRITER_S", 0.01)
    path = tmp_path / "fifo"
    os.mkfifo(path)
    for arguments in ((f"@{path}",), ("--file", str(path))):
        result = terminal.run("publish", "orders", "paid", *arguments)
        assert result.exit_code != 0
        assert f"{path} cannot be read: it is a FIFO" in result.stderr
    assert fake.requests == []


def test_invalid_payload_sends_no_request(terminal: Terminal, fake: FakeRooms) -> None:
    for payload in ("{", "", "NaN", '{"a": 1} {"b": 2}'):
        result = terminal.run("publish", "orders", "paid", stdin=payload)
        assert result.exit_code == 2
        assert "PAYLOAD is not JSON" in result.stderr
    assert fake.requests == []


def test_a_payload_may_be_a_file(terminal: Terminal, fake: FakeRooms, tmp_path: Path) -> None:
    (tmp_path / "payload.json").write_bytes(b'{"n": 7}\n')
    terminal.done("publish", "orders", "paid", f"@{tmp_path / 'payload.json'}")
    assert published(fake) == [7]
    result = terminal.run("publish", "orders", "paid", f"@{tmp_path / 'none.json'}")
    assert result.exit_code == 2
    assert "none.json cannot be read: No such file" in result.stderr


def test_a_file_goes_out_in_batches(terminal: Terminal, fake: FakeRooms, tmp_path: Path) -> None:
    path = tmp_path / "m.ndjson"
    path.write_bytes(messages(7))
    summary = terminal.json("publish", "orders", "--file", str(path), "--batch-size", "3")
    assert summary["published"] == 7
    assert summary["repeated"] == 0
    assert published(fake) == list(range(7))
    sent = fake.sent("POST", ".*/batch")
    assert [len(seen.body["messages"]) for seen in sent] == [3, 3, 1]
    keys = [seen.headers["idempotency-key"] for seen in sent]
    assert keys == [f"{summary['idempotency_prefix']}-{offset}" for offset in (0, 120, 240)]


def test_the_same_file_again_publishes_nothing(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    path = tmp_path / "m.ndjson"
    path.write_bytes(messages(5))
    command = ["publish", "orders", "--file", str(path), "--batch-size", "2"]
    terminal.done(*command)
    assert terminal.json(*command)["repeated"] == 5
    assert "published 5 messages, 5 of them by an earlier run" in terminal.done(*command)
    assert published(fake) == list(range(5))
    terminal.done(*command, "--again")
    assert published(fake) == [*range(5), *range(5)]


def test_another_batch_size_publishes_nothing_twice(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    path = tmp_path / "m.ndjson"
    path.write_bytes(messages(5))
    terminal.done("publish", "orders", "--file", str(path), "--batch-size", "2")
    result = terminal.run("publish", "orders", "--file", str(path), "--batch-size", "3")
    assert result.exit_code == 1
    assert "use the same --batch-size again" in result.stderr
    assert published(fake) == list(range(5))


TOO_COSTLY = problem(
    413,
    "A batch makes too much work",
    "the messages make too many deliveries",
    kind="batch-too-costly",
)
TOO_LARGE = problem(413, "Beyond a limit", "the body may have 9 bytes", kind="too-large")


def refuse_more_than(most: int, refusal: Answer = TOO_COSTLY) -> Callable[[Seen], Answer | None]:
    def interfere(seen: Seen) -> Answer | None:
        if seen.path.endswith("/batch") and len(seen.body["messages"]) > most:
            return refusal
        return None

    return interfere


def batch_sizes(fake: FakeRooms) -> list[int]:
    return [len(seen.body["messages"]) for seen in fake.sent("POST", ".*/batch")]


@pytest.mark.parametrize("refusal", [TOO_COSTLY, TOO_LARGE, (413, {})])
def test_a_batch_that_is_too_large_is_sent_in_halves(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, refusal: Answer
) -> None:
    path = tmp_path / "m.ndjson"
    path.write_bytes(messages(20))
    command = ["publish", "orders", "--file", str(path), "--batch-size", "10"]
    fake.interfere = refuse_more_than(3, refusal)
    result = terminal.run(*command)
    assert result.exit_code == 0, result.stderr
    assert batch_sizes(fake)[:6] == [10, 5, 3, 2, 3, 2]
    assert batch_sizes(fake)[6:] == [3, 2, 3, 2]  # the size that fits is known by now
    assert published(fake) == list(range(20))
    assert "going on with 3 messages at a time" in result.stderr


@pytest.mark.parametrize("most_now", [3, 4, 100])
def test_halves_are_not_published_twice_whatever_the_service_takes_now(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, most_now: int
) -> None:
    path = tmp_path / "m.ndjson"
    path.write_bytes(messages(20))
    command = ["publish", "orders", "--file", str(path), "--batch-size", "10"]
    fake.interfere = refuse_more_than(3)
    terminal.done(*command)
    fake.interfere = refuse_more_than(most_now)
    assert terminal.json(*command)["repeated"] == 20
    assert published(fake) == list(range(20))


def test_one_message_that_is_too_large_ends_the_upload(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    path = tmp_path / "m.ndjson"
    path.write_bytes(messages(3))
    fake.interfere = refuse_more_than(0)
    result = terminal.run("publish", "orders", "--file", str(path))
    assert result.exit_code == 1
    assert "lines 1 to 1 were not accepted" in result.stderr
    assert published(fake) == []


@pytest.mark.parametrize(
    ("status", "kind"), [(409, "conflict"), (413, "too-large"), (422, "invalid")]
)
def test_a_message_that_is_refused_refuses_its_whole_batch(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, status: int, kind: str
) -> None:
    path = tmp_path / "m.ndjson"
    path.write_bytes(messages(20))

    def interfere(seen: Seen) -> Answer | None:
        if seen.path.endswith("/batch") and b'"n":17}' in seen.raw:
            return problem(status, "Refused", "messages[7]: it cannot be published", kind=kind)
        return None

    fake.interfere = interfere
    result = terminal.run("publish", "orders", "--file", str(path), "--batch-size", "10")
    assert result.exit_code == 1
    assert "lines 11 to 20 were not accepted" in result.stderr
    assert "messages[7]: it cannot be published" in result.stderr
    assert "--from-line 11" in result.stderr
    assert "--idempotency-prefix" in result.stderr
    assert published(fake) == list(range(10))
    assert batch_sizes(fake) == [10, 10]


def test_interrupted_upload_resumes(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, pauses: list[float]
) -> None:
    path = tmp_path / "m.ndjson"
    path.write_bytes(messages(10))
    away = True

    def interfere(seen: Seen) -> Answer | None:
        if seen.path.endswith("/batch") and len(fake.messages) == 4 and away:
            fake.headers = {"Retry-After": "7"}
            return problem(503, "Try again soon", "the service cannot take this right now")
        return None

    fake.interfere = interfere
    command = ["publish", "orders", "--file", str(path), "--batch-size", "2"]
    result = terminal.run("--json", *command)
    assert result.exit_code == 1
    reported = json.loads(result.stderr.splitlines()[-1])
    assert (
        reported["published"],
        reported["from_line"],
        reported["lines"],
        reported["status"],
    ) == (
        4,
        5,
        [5, 6],
        503,
    )
    assert len(pauses) == RETRIES
    assert pauses[0] == 7
    away = False
    assert terminal.json(*command)["repeated"] == 4
    assert published(fake) == list(range(10))
    rest = [
        "--from-line",
        str(reported["from_line"]),
        "--idempotency-prefix",
        reported["idempotency_prefix"],
    ]
    summary = terminal.json(*command, *rest)
    assert (summary["published"], summary["repeated"]) == (6, 6)
    assert published(fake) == list(range(10))


def test_a_stopped_upload_says_how_to_go_on(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of batches are known for a day only; a command that is repeated later needs more."""
    (tmp_path / "m.ndjson").write_bytes(messages(5))
    keys = stop_at_second_batch(monkeypatch)
    command = ["publish", "orders", f"--file={tmp_path / 'm.ndjson'}", "--batch-size=2"]
    result = terminal.run(*command, "--idempotency-prefix=mine")
    assert result.exit_code != 0
    said = " ".join(result.stderr.split())
    assert "stopped after 2 messages; for 24 hours, repeating the command" in said
    assert "later, or to skip finished lines: --idempotency-prefix mine --from-line 3" in said
    assert len(keys) == 2


def stop_at_second_batch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let Ctrl-C interrupt the second batch. Return the keys of batches."""
    keys: list[str] = []

    def stop(upload: Upload, batch: PublishBatch) -> bool:
        keys.append(f"{upload.prefix}-{batch.offsets[0]}")
        if len(keys) == 2:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(Upload, "_send", stop)
    return keys


def test_a_stopped_upload_of_a_file_that_is_published_again_is_continued_without_that(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run with --again has keys of its own: repeating it publishes everything once more."""
    (tmp_path / "m.ndjson").write_bytes(messages(5))
    command = ["publish", "orders", f"--file={tmp_path / 'm.ndjson'}", "--batch-size=2"]
    keys = stop_at_second_batch(monkeypatch)
    result = terminal.run(*command, "--again")
    assert result.exit_code != 0
    said = " ".join(result.stderr.split())
    assert "publishes nothing twice" not in said
    prefix = keys[0].rpartition("-")[0]
    assert f"in place of --again: --idempotency-prefix {prefix} --from-line 3" in said
    both = terminal.run(*command, "--again", "--idempotency-prefix", prefix)
    assert both.exit_code == 2
    assert len(keys) == 2, "it would ignore the prefix"


def test_a_failed_upload_of_a_file_that_is_published_again_is_continued_without_that(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, pauses: list[float]
) -> None:
    (tmp_path / "m.ndjson").write_bytes(messages(5))
    fake.interfere = lambda seen: (
        problem(503, "Try again soon", "")
        if len(fake.messages) == 2 and "batch" in seen.path
        else None
    )
    command = ["publish", "orders", f"--file={tmp_path / 'm.ndjson'}", "--batch-size=2"]
    result = terminal.run(*command, "--again")
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "publishes nothing twice" not in said
    assert "in place of --again: --idempotency-prefix " in said
    rest = said.partition("in place of --again: ")[2].split()[:4]
    fake.interfere = lambda _: None
    assert terminal.json(*command, *rest)["repeated"] == 0
    assert published(fake) == list(range(5))


def test_an_upload_that_was_stopped_before_it_began_published_nothing(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.ndjson").write_bytes(messages(5))

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rooms.cli.bulk_publish.scan_file", stop)
    result = terminal.run("publish", "orders", f"--file={tmp_path / 'm.ndjson'}")
    assert result.exit_code != 0
    assert "nothing was published" in result.stderr
    assert "--idempotency-prefix" not in result.stderr


def test_busy_service_is_retried(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path, pauses: list[float]
) -> None:
    path = tmp_path / "m.ndjson"
    path.write_bytes(messages(2))
    answers = [problem(429, "Too many requests", ""), problem(503, "Try again soon", ""), None]
    fake.interfere = lambda seen: answers.pop(0) if seen.path.endswith("/batch") else None
    assert terminal.json("publish", "orders", "--file", str(path))["published"] == 2
    assert pauses == [1.0, 2.0]


def test_refused_messages_are_reported_by_line(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    path = tmp_path / "m.ndjson"
    path.write_bytes(
        messages(3) + b'\n\n{"event_type":"paid","payload":{"amount":"bad"}}\n' + messages(1)
    )
    result = terminal.run("publish", "orders", "--file", str(path), "--batch-size", "2")
    assert result.exit_code == 1
    assert "line 6: payload.amount: is no number" in result.stderr
    assert "2 messages are published" in result.stderr
    resume = result.stderr.partition("continue with: ")[2].split()
    assert resume[2:] == ["--from-line", "3"]
    path.write_bytes(messages(3) + b'\n\n{"event_type":"paid","payload":{"n":99}}\n' + messages(1))
    terminal.done("publish", "orders", "--file", str(path), "--batch-size", "2", *resume)
    assert published(fake) == [0, 1, 2, 99, 0]


def test_file_with_an_invalid_line_sends_nothing(
    terminal: Terminal, fake: FakeRooms, tmp_path: Path
) -> None:
    path = tmp_path / "m.ndjson"
    for line, problem_ in (
        (b"{", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"event_type":"\xff"}', "not a JSON object"),
        (b'{"payload":1}', "no event_type"),
    ):
        path.write_bytes(messages(3) + line)
        result = terminal.run("publish", "orders", "--file", str(path), "--batch-size", "1")
        assert result.exit_code == 1
        assert f"line 4: {problem_}" in result.stderr
        assert "nothing was published" in result.stderr
    assert fake.messages == []


def test_lines_may_be_payloads(terminal: Terminal, fake: FakeRooms) -> None:
    command = ["publish", "orders", "paid", "--file", "-", "--priority", "3"]
    first = terminal.run("--json", *command, stdin='{"n": 1}\r\n[2]\n"three"')
    assert json.loads(first.stdout)["published"] == 3
    assert [message["payload"] for message in fake.messages] == [{"n": 1}, [2], "three"]
    assert {message["priority"] for message in fake.messages} == {3}
    other = terminal.run("--json", *command[:-1], "4", stdin='{"n": 1}\r\n[2]\n"three"')
    assert json.loads(other.stdout)["repeated"] == 0


def test_options_that_do_not_go_with_a_file(terminal: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "m.ndjson"
    path.write_bytes(messages(1))
    for extra in (["--priority", "3"], ["--idempotency-key", "k"]):
        assert terminal.run("publish", "orders", "--file", str(path), *extra).exit_code == 2
    assert terminal.run("publish", "orders", "paid", "1", "--file", str(path)).exit_code == 2
    assert terminal.run("publish", "orders", "--file", f"{path}.none").exit_code == 2


def test_batches_are_bounded_in_bytes() -> None:
    line = b'{"event_type":"e","payload":"%s"}\n' % (b"x" * (1024 * 1024))
    found = list(read_batches(io.BytesIO(line * 20), parse_message_line, size=1000))
    assert sum(len(batch.messages) for batch in found) == 20
    assert max(sum(map(len, batch.messages)) for batch in found) <= MAX_BATCH_BYTES
    assert [number for batch in found for number in batch.lines] == list(range(1, 21))
    assert found[1].offsets[0] == len(line) * len(found[0].messages)


def test_a_line_without_end_is_refused() -> None:
    with pytest.raises(LineError, match="line 2: longer than"):
        scan_file(io.BytesIO(b"1\n" + b"2" * (MAX_LINE_BYTES + 1)), payload_parser({}))


def test_digest_depends_on_content_and_fields() -> None:
    wrap = payload_parser({"event_type": "e"})
    found = {
        scan_file(io.BytesIO(content), wrap, salt=salt).digest
        for content in (b"1\n", b"2\n")
        for salt in (b"", b"x")
    }
    assert len(found) == 4
    assert scan_file(io.BytesIO(b"1\n2\n\n3"), wrap, first_line=2).messages == 2
