"""Native subscriptions: what the broker is to keep of their passwords, and deliveries that their readers rejected."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from rooms.domain.copy import Copy
from rooms.domain.ids import SubscriptionId
from rooms.domain.states import LogKind, Reason, State, SubscriptionStatus
from rooms.storage.literals import numbers, plain
from rooms.storage.writer import Writer

REJECTED: Final = "its reader rejected it at the broker"
_PASSWORDS: Final = f"""
SELECT 0, s.id::text, s.native_password FROM subscriptions s
WHERE s.native_password IS NOT NULL AND s.status <> '{SubscriptionStatus.DELETED}'
    AND NOT EXISTS (SELECT FROM rooms r WHERE r.id = s.room_id AND r.deleting)
UNION ALL SELECT 0, NULL, NULL
"""  # noqa: S608 - a word of ours


class DeadLetter(StrEnum):
    """Say what became of a copy that its reader rejected."""

    SIDELINED = "sidelined"
    EARLY = "early"
    """The relay has not yet recorded that it was handed over: look again later."""
    DISCARDED = "discarded"
    """Its delivery moved on, is gone with its retention, or belongs to another installation on the same broker."""


# The broker forgets the copies afterwards, so what is written must be durable: hence the first line.
_SIDELINE_REJECTED: Final = f"""
WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true)), v AS MATERIALIZED (
    SELECT v.* FROM durable, unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[])
        WITH ORDINALITY AS v (room_id, id, generation, attempt, n)
), found AS MATERIALIZED (
    SELECT v.n, t.room_id, t.id, t.generation, t.attempt, t.state FROM v CROSS JOIN LATERAL (
        SELECT * FROM deliveries t WHERE t.room_id = v.room_id AND t.id = v.id AND t.generation = v.generation
            AND t.attempt = v.attempt LIMIT 1
    ) t CROSS JOIN LATERAL (
        SELECT FROM subscriptions s WHERE s.room_id = t.room_id AND s.id = t.subscription_id
            AND s.status <> '{SubscriptionStatus.DELETED}' LIMIT 1
    ) s CROSS JOIN LATERAL (SELECT FROM rooms r WHERE r.id = t.room_id AND NOT r.deleting LIMIT 1) r
), d AS (
    UPDATE deliveries t SET state = '{State.SIDELINED}', reason = '{Reason.NACKED}', last_error = '{REJECTED}', due_at = NULL,
        updated_at = now()
    FROM found f WHERE t.room_id = f.room_id AND t.id = f.id AND t.generation = f.generation AND t.attempt = f.attempt
        AND t.state = '{State.HANDED_OVER}'
    RETURNING f.n, t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt
), side AS (
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, generation, '{Reason.NACKED}' FROM d
    ON CONFLICT (room_id, id) DO UPDATE SET generation = excluded.generation, since = excluded.since,
        reason = excluded.reason, shard = NULL, pointer = NULL
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.SIDELINED}', d.subscription_id,
        d.id, d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(host)s::text, '{Reason.NACKED}'
    FROM d LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m ON true
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), v.n, CASE WHEN v.n IN (SELECT n FROM d) THEN '{DeadLetter.SIDELINED}'
    WHEN f.state = '{State.QUEUED}' THEN '{DeadLetter.EARLY}' ELSE '{DeadLetter.DISCARDED}' END
FROM v LEFT JOIN found f ON f.n = v.n
"""  # noqa: S608 - words of our own


async def passwords(writer: Writer) -> Mapping[SubscriptionId, str]:
    """Hashed, of all native subscriptions that nobody has deleted. Errors are `Writer.run`'s."""
    return {SubscriptionId(row[0]): row[1] for row in await writer.run(_PASSWORDS, {})}


async def sideline_rejected(writer: Writer, copies: Sequence[Copy]) -> list[DeadLetter]:
    """Sideline the deliveries of these copies, where they were handed over at these steps; what became of each.

    None of their steps comes twice. Durable when it returns. Errors are `Writer.run`'s.
    """
    if not copies:
        return []
    rows = await writer.run(
        _SIDELINE_REJECTED,
        {
            "room": numbers(copy.room_id for copy in copies),
            "id": plain(copy.delivery_id for copy in copies),
            "generation": numbers(copy.generation for copy in copies),
            "attempt": numbers(copy.attempt for copy in copies),
            "host": writer.host,
        },
    )
    fates = dict(rows)
    return [DeadLetter(fates[n]) for n in range(1, len(copies) + 1)]
