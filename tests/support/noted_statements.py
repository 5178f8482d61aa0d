"""Note the statements that an engine sends to PostgreSQL."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine


@contextmanager
def noted_statements(engine: AsyncEngine) -> Iterator[list[str]]:
    """Yield the list of the statements that are sent meanwhile."""
    noted: list[str] = []

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        noted.append(statement)

    event.listen(engine.sync_engine, "before_cursor_execute", note)
    try:
        yield noted
    finally:
        event.remove(engine.sync_engine, "before_cursor_execute", note)
