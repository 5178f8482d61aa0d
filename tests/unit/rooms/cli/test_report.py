"""Test what `rooms report` says of the present: the service is asked, and may list a part only."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

SUB = "019b0000-0000-7000-8000-00000000000a"


def publish(data: Path) -> None:
    """Write the tables of a run that knows one subscription."""
    root = data / "analysis" / "tables"
    folder = root / "runs" / "1" / "rollups_daily"
    folder.mkdir(parents=True)
    row = {
        "subscription_id": SUB,
        "room_id": 1,
        "target_host": "a.test",
        "attempts": 9,
        "failures": 9,
    }
    pq.write_table(pa.Table.from_pylist([row]), folder / "a.parquet")
    latest = {
        "run": 1,
        "at": "2026-01-01T00:00:00+00:00",
        "totals": {},
        "tables": {"rollups_daily": "runs/1/rollups_daily"},
    }
    (root / "latest.json").write_text(json.dumps(latest))


def test_the_page_of_one_subscription_has_its_state_however_many_fail(
    terminal: Terminal, fake: FakeRooms
) -> None:
    failing = {
        "subscription_id": SUB, "name": "crm", "room": "orders", "condition": "failing", "since": "2026-01-01T00:00:00Z",
        "sidelined": 0, "retrying": 1, "due": 0, "held": {}, "last_error": "timeout",
    }  # fmt: skip
    others = [
        {**failing, "subscription_id": f"019b0000-0000-7000-8000-{number:012x}"}
        for number in range(100, 300)
    ]

    def answer(seen: Seen) -> Answer:
        asked = seen.query.get("subscription_id")
        listed = others if asked is None else [failing] * (asked == SUB)
        return 200, {
            "at": "2026-01-01T01:00:00Z",
            "health": {"parts": {"database": "up"}},
            "subscriptions": listed,
            "subscriptions_total": 201 if asked is None else len(listed),
        }

    fake.interfere = answer
    publish(terminal.data)
    target = terminal.data / "one.html"
    terminal.done("report", "--subscription", SUB, "--to", str(target))
    page = target.read_text()
    assert "✕ failing" in page
    assert "Healthy" not in page
