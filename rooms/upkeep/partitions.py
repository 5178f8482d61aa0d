"""The partitions of the coming days."""

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.ports import Clock
from rooms.storage.partitions import ensure_partitions
from rooms.storage.transactions import transaction
from rooms.upkeep.duty import GoOn

# Making a partition locks the table; while it waits for a long query, every publish waits behind it.
_IMPATIENCE: Final = (
    text("SET LOCAL lock_timeout = '300ms'"),
    # Frozen in between, this process would hold everybody up.
    text("SET LOCAL idle_in_transaction_session_timeout = '2s'"),
)


class PartitionsAhead:
    """Makes partitions a week ahead."""

    name = "the making of partitions"

    def __init__(self, engine: AsyncEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    async def run(self, go_on: GoOn) -> None:
        """Make those that are missing."""
        if go_on():
            async with transaction(self._engine) as connection:
                for setting in _IMPATIENCE:
                    await connection.execute(setting)
                await connection.run_sync(ensure_partitions, self._clock.now())
