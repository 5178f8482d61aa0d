"""Sideline deliveries whose parts do not fit together.

The row of the delivery or of its message is gone, or a copy cannot be read. Deliveries are also
sidelined as `stuck` if their claims ended again and again with the death of their worker. The
module also counts the sidelined orphans by subscription.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rooms.db.operational.outbox import sidelined_ctes
from rooms.db.pg_arrays import bytes_array, literal_array, number_array, text_array, word_array
from rooms.db.queue.broker_claims import DeliveryVersion
from rooms.db.statement_parts import JOIN_MESSAGE, REPLACE_SIDELINED
from rooms.db.writer import LogWriter
from rooms.domain.delivery_properties import DeliveryProperties
from rooms.domain.delivery_task import PRIORITIES, DeliveryTask
from rooms.domain.ids import DeliveryId, RoomId, SubscriptionId, room_of
from rooms.domain.state_machine import LogKind, Reason, State
from rooms.ports import MalformedMessage

MAX_TIME_MS: Final = 253_402_300_799_000
"""The end of the year 9999."""
_MAX_SEQUENCE: Final = (1 << 63) - 1
_MAX_KEY: Final = 128
"""The longest key that a publish takes; an index holds no much longer one."""

# Up to its mark, retention has processed the past: a delivery without a row there had ended.
_COVERED_BY_RETENTION: Final = """EXISTS (SELECT FROM upkeep_marks k WHERE k.name = 'retention'
    AND v.id < rpad(lpad(to_hex((extract(epoch FROM k.at) * 1000)::int8), 12, '0'), 32, '0')::uuid)"""
# Records of the deliveries `d` that the magazine must get.
_INSERT_SIDELINED: Final = f"""side AS (
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, generation, {{0}} FROM d
    {REPLACE_SIDELINED}
)"""  # noqa: S608 - constants of this package
_EVENTS: Final = sidelined_ctes("SELECT * FROM d")
_INSERT_ORPHANS: Final = _INSERT_SIDELINED.format(f"'{Reason.ORPHAN}'")
_INSERT_WITH_REASON: Final = _INSERT_SIDELINED.format("%(reason)s::text")

# The caller settles the copies afterwards, so this write must be durable even if the session's
# claims are not: hence the first line.
_CREATE_ORPHAN_ROWS: Final = f"""
WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true)), v AS MATERIALIZED (
    SELECT v.* FROM durable, unnest(
        %(room)s::int4[], %(id)s::uuid[], %(message)s::uuid[], %(subscription)s::uuid[], %(generation)s::int4[],
        %(attempt)s::int4[], %(priority)s::int2[], %(type)s::text[], %(version)s::int4[], %(correlation)s::text[],
        %(published)s::int8[], %(expires)s::int8[], %(headers)s::bytea[], %(payload)s::bytea[],
        %(ordering_key)s::text[], %(sequence)s::int8[], %(business_key)s::text[]
    ) WITH ORDINALITY AS v (
        room_id, id, message_id, subscription_id, generation, attempt, priority, event_type, event_version,
        correlation_id, published_ms, expires_ms, headers, payload, ordering_key, sequence, business_key, n
    )
), known AS MATERIALIZED (
    SELECT v.*, s.version - s.lane_changes AS policy, timestamptz 'epoch' + v.expires_ms * interval '1 ms' AS expires_at
    FROM v CROSS JOIN LATERAL (
        SELECT * FROM subscriptions s WHERE s.room_id = v.room_id AND s.id = v.subscription_id LIMIT 1
    ) s CROSS JOIN LATERAL (SELECT * FROM rooms r WHERE r.id = v.room_id LIMIT 1) r
    WHERE s.status NOT IN ('deleted', 'rejected', 'terminated') AND NOT r.deleting AND NOT {_COVERED_BY_RETENTION}
), m AS (
    INSERT INTO messages (room_id, id, event_type, event_version, priority, fanout, published_at, expires_at,
        correlation_id, headers, payload, ordering_key, business_key)
    SELECT room_id, message_id, event_type, event_version, priority, 1,
        timestamptz 'epoch' + published_ms * interval '1 ms', expires_at, correlation_id, headers, coalesce(payload, ''),
        ordering_key, business_key
    FROM known ON CONFLICT (room_id, id) DO NOTHING
), d AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, reason, generation, attempt, attempts,
        expires_at, sequence)
    SELECT room_id, id, message_id, subscription_id, '{State.SIDELINED}', '{Reason.ORPHAN}', generation, attempt, attempt,
        expires_at, sequence FROM known ON CONFLICT (room_id, id) DO NOTHING
    RETURNING room_id, id, message_id, subscription_id, generation, reason
), {_INSERT_ORPHANS}{_EVENTS}, l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, policy_version, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id, '{LogKind.SIDELINED}', subscription_id, id,
        generation, attempt, event_type, event_version, correlation_id, policy, %(host)s::text, '{Reason.ORPHAN}'
    FROM known WHERE id IN (SELECT id FROM d)
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM d), (SELECT count(*) FROM v) - (SELECT count(*) FROM known)
"""  # noqa: S608 - constants of this package

# Its message may be gone together with the delivery, both of one day. The work row has enough data
# for a new row.
_SIDELINE_WITHOUT_MESSAGE: Final = f"""
WITH v AS MATERIALIZED (
    SELECT o.room_id, o.id, o.message_id, o.subscription_id, o.generation, o.attempt, o.expires_at
    FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id) CROSS JOIN LATERAL (
        SELECT * FROM outbox o WHERE o.room_id = v.room_id AND o.id = v.id LIMIT 1 FOR UPDATE SKIP LOCKED
    ) o CROSS JOIN LATERAL (
        SELECT count(*) AS there FROM (
            SELECT FROM messages m WHERE m.room_id = o.room_id AND m.id = o.message_id LIMIT 1
        ) m
    ) m WHERE m.there = 0
), d AS (
    INSERT INTO deliveries AS t (room_id, id, message_id, subscription_id, state, reason, generation, attempt, expires_at)
    SELECT room_id, id, message_id, subscription_id, '{State.SIDELINED}', '{Reason.ORPHAN}', generation, attempt, expires_at
    FROM v
    ON CONFLICT (room_id, id) DO UPDATE SET state = excluded.state, reason = excluded.reason, due_at = NULL,
        updated_at = now()
    WHERE t.state IN ('{State.QUEUED}', '{State.SCHEDULED}') AND t.generation = excluded.generation
        AND t.attempt = excluded.attempt
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt, t.reason
), gone AS (
    DELETE FROM outbox o USING v WHERE o.room_id = ANY (ARRAY[v.room_id]) AND o.id = v.id
), {_INSERT_ORPHANS}{_EVENTS}, l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, message_id, '{LogKind.SIDELINED}', subscription_id, id,
        generation, attempt, %(host)s::text, '{Reason.ORPHAN}' FROM d
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM d)
"""  # noqa: S608 - constants of this package

_SIDELINE_VERSIONS: Final = f"""
WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true)), v AS MATERIALIZED (
    SELECT v.* FROM durable, unnest(
        %(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[], %(error)s::text[]
    ) AS v (room_id, id, generation, attempt, error)
), d AS (
    UPDATE deliveries t SET state = '{State.SIDELINED}', reason = %(reason)s::text, last_error = v.error, due_at = NULL,
        updated_at = now()
    FROM v WHERE t.room_id = v.room_id AND t.id = v.id AND t.generation = v.generation AND t.attempt = v.attempt
        AND t.state = '{State.QUEUED}'
    RETURNING t.room_id, t.id, t.message_id, t.subscription_id, t.generation, t.attempt, t.reason
), gone AS (
    DELETE FROM outbox o USING d WHERE o.room_id = ANY (ARRAY[d.room_id]) AND o.id = d.id
), {_INSERT_WITH_REASON}{_EVENTS}, l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, '{LogKind.SIDELINED}',
        d.subscription_id, d.id, d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(host)s::text,
        %(reason)s::text
    FROM d {JOIN_MESSAGE}
    RETURNING 1
)
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM d)
"""  # noqa: S608 - constants of this package


def _clamp_ms(at_ms: int) -> int:
    # The content of such a copy was not validated.
    return min(max(at_ms, 0), MAX_TIME_MS)


def _valid_key(key: str | None) -> str | None:
    return key if key is not None and 0 < len(key) <= _MAX_KEY else None


def _valid_sequence(sequence: int | None) -> int | None:
    return sequence if sequence is not None and 0 < sequence <= _MAX_SEQUENCE else None


async def create_orphan_rows(writer: LogWriter, tasks: Sequence[DeliveryTask]) -> tuple[int, int]:
    """Create rows for copies whose deliveries have none.

    They are sidelined, with their message if that is gone too, under the keys and the sequence
    number that the copy names. Return how many deliveries were made, and for how many none was,
    because their subscription is gone or they had ended. Durable when it returns. Errors: those of
    `LogWriter.run`.
    """
    # Of several versions of a delivery the last one is right.
    last = {
        task.delivery_id: task
        for task in sorted(tasks, key=lambda task: (task.generation, task.attempt))
    }
    orphans = [last[identity] for identity in sorted(last)]
    identities = [task.properties or DeliveryProperties() for task in orphans]
    rows = await writer.run(
        _CREATE_ORPHAN_ROWS,
        {
            "room": number_array(task.room_id for task in orphans),
            "id": word_array(task.delivery_id for task in orphans),
            "message": word_array(task.message_id for task in orphans),
            "subscription": word_array(task.subscription_id for task in orphans),
            "generation": number_array(task.generation for task in orphans),
            "attempt": number_array(task.attempt for task in orphans),
            "priority": number_array(
                min(max(task.priority, 0), PRIORITIES - 1) for task in orphans
            ),
            "type": text_array(task.event_type for task in orphans),
            "version": number_array(task.event_version for task in orphans),
            "correlation": text_array(task.correlation_id for task in orphans),
            "published": number_array(_clamp_ms(task.published_ms) for task in orphans),
            "expires": literal_array(
                None if task.expires_ms is None else _clamp_ms(task.expires_ms) for task in orphans
            ),
            "headers": bytes_array(task.headers for task in orphans),
            "payload": bytes_array(task.payload for task in orphans),
            "ordering_key": text_array(_valid_key(one.ordering_key) for one in identities),
            "sequence": literal_array(_valid_sequence(one.sequence) for one in identities),
            "business_key": text_array(_valid_key(one.business_key) for one in identities),
            "host": writer.host,
        },
    )
    made, homeless = rows[0]
    return int(made), int(homeless)


async def sideline_without_message(
    writer: LogWriter, deliveries: Sequence[tuple[RoomId, DeliveryId]]
) -> int:
    """Sideline deliveries that have work and no message row, and end their work.

    Return how many there were. Errors: those of `LogWriter.run`.
    """
    rows = await writer.run_isolated(
        _SIDELINE_WITHOUT_MESSAGE,
        {
            "room": number_array(room for room, _ in deliveries),
            "id": word_array(identity for _, identity in deliveries),
            "host": writer.host,
        },
    )
    return int(rows[0][0])


async def sideline_unreadable(writer: LogWriter, messages: Sequence[MalformedMessage]) -> int:
    """Sideline the deliveries that wait for these messages, as far as they can be identified.

    Return how many. Durable when it returns. Errors: those of `LogWriter.run`.
    """
    steps = {
        (delivery_id, message.generation, message.attempt): message.reason
        for message in messages
        if (delivery_id := message.delivery_id) is not None
    }
    if not steps:
        return 0
    return await _sideline_versions(
        writer, [(*step, error) for step, error in steps.items()], Reason.UNREADABLE
    )


async def sideline_stuck(
    writer: LogWriter, versions: Sequence[DeliveryVersion], *, error: str
) -> int:
    """Sideline deliveries that are still at these versions, as `stuck`; return how many there were.

    Durable when it returns. Errors: those of `LogWriter.run`.
    """
    return await _sideline_versions(writer, [(*step, error) for step in versions], Reason.STUCK)


async def _sideline_versions(
    writer: LogWriter,
    versions: Sequence[tuple[DeliveryId, int | None, int | None, str]],
    reason: Reason,
) -> int:
    rows = await writer.run(
        _SIDELINE_VERSIONS,
        {
            "room": number_array(room_of(identity) for identity, _, _, _ in versions),
            "id": word_array(identity for identity, _, _, _ in versions),
            "generation": literal_array(generation for _, generation, _, _ in versions),
            "attempt": literal_array(attempt for _, _, attempt, _ in versions),
            "error": text_array(error for _, _, _, error in versions),
            "reason": reason,
            "host": writer.host,
        },
    )
    return int(rows[0][0])


MAX_FOUND: Final = 1000

_FIND_CRASH_LOOPS: Final = """
SELECT 0, o.* FROM (SELECT 0) one LEFT JOIN (
    SELECT id::text, generation, attempt, abandoned FROM outbox WHERE abandoned >= %(least)s::int4
    ORDER BY abandoned DESC, due_at LIMIT %(most)s::int4
) o ON true
"""


class CrashLoops:
    """Find crash loops by reading the whole outbox through one writer.

    Errors: those of `LogWriter.run`.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def find(self, min_crashes: int) -> list[tuple[DeliveryVersion, int]]:
        """Return the versions that lost so many successive claims, up to MAX_FOUND.

        Those that lost most come first, each with its count.
        """
        rows = await self._writer.run(_FIND_CRASH_LOOPS, {"least": min_crashes, "most": MAX_FOUND})
        return [
            ((DeliveryId(identity), generation, attempt), count)
            for identity, generation, attempt, count in rows
        ]

    async def sideline(self, versions: list[DeliveryVersion]) -> int:
        """Sideline those that are still there, as `stuck`; return how many."""
        return await sideline_stuck(
            self._writer, versions, error="its workers died with it, again and again"
        )


_COUNT_ORPHANS: Final = f"""
SELECT 0, o.* FROM (SELECT 0) one LEFT JOIN (
    SELECT s.subscription_id::text, r.name AS room, u.name, count(*) AS n, count(*) FILTER (WHERE m.there) AS whole,
        min(s.since) AS since
    FROM sidelined s CROSS JOIN LATERAL (
        SELECT * FROM subscriptions u WHERE u.room_id = s.room_id AND u.id = s.subscription_id AND u.status NOT IN ('deleted', 'rejected', 'terminated') LIMIT 1
    ) u CROSS JOIN LATERAL (SELECT * FROM rooms r WHERE r.id = s.room_id AND NOT r.deleting LIMIT 1) r
    LEFT JOIN LATERAL (
        SELECT EXISTS (SELECT FROM messages m WHERE m.room_id = d.room_id AND m.id = d.message_id OFFSET 0) AS there
        FROM deliveries d WHERE d.room_id = s.room_id AND d.id = s.id LIMIT 1
    ) m ON true
    WHERE s.reason = '{Reason.ORPHAN}' GROUP BY 1, 2, 3 ORDER BY n DESC, 1 LIMIT 1000
) o ON true
"""  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanCount:
    """Count the orphans of one subscription: all, and `with_message` those that can be sent.

    And the oldest's time.
    """

    subscription_id: SubscriptionId
    room: str
    name: str
    count: int
    with_message: int
    since: datetime


async def count_orphans(writer: LogWriter) -> Sequence[OrphanCount]:
    """Return up to 1,000 subscriptions that have orphans, the most first.

    It reads the whole sideline. Errors: those of `LogWriter.run`.
    """
    return [
        OrphanCount(
            subscription_id=SubscriptionId(identity),
            room=room,
            name=name,
            count=count,
            with_message=whole,
            since=since,
        )
        for identity, room, name, count, whole, since in await writer.run(_COUNT_ORPHANS, {})
    ]
