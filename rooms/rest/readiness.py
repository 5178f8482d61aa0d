"""Whether this process can take publishes, and which parts of the installation are up."""

import asyncio
from dataclasses import dataclass
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from rooms.errors import TransientError
from rooms.storage.gauges import count_alive
from rooms.storage.transactions import transaction

PARTS: Final = ("database", "worker", "upkeep")
_TIMEOUT_S: Final = 2.0
# A standby has it on.
_WRITABLE: Final = text("SELECT current_setting('transaction_read_only') = 'off'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`up`: each part; `ready`: whether publishes are taken and every part has been up once."""

    up: dict[str, bool]
    ready: bool

    @property
    def degraded(self) -> list[str]:
        """The parts that are not up."""
        return [part for part, up in self.up.items() if not up]


class Readiness:
    """Remembers which parts have been up since this process started."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._seen: set[str] = set()

    async def report(self) -> Report:
        """What is up right now; PostgreSQL gets two seconds to answer."""
        try:
            async with asyncio.timeout(_TIMEOUT_S), transaction(self._engine) as connection:
                writable = bool(await connection.scalar(_WRITABLE))
                alive = await count_alive(connection)
        except (TransientError, TimeoutError):
            writable, alive = False, {}
        up = {"database": writable, **{part: alive.get(part, 0) > 0 for part in PARTS[1:]}}
        self._seen.update(part for part, is_up in up.items() if is_up)
        return Report(up=up, ready=writable and self._seen.issuperset(PARTS))
