"""Test how workers find the member ids of publishers."""

from collections.abc import AsyncIterator

import pytest

from delivery.push.event_items import MAX_AGE_S, MemberIds
from rooms.db.connection import PersistentConnection, open_connection
from rooms.domain.ids import OrganisationId

ONE, TWO, GONE = (OrganisationId(f"01900000-0000-7000-8000-00000000000{n}") for n in range(3))


@pytest.fixture
async def members(database: str) -> AsyncIterator[MemberIds]:
    connection = PersistentConnection(database, name="test members")
    yield MemberIds(connection)
    await connection.close()


async def change(database: str, statement: str, *values: object) -> None:
    async with open_connection(database, name="test") as connection:
        await connection.execute(statement, values)


async def test_member_ids_are_read_together_and_kept_for_a_while(
    database: str, members: MemberIds
) -> None:
    insert = "INSERT INTO organisations (id, name, member_id) VALUES (%s, %s, %s)"
    await change(database, insert, ONE, "one", "EE/GOV/1")
    await change(database, insert, TWO, "two", None)
    expected = {ONE: "EE/GOV/1", TWO: None, GONE: None}
    assert await members.find({ONE, TWO, GONE}, 0.0) == expected
    update = "UPDATE organisations SET member_id = 'EE/GOV/2' WHERE id = %s"
    await change(database, update, TWO)
    assert await members.find({TWO, ONE}, MAX_AGE_S) == {ONE: "EE/GOV/1", TWO: None}
    assert await members.find({TWO}, MAX_AGE_S + 1) == {TWO: "EE/GOV/2"}
    assert await members.find(set(), 0.0) == {}


async def test_a_broken_connection_is_opened_again(database: str, members: MemberIds) -> None:
    await members.find({ONE}, 0.0)
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'test members'"
    await change(database, end)
    assert await members.find({TWO}, 0.0) == {TWO: None}
