"""Test that foreign text reaches no terminal, log or page unescaped, through any command."""

import io
import json
import logging
import re
import socket
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delivery.analytics.report.page import Figure, _figure_html
from rooms.cli.errors import ProblemError, print_error
from rooms.local.log_file import RotatingLog
from rooms.local.supervisor import print_line
from rooms.safe_text import (
    LineFormatter,
    brief_repr,
    json_safe,
    lines_safe,
    log_to_stderr,
    log_warnings_safely,
    terminal_safe,
)
from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen
from tests.unit.rooms.cli.test_sideline import DELIVERY, ITEM, STATUS
from tests.unit.rooms.cli.test_webhook_receiver import rooms_listen

HOSTILE = (
    "x\x1b]0;owned\x07\x1b[2J\x1b[31m\x7f\x9b31m\x85\x00\r\b"
    "\u202eevil\u2066\u200b\u200d\ufeff\u2028\u2029\u00ad\u3164\ufe0f\U000e0041\n"
    "ERROR rooms: forged\t[bold]"
)
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\ud800-\udfff\U000e0000-\U000e0fff]"
)
STYLE = re.compile("\x1b\\[[0-9;]*m")


def assert_harmless(text: str) -> None:
    """Check that the text has only the command's own colours, and no forged line."""
    assert not FORBIDDEN.search(STYLE.sub("", text)), repr(FORBIDDEN.search(text))
    assert "\x1b[31m" not in text.replace("\x1b[31m\x1b[1m", "") or "Error: " in text
    assert not any(line.startswith("ERROR rooms") for line in text.splitlines())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x'", '"x\'"'),
        ("a" * 1_000_000, f"'{'a' * 60}…'"),
        (None, "None"),
        (1.5, "1.5"),
        (2**64 - 1, "18446744073709551615"),
        (10**5_000, "a large number"),
        ([["x"]], "a value of type list"),
    ],
    ids=range(7),
)
def test_a_value_is_shown_briefly(value: object, shown: str) -> None:
    assert brief_repr(value) == shown


@given(st.text())
def test_terminal_safe_text_is_one_printable_line(text: str) -> None:
    safe = terminal_safe(text)
    assert not FORBIDDEN.search(safe)
    assert all(
        char == "\t" or unicodedata.category(char)[0] not in "CZ" or char == " " for char in safe
    )
    assert terminal_safe(safe) == safe
    assert lines_safe(text) == "\n".join(terminal_safe(line) for line in text.split("\n"))


@given(
    st.recursive(
        st.text() | st.integers() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_safe_text_decodes_to_the_same(value: object) -> None:
    for indent in (None, 2):
        safe = json_safe(json.dumps(value, ensure_ascii=False, indent=indent))
        assert not FORBIDDEN.search(safe)
        assert json.loads(safe) == value


def test_other_scripts_are_unchanged() -> None:
    text = "Ünïcode, 漢字, русский, עברית, हिन्दी, 😀"
    assert terminal_safe(text) == json_safe(text) == text
    assert json_safe('{"a":\r\n\t1}') == '{"a": \n\t1}'
    assert (terminal_safe("\ud800"), json_safe('"\ud800"')) == ("\\ud800", '"\\ud800"')


def poisoned(value: Any, key: str = "") -> Any:
    """Return the answer with hostile text in every text field. Ids, times and states stay."""
    if isinstance(value, dict):
        return {name: poisoned(inner, name) for name, inner in value.items()} | (
            {}
            if key in {"held", "parts", "by_reason", "sidelined"} or "messages" in value
            else {HOSTILE: HOSTILE}
        )
    if isinstance(value, list):
        return [poisoned(inner, key) for inner in value]
    kept = {"state", "condition", "next_cursor", "id"}
    if (
        not isinstance(value, str)
        or key in kept
        or re.fullmatch(r"[0-9a-f-]{36}|\d{4}-.*Z|[12]", value)
    ):
        return value
    return f"{value}{HOSTILE}"


THING = "01900000-0000-7000-8000-000000000001"
MEMBER = {
    "name": "m",
    "host": "h",
    "pid": 1,
    "since": "2026-01-01T00:00:00Z",
    "leads": True,
    "partitions": ["upkeep/x"],
}
QUEUE = {
    "name": "orders",
    "store_name": "q",
    "magazine": "orders",
    "sideline": "s",
    "active": True,
    "shards": 1,
}
SUBSCRIPTION = {
    "id": THING,
    "room_id": 1000,
    "name": "crm",
    "type": "PUSH",
    "push_url": "https://x",
    "status_reason": "no",
}
JOB = {
    "id": THING,
    "kind": "restore",
    "state": "done",
    "error": "no",
    "result": {"a": 1},
    "arguments": {"name": "x"},
}
LANE = {"condition": "open", "error": "no", "at": "2026-01-01T00:00:00Z"}
FAILED = {"id": "m", "reason": "r", "error": "e", "payload": {"n": "x"}}
DRY_RUN = {
    "would_move": 1,
    "by_reason": {HOSTILE: 2},
    "sample": [ITEM],
    "too_often": 1,
    "expired": 0,
    "until": "2026-01-01T00:00:00Z",
}
KEY = {"ordering_key": "k", "waiting": 1, "parked": True}
ROUTES: list[tuple[str, Any]] = [
    ("/status", STATUS),
    ("/cluster", {"leader": "m", "epoch": 1, "leader_absent_seconds": 0, "members": [MEMBER]}),
    ("/queues", {"items": [QUEUE], "next_cursor": None}),
    ("/queues/orders", QUEUE),
    ("/queues/orders/sideline", {"items": [FAILED], "next_cursor": None}),
    ("/magazines/orders", {"name": "orders", "depth": 1, "shards": []}),
    ("/magazines/orders_SIDELINE", {"name": "orders", "depth": 1, "shards": []}),
    (f"/subscriptions/{THING}/sideline", {"items": [ITEM], "next_cursor": None}),
    (f"/subscriptions/{THING}/sideline/shovel", DRY_RUN),
    (f"/subscriptions/{THING}/lane", LANE),
    (f"/subscriptions/{THING}/ordering-keys", {"items": [KEY], "next_cursor": None}),
    (f"/subscriptions/{THING}", SUBSCRIPTION),
    ("/jobs", {"items": [JOB], "next_cursor": None}),
    (f"/jobs/{THING}", JOB),
]  # fmt: skip
COMMANDS = [
    ("status",),
    ("cluster",),
    ("room", "list"),
    ("room", "show", "1000"),
    ("event-type", "list", "1000"),
    ("subscription", "list", "1000"),
    ("subscription", "show", THING),
    ("subscription", "lane", THING),
    ("ordering", "keys", THING),
    ("subscription", "pause", THING),
    ("subscription", "test", THING),
    ("messages", "1000"),
    ("message", "show", THING),
    ("message", "cancel", THING),
    ("message", "reschedule", THING, "--delay-ms", "0"),
    ("timeline", THING),
    ("deliveries", THING),
    ("redeliver", DELIVERY),
    ("pull", THING),
    ("stream", THING, "--max", "1"),
    ("queue", "list"),
    ("queue", "show", "orders"),
    ("queue", "sideline", "orders"),
    ("sideline", "list", THING),
    ("sideline", "shovel", THING, "--dry-run"),
    ("jobs",),
    ("job", THING),
    ("restore", "1000", "--follow"),
]


@pytest.fixture
def hostile(fake: FakeRooms, monkeypatch: pytest.MonkeyPatch) -> FakeRooms:
    """Return a service whose every text attacks the terminal."""
    answer = FakeRooms.answer
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.event_types.append({"id": fake.identity(900), "name": "paid", "latest_version": 1})
    fake.subscriptions.append(SUBSCRIPTION)
    fake.messages.append({"id": THING, "caller_id": "mine", "event_type": "paid"})
    message = {
        "message_id": THING,
        "subscription_id": THING,
        "ack_id": "a",
        "event_type": "paid",
        "version": 1,
        "attempt": 1,
        "published_at": "2026-01-01T00:00:00Z",
        "payload": {"n": "x"},
    }
    fake.waiting.append(message)

    def attacked(self: FakeRooms, seen: Seen) -> Answer:
        path = seen.path.removeprefix("/v1")
        if path == "/stream":
            text = json.dumps(poisoned(message), ensure_ascii=False).encode()
            return 200, b"event: message\ndata: " + text + b"\n\n"
        found = next((body for route, body in ROUTES if path == route), None)
        if path.endswith("/restore") and seen.method == "POST":
            found = {"job_id": THING, "kind": "restore", "state": "queued", "created_at": "x"}
        status, body = (200, found) if found is not None else answer(self, seen)
        return status, poisoned(body)

    monkeypatch.setattr(FakeRooms, "answer", attacked)
    return fake


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("as_json", [False, True])
def test_no_command_prints_control_characters(
    terminal: Terminal, hostile: FakeRooms, command: tuple[str, ...], *, as_json: bool
) -> None:
    result = terminal.run(*(["--json"] if as_json else []), *command)
    assert not isinstance(result.exception, Exception), result.exception
    assert "evil" in result.output, "the command shows something of the attack"
    assert_harmless(result.stdout)
    assert_harmless(result.stderr)


@pytest.mark.parametrize("as_json", [False, True])
def test_no_error_prints_control_characters(
    terminal: Terminal, fake: FakeRooms, *, as_json: bool
) -> None:
    problem = {
        "title": f"t{HOSTILE}",
        "detail": f"d{HOSTILE}",
        "errors": [{"field": HOSTILE, "message": HOSTILE}],
    }
    for answer in ((422, problem), (500, HOSTILE.encode()), (403, HOSTILE)):
        fake.interfere = lambda _, answer=answer: answer  # type: ignore[misc]
        result = terminal.run(*(["--json"] if as_json else []), "room", "list")
        assert result.exit_code == 1
        assert_harmless(result.output)
    result = terminal.run(
        *(["--json"] if as_json else []), "room", "show", HOSTILE.replace("\x00", "")
    )
    assert_harmless(result.output)


def test_an_error_of_a_service_has_no_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(ProblemError(403, {"title": "one", "detail": "two\nError: three"}), as_json=False)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_no_webhook_prints_control_characters(tmp_path: Path) -> None:
    """A receiver is open to every process of the machine, and shows what it receives."""
    hostile = HOSTILE.encode()
    header = bytes(byte for byte in hostile if byte not in b"\r\n\0")
    for option in ([], ["--json"]):
        with rooms_listen(tmp_path, *option, "--max", "1") as (process, url):
            port = int(url.rpartition(":")[2])
            request = (
                b"POST /%s HTTP/1.1\r\nHost: x\r\nwebhook-id: %s\r\nX-%s: y\r\n"
                b"Content-Length: %d\r\n\r\n%s"
            )
            send(port, request % (b"\xc2\x9b31m", header, b"\x9bname", len(hostile), hostile))
            stdout, stderr = process.communicate(timeout=60)
        assert_harmless(stdout)
        assert_harmless(stderr)
        assert "evil" in stdout


def send(port: int, request: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(request)
        connection.recv(1000)


@pytest.fixture
def logged() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("%(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("tests.hostile")
    logger.addHandler(handler)
    logger.propagate = False
    yield logger, stream
    logger.removeHandler(handler)
    handler.close()


def test_no_log_record_forges_another(logged: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = logged
    logger.warning("from a tenant: %s", HOSTILE)
    assert len(stream.getvalue().splitlines()) == 1
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("a bug with %s", HOSTILE, stack_info=True)
    lines = stream.getvalue().splitlines()
    assert [line[:2] == "  " for line in lines] == [False, False] + [True] * (len(lines) - 2)
    assert any("forged" in line for line in lines[2:])
    assert_harmless(stream.getvalue())


def test_logs_and_warnings_are_escaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "root", root)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    log_to_stderr("INFO")
    root.info("said: %s", HOSTILE)
    monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))  # type: ignore[attr-defined]
    log_warnings_safely()
    command = logging.getLogger("tests.command")
    command.propagate = False
    command.warning("said: %s", HOSTILE)
    first, second = stream.getvalue().splitlines()
    assert " INFO root: said: x\\x1b]0;" in first
    assert second.startswith("said: x\\x1b]0;")
    assert_harmless(stream.getvalue())


def test_output_of_servers_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = RotatingLog(tmp_path / "log", echo=print_line)
    book.write(f"ERROR: key {HOSTILE}".replace("\n", ""))
    book.close()
    assert_harmless((tmp_path / "log").read_text())
    assert_harmless(capsys.readouterr().err)
    assert "owned" in book.tail()


def test_a_report_has_no_markup_and_no_hidden_text_of_a_tenant() -> None:
    reported = f"<script>alert(1)</script>{HOSTILE}"
    html = _figure_html(Figure(name="x", title="t", chart=None, caption=reported))
    assert "<script>" not in html
    assert not FORBIDDEN.search(html)
