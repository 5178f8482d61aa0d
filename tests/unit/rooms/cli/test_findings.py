"""Test `rooms reconcile` and `rooms retry-advice`.

The first has an exit code, and says what is lost, missing in the log, or not read. Advice is
applied whole, to the version that was read, or not at all.
"""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen, problem

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
SUB = "019b0000-0000-7000-8000-00000000000a"
POLICY = {
    "delay_ms": 1000.0, "multiplier": 2.0, "redeliveries": 9, "max_delay_ms": 60_000.0, "jitter": 0.25,
}  # fmt: skip
EFFECT = {"delivered": 0.99, "attempts": 1.25, "mean_wait_s": 12.0, "p95_wait_s": 90.0}
RANGES = {"delivered": (0.97, 0.995), "attempts": (1.2, 1.4), "mean_wait_s": (8.0, 20.0)}


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


def publish_incident(data: Path, began: datetime, began_from: datetime) -> None:
    """Write a run with an incident that has ended ten minutes after it began."""
    row = {
        "incident": 1, "kind": "single", "began": began, "began_from": began_from,
        "began_to": began + timedelta(seconds=5), "ended": began + timedelta(minutes=10), "ended_from": None,
        "ended_to": None, "open": False, "subscriptions": [SUB], "failures": 9, "attempts": 9, "causes": None,
    }  # fmt: skip
    folder = data / "analysis" / "tables" / "runs" / "1" / "incidents"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([row]), folder / "a.parquet")
    latest = {
        "run": 1,
        "at": NOON.isoformat(),
        "totals": {},
        "tables": {"incidents": "runs/1/incidents"},
    }
    (folder.parents[2] / "latest.json").write_text(json.dumps(latest))


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        (timedelta(hours=2), ["10:00:00 to 12:00:05"]),
        (timedelta(days=2), ["2026-04-29 12:00:00", "to 2026-05-01 12:00:05"]),
    ],
)
def test_the_range_of_a_begin_is_its_own_and_not_centred(
    terminal: Terminal, before: timedelta, shown: list[str]
) -> None:
    publish_incident(terminal.data, NOON, NOON - before)
    output = terminal.done("incidents")
    assert "2026-05-01 12:00:00" in output
    for one in shown:
        assert one in output


@pytest.mark.parametrize("name", ["unanchored", "excess", "enqueued_twice"])
def test_a_room_whose_rows_contradict_each_other_has_their_number(
    terminal: Terminal, name: str
) -> None:
    publish(terminal.data, aside=[], **{name: 4321})
    lines = terminal.run("reconcile").stdout.splitlines()
    (place,) = [at for at, line in enumerate(lines) if line.startswith("room")]
    assert lines[place].endswith(name.replace("_", " "))
    assert lines[place + 2].split() == ["7", "0", "0", "0", "0", "4321"]


def test_the_oldest_are_listed_with_their_age(terminal: Terminal) -> None:
    publish(terminal.data, aside=[])
    lines = terminal.done("reconcile").splitlines()
    (stuck,) = [line for line in lines if line.startswith("stuck")]
    assert stuck.split() == ["stuck", "2", "1.0", "d", "7", "s"]
    first, _ = terminal.json("reconcile")["ages"]
    assert (first["outcome"], first["oldest_since"]) == ("stuck", NOON.isoformat())


@pytest.mark.parametrize(
    "content", ["", "[]", '{"run": 1}', '{"run": ', "[" * 100_000], ids=range(5)
)
def test_a_damaged_result_is_an_error_of_three_lines(terminal: Terminal, content: str) -> None:
    at = terminal.data / "analysis" / "tables" / "latest.json"
    at.parent.mkdir(parents=True)
    at.write_text(content)
    result = terminal.run("reconcile")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 3
    assert "--full" in result.stderr


def write_advice(data: Path, **fields: Any) -> None:
    """Write the table of one run of the analysis."""
    row: dict[str, Any] = {
        "subscription_id": SUB, "deliveries": 900, "hopeless": 0.01, "reproduced": True,
        "held_up": True,
    }  # fmt: skip
    for prefix in ("deployed", "recommended"):
        row |= {f"{prefix}_{name}": value for name, value in POLICY.items()}
    for prefix in ("measured", "replayed", "recommended", "tested", "tested_deployed"):
        row |= {f"{prefix}_{name}": value for name, value in EFFECT.items()}
    for name, ends in RANGES.items():
        for end, value in zip(("low", "high"), ends, strict=True):
            row[f"recommended_{name}_{end}"] = value
    tables = data / "analysis" / "tables"
    (tables / "advice").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([{**row, **fields}]), tables / "advice" / "part.parquet")
    latest = {
        "run": 1,
        "at": "2026-01-01T00:00:00+00:00",
        "totals": {},
        "tables": {"advice": "advice"},
    }
    (tables / "latest.json").write_text(json.dumps(latest))


def answering(fake: FakeRooms, patched: Answer) -> None:
    """Let the service answer with version 7, and this to a change."""

    def interfere(seen: Seen) -> Answer | None:
        if seen.path != f"/v1/subscriptions/{SUB}":
            return None
        return patched if seen.method == "PATCH" else (200, {"name": "crm", "version": 7})

    fake.interfere = interfere


def test_all_that_was_promised_is_set_in_one_request(terminal: Terminal, fake: FakeRooms) -> None:
    write_advice(terminal.data)
    answering(fake, (200, {"name": "crm", "version": 8}))
    result = terminal.run("retry-advice", "--apply", SUB)
    assert result.exit_code == 0, result.output
    assert "97.00% to 99.50%" in result.stdout
    assert "applied to crm" in result.stdout
    (change,) = [seen for seen in fake.requests if seen.method == "PATCH"]
    assert change.body == {
        "version": 7,
        "delivery_delay_ms": 1000,
        "delivery_delay_multiplier": 2.0,
        "delivery_attempts": 9,
        "delivery_max_delay_ms": 60_000,
        "delivery_jitter": 0.25,
    }


def test_a_change_meanwhile_is_reported(terminal: Terminal, fake: FakeRooms) -> None:
    write_advice(terminal.data)
    answering(fake, problem(409, "Conflict", "it was changed meanwhile"))
    result = terminal.run("retry-advice", "--apply", SUB)
    assert result.exit_code == 1
    assert "changed meanwhile" in result.stderr


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"held_up": False}, "did not keep its promise"),
        ({"reproduced": False}, "does not reproduce"),
        ({f"recommended_{name}": None for name in POLICY}, "no other policy is surely better"),
    ],
)
def test_nothing_is_applied_that_does_not_hold(
    fields: dict[str, Any], said: str, terminal: Terminal, fake: FakeRooms
) -> None:
    write_advice(terminal.data, **fields)
    answering(fake, (200, {"name": "crm"}))
    result = terminal.run("retry-advice", "--apply", SUB)
    assert result.exit_code == 1
    assert said in result.stderr
    assert fake.requests == []
