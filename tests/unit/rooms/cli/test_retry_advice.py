"""Test that advice is applied whole, to the version that was read, or not at all."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.cli_runner import Terminal
from tests.support.fake_api import Answer, FakeRooms, Seen, problem

SUB = "019b0000-0000-7000-8000-00000000000a"
POLICY = {
    "delay_ms": 1000.0, "multiplier": 2.0, "redeliveries": 9, "max_delay_ms": 60_000.0, "jitter": 0.25,
}  # fmt: skip
EFFECT = {"delivered": 0.99, "attempts": 1.25, "mean_wait_s": 12.0, "p95_wait_s": 90.0}
RANGES = {"delivered": (0.97, 0.995), "attempts": (1.2, 1.4), "mean_wait_s": (8.0, 20.0)}


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
