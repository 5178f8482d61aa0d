"""Whether this process can take publishes, and which parts of the installation are up."""

import asyncio
from dataclasses import dataclass
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.errors import TransientError
from rooms.rest.carriage import Carriage
from rooms.rest.leadership import Leadership
from rooms.rest.store_health import StoreHealth
from rooms.storage.gauges import count_alive
from rooms.storage.transactions import transaction
from rooms.storage.write_check import WriteCheck

PARTS: Final = ("database", "writes", "worker", "upkeep", "leader")
_TIMEOUT_S: Final = 2.0
# A standby has it on.
_WRITABLE: Final = text("SELECT current_setting('transaction_read_only') = 'off'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`up`: each part; `ready`: whether publishes are taken and every part has been up once; `leader_absent_s`: how long
    there has been no leader. `database`: PostgreSQL answers and is no standby; `writes`: it takes writes too.
    """

    up: dict[str, bool]
    ready: bool
    leader_absent_s: float

    @property
    def degraded(self) -> list[str]:
        """The parts that are not up."""
        return [part for part, up in self.up.items() if not up]


class Readiness:
    """Remembers which parts have been up since this process started. `carriage`: where another broker than PostgreSQL
    carries the copies; `magazines`: where another store than PostgreSQL has them. Whether those are up never keeps a process
    from being ready: publishing goes on without them.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        leadership: Leadership,
        carriage: Carriage | None = None,
        magazines: StoreHealth | None = None,
        *,
        writes: WriteCheck,
    ) -> None:
        self._engine = engine
        self._writes = writes
        self._looking: asyncio.Task[Report] | None = None
        self._carriage = carriage
        self._magazines = magazines
        self._needed = PARTS if carriage is None else (*PARTS, "relay")
        self._leadership = leadership
        self._seen: set[str] = set()

    async def report(self) -> Report:
        """Return what is up right now; PostgreSQL, the election's store, the broker and the magazines'
        store get two seconds each to answer.

        Probes need no key, so those that come at once share one look.
        """
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(self._looked)
        return await asyncio.shield(self._looking)

    def _looked(self, task: asyncio.Task[Report]) -> None:
        self._looking = None
        if not task.cancelled():
            task.exception()  # the probes may have gone

    async def _look(self) -> Report:
        absent_s = await self._leadership.absent_s()
        try:
            async with asyncio.timeout(_TIMEOUT_S), transaction(self._engine) as connection:
                writable = bool(await connection.scalar(_WRITABLE))
                alive = await count_alive(connection)
        except (TransientError, TimeoutError):
            writable, alive = False, {}
        up = {
            "database": writable,
            "writes": writable and await self._writes.works(),
            "worker": alive.get("worker", 0) > 0,
            "upkeep": alive.get("upkeep", 0) > 0,
            "leader": absent_s == 0,
        }
        if self._carriage is not None:
            up |= {"relay": alive.get("relay", 0) > 0, "broker": await self._carriage.up()}
        if self._magazines is not None:
            up["magazines"] = await self._magazines.up()
        self._seen.update(part for part, is_up in up.items() if is_up)
        return Report(up=up, ready=up["writes"] and self._seen.issuperset(self._needed), leader_absent_s=absent_s)
