"""Test the commands that show the last hour by the minute."""

from typing import Any

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen

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


def serve(fake: FakeRooms, found: dict[str, Any] = FOUND) -> None:
    def interfere(seen: Seen) -> Answer | None:
        return (200, found) if seen.path.endswith("/activity") else None

    fake.interfere = interfere


def test_busy_minutes_are_shown(terminal: Terminal, fake: FakeRooms) -> None:
    serve(fake)
    done = terminal.run("usage", "last-hour", "--organisation", "*")
    assert done.exit_code == 0, done.stderr
    assert "11:02" in done.stdout
    assert "11:01" not in done.stdout
    assert "p95 80.0 ms" in done.stdout
    assert fake.requests[-1].query == {"organisation_id": "*"}


def test_of_a_subscription(terminal: Terminal, fake: FakeRooms) -> None:
    serve(fake)
    fake.rooms.append({"id": 1000, "name": "orders"})
    fake.subscriptions.append({"id": "01900000-0000-7000-8000-000000000001", "name": "crm"})
    assert terminal.json("subscription", "activity", "orders/crm") == FOUND
    assert fake.requests[-1].path.startswith("/v1/subscriptions/")


def test_a_quiet_hour(terminal: Terminal, fake: FakeRooms) -> None:
    latency = dict.fromkeys(FOUND["latency"])
    serve(fake, {"complete_until": None, "latency": latency, "minutes": [QUIET]})
    done = terminal.run("usage", "last-hour")
    assert done.stdout == ""
    assert "nothing was delivered" in done.stderr
