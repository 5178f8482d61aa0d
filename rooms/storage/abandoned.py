"""Copies that were claimed again and again, and whose claims ended with whoever had them."""

from typing import Final

from rooms.domain.ids import DeliveryId
from rooms.storage.orphans import Step, sideline_stuck
from rooms.storage.writer import Writer

MOST: Final = 1000

_LOOK: Final = """
SELECT 0, o.* FROM (SELECT 0) one LEFT JOIN (
    SELECT id::text, generation, attempt, abandoned FROM outbox WHERE abandoned >= %(least)s::int4
    ORDER BY abandoned DESC, due_at LIMIT %(most)s::int4
) o ON true
"""


class Abandoned:
    """Looks for them, reading the whole outbox, through one writer. Errors are `Writer.run`'s."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def look(self, least: int) -> list[tuple[Step, int]]:
        """Steps that lost so many claims running, and how many each did: the most first, up to MOST of them."""
        rows = await self._writer.run(_LOOK, {"least": least, "most": MOST})
        return [((DeliveryId(identity), generation, attempt), count) for identity, generation, attempt, count in rows]

    async def end(self, steps: list[Step]) -> int:
        """Sideline those that still stand there, as `stuck`; how many."""
        return await sideline_stuck(self._writer, steps, why="whoever claimed it died with it, again and again")
