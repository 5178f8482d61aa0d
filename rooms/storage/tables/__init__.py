"""The tables as SQLAlchemy Core sees them, a module an area. The migrations make them; a test compares the two, column by column.

Whoever imports one has them all in `metadata`.
"""

from rooms.storage.tables import analysis, magazines, messages, organisations, processes, rooms, work
from rooms.storage.tables.columns import metadata

__all__ = ["analysis", "magazines", "messages", "metadata", "organisations", "processes", "rooms", "work"]
