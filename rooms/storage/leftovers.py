"""What a replacement leaves beside its tables: what was begun and not swapped, and what a swap has put out."""

from typing import Final

from rooms.storage.engine import Connection
from rooms.storage.patience import PAGES, PAGES_OF, GoOn, locked, rows, tried, value

_TABLES_LIKE: Final = """
SELECT relname::text FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r' AND NOT relispartition
    AND relname ~ ('^(messages|deliveries|log_entries)_[0-9]{4,8}' || %s || '$') ORDER BY 1
"""
_FUNCTIONS: Final = """
SELECT proname::text FROM pg_proc WHERE pronamespace = current_schema()::regnamespace
    AND proname ~ '^(messages|deliveries|log_entries)_[0-9]{4,8}(_kept[0-9]+)?_mirror$' ORDER BY 1
"""
_FREE_IDS: Final = """
DELETE FROM message_ids i USING {gone} g
WHERE g.ctid >= %(from)s::tid AND g.ctid < %(to)s::tid AND g.caller_id IS NOT NULL AND i.room_id = g.room_id
    AND i.caller_id = g.caller_id AND i.message_id = g.id
    AND NOT EXISTS (SELECT FROM messages m WHERE m.room_id = g.room_id AND m.id = g.id)
"""


async def clear(connection: Connection) -> None:
    """Take away what was begun and not swapped. StorageRefusedError: somebody uses it; to be tried again."""
    for (function,) in await rows(connection, _FUNCTIONS):
        await locked(connection, f"DROP FUNCTION {function} CASCADE")
    for (table,) in await rows(connection, _TABLES_LIKE, "_kept[0-9]+_new"):
        await connection.execute(f"DROP TABLE {table}")


async def bury(connection: Connection, go_on: GoOn) -> None:
    """Free the ids that messages had which are gone, and drop what a swap has put out."""
    for (gone,) in await rows(connection, _TABLES_LIKE, "(_kept[0-9]+)?_gone"):
        if gone.startswith("messages_"):
            for low in range(0, await value(connection, PAGES_OF, gone), PAGES):
                if not go_on():
                    return
                pages = {"from": f"({low},0)", "to": f"({low + PAGES},0)"}
                await tried(connection, _FREE_IDS.format(gone=gone), pages)
    for (gone,) in await rows(connection, _TABLES_LIKE, "(_kept[0-9]+)?_gone"):
        if not go_on():
            return
        await connection.execute(f"DROP TABLE {gone}")
