"""Replays: past messages given to one subscription as new deliveries, a batch of a job's walk in one statement.

A replayed delivery's id is made from its message's and the job's (`rooms.domain.ids.replayed_id`), so that the same
message is given once by one job, whoever repeats a step.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.domain.ids import DeliveryId, JobId, MessageId, RoomId, SubscriptionId, room_of
from rooms.domain.place import LATER, TO_SEND
from rooms.domain.room import Interest
from rooms.domain.states import LogKind, State
from rooms.storage.job_steps import MINE, told
from rooms.storage.literals import plain
from rooms.storage.subscriptions import from_json, missing
from rooms.storage.writer import Writer

BATCH: Final = 200

_COUNT: Final = """
SELECT 0, count(*) FROM messages m WHERE m.room_id = %(room)s::int4 AND m.id > %(after)s::uuid AND m.id < %(until)s::uuid
"""
_PAGE: Final = """
(SELECT 0, m.id::text, m.event_type, m.event_version, m.published_at > %(asked_at)s::timestamptz, m.priority, m.ordering_key,
    CASE WHEN %(whole)s::bool THEN m.headers END, CASE WHEN %(whole)s::bool THEN m.payload END
FROM messages m
WHERE m.room_id = %(room)s::int4 AND m.id > %(after)s::uuid AND m.id < %(until)s::uuid ORDER BY m.id LIMIT %(limit)s::int4)
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
"""

_WANTS: Final = """
SELECT 0, u.id::text, u.event_types, u.filter FROM subscriptions u
WHERE u.room_id = %(room)s::int4 AND u.id = %(subscription)s::uuid AND u.status <> 'deleted'
UNION ALL SELECT 0, NULL, NULL, NULL
"""

# An id that another delivery has already (42 bits are left to chance) stops the batch: it is made from another salt.
# What its publisher withdrew is given to nobody. A message that has no day retention may just be deleting: either it is
# locked here and stays, or it was gone before and this begins again.
_GIVE: Final = """
WITH {mine}, s AS MATERIALIZED (
    SELECT u.type, u.version AS policy, nullif(r.message_expiration_ms, 0) * interval '1 ms' AS life
    FROM subscriptions u, rooms r WHERE u.room_id = %(room)s::int4 AND u.id = %(subscription)s::uuid AND u.status <> 'deleted'
        AND r.id = %(room)s::int4 AND NOT r.deleting
), v AS MATERIALIZED (
    SELECT * FROM unnest(%(messages)s::uuid[], %(ids)s::uuid[]) AS v (message_id, id) WHERE (SELECT one FROM open_job) = 1
), clash AS MATERIALIZED (
    SELECT v.id FROM v CROSS JOIN LATERAL (
        SELECT FROM deliveries d WHERE d.room_id = %(room)s::int4 AND d.id = v.id
            AND (d.message_id <> v.message_id OR d.subscription_id <> %(subscription)s::uuid) LIMIT 1
    ) d
), free AS MATERIALIZED (
    SELECT NOT EXISTS (SELECT FROM clash) AND EXISTS (SELECT FROM s) AS yes
), no_day AS MATERIALIZED (
    SELECT v.id FROM v CROSS JOIN LATERAL (
        SELECT FROM messages_rest r WHERE r.room_id = %(room)s::int4 AND r.id = v.message_id LIMIT 1 FOR KEY SHARE
    ) r
), m AS MATERIALIZED (
    SELECT v.id AS delivery_id, m.room_id, m.id, m.event_type, m.event_version, m.priority, m.correlation_id,
        greatest(m.due_at, now()) AS due, CASE WHEN m.expires_at <= now() THEN now() + (SELECT life FROM s) ELSE m.expires_at END AS expires_at,
        CASE WHEN m.expires_at <= now() AND NOT %(expired)s::bool THEN 'expired' WHEN EXISTS (
            SELECT FROM deliveries d WHERE d.room_id = m.room_id AND d.message_id = m.id
                AND d.id >= (left(m.id::text, 13) || '-0000-0000-000000000000')::uuid
                AND d.id <= (left(m.id::text, 13) || '-ffff-ffff-ffffffffffff')::uuid
                AND d.state = '{cancelled}' AND d.reason = 'withdrawn' OFFSET 0
        ) THEN 'withdrawn' ELSE 'replayed' END AS what
    FROM v CROSS JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = %(room)s::int4 AND m.id = v.message_id LIMIT 1
    ) m WHERE (SELECT yes FROM free) AND (SELECT count(*) FROM no_day) >= 0
), x AS MATERIALIZED (
    SELECT m.*, s.type, s.policy,
        CASE WHEN extract(epoch FROM m.due - now()) * 1000 > %(horizon)s::int8 THEN '{scheduled}' ELSE '{queued}'
            END::delivery_state AS state
    FROM m CROSS JOIN s WHERE m.what = 'replayed'
), d AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, due_at, expires_at)
    SELECT room_id, delivery_id, id, %(subscription)s::uuid, state, due, expires_at FROM x
    ON CONFLICT (room_id, id) DO NOTHING RETURNING id
), given AS MATERIALIZED (
    SELECT x.* FROM x WHERE x.delivery_id IN (SELECT id FROM d)
), o AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, delivery_id, id, %(subscription)s::uuid, CASE type WHEN 'PULL' THEN %(pull)s::int2 ELSE %(push)s::int2 END
        + CASE state WHEN '{scheduled}' THEN {later:d} ELSE 0 END, priority, 0, 0, due, expires_at FROM given
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, fanout, correlation_id, policy_version, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, id, '{replayed}', %(subscription)s::uuid, delivery_id, 0, 0,
        event_type, event_version, 1, correlation_id, policy, %(host)s::text,
        CASE state WHEN '{scheduled}' THEN '{scheduled}' END FROM given
    RETURNING 1
), {told}
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM told), (SELECT type FROM s),
    (SELECT string_agg(id::text, ',') FROM clash)
"""
_STEP: Final = _GIVE.format(
    mine=MINE,
    cancelled=State.CANCELLED,
    queued=State.QUEUED,
    scheduled=State.SCHEDULED,
    replayed=LogKind.REPLAYED,
    later=LATER[0] - TO_SEND[0],
    told=told(
        position="CASE WHEN (SELECT yes FROM free) THEN jsonb_build_object('after', %(last)s::text) ELSE j.position END",
        done="CASE WHEN (SELECT yes FROM free) THEN %(seen)s::int8 ELSE 0 END",
        counts="""
            SELECT what, count(*) AS n FROM m GROUP BY what
            UNION ALL SELECT 'not_wanted', %(passed)s::int8 WHERE (SELECT yes FROM free) AND %(passed)s::int8 > 0
        """,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A message that was published; `newer`: after the replay was asked for. `headers` and `payload` are JSON, None where
    they were not asked for.
    """

    id: MessageId
    event_type: str
    event_version: int
    newer: bool
    priority: int
    ordering_key: str | None
    headers: bytes | None
    payload: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Messages to be given, each with the id of its delivery; with them the walk has come to the message `last` and seen
    `seen` more, of which `passed` are not wanted.
    """

    given: Sequence[tuple[MessageId, DeliveryId]]
    last: MessageId
    seen: int
    passed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a step came to: the subscription's type (None: it is gone, nothing was given), or ids that are others' already
    (then nothing was given either).
    """

    type: str | None
    taken: Collection[DeliveryId]


class Replays:
    """Replays through one writer. StorageUnavailableError: in doubt, the job's position tells; StorageRefusedError: not done."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def count(self, room: RoomId, after: str, until: str) -> int:
        """How many messages there are between two ids."""
        return int((await self._writer.run(_COUNT, {"room": room, "after": after, "until": until}))[0][0])

    async def interests(self, subscription: SubscriptionId) -> tuple[tuple[Interest, ...] | None, str | None]:
        """The event types that a subscription wants (None: all of them), and its filter. NotFoundError: it is gone."""
        rows = await self._writer.run(_WANTS, {"room": room_of(subscription), "subscription": subscription})
        if not rows:
            raise missing(subscription)
        _, event_types, expression = rows[0]
        return from_json(event_types), expression

    async def page(
        self, room: RoomId, after: str, until: str, *, asked_at: datetime, whole: bool, limit: int = BATCH
    ) -> Sequence[Past]:
        """The next messages between two ids; with headers and payload, if `whole`."""
        asked = {"room": room, "after": after, "until": until, "asked_at": asked_at, "whole": whole, "limit": limit}
        return [
            Past(
                id=MessageId(identity),
                event_type=event_type,
                event_version=version,
                newer=newer,
                priority=priority,
                ordering_key=ordering_key,
                headers=headers,
                payload=payload,
            )
            for identity, event_type, version, newer, priority, ordering_key, headers, payload in await self._writer.run(
                _PAGE, asked
            )
        ]

    async def give(
        self,
        job: JobId,
        position: Mapping[str, Any] | None,
        subscription: SubscriptionId,
        batch: Batch,
        *,
        expired: bool,
    ) -> Given | None:
        """Give messages to a subscription; what expired only if `expired`, with the room's lifetime. None: the job is over,
        or stands elsewhere.
        """
        asked = {
            "job": job,
            "position": None if position is None else json.dumps(dict(position)),
            "room": room_of(subscription),
            "subscription": subscription,
            "messages": plain(message for message, _ in batch.given),
            "ids": plain(delivery for _, delivery in batch.given),
            "last": batch.last,
            "seen": batch.seen,
            "passed": batch.passed,
            "expired": expired,
            "host": self._writer.host,
        }
        ((mine, kind, taken),) = await self._writer.run(_STEP, asked)
        if not mine:
            return None
        return Given(type=kind, taken=[DeliveryId(identity) for identity in (taken or "").split(",") if identity])
