"""Compare the rows of tables, whatever their order and the last digits of sums."""

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import Any, Final

from delivery.analytics.runs.tables import TABLES_BY_NAME

Rows = list[dict[str, Any]]
# Sketches are random: their percentiles have a bounded rank error, but vary.
SKETCHED: Final = {
    column.name for column in TABLES_BY_NAME["rollups_daily"].columns if column.name.endswith("_ms")
}


def differences(ours: Rows, theirs: Rows, leave: AbstractSet[str] = frozenset()) -> list[str]:
    """Return the first rows that one has more often; a diff of thousands of rows takes minutes."""
    mine, others = (
        Counter(
            repr({name: _plain(row[name]) for name in sorted(row) if name not in leave})
            for row in rows
        )
        for rows in (ours, theirs)
    )
    result = [f"only ours: {row}" for row in (mine - others)] + [
        f"only theirs: {row}" for row in (others - mine)
    ]
    return result[:4]


def _plain(value: Any) -> Any:
    """Round floats, as sums depend on their order in the last digits."""
    if isinstance(value, float):
        return f"{value:.9g}"
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value
