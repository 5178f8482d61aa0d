"""Test the election in PostgreSQL where its rows are not as this version writes them."""

import pytest

from delivery.leadership.postgres import PostgresElection
from rooms.clock import SystemClock
from rooms.db.connection import connect
from tests.support.installation import until

_JOIN = """
INSERT INTO election_members (name, host, pid, process, until)
VALUES ('other', 'elsewhere', 1, %s, clock_timestamp() + interval '1 hour')
"""


@pytest.mark.parametrize("process", ["v2/boot/4026531836/77/120", "", "boot 4026531836 77"])
async def test_a_member_whose_process_cannot_be_read_counts_as_alive(
    database: str, process: str
) -> None:
    """Another version of Rooms may write it otherwise, while not all are upgraded."""
    async with await connect(database, name="a test") as connection:
        await connection.execute(_JOIN, [process])
    names = ["first", "second"]
    async with (
        PostgresElection(database, member="own", clock=SystemClock()) as election,
        election.join(names) as membership,
    ):

        async def has_its_share() -> bool:
            return any(membership.epoch(name) is not None for name in names)

        await until(has_its_share, "one of the partitions", within_s=10)
