"""Replay past messages to one subscription as new deliveries, one batch of a job in one statement.

The id of a replayed delivery is made from the ids of its message and of the job
(`rooms.domain.ids.replayed_id`). So one job delivers a message once, even if a step is repeated.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rooms.db.bounded_counts import count_bounded
from rooms.db.catalog.subscriptions import interests_from_json, subscription_not_found
from rooms.db.job_progress import OPEN_JOB, position_json, progress_cte
from rooms.db.operational.messages import IS_OPERATIONAL
from rooms.db.pg_arrays import text_array, word_array
from rooms.db.statement_parts import ROOM_LIFETIME_MS
from rooms.db.writer import LogWriter
from rooms.domain.ids import DeliveryId, JobId, MessageId, RoomId, SubscriptionId, room_of
from rooms.domain.room import Interest
from rooms.domain.state_machine import LogKind, Reason, State
from rooms.domain.work_location import SCHEDULED, TO_RELAY

BATCH: Final = 200
PAGE_BYTES: Final = 4 * 1024 * 1024
"""A page has no more headers and payloads than this, except for a single larger message."""

# Messages are found by their ids. An id was drawn before its message was published, by the clock of
# another machine, so the time is compared too, by an expression that matches no index. Messages
# about operational events are for the subscription that they were made for, and no publish.
_IS_PAST: Final = f"""(m.published_at >= coalesce(%(since)s::timestamptz, '-infinity')) IS TRUE
    AND NOT ({IS_OPERATIONAL})"""
_COUNT: Final = f"""
SELECT 0, count(*) FROM (
    SELECT FROM messages m WHERE m.room_id = %(room)s::int4 AND m.id > %(after)s::uuid AND m.id < %(until)s::uuid
        AND {_IS_PAST} LIMIT %(most)s::int4
) c
"""  # noqa: S608 - constants of this package
_COUNT_BUSINESS_KEYS: Final = f"""
SELECT 0, count(*) FROM (
    SELECT FROM unnest(%(business_keys)s::text[]) AS k (key) CROSS JOIN LATERAL (
        SELECT FROM messages m WHERE m.business_key = k.key AND m.room_id = %(room)s::int4
            AND m.id > %(after)s::uuid AND m.id < %(until)s::uuid AND {_IS_PAST} LIMIT %(most)s::int4
    ) n LIMIT %(most)s::int4
) c
"""  # noqa: S608 - constants of this package
# The deliveries of a moment are read once, for all its messages. Those of a batch share one, and
# each would read the deliveries of all others. `had`: was it withdrawn, and did the subscription
# have it.
_HAD: Final = f"""had AS MATERIALIZED (
    SELECT d.message_id, bool_or(d.withdrawn) AS withdrawn, bool_or(d.own) AS own, min(d.sequence) FILTER (WHERE d.own) AS sequence
    FROM moments t CROSS JOIN LATERAL (
        SELECT d.message_id, (d.state = '{State.CANCELLED}' AND d.reason = '{Reason.WITHDRAWN}') IS TRUE AS withdrawn,
            d.subscription_id = %(subscription)s::uuid AS own, d.sequence
        FROM deliveries d WHERE d.room_id = %(room)s::int4
            AND d.id >= (t.at || '-0000-0000-000000000000')::uuid AND d.id <= (t.at || '-ffff-ffff-ffffffffffff')::uuid OFFSET 0
    ) d WHERE d.withdrawn OR d.own GROUP BY d.message_id
)"""  # noqa: S608 - constants of this package
_JOIN_HAD: Final = """LEFT JOIN LATERAL (
        SELECT h.withdrawn, h.own, h.sequence FROM had h WHERE h.message_id = {} LIMIT 1
    ) h ON true"""
# Another organisation may not learn, by its filter, what is in a message that was withdrawn or is
# not due. A backfill gives it what is not due, because no publish did.
_HIDDEN: Final = """%(foreign)s::bool
        AND ((NOT %(missing)s::bool AND m.due_at > now()) IS TRUE OR h.withdrawn IS TRUE)"""
# A message that another organisation may not see is not read whole. The last row says whether there
# are no more messages, as a page with few of them may have many bytes.
_PAGE_TEMPLATE: Final = f"""
WITH picked AS MATERIALIZED (
    SELECT m.*, NOT %(whole)s::bool OR coalesce(sum(coalesce(octet_length(m.headers), 0) + octet_length(m.payload)) OVER (
        ORDER BY m.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) < %(bytes)s::int8 AS fits
    FROM (
        SELECT m.* FROM {{source}} WHERE m.room_id = %(room)s::int4 AND m.id > %(after)s::uuid AND m.id < %(until)s::uuid AND {_IS_PAST}
        ORDER BY m.id LIMIT %(limit)s::int4
    ) m
), moments AS MATERIALIZED (
    SELECT DISTINCT left(m.id::text, 13) AS at FROM picked m WHERE m.fits AND %(foreign)s::bool
), {_HAD}, page AS MATERIALIZED (
    SELECT m.*, {_HIDDEN} AS hidden, h.own IS TRUE AS own
    FROM picked m {_JOIN_HAD.format("m.id")} WHERE m.fits
)
(SELECT 0, m.id::text, m.event_type, m.event_version, m.published_at > %(asked_at)s::timestamptz, m.priority, m.ordering_key,
    CASE WHEN %(whole)s::bool AND NOT m.hidden THEN m.headers END, CASE WHEN %(whole)s::bool AND NOT m.hidden THEN m.payload END,
    (extract(epoch FROM m.published_at) * 1000000)::int8,
    %(foreign)s::bool AND (m.directed OR m.publisher_id IS NULL) AND NOT m.own, m.hidden, NULL
FROM page m ORDER BY m.id)
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    (SELECT count(*) < %(limit)s::int4 AND coalesce(bool_and(fits), true) FROM picked)
"""  # noqa: S608 - constants of this package
_PAGE: Final = _PAGE_TEMPLATE.format(source="messages m")
# The first messages of each key, by the index of business keys, and the first of all of them.
_PAGE_BUSINESS_KEYS: Final = _PAGE_TEMPLATE.format(
    source=f"""(
            SELECT n.id FROM unnest(%(business_keys)s::text[]) AS k (key) CROSS JOIN LATERAL (
                SELECT m.id FROM messages m WHERE m.business_key = k.key AND m.room_id = %(room)s::int4
                    AND m.id > %(after)s::uuid AND m.id < %(until)s::uuid AND {_IS_PAST} ORDER BY m.id LIMIT %(limit)s::int4
            ) n ORDER BY n.id LIMIT %(limit)s::int4
        ) f CROSS JOIN LATERAL (
            SELECT * FROM messages m WHERE m.room_id = %(room)s::int4 AND m.id = f.id LIMIT 1
        ) m"""  # noqa: S608 - constants of this package
)

_INTERESTS: Final = """
SELECT 0, u.version - u.lane_changes, u.event_types, u.filter FROM subscriptions u
WHERE u.room_id = %(room)s::int4 AND u.id = %(subscription)s::uuid AND u.status NOT IN ('deleted', 'rejected', 'terminated')
UNION ALL SELECT 0, NULL, NULL, NULL
"""

# An id that another delivery has already (42 bits are random) stops the batch: the ids are made
# from another salt. So does a change of the subscription: its former version decided what it wants
# and may have. Messages that their publisher cancelled are delivered to no subscription.
# Retention may just be deleting a message of the default partition: either it is locked here and
# stays, or it was deleted before and this starts again. A message that the subscription had before
# has the same sequence number again, so that a consumer knows it for a repetition. What another
# organisation's subscription may not know of yet is delivered and not counted: its filter matched.
_INSERT_TEMPLATE: Final = """
WITH {open_job}, s AS MATERIALIZED (
    SELECT u.type, u.version - u.lane_changes AS policy, u.message_expiration_ms * interval '1 ms' AS own_life,
        least({room_lifetime_ms}, u.message_expiration_ms) * interval '1 ms' AS life,
        u.organisation_id <> r.organisation_id AS guest, CASE WHEN u.status = 'suspended' THEN u.status_since END AS held_since
    FROM subscriptions u, rooms r WHERE u.room_id = %(room)s::int4 AND u.id = %(subscription)s::uuid AND u.status NOT IN ('deleted', 'rejected', 'terminated')
        AND r.id = %(room)s::int4 AND NOT r.deleting
), v AS MATERIALIZED (
    SELECT * FROM unnest(%(messages)s::uuid[], %(ids)s::uuid[]) AS v (message_id, id) WHERE (SELECT one FROM open_job) = 1
), clash AS MATERIALIZED (
    SELECT v.id FROM v CROSS JOIN LATERAL (
        SELECT FROM deliveries d WHERE d.room_id = %(room)s::int4 AND d.id = v.id
            AND (d.message_id <> v.message_id OR d.subscription_id <> %(subscription)s::uuid) LIMIT 1
    ) d
), free AS MATERIALIZED (
    SELECT NOT EXISTS (SELECT FROM clash) AND EXISTS (SELECT FROM s WHERE policy = %(version)s::int4) AS yes
), no_day AS MATERIALIZED (
    SELECT v.id FROM v CROSS JOIN LATERAL (
        SELECT FROM messages_rest r WHERE r.room_id = %(room)s::int4 AND r.id = v.message_id LIMIT 1 FOR KEY SHARE
    ) r
), moments AS MATERIALIZED (
    SELECT DISTINCT left(v.message_id::text, 13) AS at FROM v WHERE (SELECT yes FROM free)
), {had}, m AS MATERIALIZED (
    SELECT v.id AS delivery_id, m.room_id, m.id, m.event_type, m.event_version, m.priority, m.correlation_id,
        greatest(m.due_at, now()) AS due,
        (SELECT guest FROM s) AND (m.due_at > now() OR m.published_at >= (SELECT held_since FROM s)) IS TRUE AS uncounted, CASE WHEN m.until <= now() THEN now() + (SELECT life FROM s) ELSE m.until END AS expires_at,
        CASE WHEN m.until <= now() AND NOT %(expired)s::bool THEN 'expired' WHEN h.withdrawn THEN 'withdrawn'
            WHEN %(missing)s::bool AND h.own THEN 'present' ELSE 'replayed' END AS what,
        CASE WHEN m.ordering_key IS NOT NULL THEN h.sequence END AS sequence
    FROM v CROSS JOIN LATERAL (
        SELECT m.*, least(m.expires_at, coalesce(m.due_at, m.published_at) + (SELECT own_life FROM s)) AS until
        FROM messages m WHERE m.room_id = %(room)s::int4 AND m.id = v.message_id LIMIT 1
    ) m {join_had} WHERE (SELECT yes FROM free) AND (SELECT count(*) FROM no_day) >= 0
), x AS MATERIALIZED (
    SELECT m.*, s.type, s.policy,
        CASE WHEN extract(epoch FROM m.due - now()) * 1000 > %(lookahead)s::int8 THEN '{scheduled}' ELSE '{queued}'
            END::delivery_state AS state
    FROM m CROSS JOIN s WHERE m.what = 'replayed'
), d AS (
    INSERT INTO deliveries (room_id, id, message_id, subscription_id, state, due_at, expires_at, sequence)
    SELECT room_id, delivery_id, id, %(subscription)s::uuid, state, due, expires_at, sequence FROM x
    ON CONFLICT (room_id, id) DO NOTHING RETURNING id
), given AS MATERIALIZED (
    SELECT x.* FROM x WHERE x.delivery_id IN (SELECT id FROM d)
), o AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, due_at, expires_at)
    SELECT room_id, delivery_id, id, %(subscription)s::uuid, CASE type WHEN 'PULL' THEN %(pull)s::int2 ELSE %(push)s::int2 END
        + CASE state WHEN '{scheduled}' THEN {later:d} ELSE 0 END, priority, 0, 0, due, expires_at FROM given
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, fanout, correlation_id, policy_version, delay_ms, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), room_id, id, '{replayed}', %(subscription)s::uuid, delivery_id, 0, 0,
        event_type, event_version, 1, correlation_id, policy,
        CASE WHEN due > now() THEN ceil(extract(epoch FROM due - now()) * 1000)::int8 END, %(host)s::text,
        CASE state WHEN '{scheduled}' THEN '{scheduled}' END FROM given
    RETURNING 1
), {progress}
SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM progress), (SELECT type FROM s),
    EXISTS (SELECT FROM s WHERE policy <> %(version)s::int4), (SELECT string_agg(id::text, ',') FROM clash)
"""
_INSERT: Final = _INSERT_TEMPLATE.format(
    open_job=OPEN_JOB,
    room_lifetime_ms=ROOM_LIFETIME_MS,
    had=_HAD,
    join_had=_JOIN_HAD.format("v.message_id"),
    queued=State.QUEUED,
    scheduled=State.SCHEDULED,
    replayed=LogKind.REPLAYED,
    later=SCHEDULED[0] - TO_RELAY[0],
    progress=progress_cte(
        position="CASE WHEN (SELECT yes FROM free) THEN jsonb_build_object('after', %(last)s::text) ELSE j.position END",
        done="CASE WHEN (SELECT yes FROM free) THEN %(seen)s::int8 - (SELECT count(*) FROM m WHERE uncounted) ELSE 0 END",
        counts="""
            SELECT what, count(*) FILTER (WHERE NOT none) AS n FROM (
                SELECT what, false AS none FROM m WHERE NOT uncounted UNION ALL SELECT 'replayed', true
            ) y GROUP BY what
            UNION ALL SELECT 'not_wanted', %(passed)s::int8 WHERE (SELECT yes FROM free) AND %(passed)s::int8 > 0
        """,
    ),
)


@dataclass(frozen=True, slots=True)
class PastMessage:
    """Describe a published message; `newer`: published after the replay was requested.

    `for_others`: published for destinations that do not include the subscription of another
    organisation. A message that was made again from a broker's copy names none, so it is for those
    that had it.
    `hidden`: another organisation's subscription may not see it, as it was withdrawn or is not due.
    `headers` and `payload` are JSON, None if they were not asked for.
    """

    id: MessageId
    event_type: str
    event_version: int
    newer: bool
    priority: int
    ordering_key: str | None
    headers: bytes | None
    payload: bytes | None
    published_us: int = 0
    for_others: bool = False
    hidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedInterests:
    """Hold the event types that a subscription wants (None: all) and its filter, in a version."""

    event_types: tuple[Interest, ...] | None
    filter: str | None
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPage:
    """List the next messages of a walk; `end`: there are no more."""

    messages: Sequence[PastMessage]
    end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBatch:
    """List messages to deliver, each with the id of its delivery.

    With them the walk has come to the message `last` and has scanned `scanned` more, of which
    `unwanted` do not match. `version`: of the subscription, by which that was decided.
    """

    version: int
    deliveries: Sequence[tuple[MessageId, DeliveryId]]
    last: MessageId
    scanned: int
    unwanted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Hold the subscription's type (None: it is gone), and ids that other deliveries have already.

    `is_outdated`: it has another version now. In all these cases nothing was delivered.
    """

    type: str | None
    is_outdated: bool
    clashing_ids: Collection[DeliveryId]


class ReplayQueries:
    """Replay through one writer.

    StorageUnavailableError: in doubt, read the job's position; StorageRefusedError: not done.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def count(
        self,
        room: RoomId,
        after: str,
        until: str,
        *,
        since: datetime | None = None,
        business_keys: Collection[str] = (),
    ) -> int | None:
        """Count the messages between two ids, or those of them with one of these business keys.

        None: there are too many. `since`: only those that were published then or later.
        """
        parameters: dict[str, Any] = {"room": room, "after": after, "until": until, "since": since}
        if business_keys:
            parameters["business_keys"] = text_array(sorted(business_keys))
        statement = _COUNT_BUSINESS_KEYS if business_keys else _COUNT
        return await count_bounded(self._writer, statement, parameters)

    async def interests(self, subscription: SubscriptionId) -> ReplayedInterests:
        """Return what a subscription wants. NotFoundError: it is gone."""
        rows = await self._writer.run(
            _INTERESTS, {"room": room_of(subscription), "subscription": subscription}
        )
        if not rows:
            raise subscription_not_found(subscription)
        version, event_types, expression = rows[0]
        return ReplayedInterests(
            event_types=interests_from_json(event_types), filter=expression, version=version
        )

    async def page(
        self,
        subscription: SubscriptionId,
        after: str,
        until: str,
        *,
        requested_at: datetime,
        with_payload: bool,
        foreign: bool = False,
        missing: bool = False,
        since: datetime | None = None,
        business_keys: Collection[str] = (),
        limit: int = BATCH,
    ) -> ReplayPage:
        """Return the next messages between two ids, of the room of a subscription.

        `foreign`: mark those that another organisation's subscription may not see, with `missing`
        only what was withdrawn. They have headers and payload, if `with_payload`. `since`: only
        those that were published then or later; `business_keys`: only those with one of them.
        """
        parameters = {
            "room": room_of(subscription),
            "subscription": subscription,
            "after": after,
            "until": until,
            "since": since,
            "asked_at": requested_at,
            "whole": with_payload,
            "foreign": foreign,
            "missing": missing,
            "limit": limit,
            "bytes": PAGE_BYTES,
        }
        if business_keys:
            parameters["business_keys"] = text_array(sorted(business_keys))
        statement = _PAGE_BUSINESS_KEYS if business_keys else _PAGE
        *found, (*_, end) = await self._writer.run(statement, parameters)
        return ReplayPage(messages=[PastMessage(*row[:-1]) for row in found], end=end)

    async def insert(
        self,
        job: JobId,
        position: Mapping[str, Any] | None,
        subscription: SubscriptionId,
        batch: ReplayBatch,
        *,
        expired: bool,
        missing: bool = False,
    ) -> ReplayResult | None:
        """Deliver messages to a subscription; None: the job has ended, or is at another position.

        Expired messages are delivered only if `expired`, with the room's lifetime. `missing`: only
        messages that have no delivery to the subscription.
        """
        parameters = {
            "job": job,
            "position": position_json(position),
            "room": room_of(subscription),
            "subscription": subscription,
            "messages": word_array(message for message, _ in batch.deliveries),
            "ids": word_array(delivery for _, delivery in batch.deliveries),
            "last": batch.last,
            "seen": batch.scanned,
            "passed": batch.unwanted,
            "version": batch.version,
            "expired": expired,
            "missing": missing,
            "host": self._writer.host,
        }
        ((is_current, kind, is_outdated, taken),) = await self._writer.run(_INSERT, parameters)
        if not is_current:
            return None
        return ReplayResult(
            type=kind,
            is_outdated=is_outdated,
            clashing_ids=[
                DeliveryId(identity) for identity in (taken or "").split(",") if identity
            ],
        )
