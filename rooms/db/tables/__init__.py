"""Declare the tables for SQLAlchemy Core, one module an area.

`metadata` has all of them.

The migrations make the tables; a test compares the two, column by column.
"""

from rooms.db.tables import (
    analysis,
    evidence,
    journal,
    magazines,
    messages,
    operational,
    organisations,
    processes,
    rooms,
    usage,
    work,
)
from rooms.db.tables.columns import metadata

__all__ = [
    "analysis",
    "evidence",
    "journal",
    "magazines",
    "messages",
    "metadata",
    "operational",
    "organisations",
    "processes",
    "rooms",
    "usage",
    "work",
]
