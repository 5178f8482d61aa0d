"""Check that what the console asks for is found by indexes."""

import re
from collections.abc import Mapping
from typing import Final

import psycopg
import pytest

from rooms.db.catalog import people
from rooms.db.queries import failures, pull_queue, search
from rooms.db.sideline import overview
from rooms.db.usage import minutes
from tests.support.query_plans import kept_plans

_PLACEHOLDER: Final = re.compile(r"(?<![:\w]):([a-z_]+)")
STATEMENTS: Final[Mapping[str, str]] = {
    **search.STATEMENTS,
    "sidelines": overview.OVERVIEW,
    "waiting": pull_queue.WAITING,
    "leased": pull_queue.LEASED,
    "status": failures.STATEMENTS[""],
    "status of a room": failures.STATEMENTS["room"],
    "status of subscriptions": failures.STATEMENTS["chosen"],
    "minutes": minutes.READ,
    "consumers": pull_queue.CONSUMERS,
    "oldest": pull_queue.OLDEST,
    "people": people.PEOPLE,
    "end all": people.END_ALL,
}
LARGE: Final = re.compile(
    r"(Seq|Index|Index Only) Scan (?:Backward )?(?:using (\w+) )?on "
    r"(messages|message_ids|deliveries|subscriptions|rooms|event_types|outbox|leases|sidelined|api_keys|journal|activity_minutes)\w*"
)


@pytest.mark.parametrize("name", STATEMENTS)
def test_large_tables_are_read_by_a_condition_of_an_index(database: str, name: str) -> None:
    numbered = _PLACEHOLDER.sub(r"%(\1)s", STATEMENTS[name])
    with psycopg.connect(database, autocommit=True) as connection:
        ((_, plan),) = kept_plans(connection, {name: numbered})
    found = [(at, match) for at, line in enumerate(plan) if (match := LARGE.search(line))]
    assert found
    wrong = [
        plan[at]
        for at, match in found
        if match[1] == "Seq" or not any("Index Cond" in line for line in plan[at + 1 : at + 3])
    ]
    assert not wrong, "\n".join(plan)
