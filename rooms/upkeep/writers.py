"""The end of dead writers' records."""

from typing import Final

from rooms.storage.chores import delete_dead_writers
from rooms.storage.writer import Writer
from rooms.upkeep.duty import GoOn

BATCH: Final = 1000


class EndOfWriters:
    """Deletes writers whose session is long gone and that claim nothing."""

    name = "the end of writers"

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def run(self, go_on: GoOn) -> None:
        """Delete all that are old enough."""
        while go_on() and await delete_dead_writers(self._writer, limit=BATCH) == BATCH:
            pass
