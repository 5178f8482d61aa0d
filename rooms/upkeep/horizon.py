"""What comes due: deliveries scheduled beyond the broker's horizon, once it reaches them."""

from collections.abc import Callable
from typing import Final

from rooms.storage.horizon import come_due
from rooms.storage.writer import Writer
from rooms.upkeep.duty import GoOn

BATCH: Final = 1000


class ComingDue:
    """Has what is near enough sent, and wakes the relay. The writer's shape says how near that is."""

    name = "what comes due"

    def __init__(self, writer: Writer, ring: Callable[[], None]) -> None:
        self._writer = writer
        self._ring = ring

    async def run(self, go_on: GoOn) -> None:
        """Everything that the horizon has reached."""
        while go_on():
            moved = await come_due(self._writer, limit=BATCH)
            if moved:
                self._ring()
            if moved < BATCH:
                return
