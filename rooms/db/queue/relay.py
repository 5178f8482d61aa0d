"""Claim outbox rows for the relay to another broker, and record what was sent.

A claim writes only `claimed_until` and `worker`, which are in no index. The mark that a copy was
sent moves its row out of the index that the relay reads. Rows are locked in the order of their ids,
whatever their rooms, as leases do: a statement of either has those of many rooms.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from rooms.db.operational.outbox import sidelined_ctes
from rooms.db.pg_arrays import literal_array, number_array, text_array, word_array
from rooms.db.queue.claims import (
    OF_OTHERS_AND_NOT_ENDED,
    OF_OTHERS_BY_KEY,
    count_by_organisation,
    have_many_subscriptions,
)
from rooms.db.queue.delivery_properties import PROPERTIES, add_sequences, parse_properties
from rooms.db.queue.ordering import RELEASED_COUNT, advance_ordering
from rooms.db.statement_parts import (
    JOIN_MESSAGE,
    REPLACE_SIDELINED,
    VERSION_ARRAYS,
    version_arrays,
)
from rooms.db.writer import LogWriter, dead_writers
from rooms.domain.delivery_properties import DeliveryProperties
from rooms.domain.delivery_task import PRIORITIES, DeliveryTask
from rooms.domain.ids import (
    DeliveryId,
    MessageId,
    OrganisationId,
    RoomId,
    SubscriptionId,
    room_of,
)
from rooms.domain.state_machine import Reason, State, SubscriptionType
from rooms.domain.work_location import AT_BROKER, TO_RELAY, WorkLocation
from rooms.errors import StorageRefusedError

RELAY_WRITER_KIND: Final = "relay"
"""The kind of writer whose claims count on rows to send."""
MAX_CLAIM_BYTES: Final = 16 * 1024 * 1024
"""A statement claims no more payload than this, except for a single larger message."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_FREE: Final = f"""kind IN ({TO_RELAY[0]:d}, {TO_RELAY[1]:d})
            AND (claimed_until < now() OR worker = ANY (%(dead)s::int4[]))"""
_TO_SEND_LOCATION: Final = f"o.kind + 0 BETWEEN {min(TO_RELAY):d} AND {max(TO_RELAY):d}"
"""To be sent; an expression that no index matches, so that rows are found by their key."""

# Spans rooms: the relay sends for all of them. What is due comes first, by priority, with one index
# probe for each; then what the broker must delay, by due time. Probes begin at watermarks, so that
# a claim does not read the sent rows that an old snapshot keeps in the index.
_CLAIM_TEMPLATE: Final = f"""
WITH due AS MATERIALIZED (
    SELECT o.* FROM unnest(%(low)s::int8[]) WITH ORDINALITY AS p (low, n), LATERAL (
        SELECT ctid AS at, room_id, message_id, due_at FROM outbox
        WHERE {_FREE} AND priority = {PRIORITIES} - p.n AND due_at <= now()
            AND due_at >= timestamptz 'epoch' + p.low * interval '1 microsecond'{{others}}
        ORDER BY due_at LIMIT %(limit)s::int4 FOR UPDATE SKIP LOCKED
    ) o LIMIT %(limit)s::int4
), later AS MATERIALIZED (
    SELECT o.at FROM generate_series(0, {PRIORITIES - 1}) AS p (priority), LATERAL (
        SELECT ctid AS at, due_at FROM outbox WHERE {_FREE} AND priority = p.priority AND due_at > now(){{later_others}}
        ORDER BY due_at LIMIT %(limit)s::int4
    ) o WHERE (SELECT count(*) FROM due) < %(limit)s::int4
    ORDER BY o.due_at LIMIT %(limit)s::int4 - (SELECT count(*) FROM due)
), soon AS MATERIALIZED (
    SELECT o.* FROM later l CROSS JOIN LATERAL (
        SELECT ctid AS at, room_id, message_id, due_at FROM outbox WHERE ctid = l.at FOR UPDATE SKIP LOCKED
    ) o
), picked AS MATERIALIZED (
    SELECT o.*, row_number() OVER () AS n FROM (SELECT * FROM due UNION ALL SELECT * FROM soon) o
), read AS MATERIALIZED (
    SELECT p.at, m.id AS message, m.event_type, m.event_version, m.correlation_id, m.published_at, m.headers, m.payload,
        {PROPERTIES} AS identity,
        coalesce(sum(octet_length(m.payload)) OVER (
            ORDER BY p.n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) < %(bytes)s::int8 AS fits
    FROM picked p LEFT JOIN LATERAL (
        SELECT * FROM messages m WHERE m.room_id = p.room_id AND m.id = p.message_id LIMIT 1
    ) m ON true
), claimed AS (
    UPDATE outbox o SET claimed_until = now() + %(claim_s)s::float8 * interval '1 s', worker = %(writer)s
    FROM read r WHERE o.ctid = r.at AND r.fits
    RETURNING o.*, r.message, r.event_type, r.event_version, r.correlation_id, r.published_at, r.headers, r.payload, r.identity
)
SELECT 0, c.room_id, c.id::text, c.message_id::text, c.subscription_id::text, c.kind, c.generation, c.attempt, c.delay_ms,
    c.priority, (extract(epoch FROM c.due_at) * 1000000)::int8, (extract(epoch FROM c.expires_at) * 1000)::int8,
    CASE WHEN s.status NOT IN ('deleted', 'rejected', 'terminated') THEN s.version END, c.event_type, c.event_version, c.correlation_id,
    (extract(epoch FROM c.published_at) * 1000)::int8, c.headers, c.payload, s.native_password IS NOT NULL,
    CASE WHEN s.native_password IS NULL THEN c.identity ELSE (
        SELECT json_build_array(c.identity, r.organisation_id, (extract(epoch FROM c.expires_at) * 1000)::int8)::text
        FROM rooms r WHERE r.id = c.room_id
    ) END
FROM claimed c LEFT JOIN LATERAL (
    SELECT * FROM subscriptions s WHERE s.room_id = c.room_id AND s.id = c.subscription_id LIMIT 1
) s ON true
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, (SELECT count(*) FROM picked), NULL,
    (extract(epoch FROM now()) * 1000000)::int8, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
"""  # noqa: S608 - constants of this package
_CLAIM: Final = _CLAIM_TEMPLATE.format(others="", later_others="")
_NOT_EXCLUDED: Final = " AND subscription_id <> ALL (%(excluded)s::uuid[])"
_CLAIM_OF_OTHERS: Final = _CLAIM_TEMPLATE.format(
    others=OF_OTHERS_AND_NOT_ENDED + _NOT_EXCLUDED,
    later_others=OF_OTHERS_AND_NOT_ENDED + _NOT_EXCLUDED,
)
# No watermark bounds what is due later, so each claim may read many rows of it. Without any,
# nothing is hashed.
_CLAIM_OF_OTHERS_BY_KEY: Final = _CLAIM_TEMPLATE.format(
    others=OF_OTHERS_BY_KEY + _NOT_EXCLUDED,
    later_others=OF_OTHERS_AND_NOT_ENDED + _NOT_EXCLUDED,
)

_OWNERS: Final = """
SELECT 0, s.id::text, s.organisation_id::text
FROM unnest(%(room)s::int4[], %(subscription)s::uuid[]) AS v (room_id, subscription_id), LATERAL (
    SELECT * FROM subscriptions s WHERE s.room_id = v.room_id AND s.id = v.subscription_id LIMIT 1
) s UNION ALL SELECT 0, NULL, NULL
"""

# An expired claim does not count: another relay has claimed and sent what it sent. Otherwise a
# relay that was suspended could mark as sent what a broker has lost since.
_CLAIMED_HERE: Final = f"""
    o.room_id = ANY (ARRAY[v.room_id]) AND o.id = v.id AND o.generation = v.generation AND o.attempt = v.attempt
        AND {_TO_SEND_LOCATION} AND o.worker = %(writer)s AND o.claimed_until > now()
"""

_MARK_SENT: Final = f"""
WITH sent AS (
    UPDATE outbox o SET kind = o.kind + {AT_BROKER[0] - TO_RELAY[0]:d}, claimed_until = '-infinity', worker = NULL
    FROM {VERSION_ARRAYS} AS v (room_id, id, generation, attempt) WHERE {_CLAIMED_HERE}
    RETURNING o.kind, o.subscription_id
) SELECT 0, count(*), string_agg(DISTINCT subscription_id::text, ',') FILTER (WHERE kind = {WorkLocation.PULL_AT_BROKER:d}) FROM sent
"""  # noqa: S608 - constants of this package

_RELEASE: Final = f"""
WITH freed AS (
    UPDATE outbox o SET claimed_until = '-infinity', worker = NULL
    FROM {VERSION_ARRAYS} AS v (room_id, id, generation, attempt) WHERE {_CLAIMED_HERE}
    RETURNING 1
) SELECT 0, count(*) FROM freed
"""  # noqa: S608 - constants of this package

_END_DELIVERIES: Final = f"""
WITH v AS MATERIALIZED (
    SELECT * FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[],
        %(state)s::delivery_state[], %(reason)s::text[], %(error)s::text[])
        AS v (room_id, id, generation, attempt, state, reason, error)
), gone AS (
    DELETE FROM outbox o USING v WHERE {_CLAIMED_HERE} RETURNING v.*
), d AS (
    UPDATE deliveries t SET state = v.state, reason = v.reason, last_error = coalesce(v.error, t.last_error), due_at = NULL,
        updated_at = now()
    FROM gone v WHERE t.room_id = v.room_id AND t.id = v.id AND t.generation = v.generation AND t.attempt = v.attempt
        AND t.state = 'queued'
    RETURNING v.*, t.message_id, t.subscription_id
), side AS (
    INSERT INTO sidelined (room_id, id, subscription_id, generation, reason)
    SELECT room_id, id, subscription_id, generation, reason FROM d WHERE state = 'sidelined'
    {REPLACE_SIDELINED}
), l AS (
    INSERT INTO log_entries (writer_id, writer_seq, room_id, message_id, kind, subscription_id, delivery_id, generation,
        attempt, event_type, event_version, correlation_id, worker, worker_host, detail)
    SELECT %(writer)s, %(seq)s - 1 + row_number() OVER (), d.room_id, d.message_id, d.state::text, d.subscription_id, d.id,
        d.generation, d.attempt, m.event_type, m.event_version, m.correlation_id, %(writer)s, %(host)s::text,
        nullif(concat_ws(': ', d.reason, d.error), '')
    FROM d {JOIN_MESSAGE} RETURNING 1
){sidelined_ctes("SELECT * FROM d WHERE state = 'sidelined'")}{advance_ordering("SELECT room_id, id FROM d WHERE state <> 'sidelined'")}
SELECT (SELECT count(*) FROM l) + {RELEASED_COUNT}, (SELECT count(*) FROM d)
"""  # noqa: S608 - constants of this package

_EXISTING_SUBSCRIPTIONS: Final = """
SELECT 0, s.id::text FROM unnest(%(room)s::int4[], %(subscription)s::uuid[]) AS v (room_id, subscription_id), LATERAL (
    SELECT * FROM subscriptions s WHERE s.room_id = v.room_id AND s.id = v.subscription_id LIMIT 1
) s WHERE s.status NOT IN ('deleted', 'rejected', 'terminated') UNION ALL SELECT 0, NULL
"""

_NOTHING_SENT: Final = f"""
SELECT 0, NOT EXISTS (SELECT FROM outbox o WHERE o.kind IN ({AT_BROKER[0]:d}, {AT_BROKER[1]:d})
    OR {_TO_SEND_LOCATION} AND o.claimed_until > now() AND o.worker <> %(writer)s)
"""  # noqa: S608 - constants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayBatch:
    """Hold the copies that one claim took, with their due times.

    They are claimed until `deadline` (monotonic seconds) at most. `row_count`: rows that could be
    claimed, more than were taken if their payloads were too large together. `at_us`: PostgreSQL's
    time. `without_message`: deliveries whose message is gone. `highest_due_us`: by
    priority, the latest due time of those that are due; `has_future`: some are not due yet.
    `organisations`: the owners of the subscriptions, where the claim asked for them.
    """

    tasks: Sequence[DeliveryTask]
    not_before: Sequence[datetime]
    without_message: Sequence[DeliveryId]
    row_count: int
    at_us: int
    highest_due_us: Mapping[int, int]
    has_future: bool
    deadline: float
    organisations: Mapping[SubscriptionId, OrganisationId] = field(default_factory=dict)

    def left_nothing_due(self, limit: int) -> bool:
        """Return whether a claim of up to `limit` rows took all that was due."""
        taken = len(self.tasks) + len(self.without_message)
        return self.has_future or taken == self.row_count < limit

    def count_by_organisation(self) -> Mapping[OrganisationId, int]:
        """Return how many tasks each organisation's subscriptions have."""
        return count_by_organisation(self.tasks, self.organisations)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTask:
    """Name a copy that is done, the state its delivery ends in, and why.

    `error` is the broker's text.
    """

    task: DeliveryTask
    state: State
    reason: Reason | None = None
    error: str | None = None


def _native_properties(text: str) -> DeliveryProperties:
    """Return the properties of a native copy, which is complete for readers outside."""
    own, owner, expires_at_ms = json.loads(text)
    properties = parse_properties(own) or DeliveryProperties()
    properties.expires_at_ms = expires_at_ms
    properties.organisation = properties.organisation or owner
    return properties


def _sorted_by_id(tasks: Sequence[DeliveryTask]) -> list[DeliveryTask]:
    return sorted(tasks, key=lambda task: task.delivery_id)


async def existing_subscriptions(
    writer: LogWriter, subscriptions: Sequence[SubscriptionId]
) -> frozenset[SubscriptionId]:
    """Return those of the subscriptions that exist and are not deleted.

    Errors: those of `LogWriter.run`.
    """
    parameters = {
        "room": number_array(map(room_of, subscriptions)),
        "subscription": word_array(subscriptions),
    }
    return frozenset(
        SubscriptionId(row[0]) for row in await writer.run(_EXISTING_SUBSCRIPTIONS, parameters)
    )


class RelayOutbox:
    """Claim rows to send through one writer of `RELAY_WRITER_KIND`.

    Its id marks the claims and its session proves that they are alive. StorageUnavailableError: in
    doubt, and the claims are lost. StorageRefusedError: nothing was done.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    @property
    def writer(self) -> LogWriter:
        """Return the writer; its id changes when its claims were lost."""
        return self._writer

    async def claim(
        self,
        *,
        limit: int,
        claim_s: float,
        deadline: float,
        watermarks_us: Sequence[int],
        dead_relays: Sequence[int],
        excluded_organisations: Sequence[OrganisationId] = (),
        excluded_subscriptions: Sequence[SubscriptionId] = (),
        ended: Sequence[SubscriptionId] = (),
        looks_up_owners: bool = False,
        with_owners: bool = False,
    ) -> RelayBatch:
        """Claim up to `limit` rows for `claim_s` seconds.

        What is due comes first, by priority and due time, then what is due later. `watermarks_us`:
        for priorities from 9 down to 0, due times (epoch microseconds) below which the scan need
        not begin; `dead_relays`: relays whose claims do not count; `excluded_organisations`: owners
        of subscriptions to skip; `excluded_subscriptions`: further ones; `ended`: deleted ones of
        these organisations; `looks_up_owners`: the organisations have many subscriptions, and the
        claim begins beyond most rows of them; `with_owners`: name the owners of what was taken, as
        a full claim always does. Expiry is by PostgreSQL's clock.
        """
        others = (
            {
                "organisations": literal_array(excluded_organisations),
                "excluded": literal_array(excluded_subscriptions),
                "ended": literal_array(ended),
            }
            if excluded_organisations or excluded_subscriptions
            else {}
        )
        of_others = _CLAIM_OF_OTHERS_BY_KEY if looks_up_owners else _CLAIM_OF_OTHERS
        rows = await self._writer.run(
            of_others if others else _CLAIM,
            {
                **others,
                "low": literal_array(watermarks_us),
                "dead": literal_array(dead_relays),
                "limit": limit,
                "bytes": MAX_CLAIM_BYTES,
                "claim_s": claim_s,
            },
        )
        last = rows.pop()
        at_us = last[9]
        rows.sort(key=lambda row: (row[9] > at_us, 0 if row[9] > at_us else -row[8], row[9]))
        tasks, due, unreadable = [], [], []
        highest: dict[int, int] = {}
        for row in rows:
            if row[9] <= at_us:
                highest[row[8]] = row[9]
            if row[17] is None:
                unreadable.append(DeliveryId(row[1]))
                continue
            due.append(_EPOCH + timedelta(microseconds=row[9]))
            tasks.append(
                DeliveryTask(
                    room_id=RoomId(row[0]),
                    delivery_id=DeliveryId(row[1]),
                    message_id=MessageId(row[2]),
                    subscription_id=SubscriptionId(row[3]),
                    kind=SubscriptionType.PULL if row[4] & 1 else SubscriptionType.PUSH,
                    generation=row[5],
                    attempt=row[6],
                    delay_ms=row[7],
                    priority=row[8],
                    expires_ms=row[10],
                    subscription_version=row[11],
                    event_type=row[12],
                    event_version=row[13],
                    correlation_id=row[14],
                    published_ms=row[15],
                    headers=row[16],
                    payload=row[17],
                    properties=None
                    if row[19] is None
                    else _native_properties(row[19])
                    if row[18]
                    else parse_properties(row[19]),
                    native=row[18],
                    deadline=deadline,
                )
            )
        try:
            await add_sequences(self._writer, tasks)
            full = with_owners or last[7] >= limit
            owners = await self._find_owners(
                {task.subscription_id for task in tasks} if full else ()
            )
        except StorageRefusedError:
            await self.release(tasks)
            raise
        return RelayBatch(
            tasks=tasks,
            not_before=due,
            without_message=unreadable,
            row_count=last[7],
            at_us=at_us,
            highest_due_us=highest,
            has_future=bool(rows) and rows[-1][9] > at_us,
            deadline=deadline,
            organisations=owners,
        )

    async def _find_owners(
        self, subscriptions: Collection[SubscriptionId]
    ) -> Mapping[SubscriptionId, OrganisationId]:
        if not subscriptions:
            return {}
        parameters = {
            "room": number_array(map(room_of, subscriptions)),
            "subscription": word_array(subscriptions),
        }
        return {row[0]: row[1] for row in await self._writer.run(_OWNERS, parameters) if row[0]}

    async def mark_sent(self, tasks: Sequence[DeliveryTask]) -> tuple[int, list[SubscriptionId]]:
        """Record that these were sent.

        Return how many rows were still to send, and their PULL subscriptions. A row whose copy was
        taken already, or that moved on, stays as it is.
        """
        ((count, pulls),) = await self._writer.run(_MARK_SENT, version_arrays(_sorted_by_id(tasks)))
        return count, [
            SubscriptionId(identity) for identity in (pulls or "").split(",") if identity
        ]

    async def release(self, tasks: Sequence[DeliveryTask]) -> None:
        """Give claimed rows back untouched."""
        await self._writer.run(_RELEASE, version_arrays(_sorted_by_id(tasks)))

    async def end_deliveries(self, ended: Sequence[EndedTask]) -> int:
        """End the deliveries of claimed rows that cannot be sent or are handed over.

        Return how many ended.
        """
        ended = sorted(ended, key=lambda ending: ending.task.delivery_id)
        rows = await self._writer.run(
            _END_DELIVERIES,
            {
                **version_arrays([ending.task for ending in ended]),
                "state": word_array(ending.state for ending in ended),
                "reason": text_array(ending.reason for ending in ended),
                "error": text_array(ending.error for ending in ended),
                "host": self._writer.host,
            },
        )
        return int(rows[0][0])

    async def have_many_subscriptions(self, organisations: Collection[OrganisationId]) -> bool:
        """Return whether these have more than `MANY_SUBSCRIPTIONS` together."""
        return await have_many_subscriptions(self._writer, organisations)

    async def existing_subscriptions(
        self, subscriptions: Sequence[SubscriptionId]
    ) -> frozenset[SubscriptionId]:
        """Return those that are not deleted."""
        return await existing_subscriptions(self._writer, subscriptions)

    async def is_nothing_sent(self) -> bool:
        """Return whether no row has a copy in the broker, or may have one soon.

        Another relay that claims a row may just be sending its copy.
        """
        return bool((await self._writer.run(_NOTHING_SENT, {}))[0][0])

    async def dead_relays(self) -> list[int]:
        """Return the relays whose session is gone: their claims do not count."""
        return await dead_writers(self._writer, kind=RELAY_WRITER_KIND)
