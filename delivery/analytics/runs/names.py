"""Check the names of keys: no two names of one kind may share a key."""

from itertools import pairwise

import pyarrow as pa

from delivery.analytics.runs.errors import CollisionError


def checked_names(names: pa.Table) -> list[tuple[str, int, str]]:
    """Return (what, key, name) of every name. Raise CollisionError if two names share a key."""
    columns = names.to_pydict()
    known = sorted(zip(columns["what"], columns["key"], columns["name"], strict=True))
    for first, second in pairwise(known):
        if first[:2] == second[:2]:
            raise CollisionError(
                f"two names of one {first[0]} have the same key: {first[2]}, {second[2]}"
            )
    return known
