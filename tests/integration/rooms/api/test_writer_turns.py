"""Test that a change of deliveries ends before others lose their patience."""

import psycopg
import pytest

from rooms.api import writer_turns
from rooms.api.writer_turns import change_writer
from rooms.domain.work_location import POSTGRES_MODE
from rooms.errors import QueryTimeoutError

LOCKS = "SELECT 0, " + ", ".join(f"pg_advisory_xact_lock(7, {key})::text" for key in range(4))


async def test_several_waits_for_locks_are_bounded_together(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them may be shorter than the longest wait for one lock."""
    monkeypatch.setattr(writer_turns, "STATEMENT_TIMEOUT_S", 1)
    async with (
        change_writer(database, query_timeout_s=30, broker_mode=POSTGRES_MODE) as writer,
        await psycopg.AsyncConnection.connect(database) as other,
    ):
        await other.execute("SELECT pg_advisory_xact_lock(7, 3)")
        with pytest.raises(QueryTimeoutError, match="nothing was written"):
            await writer.run(LOCKS, {})
        await other.rollback()
        assert len(await writer.run(LOCKS, {})) == 1


async def test_a_shorter_time_of_queries_is_that_of_changes_too(database: str) -> None:
    async with change_writer(database, query_timeout_s=1, broker_mode=POSTGRES_MODE) as writer:
        ((found,),) = await writer.run("SELECT 0, current_setting('statement_timeout')", {})
    assert found == "1s"
