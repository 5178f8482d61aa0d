"""The partitions of the coming days."""

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.domain.ids import first_id
from rooms.ports import Clock
from rooms.storage.partitions import Day, check_out, keep_out, let_in, make_day, missing_days, rest_bytes
from rooms.storage.retention import REST_BYTES
from rooms.storage.transactions import transaction
from rooms.upkeep.duty import GoOn

# Making a partition locks the table; while it waits for a long query, every publish waits behind it.
_BRIEFLY: Final = (
    text("SET LOCAL lock_timeout = '300ms'"),
    text("SET LOCAL statement_timeout = '2s'"),
    # Frozen in between, this process would hold everybody up.
    text("SET LOCAL idle_in_transaction_session_timeout = '2s'"),
)

_T = TypeVar("_T")


class PartitionsAhead:
    """Makes partitions a week ahead."""

    name = "the making of partitions"

    def __init__(self, engine: AsyncEngine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    async def run(self, go_on: GoOn) -> None:
        """Make those that are missing, a day in a transaction. StorageRefusedError: somebody is in the way."""
        if not go_on():
            return
        await self._do(let_in)
        now = self._clock.now()
        days = await self._do(partial(missing_days, now=now), brief=False)
        for day in days:
            if not go_on():
                return
            large = await self._do(rest_bytes) > REST_BYTES
            # Rows of a day that has begun may come at any moment: it is not kept out, and stays in the default partitions.
            if not large:
                await self._do(partial(make_day, day=day))
            elif day.low > first_id(int(now.timestamp() * 1000)):
                await self._make_apart(day)

    async def _make_apart(self, day: Day) -> None:
        # What is in the default partitions is read before, or everybody would wait for that. Whoever dies in between leaves
        # constraints, which the next run takes away.
        try:
            await self._do(partial(keep_out, day=day))
            await self._do(partial(check_out, day=day), brief=False)
            await self._do(partial(make_day, day=day))
        finally:
            await self._do(let_in)

    async def _do(self, work: Callable[[Connection], _T], *, brief: bool = True) -> _T:
        """Do it in a transaction; a `brief` one is such that others wait for it, or may."""
        async with transaction(self._engine) as connection:
            for setting in _BRIEFLY if brief else ():
                await connection.execute(setting)
            return await connection.run_sync(work)
