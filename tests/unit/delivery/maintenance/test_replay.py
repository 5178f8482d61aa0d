"""Test what replay jobs read from their arguments."""

from typing import Any

import pytest

from delivery.maintenance.replay import Entitlement


@pytest.mark.parametrize(
    ("arguments", "from_us", "until_us"),
    [
        ({"from_us": 1_500_001, "until_us": 2_000_003}, 1_500_001, 2_000_003),
        ({"from_us": 1_500_001, "until_us": None}, 1_500_001, None),
        # of jobs that version 0.1.0 made
        ({"from": 1_500, "until": 2_001}, 1_500_000, 2_001_000),
        ({"from": 0, "until": None}, 0, None),
    ],
)
@pytest.mark.parametrize("types", [None, ["order.*"]])
def test_a_period_is_read_to_the_microsecond(
    arguments: dict[str, Any], from_us: int, until_us: int | None, types: list[str] | None
) -> None:
    assert Entitlement.parse({**arguments, "event_types": types}) == Entitlement(
        event_types=None if types is None else tuple(types), from_us=from_us, until_us=until_us
    )
