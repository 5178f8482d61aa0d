"""Test the exit code of `rooms reconcile`, and what it says of losses, holes and what is not read."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.cli_runner import Terminal

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
ASIDE = {
    "path": "dt=2026-05-01/hr=11/a.parquet", "reason": "damaged", "detail": "its bytes are not those that were sealed",
    "part": 493787, "counted": False, "remedy": "restore it from a copy",
}  # fmt: skip
AGES = pa.schema(
    [
        ("room_id", pa.int32()), ("subscription_id", pa.string()), ("outcome", pa.string()), ("deliveries", pa.int64()),
        ("oldest_since", pa.timestamp("us", "UTC")), ("oldest_age_s", pa.float64()), ("oldest_delivery_id", pa.string()),
    ]
)  # fmt: skip


def publish(data: Path, *, aside: list[dict[str, Any]], **columns: int) -> None:
    """Write the tables of a run with one room and hour."""
    root = data / "analysis" / "tables"
    counts = {
        "fanout": 9, "enqueued": 9, "delivered": 9, "missing": 0, "lost": 0, "stuck": 0, "unknown": 0,
        "never_enqueued": 0, "unanchored": 0, "residual_fanout": 0, "residual_outcome": 0, **columns,
    }  # fmt: skip
    tables = {
        "reconciliation": pa.Table.from_pylist([{"hour": NOON, "room_id": 7, **counts}]),
        "gaps": pa.table({"missing": pa.array([], pa.int64())}),
        "ages": pa.Table.from_pylist(
            [
                {"room_id": 7, "subscription_id": "s", "outcome": outcome, "deliveries": 2, "oldest_since": NOON,
                 "oldest_age_s": 90_000.0, "oldest_delivery_id": "d"}
                for outcome in ("waiting", "stuck")
            ],
            schema=AGES,
        ),
    }  # fmt: skip
    for name, rows in tables.items():
        (root / "runs" / "1" / name).mkdir(parents=True)
        pq.write_table(rows, root / "runs" / "1" / name / "a.parquet")
    latest = {
        "run": 1, "at": NOON.isoformat(), "totals": counts, "tables": {name: f"runs/1/{name}" for name in tables},
        "incomplete": bool(aside), "set_aside": aside, "set_aside_total": len(aside),
    }  # fmt: skip
    (root / "latest.json").write_text(json.dumps(latest))


@pytest.mark.parametrize(
    ("aside", "columns", "code", "said"),
    [
        ([], {}, 0, "nothing is lost: every delivery is accounted for"),
        ([], {"stuck": 2}, 0, "nothing is lost, but 2 deliveries are stuck"),
        ([], {"lost": 1}, 1, "1 lost, 0 missing"),
        ([], {"missing": 1}, 1, "0 lost, 1 missing"),
        ([], {"never_enqueued": 1}, 1, "nothing is lost, but rows of the log are missing"),
        ([], {"residual_outcome": 1}, 1, "the totals do not match"),
        ([ASIDE], {}, 3, "nothing that was read is lost"),
        ([ASIDE], {"never_enqueued": 1, "unknown": 4}, 3, "nothing that was read is lost"),
        ([ASIDE], {"lost": 1}, 1, "1 lost, 0 missing"),
    ],
)
def test_the_exit_code_says_whether_anything_is_lost(
    terminal: Terminal, aside: list[dict[str, Any]], columns: dict[str, int], code: int, said: str
) -> None:
    publish(terminal.data, aside=aside, **columns)
    result = terminal.run("reconcile")
    assert (result.exit_code, said in result.stderr) == (code, True), result.output
    assert f"(as of {NOON.isoformat()})" in result.stderr
    assert ("set aside: dt=2026-05-01/hr=11/a.parquet: damaged" in result.stderr) is bool(aside)
    found = terminal.run("--json", "reconcile")
    assert found.exit_code == code
    document = json.loads(found.stdout)
    assert document["incomplete"] is bool(aside)
    assert document["set_aside"] == aside
    assert document["closed"] is (code == 0)
    for name in ("lost", "missing"):
        assert document[name] == columns.get(name, 0)


def test_the_oldest_are_listed_with_their_age(terminal: Terminal) -> None:
    publish(terminal.data, aside=[])
    lines = terminal.done("reconcile").splitlines()
    (stuck,) = [line for line in lines if line.startswith("stuck")]
    assert stuck.split() == ["stuck", "2", "1.0", "d", "7", "s"]
    first, _ = terminal.json("reconcile")["ages"]
    assert (first["outcome"], first["oldest_since"]) == ("stuck", NOON.isoformat())


@pytest.mark.parametrize("content", ["", "[]", '{"run": 1}', '{"run": '])
def test_a_damaged_result_is_an_error_of_three_lines(terminal: Terminal, content: str) -> None:
    at = terminal.data / "analysis" / "tables" / "latest.json"
    at.parent.mkdir(parents=True)
    at.write_text(content)
    result = terminal.run("reconcile")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 3
    assert "--full" in result.stderr
