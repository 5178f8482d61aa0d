"""Plans made on a database that nobody has analysed yet: they are kept, and must be right when the tables have grown."""

import re

import psycopg
import pytest

from rooms.storage import outbox, outcomes

STATEMENTS = {
    "claim": outbox._CLAIM,
    "decide": outcomes._DECIDE,
    "release held": outcomes._RELEASE_HELD,
}
ROOM_AND_ID = re.compile(r"room_id = .*\.room_id\) AND \((?:\w+\.)?id = ")


@pytest.mark.parametrize("name", STATEMENTS)
def test_rows_are_found_by_primary_key_before_anything_was_analysed(database: str, name: str) -> None:
    numbers: dict[str, int] = {}

    def place(found: re.Match[str]) -> str:
        return f"${numbers.setdefault(found[1], len(numbers) + 1)}"

    statement = re.sub(r"%\((\w+)\)s", place, STATEMENTS[name])
    with psycopg.connect(database) as connection:
        connection.execute("SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off")
        plan = [row[0] for row in connection.execute(f"EXPLAIN (GENERIC_PLAN, COSTS OFF) {statement}".encode())]
    assert not [line for line in plan if "Seq Scan" in line]
    by_key = [at for at, line in enumerate(plan) if "Index Cond" in line and ROOM_AND_ID.search(line)]
    assert by_key
    for at in by_key:
        assert "_pkey on" in plan[at - 1], f"{plan[at - 1].strip()} / {plan[at].strip()}"
