"""What gathers slowly and is taken away now and then: idempotency keys, and writers that are long gone."""

from typing import Final

from rooms.storage.publish_statement import KEYS_KEPT
from rooms.storage.writer import LIFE_LOCK, Writer

WRITERS_KEPT: Final = "7 days"
"""How long a dead writer stays on record."""

_OLD_KEYS: Final = f"""
WITH old AS MATERIALIZED (
    SELECT room_id, key FROM idempotency_keys WHERE created_at <= now() - interval '{KEYS_KEPT}'
    LIMIT %(limit)s::int4 FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM idempotency_keys k
    WHERE k.room_id = ANY (ARRAY(SELECT DISTINCT room_id FROM old)) AND k.key = ANY (ARRAY(SELECT key FROM old))
        AND k.created_at <= now() - interval '{KEYS_KEPT}'
    RETURNING 1
)
SELECT 0, count(*) FROM gone
"""  # noqa: S608 - constants of our own

# The log keeps the numbers of writers that are gone; they mean nothing else any more.
_DEAD_WRITERS: Final = f"""
WITH old AS MATERIALIZED (
    SELECT id FROM writers w WHERE started_at <= now() - interval '{WRITERS_KEPT}' AND NOT EXISTS (
        SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.classid = %(life)s
            AND l.objid::int8 = w.id AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    ) ORDER BY id LIMIT %(limit)s::int4
), gone AS (
    DELETE FROM writers w USING old WHERE w.id = old.id
        AND w.id NOT IN (SELECT worker FROM outbox WHERE worker IS NOT NULL)
    RETURNING 1
)
SELECT 0, count(*) FROM gone
"""  # noqa: S608 - constants of our own


async def delete_old_keys(writer: Writer, *, limit: int) -> int:
    """Delete idempotency keys that answer no longer; how many there were. Errors are `Writer.run`'s."""
    return int((await writer.run(_OLD_KEYS, {"limit": limit}))[0][0])


async def delete_dead_writers(writer: Writer, *, limit: int) -> int:
    """Delete writers whose session is long gone and that claim nothing; how many. Errors are `Writer.run`'s."""
    return int((await writer.run(_DEAD_WRITERS, {"life": LIFE_LOCK, "limit": limit}))[0][0])
