"""Test the election in PostgreSQL where its rows are not as this version writes them."""

import time

import pytest

from delivery.leadership.epochs import EPOCHS_PER_MS
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


@pytest.mark.parametrize("ahead_ms", [-365 * 86_400_000, 365 * 86_400_000])
async def test_epochs_grow_over_a_restored_backup_and_a_clock_that_was_set_back(
    database: str, ahead_ms: int
) -> None:
    """Let the last epoch be of last year, as after a restore, or of next year."""
    now_ms = time.time_ns() // 1_000_000
    last = (now_ms + ahead_ms) * EPOCHS_PER_MS
    async with await connect(database, name="a test") as connection:
        await connection.execute("UPDATE election_terms SET epoch = %s", [last])
    async with (
        PostgresElection(database, member="own", clock=SystemClock()) as election,
        election.join(["p"]) as membership,
    ):

        async def is_held() -> bool:
            return membership.epoch("p") is not None

        await until(is_held, "the partition", within_s=10)
        epoch = membership.epoch("p") or 0
        assert epoch > max(last, (now_ms - 60_000) * EPOCHS_PER_MS)
        assert (await election.view()).epoch < EPOCHS_PER_MS, "terms are counted apart"
