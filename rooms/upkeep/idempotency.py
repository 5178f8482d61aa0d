"""The end of idempotency keys."""

from typing import Final

from rooms.storage.chores import delete_old_keys
from rooms.storage.writer import Writer
from rooms.upkeep.duty import GoOn

BATCH: Final = 5000


class EndOfKeys:
    """Deletes idempotency keys that answer no longer."""

    name = "the end of idempotency keys"

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def run(self, go_on: GoOn) -> None:
        """Delete all that are old enough."""
        while go_on() and await delete_old_keys(self._writer, limit=BATCH) == BATCH:
            pass
