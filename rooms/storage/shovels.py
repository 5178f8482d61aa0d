"""What takes deliveries out of a sideline for good: a shovel, which queues them again, and a purge, which ends them."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from rooms.domain.states import LogKind, Reason, State
from rooms.storage.order import TURNS, pass_on
from rooms.storage.sidelines import DELIVERY, MESSAGE, Step, keys_of
from rooms.storage.writer import Writer

_PASS_ON_EXPIRED: Final = pass_on(f"SELECT room_id, id FROM u WHERE next = '{State.EXPIRED}'")  # noqa: S608 - a word of ours
_STEPS: Final = """
WITH v AS MATERIALIZED (
    SELECT * FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[]) WITH ORDINALITY AS v (room_id, id, generation, n)
), s AS MATERIALIZED (
    SELECT v.n, s.* FROM v CROSS JOIN LATERAL (
        SELECT * FROM sidelined s WHERE s.room_id = v.room_id AND s.id = v.id AND s.generation = v.generation
        LIMIT 1 FOR UPDATE SKIP LOCKED
    ) s
)"""

# A shovel does not renew the lifetime: what expired meanwhile ends here. What was shoveled too often stays.
_SHOVEL: Final = f"""{_STEPS}, t AS MATERIALIZED (
    SELECT s.n, s.shard, s.pointer, d.room_id, d.id, d.message_id, d.subscription_id, d.generation, d.expires_at,
        u.type, u.version AS policy, m.priority, m.event_type, m.event_version, m.correlation_id,
        CASE WHEN d.expires_at <= now() THEN '{State.EXPIRED}' WHEN d.shovels >= %(most)s::int4 THEN NULL
            ELSE '{State.QUEUED}' END::delivery_state AS next
    FROM s {DELIVERY} CROSS JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id LIMIT 1
    ) m CROSS JOIN LATERAL (
        SELECT * FROM subscriptions u WHERE u.room_id = d.room_id AND u.id = d.subscription_id LIMIT 1
    ) u WHERE u.status <> 'deleted'
), u AS (
    UPDATE deliveries d SET state = t.next, updated_at = now(),
        generation = d.generation + (t.next = '{State.QUEUED}')::int4,
        attempt = CASE WHEN t.next = '{State.QUEUED}' THEN 0 ELSE d.attempt END,
        shovels = d.shovels + (t.next = '{State.QUEUED}')::int4,
        due_at = CASE WHEN t.next = '{State.QUEUED}' THEN now() END,
        reason = CASE WHEN t.next = '{State.EXPIRED}' THEN '{Reason.TOO_LATE}' END
    FROM t WHERE t.next IS NOT NULL AND d.room_id = t.room_id AND d.id = t.id AND d.generation = t.generation
        AND d.state = '{State.SIDELINED}'
    RETURNING t.*, d.generation AS new_generation, d.attempt
), gone AS (
    DELETE FROM sidelined s USING u WHERE s.room_id = ANY (ARRAY[u.room_id]) AND s.id = u.id
), o AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, id, message_id, subscription_id,
        CASE type WHEN 'PULL' THEN %(pull)s::int2 ELSE %(push)s::int2 END, priority, new_generation, 0, now(), expires_at
    FROM u WHERE next = '{State.QUEUED}'
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, delay_ms, worker_host)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id,
        CASE next WHEN '{State.QUEUED}' THEN '{LogKind.SHOVELED}' ELSE '{LogKind.EXPIRED}' END, subscription_id, id,
        new_generation, attempt, event_type, event_version, correlation_id, policy, 0, %(host)s::text FROM u
    RETURNING 1
){_PASS_ON_EXPIRED}
SELECT (SELECT count(*) FROM l) + {TURNS}, t.n, CASE WHEN u.n IS NOT NULL THEN u.next::text END, t.type
FROM t LEFT JOIN u ON u.n = t.n UNION ALL SELECT (SELECT count(*) FROM l) + {TURNS}, NULL, NULL, NULL
"""  # noqa: S608 - text of our own

_PURGE: Final = f"""{_STEPS}, u AS (
    UPDATE deliveries d SET state = '{State.PURGED}', updated_at = now()
    FROM s WHERE d.room_id = s.room_id AND d.id = s.id AND d.generation = s.generation AND d.state = '{State.SIDELINED}'
    RETURNING s.n, d.room_id, d.id, d.message_id, d.subscription_id, d.generation, d.attempt
), gone AS (
    DELETE FROM sidelined s USING u WHERE s.room_id = ANY (ARRAY[u.room_id]) AND s.id = u.id
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.PURGED}', d.subscription_id,
        d.id, d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(host)s::text
    FROM u d {MESSAGE}
    RETURNING 1
){pass_on("SELECT room_id, id FROM u")}
SELECT (SELECT count(*) FROM l) + {TURNS}, n FROM u UNION ALL SELECT (SELECT count(*) FROM l) + {TURNS}, NULL
"""  # noqa: S608 - text of our own


class Shoveled(StrEnum):
    """What became of a step that was to be shoveled."""

    QUEUED = "queued"
    EXPIRED = "expired"
    TOO_OFTEN = "too_often"
    STALE = "stale"
    """Not sidelined at this generation any more, its message or its subscription gone, or in somebody's hands."""


class Shovels:
    """Moves sidelined deliveries on through one writer. StorageUnavailableError: in doubt; StorageRefusedError: not done."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def shovel(self, steps: Sequence[Step], *, most: int) -> list[tuple[Shoveled, str | None]]:
        """Queue steps again, their attempts counted anew, unless they were shoveled `most` times. What became of each,
        and the type of its subscription where that is known. The entries are the caller's to delete.
        """
        rows = await self._writer.run(_SHOVEL, keys_of(steps) | {"most": most, "host": self._writer.host})
        told: list[tuple[Shoveled, str | None]] = [(Shoveled.STALE, None)] * len(steps)
        for n, following, kind in rows:
            told[n - 1] = (Shoveled.TOO_OFTEN if following is None else Shoveled(following), kind)
        return told

    async def purge(self, steps: Sequence[Step]) -> list[Step]:
        """End steps as `purged`; those that ended. The entries are the caller's to delete."""
        rows = await self._writer.run(_PURGE, keys_of(steps) | {"host": self._writer.host})
        return [steps[n - 1] for (n,) in rows]
