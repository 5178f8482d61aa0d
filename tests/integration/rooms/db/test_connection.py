"""Test how the connections of everyday queries are set up."""

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.db.connection import open_engine, transaction
from rooms.db.queries.deliveries import deliveries_of_subscription
from rooms.db.queries.messages import ListFilter
from rooms.domain.ids import RoomId, SubscriptionId

_RUNS = 20
"""psycopg prepares a statement after 5 of them, and PostgreSQL may keep one plan after 5 more."""
_PREPARED = text(
    "SELECT generic_plans, custom_plans FROM pg_prepared_statements"
    " WHERE statement LIKE '%FROM deliveries%'"
)


async def plans_of_a_list(engine: AsyncEngine) -> tuple[int, int]:
    """Read a page again and again; return how many plans were for any value, and for its own."""
    for _ in range(_RUNS):
        async with transaction(engine) as connection:
            assert not await deliveries_of_subscription(
                connection,
                RoomId(1),
                SubscriptionId("01a20a90-7e59-7000-8000-000100000001"),
                ListFilter(),
                due_only=False,
                before=None,
                limit=51,
            )
    async with transaction(engine) as connection:
        row = (await connection.execute(_PREPARED)).one()
    await engine.dispose()
    return row[0], row[1]


async def test_a_page_is_planned_for_its_values(database: str) -> None:
    """Check that no plan is kept that knows no LIMIT: it would sort all deliveries for a page."""
    generic, custom = await plans_of_a_list(open_engine(database, size=1))
    assert generic == 0
    assert custom > 0


async def test_options_of_the_url_win(database: str) -> None:
    joined = "&" if "?" in database else "?"
    asked = f"{database}{joined}options=-c%20plan_cache_mode%3Dforce_generic_plan"
    generic, _ = await plans_of_a_list(open_engine(asked, size=1))
    assert generic > 0
