"""Count what a job has to do, up to a bound: all jobs wait for the statement."""

from collections.abc import Mapping
from typing import Any, Final

from rooms.db.writer import LogWriter

MAX_COUNTED: Final = 100_000


async def count_bounded(
    writer: LogWriter, statement: str, parameters: Mapping[str, Any]
) -> int | None:
    """Return a number of rows; None: there are too many.

    `statement` counts, but no more rows than the parameter `most`. Errors: those of
    `LogWriter.run`.
    """
    rows = await writer.run(statement, {**parameters, "most": MAX_COUNTED + 1})
    count = int(rows[0][0])
    return None if count > MAX_COUNTED else count
