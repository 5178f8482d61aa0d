"""Store quotas, count what is used of daily limits, and estimate what is stored."""

# ruff: noqa: E501 - SQL statements keep their lines

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import TextClause, bindparam, text, update
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.types import BigInteger, Text

from rooms.db.connection import autocommit, savepoint, transaction
from rooms.db.processes import RUNNING_S
from rooms.db.tables.organisations import organisations
from rooms.db.tables.rooms import rooms
from rooms.domain.ids import OrganisationId, RoomId, first_id
from rooms.domain.quota import ORGANISATION, Quotas, Subject, organisation_subject, room_subject
from rooms.domain.state_machine import ENDED_STATUSES, SubscriptionStatus
from rooms.errors import QueryTimeoutError

_log = logging.getLogger(__name__)

_MARGIN: Final = timedelta(seconds=10)
"""A row shows its time only when it is committed, which may be later."""
_DAYS_KEPT: Final = 2
_UNCOUNTED_MS: Final = 2000
"""Time to count, where a limit is set, what usage has not counted: a row is locked meanwhile, and
an open transaction may keep usage from counting for hours."""
_CLOCK_MARGIN_MS: Final = 3_600_000
"""An id is of the publishing process's clock, a row's time of PostgreSQL's."""
_API_KINDS: Final = "('serve', 'standalone')"
_DAY: Final = "(now() AT TIME ZONE 'UTC')::date"
_ENDED: Final = ", ".join(f"'{status}'" for status in sorted(ENDED_STATUSES))
# Rows are locked in one order, so that two processes cannot wait for each other.
_SYNC: Final = text(f"""
WITH added AS (
    INSERT INTO quota_days AS q (subject, day, messages, bytes, at)
    SELECT subject, {_DAY}, messages, bytes, clock_timestamp()
    FROM unnest(:subjects, :messages, :bytes) AS d (subject, messages, bytes) ORDER BY subject
    ON CONFLICT (subject, day) DO UPDATE SET messages = q.messages + excluded.messages, bytes = q.bytes + excluded.bytes,
        at = excluded.at
    RETURNING subject, messages, bytes
)
SELECT now() AS now, {_DAY} AS day,
    extract(epoch FROM ({_DAY} + 1) - (now() AT TIME ZONE 'UTC'))::float8 AS day_left_s,
    (SELECT count(*) FROM processes WHERE kind IN {_API_KINDS} AND NOT stopped AND seen_at > now() - interval '{RUNNING_S} s') AS processes,
    (SELECT coalesce(json_agg(json_build_array(subject, messages, bytes)), '[]') FROM (
        SELECT subject, messages, bytes FROM added
        UNION ALL
        SELECT subject, messages, bytes FROM quota_days q WHERE q.day = {_DAY}
            AND (CAST(:since AS timestamptz) IS NULL OR q.at > CAST(:since AS timestamptz))
            AND q.subject <> ALL (:subjects)
    ) u) AS used,
    (SELECT coalesce(json_agg(subject), '[]') FROM quota_stored WHERE is_full) AS full_subjects
""").bindparams(  # noqa: S608 - constants of this package
    bindparam("subjects", type_=ARRAY(Text)),
    bindparam("messages", type_=ARRAY(BigInteger)),
    bindparam("bytes", type_=ARRAY(BigInteger)),
)
_DAY_BEGIN: Final = text(f"""
SELECT {_DAY}::timestamp AT TIME ZONE 'UTC' AS day, current_setting('statement_timeout') AS timeout
""")
# Only by the index of transactions are the newest rows found without reading the whole day.
_BY_TRANSACTION: Final = text(f"""
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_indexscan', 'off', true), set_config('jit', 'off', true),
    set_config('statement_timeout', '{_UNCOUNTED_MS}', true)
""")
_BY_ANY_PLAN: Final = text("""
SELECT set_config('enable_seqscan', 'on', true), set_config('enable_indexscan', 'on', true), set_config('statement_timeout', :timeout, true)
""")
# By CASE, a room's rows are found by no other index, and nothing is looked up for them.
_UNCOUNTED: Final = """
    SELECT count(*)::int8 AS messages, coalesce(sum(payload_bytes), 0)::int8 AS bytes FROM log_entries l
    WHERE (xid::text::bigint) >= (SELECT counted_xid FROM mark) AND message_id >= CAST(:first AS uuid) AND kind = 'published'
        AND ts >= greatest(CAST(:day AS timestamptz), (SELECT since FROM mark))
        AND CASE WHEN CAST(:organisation AS uuid) IS NULL THEN room_id = :room ELSE CAST(:organisation AS uuid) = (
            SELECT coalesce(m.publisher_organisation_id, r.organisation_id) FROM messages m JOIN rooms r ON r.id = m.room_id
            WHERE m.room_id = l.room_id AND m.id = l.message_id LIMIT 1
        ) END
"""


def _seed(uncounted: str) -> TextClause:
    return text(f"""
WITH mark AS MATERIALIZED (
    SELECT counted_xid, since FROM usage_mark WHERE coalesce(system, '') IN ('', (SELECT system_identifier::text FROM pg_control_system()))
), uncounted AS (
    {uncounted}
), counted AS (
    SELECT coalesce(sum(u.messages), 0)::int8 AS messages, coalesce(sum(u.bytes), 0)::int8 AS bytes FROM usage_hours u
    WHERE u.hour >= CAST(:day AS timestamptz) AND (u.organisation_id = CAST(:organisation AS uuid) OR u.room_id = :room)
)
INSERT INTO quota_days AS q (subject, day, messages, bytes, at)
SELECT :subject, {_DAY}, c.messages + n.messages, c.bytes + n.bytes, clock_timestamp() FROM counted c, uncounted n
ON CONFLICT (subject, day) DO UPDATE SET messages = greatest(q.messages, excluded.messages),
    bytes = greatest(q.bytes, excluded.bytes), at = excluded.at
""")  # noqa: S608 - constants of this package


# What was published before the limit was set counts, too: what usage has counted, and the rows of
# the transactions after its mark. Both are of one snapshot, so each row is in one of them.
_SEED: Final = _seed(_UNCOUNTED)
_SEED_COUNTED: Final = _seed("SELECT 0::int8 AS messages, 0::int8 AS bytes")
# Of an organisation or of a room, whichever is given. Two counts, each of which reads one index:
# with OR, all subscriptions of the installation are read. Strangers must not use up a room's quota,
# so what waits for its owner's approval counts there once it is approved.
_SUBSCRIPTIONS_IN_USE: Final = f"""
SELECT (SELECT count(*) FROM subscriptions WHERE organisation_id = CAST(:organisation AS uuid) AND status NOT IN ({_ENDED}))
    + (SELECT count(*) FROM subscriptions WHERE room_id = :room AND status NOT IN ('{SubscriptionStatus.PENDING}', {_ENDED}))
"""  # noqa: S608 - constants of this package
_USED: Final = text(f"""
SELECT (SELECT json_build_array(messages, bytes) FROM quota_days WHERE subject = :subject AND day = {_DAY}) AS today,
    ({_SUBSCRIPTIONS_IN_USE}) AS subscriptions,
    (SELECT messages FROM quota_stored WHERE subject = :subject) AS stored
""")  # noqa: S608 - constants of this package
_LIMITED_STORES: Final = text("""
SELECT s.* FROM (
    SELECT 'organisation' AS kind, id::text AS id, id::text AS owner, (quotas->>'stored_messages')::int8 AS most
    FROM organisations WHERE quotas ? 'stored_messages'
    UNION ALL
    SELECT 'room', id::text, organisation_id::text, (quotas->>'stored_messages')::int8 FROM rooms
    WHERE quotas ? 'stored_messages' AND NOT deleting
) s LEFT JOIN quota_stored q ON q.subject = s.kind || ':' || s.id
ORDER BY row_number() OVER (PARTITION BY s.owner ORDER BY q.at NULLS FIRST, s.kind, s.id), s.owner
""")
# No more is counted than the limit: a number of entries of the key's index.
_COUNT_STORED: Final = text("""
SELECT count(*) FROM (
    SELECT FROM rooms r CROSS JOIN LATERAL (SELECT FROM messages m WHERE m.room_id = r.id LIMIT :most) m
    WHERE (r.id = :room OR r.organisation_id = CAST(:organisation AS uuid)) LIMIT :most
) s
""")
_RECORD_STORED: Final = text("""
INSERT INTO quota_stored (subject, messages, is_full, at) VALUES (:subject, :messages, :is_full, now())
ON CONFLICT (subject) DO UPDATE SET messages = excluded.messages, is_full = excluded.is_full, at = excluded.at
""")
# No more than the former limit was counted, so a higher one has room until the next count.
_RAISE_STORED: Final = text("""
UPDATE quota_stored SET is_full = false, at = now()
WHERE subject = :subject AND is_full AND (CAST(:most AS int8) IS NULL OR messages < :most)
""")
_CLEAN: Final = text(f"""
WITH days AS (DELETE FROM quota_days WHERE day < {_DAY} - {_DAYS_KEPT}), stored AS (
    DELETE FROM quota_stored WHERE subject <> ALL (:kept)
) SELECT 1
""").bindparams(bindparam("kept", type_=ARRAY(Text)))  # noqa: S608 - constants of this package
_SUBSCRIPTIONS: Final = text(_SUBSCRIPTIONS_IN_USE)
_SUBSCRIPTIONS_OF_ONE_IN_ROOM: Final = text(f"""
SELECT count(*) FROM subscriptions
WHERE room_id = :room AND organisation_id = CAST(:organisation AS uuid) AND status NOT IN ('{SubscriptionStatus.PENDING}', {_ENDED})
""")  # noqa: S608 - constants of this package
_LOCK_SUBSCRIPTIONS: Final = text(
    "SELECT pg_advisory_xact_lock(hashtextextended('subscriptions of ' || :organisation, 0))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Count messages and the bytes of their payloads."""

    messages: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaState:
    """Hold what all processes have used, as of `at`.

    `used` has the subjects that changed since the last time.
    """

    at: datetime
    day: str
    day_left_s: float
    processes: int
    used: Mapping[Subject, Published]
    full_subjects: frozenset[Subject]


async def sync_used(
    engine: AsyncEngine, added: Mapping[Subject, Published], since: datetime | None
) -> QuotaState:
    """Add what this process has published, and return what all have, in one statement.

    `since`: the time of the last state; None: there is none, so return everything of today.

    StorageUnavailableError: in doubt. StorageRefusedError: nothing was added.
    """
    subjects = sorted(added)
    async with autocommit(engine) as connection:
        row = (
            await connection.execute(
                _SYNC,
                {
                    "subjects": subjects,
                    "messages": [added[one].messages for one in subjects],
                    "bytes": [added[one].bytes for one in subjects],
                    "since": None if since is None else since - _MARGIN,
                },
            )
        ).one()
    return QuotaState(
        at=row.now,
        day=row.day.isoformat(),
        day_left_s=row.day_left_s,
        processes=row.processes,
        used={
            subject: Published(messages=messages, bytes=size)
            for subject, messages, size in row.used
        },
        full_subjects=frozenset(row.full_subjects),
    )


def _identities(
    organisation: OrganisationId | None, room: RoomId | None
) -> dict[str, str | int | None]:
    subject = room_subject(room) if room is not None else organisation_subject(_known(organisation))
    return {"subject": subject, "organisation": organisation, "room": room}


def _known(organisation: OrganisationId | None) -> OrganisationId:
    assert organisation is not None
    return organisation


async def set_quotas(
    connection: AsyncConnection,
    quotas: Quotas,
    *,
    organisation: OrganisationId | None = None,
    room: RoomId | None = None,
) -> None:
    """Store the limits of one of the two; the caller has locked its row.

    A room's plan version must be counted up in the same transaction. A higher limit of stored
    messages, or none, counts at once; a lower one from the next count on. Where days were not
    counted, the day so far is their first count. Where that takes too long, it lacks the latest
    messages.
    """
    before = await find_quotas(connection, organisation=organisation, room=room)
    values = {"quotas": quotas.to_document()}
    if room is not None:
        await connection.execute(update(rooms).where(rooms.c.id == room).values(**values))
    else:
        await connection.execute(
            update(organisations).where(organisations.c.id == organisation).values(**values)
        )
    identities = _identities(organisation, room)
    if quotas.stored_messages != before.stored_messages:
        raised = {"subject": identities["subject"], "most": quotas.stored_messages}
        await connection.execute(_RAISE_STORED, raised)
    if quotas.counts_days and not before.counts_days:
        await _count_day_so_far(connection, identities)


async def _count_day_so_far(
    connection: AsyncConnection, identities: Mapping[str, str | int | None]
) -> None:
    row = (await connection.execute(_DAY_BEGIN)).one()
    day: datetime = row.day
    values = {**identities, "day": day}
    first = first_id(int(day.timestamp() * 1000) - _CLOCK_MARGIN_MS)
    try:
        async with savepoint(connection):
            await connection.execute(_BY_TRANSACTION)
            await connection.execute(_SEED, {**values, "first": first})
            await connection.execute(_BY_ANY_PLAN, {"timeout": row.timeout})
    except QueryTimeoutError:
        # The limit holds all the same, and its first count is too low.
        _log.warning("the first count of %s lacks the latest messages", identities["subject"])
        await connection.execute(_SEED_COUNTED, values)


async def find_quotas(
    connection: AsyncConnection,
    *,
    organisation: OrganisationId | None = None,
    room: RoomId | None = None,
) -> Quotas:
    """Return the limits of one of the two, which exists."""
    table, identity = (organisations, organisation) if room is None else (rooms, room)
    found = await connection.scalar(
        text(f"SELECT quotas FROM {table.name} WHERE id = :id").columns(quotas=JSONB),  # noqa: S608 - a table of this package
        {"id": identity},
    )
    return Quotas.from_document(found) or Quotas()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """Hold what is used; None: not counted, because there is no limit."""

    messages_per_day: int | None
    bytes_per_day: int | None
    stored_messages: int | None
    subscriptions: int


async def find_use(
    connection: AsyncConnection,
    *,
    organisation: OrganisationId | None = None,
    room: RoomId | None = None,
) -> QuotaUse:
    """Return what one of the two has used, a second ago or, of what is stored, a minute ago."""
    row = (await connection.execute(_USED, _identities(organisation, room))).one()
    messages, size = row.today or (None, None)
    return QuotaUse(
        messages_per_day=messages,
        bytes_per_day=size,
        stored_messages=row.stored,
        subscriptions=row.subscriptions,
    )


async def lock_subscriptions(connection: AsyncConnection, organisation: OrganisationId) -> None:
    """Let only this transaction create subscriptions of an organisation, until it ends."""
    await connection.execute(_LOCK_SUBSCRIPTIONS, {"organisation": organisation})


async def count_subscriptions(
    connection: AsyncConnection,
    *,
    organisation: OrganisationId | None = None,
    room: RoomId | None = None,
) -> int:
    """Count the subscriptions of an organisation, to a room, or of one to the other.

    Those that have ended do not count, and to a room neither do those that wait for approval. The
    transaction has locked the room.
    """
    values = {"room": room, "organisation": organisation}
    is_of_one = room is not None and organisation is not None
    statement = _SUBSCRIPTIONS_OF_ONE_IN_ROOM if is_of_one else _SUBSCRIPTIONS
    return int(await connection.scalar(statement, values) or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedStore:
    """Name what may store so many messages: an organisation in its rooms, or a room."""

    kind: str
    id: str
    owner: OrganisationId
    """The organisation, or that of the room."""
    most: int

    @property
    def subject(self) -> Subject:
        """Return its subject."""
        return f"{self.kind}:{self.id}"


async def limited_stores(engine: AsyncEngine) -> Sequence[LimitedStore]:
    """Return what has a limit on stored messages, in turns of its owners.

    Of each, what was counted the longest time ago comes first. StorageUnavailableError,
    StorageRefusedError.
    """
    async with transaction(engine) as connection:
        rows = await connection.execute(_LIMITED_STORES)
        return [
            LimitedStore(kind=row.kind, id=row.id, owner=OrganisationId(row.owner), most=row.most)
            for row in rows
        ]


async def estimate_stored(engine: AsyncEngine, store: LimitedStore) -> None:
    """Count the messages of a store up to its limit, and record whether it is full.

    StorageUnavailableError, StorageRefusedError.
    """
    is_organisation = store.kind == ORGANISATION
    values: dict[str, Any] = {
        "organisation": store.id if is_organisation else None,
        "room": None if is_organisation else int(store.id),
        "most": store.most,
    }
    async with transaction(engine) as connection:
        count = int(await connection.scalar(_COUNT_STORED, values) or 0)
        record = {
            "subject": store.subject,
            "messages": count,
            "is_full": count >= store.most,
        }
        await connection.execute(_RECORD_STORED, record)


async def delete_old_use(engine: AsyncEngine, kept: Collection[Subject]) -> None:
    """Delete the counts of days before yesterday, and estimates of all but `kept`.

    StorageUnavailableError, StorageRefusedError.
    """
    async with transaction(engine) as connection:
        await connection.execute(_CLEAN, {"kept": list(kept)})
