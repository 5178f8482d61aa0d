"""Test `rooms usage`, and the last hour by the minute: queries, tables, and files."""

from pathlib import Path
from typing import Any

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen

ROW: dict[str, Any] = {
    "start": "2026-03-01T12:00:00Z",
    "closed": False,
    "organisation_id": "01900000-0000-7000-8000-0000000000a1",
    "organisation_name": "north",
    "room_id": None,
    "room_name": None,
    "event_type": "order.paid",
    "application": "registry",
    "messages": 12,
    "bytes": 3456,
    "deliveries": 24,
    "attempts": 30,
    "failed_attempts": 7,
    "delivered": 23,
    "sidelined": 1,
    "expired": 0,
    "cancelled": 0,
    "dropped": 0,
    "purged": 0,
}
FILE = b"start,closed\r\n2026-03-01T12:00:00Z,false\r\n"
QUIET: dict[str, Any] = {
    "start": "2026-03-01T11:01:00Z",
    "deliveries": 0,
    "delivered": 0,
    "failed": 0,
    "sidelined": 0,
    "expired": 0,
    "p50_ms": None,
    "p95_ms": None,
    "p99_ms": None,
}
BUSY = QUIET | {"start": "2026-03-01T11:02:00Z", "delivered": 41, "failed": 7, "p50_ms": 12.5}
FOUND: dict[str, Any] = {
    "complete_until": None,
    "latency": {"p50_ms": 12.5, "p95_ms": 80.0, "p99_ms": 250.0},
    "minutes": [QUIET, BUSY],
}


def serve(fake: FakeRooms) -> None:
    def interfere(seen: Seen) -> Answer | None:
        match seen.path:
            case "/v1/usage":
                return 200, {"items": [ROW], "complete_until": None, "next_cursor": None}
            case "/v1/usage/export":
                return 200, FILE
        return None

    fake.interfere = interfere


def test_a_room_without_a_name_is_shown_as_deleted(fake: FakeRooms, terminal: Terminal) -> None:
    rows = [ROW | {"room_id": 7, "room_name": name} for name in ("orders", None)]
    page = {"items": rows, "next_cursor": None}
    fake.interfere = lambda _: (200, page)
    shown = terminal.done("usage", "list", "--by", "room").splitlines()
    assert ["orders" in line for line in shown[-2:]] == [True, False]
    assert ["(deleted, or not shared any more)" in line for line in shown[-2:]] == [False, True]
    assert terminal.json("usage", "list", "--by", "room") == page


def test_list(terminal: Terminal, fake: FakeRooms) -> None:
    serve(fake)
    done = terminal.run(
        "usage", "list", "--by", "organisation", "--by", "event_type", "--by", "application", "--per", "day",
        "--since", "2026-03-01T00:00:00Z", "--organisation", "*", "--application", "registry", "--own",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    for value in ("north", "order.paid", "registry", "12", "3456", "no"):
        assert value in done.stdout
    assert "room" not in done.stdout
    query = fake.requests[-1].query
    assert (query["by"], query["per"]) == ("organisation,event_type,application", "day")
    assert (query["since"], query["organisation_id"]) == ("2026-03-01T00:00:00Z", "*")
    assert (query["application"], query["own"]) == ("registry", "true")


def test_a_list_says_how_far_it_counts(terminal: Terminal, fake: FakeRooms) -> None:
    """Counts follow a publish after seconds: without the time, the last ones seem to be lost."""
    page: dict[str, Any] = {
        "items": [],
        "complete_until": "2026-03-01T12:34:56Z",
        "next_cursor": None,
    }
    fake.interfere = lambda _: (200, page)
    done = terminal.run("usage", "list")
    assert done.stderr.splitlines() == [
        "nothing was counted in this time",
        "everything before 2026-03-01T12:34:56Z is counted",
    ]
    assert terminal.json("usage", "list") == page
    page["complete_until"] = None
    assert "everything before" not in terminal.run("usage", "list").stderr


def test_export_appears_complete(terminal: Terminal, fake: FakeRooms, tmp_path: Path) -> None:
    serve(fake)
    out = tmp_path / "usage.csv"
    done = terminal.run("usage", "export", "--out", str(out))
    assert done.exit_code == 0, done.stderr
    assert out.read_bytes() == FILE
    assert list(tmp_path.glob("*.part")) == []
    assert fake.requests[-1].query["by"] == "organisation"


def serve_activity(fake: FakeRooms, found: dict[str, Any] = FOUND) -> None:
    def interfere(seen: Seen) -> Answer | None:
        return (200, found) if seen.path.endswith("/activity") else None

    fake.interfere = interfere


def test_busy_minutes_are_shown(terminal: Terminal, fake: FakeRooms) -> None:
    serve_activity(fake)
    done = terminal.run("usage", "last-hour", "--organisation", "*")
    assert done.exit_code == 0, done.stderr
    assert "11:02" in done.stdout
    assert "11:01" not in done.stdout
    assert "p95 80.0 ms" in done.stdout
    assert fake.requests[-1].query == {"organisation_id": "*"}


def test_of_a_subscription(terminal: Terminal, fake: FakeRooms) -> None:
    serve_activity(fake)
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.subscriptions.append({"id": "01900000-0000-7000-8000-000000000001", "name": "crm"})
    assert terminal.json("subscription", "activity", "orders/crm") == FOUND
    assert fake.requests[-1].path.startswith("/v1/subscriptions/")


def test_a_quiet_hour(terminal: Terminal, fake: FakeRooms) -> None:
    latency = dict.fromkeys(FOUND["latency"])
    serve_activity(fake, {"complete_until": None, "latency": latency, "minutes": [QUIET]})
    done = terminal.run("usage", "last-hour")
    assert done.stdout == ""
    assert "nothing was delivered" in done.stderr
