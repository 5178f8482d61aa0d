"""Share the parts that many statements have in common.

Each part names its rows by fixed aliases: `d` a delivery, `m` its message. Many rows are inserted
by one parameter: a statement with a parameter for each value differs for each number of rows, so
that it is built, parsed and planned every time.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import Table, column, func, select, text
from sqlalchemy.dialects.postgresql import Insert, insert

from rooms.db.pg_arrays import number_array, word_array
from rooms.domain.delivery_task import DeliveryTask

JOIN_MESSAGE: Final = """LEFT JOIN LATERAL (
    SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
) m ON true"""
"""Join the message of `d`, one row at a time; `rooms.db.leases.acquire` explains why."""

REPLACE_SIDELINED: Final = """ON CONFLICT (room_id, id) DO UPDATE
    SET generation = excluded.generation, since = excluded.since, reason = excluded.reason,
        shard = NULL, pointer = NULL"""
"""End an INSERT INTO sidelined: an older row of the delivery is replaced, without a slot."""

ROOM_LIFETIME_MS: Final = """least(nullif(r.message_expiration_ms, 0), (
    SELECT (o.quotas->>'expiration_ms')::int8 FROM organisations o WHERE o.id = r.organisation_id
))"""
"""Return the longest lifetime of a message in the room `r`, in milliseconds; null: no limit.

It is the shorter one of the room's setting and of its organisation's quota.
"""


def matches_patterns(event_type: str, patterns: str) -> str:
    """Return the condition that an event type matches one of an array of patterns, both as SQL."""
    return f"""EXISTS (SELECT FROM unnest({patterns}) AS p (pattern)
        WHERE p.pattern IN ('*', {event_type})
            OR right(p.pattern, 2) = '.*' AND starts_with({event_type}, left(p.pattern, -1)))"""


def has_live_grant(subscription: str, event_type: str, *, at: str = "statement_timestamp()") -> str:
    """Return the condition that a valid grant covers an event type, as SQL.

    `subscription`: the alias of a row of `subscriptions`, by whose subscriber grants are chosen.
    `at`: the time by which a grant has begun, as SQL.
    """
    return f"""EXISTS (SELECT FROM grants g
        WHERE g.room_id = {subscription}.room_id AND g.kind = 'subscribe' AND g.revoked_at IS NULL
            AND (g.organisation_id = {subscription}.organisation_id OR g.organisation_id IS NULL)
            AND g.starts_at <= {at} AND (g.until IS NULL OR g.until > now())
            AND (g.event_types IS NULL OR {matches_patterns(event_type, "g.event_types")}))"""


VERSION_ARRAYS: Final = (
    "unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[])"
)
"""Read the parameters that `version_arrays` makes: (room_id, id, generation, attempt)."""


def version_arrays(tasks: Sequence[DeliveryTask]) -> dict[str, str]:
    """Return the parameters room, id, generation and attempt of these copies."""
    return {
        "room": number_array(task.room_id for task in tasks),
        "id": word_array(task.delivery_id for task in tasks),
        "generation": number_array(task.generation for task in tasks),
        "attempt": number_array(task.attempt for task in tasks),
    }


def session_lives(writer: str) -> str:
    """Return the condition that the session of a writer lives, as its lock proves.

    `writer` is the SQL of the writer's id. The statement gets `LIVENESS_LOCK` as the parameter
    `life`.
    """
    return f"""EXISTS (
    SELECT FROM pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 2
        AND l.classid = %(life)s AND l.objid::int8 = {writer}
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)"""  # noqa: S608 - constants of this package


def insert_from_json(table: Table, names: tuple[str, ...]) -> Insert:
    """Return the statement that inserts these columns of the parameter `rows`."""
    record = func.json_populate_recordset(text(f"NULL::{table.name}"), text("CAST(:rows AS json)"))
    found: Any = select(*[column(name) for name in names]).select_from(record.alias("r"))
    return insert(table).from_select(names, found, include_defaults=False)


def rows_as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the parameter `rows`: JSON, with bytes as PostgreSQL reads them.

    ValueError: the rows have different columns, so the statement of one would lose those of others.
    """
    if any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError("the rows have different columns")
    return msgspec.json.encode(
        [
            {
                name: f"\\x{value.hex()}" if isinstance(value, bytes) else value
                for name, value in row.items()
            }
            for row in rows
        ]
    ).decode()
