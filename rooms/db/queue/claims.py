"""Claim work of the outbox, with PostgreSQL as broker: the outbox is the PUSH queue itself.

With another broker its rows have other locations. A claim writes only `claimed_until`, `worker` and
`abandoned`. None of them is in an index, so every claim is a HOT update. `abandoned` counts the
successive claims that were not given back: the worker that had them died, or was suspended until
they expired. The count outlasts a hold, and ends with the next outcome of an attempt.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from rooms.db.pg_arrays import literal_array
from rooms.db.queue.delivery_properties import PROPERTIES, add_sequences, parse_properties
from rooms.db.queue.orphans import sideline_without_message
from rooms.db.writer import LogWriter, dead_writers
from rooms.domain.delivery_task import DeliveryTask
from rooms.domain.ids import DeliveryId, OrganisationId, RoomId, SubscriptionId, first_id, room_of
from rooms.domain.state_machine import SubscriptionType
from rooms.domain.work_location import WorkLocation
from rooms.errors import StorageRefusedError

_log = logging.getLogger(__name__)

OUTBOX_KINDS: Final = {
    SubscriptionType.PUSH: int(WorkLocation.PUSH_LOCAL),
    SubscriptionType.PULL: int(WorkLocation.PULL_LOCAL),
}
_RECENT_MS: Final = 86_400_000
"""The claim itself finds messages that are not further from now than this."""

# One index probe for each priority, highest first, each from its watermark: what is below was seen
# and taken, so the scan does not read dead rows that an old snapshot keeps. This is the one hot
# statement that spans rooms: a worker serves all of them. Five kinds of rows come back, in this
# order: the copies; each of their priorities once with the highest due time; each of their
# subscriptions, without a version if it has ended; each of their messages; and the time and the
# snapshot that the statement saw. Messages are looked up only in the days between `first` and
# `last`: the tables and indexes of all other days are not even opened. Older ones are looked up by
# another statement. (`outcomes` explains "<= ANY".)
_CLAIM_TEMPLATE: Final = """
WITH picked AS MATERIALIZED (
    SELECT o.at FROM unnest(%(low)s::int8[]) WITH ORDINALITY AS p (low, n), LATERAL (
        SELECT ctid AS at FROM outbox
        WHERE kind = 0 AND priority = 10 - p.n AND due_at <= now()
            AND due_at >= timestamptz 'epoch' + p.low * interval '1 microsecond'
            AND (claimed_until < now() OR worker = ANY (%(dead)s::int4[]))
            AND subscription_id <> ALL (%(excluded)s::uuid[]){others}
        ORDER BY due_at LIMIT %(limit)s::int4 FOR UPDATE SKIP LOCKED
    ) o LIMIT %(limit)s::int4
), claimed AS (
    UPDATE outbox o SET claimed_until = now() + %(claim_s)s::float8 * interval '1 s', worker = %(writer)s,
        abandoned = CASE WHEN o.worker IS NULL THEN o.abandoned ELSE least(coalesce(o.abandoned, 0) + 1, 32767) END
    FROM picked WHERE o.ctid = picked.at
    RETURNING o.room_id, o.id, o.message_id, o.subscription_id, o.generation, o.attempt, o.delay_ms, o.priority,
        o.due_at, o.expires_at, o.abandoned
)
SELECT 0, c.room_id, c.id::text, c.message_id::text, c.subscription_id::text, c.generation, c.attempt, c.delay_ms,
    c.priority, NULL::int8, (extract(epoch FROM c.expires_at) * 1000)::int8,
    c.abandoned::int4, NULL::text, NULL::int4, NULL::text, NULL::int8, NULL::bytea, NULL::bytea
FROM claimed c
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, c.priority, (extract(epoch FROM max(c.due_at)) * 1000000)::int8,
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM claimed c GROUP BY c.priority
UNION ALL SELECT 0, NULL, NULL, NULL, s.id::text, NULL, NULL, NULL, NULL, NULL, NULL,
    CASE WHEN s.status NOT IN ('deleted', 'rejected', 'terminated') THEN s.version END, s.organisation_id::text,
    NULL, NULL, NULL, NULL, NULL
FROM (SELECT DISTINCT room_id, subscription_id FROM claimed) c CROSS JOIN LATERAL (
    SELECT s.id, s.version, s.status, s.organisation_id FROM subscriptions s WHERE s.room_id = c.room_id AND s.id = c.subscription_id LIMIT 1
) s
UNION ALL SELECT 0, NULL, {identity}, m.id::text, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, m.event_type, m.event_version,
    m.correlation_id, (extract(epoch FROM m.published_at) * 1000)::int8, m.headers, m.payload
FROM (SELECT DISTINCT room_id, message_id FROM claimed) c CROSS JOIN LATERAL (
    SELECT * FROM messages m
    WHERE m.room_id = c.room_id AND m.id = c.message_id AND m.id >= %(first)s::uuid AND m.id <= ANY (ARRAY[%(last)s::uuid])
    LIMIT 1
) m
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, (extract(epoch FROM now()) * 1000000)::int8,
    pg_snapshot_xmin(pg_current_snapshot())::text::int8, NULL, NULL, NULL, NULL,
    pg_snapshot_xmax(pg_current_snapshot())::text::int8, NULL, NULL
"""
# The subscriptions of the organisations that are skipped are hashed once, however many there are.
# Deleted ones are in no index of organisations, and may be many more. So claims name those that
# they have met.
_OF_ORGANISATIONS: Final = """
                SELECT s.id FROM subscriptions s WHERE s.organisation_id = ANY (%(organisations)s::uuid[]) AND s.status <> 'deleted'"""
OF_OTHER_ORGANISATIONS: Final = f"""
            AND subscription_id NOT IN ({_OF_ORGANISATIONS})"""
OF_OTHERS_AND_NOT_ENDED: Final = f"""
            AND subscription_id NOT IN ({_OF_ORGANISATIONS}
                UNION ALL SELECT unnest(%(ended)s::uuid[]))"""
"""The same, without further subscriptions."""
OF_OTHERS_BY_KEY: Final = """
            AND subscription_id NOT IN (SELECT unnest(%(ended)s::uuid[]))
            AND NOT EXISTS (SELECT FROM (
                SELECT s.organisation_id, s.status FROM subscriptions s
                WHERE s.room_id = outbox.room_id AND s.id = outbox.subscription_id LIMIT 1
            ) s WHERE s.organisation_id = ANY (%(organisations)s::uuid[]) AND s.status <> 'deleted' OFFSET 0)"""
"""The same, by the owner of each row that the claim reads.

To look up an owner takes longer than to find a subscription in the hash, but there is none to make.
So this is for claims that read few rows, and skip more than `MANY_SUBSCRIPTIONS`.
"""
MANY_SUBSCRIPTIONS: Final = 5_000
"""So many are hashed by each claim that skips the organisations."""
_HAVE_MANY_SUBSCRIPTIONS: Final = f"""
SELECT 0, count(*) > %(most)s::int8 FROM ({_OF_ORGANISATIONS} LIMIT %(most)s::int8 + 1) s
"""  # noqa: S608 - constants of this package
LARGEST_ORGANISATION: Final = """(
        SELECT s.organisation_id::text FROM (SELECT room_id, subscription_id, count(*) AS n FROM {} GROUP BY 1, 2) c
        CROSS JOIN LATERAL (
            SELECT s.organisation_id, s.status FROM subscriptions s WHERE s.room_id = c.room_id AND s.id = c.subscription_id LIMIT 1
        ) s WHERE s.status <> 'deleted' GROUP BY 1 ORDER BY sum(c.n) DESC LIMIT 1)"""
"""The organisation with the most rows of a CTE, but for those which are never skipped."""
_CLAIM: Final = _CLAIM_TEMPLATE.format(identity=PROPERTIES, others="")
_CLAIM_OF_OTHERS: Final = _CLAIM_TEMPLATE.format(
    identity=PROPERTIES, others=OF_OTHERS_AND_NOT_ENDED
)
_CLAIM_OF_OTHERS_BY_KEY: Final = _CLAIM_TEMPLATE.format(
    identity=PROPERTIES, others=OF_OTHERS_BY_KEY
)

_LOAD_MESSAGES: Final = f"""
SELECT 0, m.id::text, {PROPERTIES}, m.event_type, m.event_version, m.correlation_id, (extract(epoch FROM m.published_at) * 1000)::int8,
    m.headers, m.payload
FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id) CROSS JOIN LATERAL (
    SELECT * FROM messages m WHERE m.room_id = v.room_id AND m.id = v.id LIMIT 1
) m
UNION ALL SELECT 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
"""  # noqa: S608 - constants of this package

_RELEASE: Final = """
WITH freed AS (
    UPDATE outbox o SET claimed_until = '-infinity', worker = NULL
    FROM unnest(%(room)s::int4[], %(id)s::uuid[]) AS v (room_id, id)
    WHERE o.room_id = ANY (ARRAY[v.room_id]) AND o.id = v.id AND o.worker = %(writer)s
    RETURNING 1
) SELECT 0, count(*) FROM freed
"""

_ENQUEUE: Final = """
WITH o AS (
    INSERT INTO outbox (room_id, id, message_id, subscription_id, kind, priority, generation, attempt, delay_ms, due_at, expires_at)
    SELECT d.room_id, d.id, d.message_id, d.subscription_id, v.kind, v.priority, v.generation, v.attempt, v.delay_ms, v.due_at,
        d.expires_at
    FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(generation)s::int4[], %(attempt)s::int4[], %(kind)s::int2[],
            %(priority)s::int2[], %(delay)s::int8[], %(due)s::timestamptz[])
            AS v (room_id, id, generation, attempt, kind, priority, delay_ms, due_at)
        JOIN deliveries d ON d.room_id = v.room_id AND d.id = v.id AND d.generation = v.generation AND d.attempt = v.attempt
    WHERE d.state = 'queued'
    ON CONFLICT (room_id, id) DO NOTHING RETURNING 1
) SELECT 0, count(*) FROM o
"""

_DEPTH: Final = """
SELECT 0, CASE WHEN %(subscription)s::uuid IS NULL THEN (SELECT count(*) FROM outbox WHERE kind = 0)
    ELSE (SELECT count(*) FROM outbox WHERE kind = 1 AND room_id = %(room)s AND subscription_id = %(subscription)s::uuid) END
"""

_SEVERAL_ORGANISATIONS: Final = "SELECT 0, count(*) > 1 FROM (SELECT FROM organisations LIMIT 2) o"

_PURGE: Final = """
WITH gone AS (
    DELETE FROM outbox WHERE room_id = %(room)s AND subscription_id = %(subscription)s::uuid AND claimed_until < now() RETURNING 1
) SELECT 0, count(*) FROM gone
"""

_NEXT_DUE: Final = """
SELECT 0, min(wait) FROM generate_series(0, 9) AS p (n), LATERAL (
    SELECT extract(epoch FROM due_at - now())::float8 AS wait FROM outbox
    WHERE kind = 0 AND priority = p.n AND due_at > timestamptz 'epoch' + %(after)s::int8 * interval '1 microsecond'
    ORDER BY due_at LIMIT 1
) o
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedBatch:
    """Hold what one claim took and saw.

    `at_us`: its time in epoch microseconds; `xmin`: the oldest transaction that was running;
    `xmax`: the first one that had not begun; `highest_due_us`: of each priority the highest due
    time taken; `row_count`: how many rows were claimed, including those whose messages are gone;
    `organisations`: the owners of the subscriptions, also of those that have ended.
    """

    at_us: int
    xmin: int
    xmax: int
    highest_due_us: Mapping[int, int]
    row_count: int
    tasks: Sequence[DeliveryTask]
    organisations: Mapping[SubscriptionId, OrganisationId] = field(default_factory=dict)

    def count_by_organisation(self) -> Mapping[OrganisationId, int]:
        """Return how many tasks each organisation's subscriptions have."""
        return count_by_organisation(self.tasks, self.organisations)


def count_by_organisation(
    tasks: Iterable[DeliveryTask], owners: Mapping[SubscriptionId, OrganisationId]
) -> Mapping[OrganisationId, int]:
    """Return how many tasks each organisation has, by the owners of their subscriptions."""
    return Counter(owners[task.subscription_id] for task in tasks if task.subscription_id in owners)


async def have_many_subscriptions(
    writer: LogWriter, organisations: Collection[OrganisationId]
) -> bool:
    """Return whether these have more than `MANY_SUBSCRIPTIONS` together.

    Errors: those of `LogWriter.run`.
    """
    parameters = {"organisations": literal_array(organisations), "most": MANY_SUBSCRIPTIONS}
    return bool((await writer.run(_HAVE_MANY_SUBSCRIPTIONS, parameters))[0][0])


class Outbox:
    """Use the outbox through one writer.

    Its id marks the claims and its session proves that they are alive.
    """

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    async def claim(
        self,
        *,
        limit: int,
        claim_s: float,
        deadline: float,
        now_ms: int,
        watermarks_us: Sequence[int],
        dead_workers: Sequence[int],
        excluded: frozenset[SubscriptionId],
        excluded_organisations: Sequence[OrganisationId] = (),
        ended: Sequence[SubscriptionId] = (),
        looks_up_owners: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> ClaimedBatch:
        """Claim up to `limit` due PUSH copies for `claim_s` seconds.

        `watermarks_us`: for each priority from 9 down to 0 the due time (epoch microseconds) below
        which the scan need not begin; `dead_workers`: workers whose claims do not count;
        `excluded`, `excluded_organisations`: subscriptions to skip, and the owners of further ones;
        `ended`: deleted ones of these organisations; `looks_up_owners`: the organisations have many
        subscriptions, and the claim begins beyond most rows of them;
        `deadline`: set on the copies; `now_ms`: this process's time of day, around which messages
        are found at once; `monotonic`: the clock on which their expiry is computed.
        """
        others = (
            {
                "organisations": literal_array(excluded_organisations),
                "ended": literal_array(ended),
            }
            if excluded_organisations
            else {}
        )
        of_others = _CLAIM_OF_OTHERS_BY_KEY if looks_up_owners else _CLAIM_OF_OTHERS
        rows = await self._writer.run_whole(
            of_others if others else _CLAIM,
            {
                **others,
                "low": literal_array(watermarks_us),
                "dead": literal_array(dead_workers),
                "excluded": literal_array(excluded),
                "limit": limit,
                "claim_s": claim_s,
                "first": first_id(max(0, now_ms - _RECENT_MS)),
                "last": first_id(now_ms + _RECENT_MS),
            },
        )
        # A statement may wait, so its time is taken afterwards: no copy may seem to expire early.
        claimed_at = monotonic()
        last = rows.pop()
        count = next((at for at, row in enumerate(rows) if row[1] is None), len(rows))
        claimed, others_found = rows[:count], rows[count:]
        highest = {row[8]: row[9] for row in others_found if row[8] is not None}
        subscriptions = [row for row in others_found if row[4] is not None]
        versions = {row[4]: row[11] for row in subscriptions}
        found = others_found[len(highest) + len(versions) :]
        messages = {row[3]: row[12:] for row in found}
        identities = {row[3]: row[2] for row in found if row[2] is not None}
        if missing := {row[3]: row[1] for row in claimed if row[3] not in messages}:
            for row in await self._load_older_messages(missing, claimed):
                messages[row[0]] = row[2:]
                if row[1] is not None:
                    identities[row[0]] = row[1]
        tasks: list[DeliveryTask] = []
        orphans: list[tuple[RoomId, DeliveryId]] = []
        kind = SubscriptionType.PUSH
        for row in claimed:
            (_, room_id, delivery_id, message_id, subscription_id, generation, attempt, delay_ms,
                priority, _, expires_at_ms, crash_count, _, _, _, _, _, _) = row  # fmt: skip
            message = messages.get(message_id)
            if message is None:
                orphans.append((room_id, delivery_id))
                continue
            event_type, event_version, correlation_id, published_ms, headers, payload = message
            tasks.append(
                # By position; `DeliveryTask` explains why.
                DeliveryTask(
                    room_id,
                    delivery_id,
                    message_id,
                    subscription_id,
                    kind,
                    generation,
                    attempt,
                    delay_ms,
                    priority,
                    event_type,
                    event_version,
                    correlation_id,
                    published_ms,
                    expires_at_ms,
                    versions.get(subscription_id),
                    deadline,
                    headers,
                    payload,
                    crash_count or 0,
                )
            )
        # A pass of its own costs less than a field more of every task.
        if own := [
            task for task in tasks if task.expires_ms is not None or task.message_id in identities
        ]:
            for task in own:
                expires_ms = task.expires_ms
                task.properties = parse_properties(identities.get(task.message_id), expires_ms)
                if expires_ms is not None:
                    task.expires_at = claimed_at + (expires_ms - last[9] / 1000) / 1000
            await self._add_sequences(own, claimed)
        if orphans:
            _log.error(
                "%d deliveries are sidelined because their messages are gone; the first is %s",
                len(orphans),
                orphans[0][1],
            )
            await self._sideline_orphans(orphans, claimed)
        return ClaimedBatch(
            at_us=last[9],
            xmin=last[10],
            xmax=last[15],
            highest_due_us=highest,
            row_count=count,
            tasks=tasks,
            organisations={row[4]: row[12] for row in subscriptions},
        )

    async def _load_older_messages(
        self, missing: Mapping[str, RoomId], claimed: Sequence[tuple[Any, ...]]
    ) -> list[tuple[Any, ...]]:
        """Return messages that the claim did not look up, of any day.

        Each has its id, its properties and the columns that the claim returns.
        """
        try:
            return await self._writer.run(
                _LOAD_MESSAGES,
                {"room": literal_array(missing.values()), "id": literal_array(missing)},
            )
        except StorageRefusedError:
            await self._release_rows([row[1] for row in claimed], [row[2] for row in claimed])
            raise

    async def _add_sequences(
        self, tasks: Sequence[DeliveryTask], claimed: Sequence[tuple[Any, ...]]
    ) -> None:
        """Set the sequence numbers of tasks with an ordering key."""
        try:
            await add_sequences(self._writer, tasks)
        except StorageRefusedError:
            await self._release_rows([row[1] for row in claimed], [row[2] for row in claimed])
            raise

    async def _sideline_orphans(
        self, orphans: Sequence[tuple[RoomId, DeliveryId]], claimed: Sequence[tuple[Any, ...]]
    ) -> None:
        """Sideline deliveries whose messages are gone."""
        try:
            await sideline_without_message(self._writer, orphans)
        except StorageRefusedError:
            await self._release_rows([row[1] for row in claimed], [row[2] for row in claimed])
            raise

    async def release(self, tasks: Sequence[DeliveryTask]) -> None:
        """Give claimed copies back untouched."""
        await self._release_rows(
            [task.room_id for task in tasks], [task.delivery_id for task in tasks]
        )

    async def _release_rows(
        self, rooms: Sequence[RoomId], deliveries: Sequence[DeliveryId]
    ) -> None:
        await self._writer.run(
            _RELEASE, {"room": literal_array(rooms), "id": literal_array(deliveries)}
        )

    async def enqueue(
        self, tasks: Sequence[DeliveryTask], *, not_before: Sequence[datetime]
    ) -> None:
        """Queue copies of deliveries whose rows are at the same version.

        One that is queued already stays as it is.
        """
        await self._writer.run(
            _ENQUEUE,
            {
                "room": literal_array(task.room_id for task in tasks),
                "id": literal_array(task.delivery_id for task in tasks),
                "generation": literal_array(task.generation for task in tasks),
                "attempt": literal_array(task.attempt for task in tasks),
                "kind": literal_array(OUTBOX_KINDS[task.kind] for task in tasks),
                "priority": literal_array(task.priority for task in tasks),
                "delay": literal_array(task.delay_ms for task in tasks),
                "due": literal_array(at.isoformat() for at in not_before),
            },
        )

    async def depth(self, subscription: SubscriptionId | None) -> int:
        """Count the waiting rows: of a PULL subscription, or (None) all of PUSH."""
        room = None if subscription is None else room_of(subscription)
        rows = await self._writer.run(_DEPTH, {"room": room, "subscription": subscription})
        return int(rows[0][0])

    async def purge(self, room: RoomId, subscription: SubscriptionId) -> int:
        """Delete the unclaimed rows of a subscription, and return how many.

        The delivery rows stay.
        """
        rows = await self._writer.run(_PURGE, {"room": room, "subscription": subscription})
        return int(rows[0][0])

    async def seconds_to_next_due(self, after_us: int) -> float | None:
        """Return the seconds until the next PUSH copy that was not due at `after_us` is due.

        `after_us` is in epoch microseconds. None: there is none. Less than 0: it came due since
        then.
        """
        rows = await self._writer.run(_NEXT_DUE, {"after": after_us})
        return float(rows[0][0]) if rows else None

    async def have_many_subscriptions(self, organisations: Collection[OrganisationId]) -> bool:
        """Return whether these have more than `MANY_SUBSCRIPTIONS` together."""
        return await have_many_subscriptions(self._writer, organisations)

    async def has_several_organisations(self) -> bool:
        """Return whether the installation has more than one organisation."""
        return bool((await self._writer.run(_SEVERAL_ORGANISATIONS, {}))[0][0])

    async def dead_workers(self) -> list[int]:
        """Return the workers whose session is gone: their claims do not count."""
        return await dead_writers(self._writer, kind="worker")
