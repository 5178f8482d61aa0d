"""Declare the tables for SQLAlchemy Core, one module an area.

`metadata` has all of them.

The migrations make the tables; a test compares the two, column by column.
"""

from rooms.db.tables import (
    magazines,
    messages,
    organisations,
    processes,
    rooms,
    usage,
)
from rooms.db.tables.columns import metadata

__all__ = [
    "magazines",
    "messages",
    "metadata",
    "organisations",
    "processes",
    "rooms",
    "usage",
]
