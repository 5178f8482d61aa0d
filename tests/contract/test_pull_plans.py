"""Plans of the PULL statements on a database that nobody has analysed yet: they are kept, and must be right later too."""

import re

import psycopg
import pytest

from rooms.storage import lease_ends, leases

STATEMENTS = {
    "take": leases._TAKE,
    "ack": leases._ACK,
    "nack": lease_ends._NACK,
    "extend": lease_ends._EXTEND,
    "end": lease_ends._END,
    "look": lease_ends._LOOK,
    "due": lease_ends._DUE,
}
BY_KEY = re.compile(r"Index Cond: \(\((\w+\.)?room_id = .*\) AND \((\w+\.)?id = ")
SCAN = re.compile(r"(?:Index Scan|Index Only Scan|Bitmap Index Scan)(?: using| on) (\w+)")


def plan_of(database: str, name: str) -> list[str]:
    numbers: dict[str, int] = {}
    statement = re.sub(
        r"%\((\w+)\)s", lambda found: f"${numbers.setdefault(found[1], len(numbers) + 1)}", STATEMENTS[name]
    )
    with psycopg.connect(database) as connection:
        connection.execute("SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off")
        return [row[0] for row in connection.execute(f"EXPLAIN (GENERIC_PLAN, COSTS OFF) {statement}".encode())]


@pytest.mark.parametrize("name", STATEMENTS)
def test_rows_are_found_by_primary_key_and_queues_by_their_index(database: str, name: str) -> None:
    plan = plan_of(database, name)
    assert not [line for line in plan if "Seq Scan" in line or "Bitmap" in line]
    used = {found[1] for line in plan if (found := SCAN.search(line))}
    own = {"take": {"outbox_pull"}, "due": {"outbox_pull"}, "end": {"leases_until"}}.get(name, set())
    assert own <= used
    for at, line in enumerate(plan):
        found = SCAN.search(line)
        if found is not None and found[1] not in own and "Scan using rooms_" not in line:
            assert found[1].endswith("_pkey"), line
            assert BY_KEY.search(plan[at + 1]), f"{line.strip()} / {plan[at + 1].strip()}"
