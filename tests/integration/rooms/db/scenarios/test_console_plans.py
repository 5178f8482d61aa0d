"""Check that what the console asks for is found by indexes."""

import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, Final

import psycopg
import pytest
from sqlalchemy import Select, make_url

from rooms.db.catalog import people
from rooms.db.catalog.rooms import list_rooms
from rooms.db.catalog.subscriptions import list_subscriptions
from rooms.db.queries import failures, pull_queue, search
from rooms.db.sideline import overview
from rooms.db.usage import minutes
from rooms.domain.ids import KeyId, OrganisationId, RoomId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import SubscriptionStatus
from tests.support.query_plans import kept_plans

_PLACEHOLDER: Final = re.compile(r"(?<![:\w]):([a-z_]+)")
STATEMENTS: Final[Mapping[str, str]] = {
    **search.STATEMENTS,
    "sidelines": overview.OVERVIEW,
    "sidelines of many": overview.OVERVIEW_OF_MANY,
    "waiting": pull_queue.WAITING,
    "waiting and known": pull_queue.WAITING_KNOWN,
    "leased": pull_queue.LEASED,
    "status": failures.STATEMENTS[""],
    "status of a room": failures.STATEMENTS["room"],
    "status of subscriptions": failures.STATEMENTS["chosen"],
    "minutes": minutes.READ,
    "consumers": pull_queue.CONSUMERS,
    "oldest": pull_queue.OLDEST,
    "oldest and known": pull_queue.OLDEST_KNOWN,
    "people": people.PEOPLE,
    "end all": people.END_ALL,
}
LARGE: Final = re.compile(
    r"(Seq|Index|Index Only) Scan (?:Backward )?(?:using (\w+) )?on "
    r"(messages|message_ids|deliveries|subscriptions|rooms|event_types|outbox|leases|sidelined|held|api_keys|journal|activity_minutes)\w*"
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


_OTHERS: Final = 40
_EACH: Final = 100
_OWN: Final = 2
_ROOMS: Final = 300
_ORGANISATION: Final = "INSERT INTO organisations (id, name) VALUES (%s, %s)"
_ROOM: Final = """
INSERT INTO rooms (id, organisation_id, name, delivery_delay_ms, delivery_delay_multiplier, delivery_attempts)
VALUES (%s, %s, %s, 1, 1, 1)
"""
_SUBSCRIBE: Final = """
INSERT INTO subscriptions (room_id, id, organisation_id, name, type, status)
SELECT %s, gen_random_uuid(), %s, %s || n, 'PULL', %s FROM generate_series(1, %s) n
"""


class _Reader:
    """Keep the statement that it is given, and read nothing."""

    statement: Select[Any] | None = None

    async def execute(self, statement: Select[Any]) -> SimpleNamespace:
        self.statement = statement
        return SimpleNamespace(mappings=list)


async def test_only_what_waits_for_the_own_approval_is_read_for_the_first_page(
    database: str,
) -> None:
    """Neither what waits for others is read, nor what is active: on each visit of that page."""
    own, other, subscriber = (OrganisationId(str(uuid.uuid4())) for _ in range(3))
    reader: Any = _Reader()
    principal = Principal(key_id=KeyId(own), organisation_id=own, scopes=frozenset())
    asked: dict[str, Any] = {
        "subscriber": None,
        "name": None,
        "status": SubscriptionStatus.PENDING,
        "limit": 51,
    }
    await list_subscriptions(reader, principal, None, before=None, **asked)
    dialect = make_url("postgresql+psycopg://").get_dialect()()
    text = reader.statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True})
    with psycopg.connect(database, autocommit=True) as connection:
        for organisation, name in ((own, "own"), (other, "other"), (subscriber, "subscriber")):
            connection.execute(_ORGANISATION, (organisation, name))
        for room in range(_OTHERS + 1):
            connection.execute(_ROOM, (room + 1, other if room else own, f"room-{room}"))
            waiting = _EACH if room else _OWN
            connection.execute(_SUBSCRIBE, (room + 1, subscriber, "waiting", "pending", waiting))
        connection.execute(_SUBSCRIBE, (1, subscriber, "active", "active", _OTHERS * _EACH))
        connection.execute("ANALYZE rooms, subscriptions")
        found = connection.execute(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {text}".encode())
        ((((plan,),),),) = ((row,) for row in found)
    assert plan["Plan"]["Actual Rows"] == _OWN
    read = sum(rows_read(plan["Plan"], "subscriptions"))
    assert _OWN <= read < _EACH, plan


async def test_a_page_of_rooms_reads_only_its_own_rows(database: str) -> None:
    """The first page, and one behind it, in the order of the index."""
    own = OrganisationId(str(uuid.uuid4()))
    principal = Principal(key_id=KeyId(own), organisation_id=own, scopes=frozenset())
    dialect = make_url("postgresql+psycopg://").get_dialect()()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(_ORGANISATION, (own, "own"))
        for room in range(_ROOMS):
            connection.execute(_ROOM, (room + 1, own, f"room-{room}"))
        connection.execute("ANALYZE rooms")
        for before in (None, (datetime.now(UTC), RoomId(1))):
            reader: Any = _Reader()
            await list_rooms(reader, principal, name=None, before=before, limit=10)
            text = reader.statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True})
            found = connection.execute(
                f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {text}".encode()
            )
            ((((plan,),),),) = ((row,) for row in found)
            assert "rooms_of_organisation" in str(plan), plan
            assert sum(rows_read(plan["Plan"], "rooms")) == 10, plan


def rows_read(node: dict[str, Any], table: str) -> Iterator[float]:
    """Yield how many rows of a table each part of a plan has read."""
    if node.get("Relation Name") == table:
        removed = sum(node.get(f"Rows Removed by {why}", 0) for why in ("Filter", "Index Recheck"))
        yield (node["Actual Rows"] + removed) * node["Actual Loops"]
    for inner in node.get("Plans", ()):
        yield from rows_read(inner, table)
