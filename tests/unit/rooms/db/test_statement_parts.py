"""Test the parameter of statements that insert many rows."""

import json
from datetime import UTC, datetime

import pytest

from rooms.db.statement_parts import rows_as_json
from rooms.domain.state_machine import SubscriptionType


def test_values_are_written_as_postgresql_reads_them() -> None:
    at = datetime(2026, 1, 31, 12, 0, 0, 250, tzinfo=UTC)
    row = {"a": b"\x00\xff", "at": at, "kind": SubscriptionType.PULL, "none": None, "n": [1, 2.5]}
    assert json.loads(rows_as_json([row, row | {"a": None}])) == [
        {"a": "\\x00ff", "at": "2026-01-31T12:00:00.000250Z", "kind": "PULL", "none": None}
        | {"n": [1, 2.5]},
        {"a": None, "at": "2026-01-31T12:00:00.000250Z", "kind": "PULL", "none": None}
        | {"n": [1, 2.5]},
    ]
    assert rows_as_json([]) == "[]"


@pytest.mark.parametrize("other", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 3}])
def test_no_column_of_a_row_is_lost(other: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="different columns"):
        rows_as_json([{"a": 1, "b": 2}, other])
