"""Define the SQL of magazines: each step is one statement, and so one transaction.

A shard has four rows of `magazine_pointers`, by `kind`, so that calls of different kinds lock
different rows: load (0), fire (1), sweep (2), and counters (3), which are always locked last and in
the order of the shards. Loads of a shard are serial: they hold its load row until they commit. So a
transaction that sees an entry sees all before it, and PostgreSQL needs no tombstones.
"""

# ruff: noqa: S608 the statements are composed of constants of this module
# ruff: noqa: E501 SQL text

from typing import Final

from rooms.domain.magazine import MAX_BATCH

# The columns of a stored entry, as `postgres._stored` reads them.
_COLUMNS: Final = """e.shard, e.pointer, e.id, e.body, e.generation, e.shovels, e.reason, e.detail,
    (extract(epoch FROM e.expires_at) * 1000000)::int8, (extract(epoch FROM e.loaded_at) * 1000000)::int8,
    (extract(epoch FROM e.fire_ts) * 1000000)::int8"""
_NO_ENTRY_COLUMNS: Final = "NULL::int2, {0}, NULL::text, NULL::bytea, {1}, NULL::int4, NULL::text, NULL::text, {2}, {3}, NULL::int8"
_UPDATE_COUNTERS: Final = """
), counted AS (
    SELECT shard, count(*) AS many FROM {source} GROUP BY shard
), locked AS MATERIALIZED (
    SELECT p.shard, c.many FROM counted c JOIN magazine_pointers p
        ON p.magazine_id = %(magazine)s::int4 AND p.kind = 3 AND p.shard = c.shard
    ORDER BY p.shard FOR UPDATE OF p
), tallied AS (
    UPDATE magazine_pointers p SET {change} FROM locked l
    WHERE p.magazine_id = %(magazine)s::int4 AND p.kind = 3 AND p.shard = l.shard
"""
# The wanted slots are materialized first, with their magazine, and entries are joined to them by "=
# ANY (ARRAY[…])" (`rooms.db.leases.acquire` says why). Otherwise a plan made on a nearly empty
# table would start with all entries of the magazine, and PostgreSQL would keep it.
_SLOTS: Final = """v AS MATERIALIZED (
    SELECT %(magazine)s::int4 AS magazine, v.* FROM unnest(%(shard)s::int2[], %(pointer)s::int8[]) AS v (shard, pointer)
)"""
_SLOT_MATCHES: Final = (
    "e.magazine_id = ANY (ARRAY[{0}.magazine]) AND e.shard = {0}.shard AND e.pointer = {0}.pointer"
)
# Not as an EXISTS, which would be joined. {0}: a bound of `e.pointer`.
_HAS_WAITING: Final = """coalesce((
        SELECT true FROM magazine_entries e
        WHERE e.magazine_id = p.magazine_id AND e.shard = p.shard AND e.pointer >= p.pointer{0} LIMIT 1
    ), false)"""
# {0}: the row with the shard, not the entry, so that the index finds the bound.
_BELOW: Final = " AND e.pointer < (%(below)s::int8[])[{0}.shard + 1]"
_EXPIRED: Final = "(%(expires)s::bool AND e.expires_at IS NOT NULL AND e.expires_at <= now())"
# The length is in the row itself: a large body is not read for it.
_HANDED_BYTES: Final = "CASE WHEN {0} THEN octet_length(e.body) ELSE 0 END"
_OLDER_THAN: Final = "now() - %(older)s::float8 * interval '1 s'"
_ARRAYS: Final = """unnest(%(id)s::text[], %(body)s::bytea[], %(generation)s::int4[], %(shovels)s::int4[], %(reason)s::text[],
        %(detail)s::text[], %(expires_at)s::timestamptz[]"""
_FIELDS: Final = "id, body, generation, shovels, reason, detail, expires_at"

CREATE: Final = """
WITH made AS (
    INSERT INTO magazines (name, shards, expires) VALUES (%(name)s, %(shards)s, %(expires)s)
    ON CONFLICT (name) DO NOTHING RETURNING id
), pointers AS (
    INSERT INTO magazine_pointers (magazine_id, kind, shard, pointer)
    SELECT made.id, kind, shard, CASE WHEN kind < 3 THEN %(beginning)s::int8 ELSE 0 END
    FROM made, generate_series(0, 3) kind, generate_series(0, %(shards)s::int4 - 1) shard
) SELECT 0, count(*) FROM made
"""

OPEN: Final = """
SELECT 0, m.id, m.shards, m.expires, EXISTS (SELECT FROM magazine_pointers p WHERE p.magazine_id = m.id)
FROM magazines m WHERE m.name = %(name)s
UNION ALL SELECT 0, NULL, NULL, NULL, NULL
"""

# Without pointers no process can load. The row that names the magazine goes last, so that an
# interrupted drop can be completed.
DROP_POINTERS: Final = "WITH gone AS (DELETE FROM magazine_pointers WHERE magazine_id = %(magazine)s RETURNING 1) SELECT 0, count(*) FROM gone"
# Each step begins at a slot, so that it does not read the dead rows that earlier ones left.
DROP_ENTRIES: Final = f"""
WITH step AS MATERIALIZED (
    SELECT e.shard, e.pointer FROM magazine_entries e
    WHERE e.magazine_id = %(magazine)s::int4 AND (e.shard, e.pointer) > (%(shard)s::int2, %(pointer)s::int8)
    ORDER BY e.shard, e.pointer LIMIT {MAX_BATCH}
), last AS MATERIALIZED (
    SELECT shard, pointer FROM step ORDER BY step.shard DESC, step.pointer DESC LIMIT 1
), gone AS (
    DELETE FROM magazine_entries e USING last l
    WHERE e.magazine_id = %(magazine)s::int4 AND (e.shard, e.pointer) > (%(shard)s::int2, %(pointer)s::int8)
        AND (e.shard, e.pointer) <= (l.shard, l.pointer) RETURNING 1
) SELECT 0, shard, pointer FROM last WHERE (SELECT count(*) FROM gone) >= 0 UNION ALL SELECT 0, NULL, NULL
"""
DROP_MAGAZINE: Final = "WITH gone AS (DELETE FROM magazines WHERE id = %(magazine)s RETURNING 1) SELECT 0, count(*) FROM gone"

LOAD_ENTRIES: Final = f"""
WITH claimed AS (
    UPDATE magazine_pointers SET pointer = pointer + %(count)s::int8, loaded = loaded + %(count)s::int8
    WHERE magazine_id = %(magazine)s::int4 AND kind = 0 AND shard = %(shard)s::int2 RETURNING pointer - %(count)s::int8 AS first
), put AS (
    INSERT INTO magazine_entries (magazine_id, shard, pointer, {_FIELDS})
    SELECT %(magazine)s::int4, %(shard)s::int2, c.first + v.n - 1, v.id, coalesce(v.body, ''), v.generation, v.shovels,
        v.reason, v.detail, v.expires_at
    FROM claimed c CROSS JOIN {_ARRAYS}) WITH ORDINALITY AS v ({_FIELDS}, n)
) SELECT 0, first FROM claimed UNION ALL SELECT 0, NULL
"""

RELOAD: Final = f"""
WITH v AS MATERIALIZED (
    SELECT %(magazine)s::int4 AS magazine, v.*
    FROM {_ARRAYS}, %(shards)s::int2[], %(pointers)s::int8[]) WITH ORDINALITY AS v ({_FIELDS}, shard, pointer, n)
), gone AS (
    DELETE FROM magazine_entries e USING v WHERE {_SLOT_MATCHES.format("v")} RETURNING v.*
), claimed AS (
    UPDATE magazine_pointers p
    SET pointer = p.pointer + %(count)s::int8, loaded = p.loaded + g.many, reloaded = p.reloaded + g.many
    FROM (SELECT count(*) AS many FROM gone) g
    WHERE p.magazine_id = %(magazine)s::int4 AND p.kind = 0 AND p.shard = %(shard)s::int2
    RETURNING p.pointer - %(count)s::int8 AS first
), put AS (
    INSERT INTO magazine_entries (magazine_id, shard, pointer, {_FIELDS})
    SELECT %(magazine)s::int4, %(shard)s::int2, c.first + g.n - 1, g.id, coalesce(g.body, ''), g.generation, g.shovels,
        g.reason, g.detail, g.expires_at
    FROM claimed c CROSS JOIN gone g
    RETURNING pointer
{_UPDATE_COUNTERS.format(source="gone", change="deleted = p.deleted + l.many")}
) SELECT 0, c.first, g.n - 1 FROM claimed c LEFT JOIN gone g ON true UNION ALL SELECT 0, NULL, NULL
"""


# While a firer waits for a shard, another may empty it, and entries loaded meanwhile are not in the
# first one's snapshot. So the statement reports separately whether there really was nothing.
_MISSED_ENTRIES: Final = (
    """(NOT EXISTS (SELECT FROM line) AND EXISTS (
        SELECT FROM magazine_pointers p WHERE p.magazine_id = %(magazine)s::int4 AND p.kind = 1 AND """
    + _HAS_WAITING
    + """
    ))::int4::int8"""
)


def _fire(lock: str, bound: str = "") -> str:
    return f"""
WITH line AS MATERIALIZED (
    SELECT p.shard, p.pointer FROM magazine_pointers p
    WHERE p.magazine_id = %(magazine)s::int4 AND p.kind = 1 AND {
        _HAS_WAITING.format(bound.format("p"))
    }
    ORDER BY (p.shard + %(turn)s::int4) %% %(shards)s::int4 LIMIT %(most)s::int4 FOR UPDATE {lock}
), sized AS MATERIALIZED (
    SELECT l.shard, e.pointer, e.bytes FROM line l CROSS JOIN LATERAL (
        SELECT e.pointer, {
        _HANDED_BYTES.format(f"e.fire_ts IS NULL AND NOT {_EXPIRED}")
    } AS bytes FROM magazine_entries e
        WHERE e.magazine_id = %(magazine)s::int4 AND e.shard = l.shard AND e.pointer >= l.pointer{
        bound.format("l")
    }
        ORDER BY e.pointer LIMIT %(limit)s::int4
    ) e LIMIT %(limit)s::int4
), picked AS MATERIALIZED (
    SELECT %(magazine)s::int4 AS magazine, shard, pointer FROM (
        SELECT shard, pointer, sum(bytes) OVER (ORDER BY (shard + %(turn)s::int4) %% %(shards)s::int4, pointer) - bytes AS before FROM sized
    ) s WHERE before < %(bytes)s::int8
), stamped AS (
    UPDATE magazine_entries e SET fire_ts = now() FROM picked p
    WHERE {_SLOT_MATCHES.format("p")} AND e.fire_ts IS NULL AND NOT {_EXPIRED}
    RETURNING e.*
), moved AS (
    UPDATE magazine_pointers p SET pointer = m.last + 1, fired = p.fired + m.many
    FROM (
        SELECT c.shard, max(c.pointer) AS last, (SELECT count(*) FROM stamped s WHERE s.shard = c.shard) AS many
        FROM picked c GROUP BY c.shard
    ) m
    WHERE p.magazine_id = %(magazine)s::int4 AND p.kind = 1 AND p.shard = m.shard
) SELECT 0, {_COLUMNS} FROM stamped e
UNION ALL SELECT 0, {
        _NO_ENTRY_COLUMNS.format(
            "(SELECT count(*) FROM line)",
            "(SELECT count(*)::int4 FROM picked)",
            _MISSED_ENTRIES.format(bound.format("p")),
            "NULL::int8",
        )
    }
"""


FIRE_FREE: Final = _fire("SKIP LOCKED")
"""From shards that no other call fires from."""
FIRE_ANY: Final = _fire("")
FIRE_FREE_BELOW: Final = _fire("SKIP LOCKED", _BELOW)
FIRE_ANY_BELOW: Final = _fire("", _BELOW)

TAKE: Final = f"""
WITH {_SLOTS}, taken AS (
    UPDATE magazine_entries e SET fire_ts = now() FROM v
    WHERE {_SLOT_MATCHES.format("v")} AND (e.fire_ts IS NULL OR e.fire_ts < {_OLDER_THAN}) AND NOT {_EXPIRED}
    RETURNING e.*
{_UPDATE_COUNTERS.format(source="taken", change="fired = p.fired + l.many")}
) SELECT 0, {_COLUMNS} FROM taken e UNION ALL SELECT 0, {_NO_ENTRY_COLUMNS.format("NULL::int8", "NULL::int4", "NULL::int8", "NULL::int8")}
"""

FIND: Final = f"""
WITH {_SLOTS} SELECT 0, {_COLUMNS} FROM v JOIN magazine_entries e ON {_SLOT_MATCHES.format("v")}
WHERE NOT {_EXPIRED}
UNION ALL SELECT 0, {_NO_ENTRY_COLUMNS.format("NULL::int8", "NULL::int4", "NULL::int8", "NULL::int8")}
"""

PEEK: Final = f"""
(SELECT 0, {_COLUMNS} FROM magazine_entries e
WHERE e.magazine_id = %(magazine)s::int4 AND (e.shard, e.pointer) > (%(shard)s::int2, %(pointer)s::int8) AND NOT {_EXPIRED}
ORDER BY e.shard, e.pointer LIMIT %(limit)s::int4)
UNION ALL SELECT 0, {_NO_ENTRY_COLUMNS.format("NULL::int8", "NULL::int4", "NULL::int8", "NULL::int8")}
"""

PEEK_SLOTS: Final = f"""
(SELECT 0, e.shard, e.pointer FROM magazine_entries e
WHERE e.magazine_id = %(magazine)s::int4 AND (e.shard, e.pointer) > (%(shard)s::int2, %(pointer)s::int8) AND NOT {_EXPIRED}
ORDER BY e.shard, e.pointer LIMIT %(limit)s::int4)
UNION ALL SELECT 0, NULL, NULL
"""

DELETE: Final = f"""
WITH {_SLOTS}, gone AS (
    DELETE FROM magazine_entries e USING v WHERE {_SLOT_MATCHES.format("v")}
    RETURNING e.shard, e.pointer
{_UPDATE_COUNTERS.format(source="gone", change="deleted = p.deleted + l.many, swept = p.swept + CASE WHEN %(swept)s::bool THEN l.many ELSE 0 END")}
) SELECT 0, shard, pointer FROM gone UNION ALL SELECT 0, NULL, NULL
"""

SWEEP_SHARD: Final = f"""
WITH held AS MATERIALIZED (
    SELECT pointer, epoch FROM magazine_pointers
    WHERE magazine_id = %(magazine)s::int4 AND kind = 2 AND shard = %(shard)s::int2 FOR UPDATE
), fire AS MATERIALIZED (
    SELECT p.pointer FROM magazine_pointers p, held h
    WHERE p.magazine_id = %(magazine)s::int4 AND p.kind = 1 AND p.shard = %(shard)s::int2 AND h.epoch <= %(epoch)s::int8
), read AS MATERIALIZED (
    SELECT e.magazine_id AS magazine, e.shard, e.pointer, coalesce(e.fire_ts, e.loaded_at) < {
    _OLDER_THAN
} AS stuck,
        {_EXPIRED} AS expired, {_HANDED_BYTES.format(f"NOT {_EXPIRED}")} AS bytes
    FROM held h, fire f, LATERAL (
        SELECT * FROM magazine_entries e WHERE e.magazine_id = %(magazine)s::int4 AND e.shard = %(shard)s::int2
            AND e.pointer >= h.pointer AND e.pointer < f.pointer
        ORDER BY e.pointer LIMIT %(limit)s::int4
    ) e
), looked AS MATERIALIZED (
    SELECT r.*, sum(r.bytes) OVER (ORDER BY r.pointer) - r.bytes AS before FROM read r
), young AS MATERIALIZED (
    SELECT min(pointer) AS pointer FROM looked WHERE NOT stuck AND NOT expired
), taken AS (
    UPDATE magazine_entries e SET fire_ts = now() FROM looked l, young y
    WHERE {_SLOT_MATCHES.format("l")}
        AND l.stuck AND NOT l.expired AND (y.pointer IS NULL OR l.pointer < y.pointer) AND l.before < %(bytes)s::int8
        AND coalesce(e.fire_ts, e.loaded_at) < {_OLDER_THAN}
    RETURNING e.*
), gone AS (
    DELETE FROM magazine_entries e USING looked l
    WHERE {_SLOT_MATCHES.format("l")} AND l.expired
    RETURNING e.shard
{_UPDATE_COUNTERS.format(source="gone", change="deleted = p.deleted + l.many")}
), moved AS (
    UPDATE magazine_pointers p SET epoch = %(epoch)s::int8, pointer = greatest(p.pointer, coalesce(
        (SELECT min(pointer) FROM looked WHERE NOT expired),
        CASE WHEN (SELECT count(*) FROM looked) < %(limit)s::int4 THEN f.pointer ELSE (SELECT max(pointer) + 1 FROM looked) END
    ))
    FROM fire f
    WHERE p.magazine_id = %(magazine)s::int4 AND p.kind = 2 AND p.shard = %(shard)s::int2
    RETURNING p.pointer
) SELECT 0, {_COLUMNS} FROM taken e
UNION ALL SELECT 0, {
    _NO_ENTRY_COLUMNS.format(
        "(SELECT pointer FROM moved)",
        "(SELECT count(*)::int4 FROM looked)",
        "(SELECT epoch FROM held)",
        "(SELECT pointer FROM young)",
    )
}
"""

STATE: Final = """
SELECT 0, shard, max(pointer) FILTER (WHERE kind = 0), max(pointer) FILTER (WHERE kind = 1), max(pointer) FILTER (WHERE kind = 2),
    max(epoch), sum(loaded)::int8, sum(fired)::int8, sum(deleted)::int8, sum(reloaded)::int8, sum(swept)::int8
FROM magazine_pointers WHERE magazine_id = %(magazine)s GROUP BY shard
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL ORDER BY 2
"""

COUNT: Final = f"""
SELECT 0, (SELECT count(*) FROM magazine_entries e WHERE e.magazine_id = %(magazine)s AND NOT {_EXPIRED}),
    EXISTS (SELECT FROM magazine_pointers WHERE magazine_id = %(magazine)s)
"""

OLDEST: Final = f"""
SELECT 0, min(f.loaded_us) FROM magazine_pointers p CROSS JOIN LATERAL (
    SELECT (extract(epoch FROM e.loaded_at) * 1000000)::int8 AS loaded_us FROM (
        SELECT * FROM magazine_entries e WHERE e.magazine_id = p.magazine_id AND e.shard = p.shard AND e.pointer >= p.pointer
        ORDER BY e.pointer LIMIT {MAX_BATCH}
    ) e WHERE NOT {_EXPIRED} ORDER BY e.pointer LIMIT 1
) f WHERE p.magazine_id = %(magazine)s::int4 AND p.kind = 2
"""

_QUEUE: Final = """name, handler_type, active, shards, queue_expiry_s, message_expiry_s, concurrency, shovel_concurrency,
    shovel_interval_s, sweep_duration_s, max_batch, max_wait_s"""

KEEP_QUEUE: Final = f"""
WITH kept AS (
    INSERT INTO handler_queues ({_QUEUE}, created_at)
    VALUES ({", ".join(f"%({field.strip()})s" for field in _QUEUE.split(","))}, %(created_at)s)
    ON CONFLICT (name) DO UPDATE SET {", ".join(f"{field.strip()} = excluded.{field.strip()}" for field in [*_QUEUE.split(",")[1:], "created_at"])}
) SELECT 0
"""

QUEUES: Final = f"""
SELECT 0, {_QUEUE}, (extract(epoch FROM created_at) * 1000000)::int8 FROM handler_queues WHERE active = %(active)s
UNION ALL SELECT 0{", NULL" * 13} ORDER BY 2
"""

FORGET_QUEUE: Final = "WITH gone AS (DELETE FROM handler_queues WHERE name = %(name)s RETURNING 1) SELECT 0, count(*) FROM gone"
