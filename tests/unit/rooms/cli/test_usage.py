"""Test `rooms usage`: queries, the table, and files."""

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


def serve(fake: FakeRooms) -> None:
    def interfere(seen: Seen) -> Answer | None:
        match seen.path:
            case "/v1/usage":
                return 200, {"items": [ROW], "complete_until": None, "next_cursor": None}
            case "/v1/usage/export":
                return 200, FILE
        return None

    fake.interfere = interfere


def test_list(terminal: Terminal, fake: FakeRooms) -> None:
    serve(fake)
    done = terminal.run(
        "usage", "list", "--by", "organisation", "--by", "event_type", "--by", "application", "--per", "day",
        "--since", "2026-03-01T00:00:00Z", "--organisation", "*", "--application", "registry",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    for value in ("north", "order.paid", "registry", "12", "3456", "no"):
        assert value in done.stdout
    assert "room" not in done.stdout
    query = fake.requests[-1].query
    assert (query["by"], query["per"]) == ("organisation,event_type,application", "day")
    assert (query["since"], query["organisation_id"]) == ("2026-03-01T00:00:00Z", "*")
    assert query["application"] == "registry"


def test_export_appears_complete(terminal: Terminal, fake: FakeRooms, tmp_path: Path) -> None:
    serve(fake)
    out = tmp_path / "usage.csv"
    done = terminal.run("usage", "export", "--out", str(out))
    assert done.exit_code == 0, done.stderr
    assert out.read_bytes() == FILE
    assert list(tmp_path.glob("*.part")) == []
    assert fake.requests[-1].query["by"] == "organisation"
