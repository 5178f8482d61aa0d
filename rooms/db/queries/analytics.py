"""Store and read the results of the analysis.

The tables are small: one row a finding, of one run at any time.
"""


# ruff: noqa: E501 - SQL statements keep their lines

import json

# ruff: noqa: E501 - SQL statements keep their lines
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import psycopg
from sqlalchemy import func, literal, or_, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.connection import CONNECTION_LOST, psycopg_url
from rooms.db.queries.messages import event_type_conditions
from rooms.db.session_settings import SERVER_TIMEOUTS, apply_settings
from rooms.db.tables.usage import analysis_rows, analysis_runs
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of
from rooms.domain.principal import Principal
from rooms.domain.state_machine import SERVED_STATUSES
from rooms.errors import StorageUnavailableError

_LOCK: Final = "SELECT pg_advisory_xact_lock(7233390)"
_ROOM_OWNERS: Final = "SELECT id, organisation_id::text FROM rooms WHERE NOT deleting"
_SUBSCRIBERS: Final = """
SELECT s.id::text, s.organisation_id::text, s.status FROM subscriptions s JOIN rooms r ON r.id = s.room_id
WHERE NOT r.deleting
"""
_ONE_SNAPSHOT: Final = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_RUN: Final = (
    "INSERT INTO analysis_runs (run, analysed_at, set_aside) VALUES (%s, %s, %s) RETURNING id"
)
# Findings of a time to come are of a clock that was wrong, and must not stay until then.
_NEWER: Final = (
    "SELECT EXISTS (SELECT FROM analysis_runs WHERE analysed_at > %s "
    "AND analysed_at < clock_timestamp() + interval '5 minutes')"
)
_DELETE_ROWS: Final = "DELETE FROM analysis_rows"
_DELETE_OLDER_RUNS: Final = "DELETE FROM analysis_runs WHERE id < %s"
_COPY_ROWS: Final = """
COPY analysis_rows (organisation_id, finding, number, run_id, rooms, subscriptions, began, ended, body) FROM STDIN
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """Hold the organisation of each room, and that of each subscription.

    `stopped`: the subscriptions that are suspended or have ended.
    """

    rooms: Mapping[RoomId, OrganisationId]
    subscribers: Mapping[SubscriptionId, OrganisationId] = field(default_factory=dict)
    stopped: frozenset[SubscriptionId] = frozenset()

    def of_room(self, room: int) -> OrganisationId | None:
        """Return a room's owner; None: the room is gone."""
        return self.rooms.get(RoomId(room))

    def of_subscription(self, identity: str) -> OrganisationId | None:
        """Return the subscriber; None: the room, or subscription and organisation, are gone."""
        return self.subscribers.get(SubscriptionId(identity))

    def is_guest(self, identity: str) -> bool:
        """Return whether a subscription is in a room of another organisation."""
        return self.of_subscription(identity) != self.of_room(room_of(identity))

    def organisations(self) -> frozenset[OrganisationId]:
        """Return the organisations that have rooms or subscriptions."""
        return frozenset(self.rooms.values()) | frozenset(self.subscribers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisFinding:
    """Hold a finding about an organisation's rooms or subscriptions.

    `number` orders those of one `kind` for display.
    """

    organisation: OrganisationId
    kind: str
    number: int
    rooms: tuple[RoomId, ...]
    subscriptions: tuple[SubscriptionId, ...]
    began: datetime | None
    ended: datetime | None
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingFilter:
    """Select findings; None: no restriction. Findings match that overlap [since, until).

    A finding without an end goes on.
    """

    since: datetime | None = None
    until: datetime | None = None
    room: RoomId | None = None
    subscription: SubscriptionId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisRun:
    """Name the run that the findings are of.

    `set_aside`: hours (RFC 3339 or null) whose segments were not read, with reason and number.
    """

    id: int
    analysed_at: datetime
    set_aside: Sequence[Mapping[str, Any]] = ()


def _connect(url: str) -> psycopg.Connection[Any]:
    connection = psycopg.connect(psycopg_url(url))
    apply_settings(connection, url, SERVER_TIMEOUTS)
    return connection


def read_owners(url: str) -> Owners:
    """Return the organisations that findings are about. StorageUnavailableError."""
    try:
        with _connect(url) as connection, connection.transaction():
            connection.execute(_ONE_SNAPSHOT)
            subscribers = connection.execute(_SUBSCRIBERS).fetchall()
            return Owners(
                rooms={
                    RoomId(room): OrganisationId(owner)
                    for room, owner in connection.execute(_ROOM_OWNERS)
                },
                subscribers={
                    SubscriptionId(identity): OrganisationId(subscriber)
                    for identity, subscriber, _ in subscribers
                },
                stopped=frozenset(
                    SubscriptionId(identity)
                    for identity, _, status in subscribers
                    if status not in SERVED_STATUSES
                ),
            )
    except CONNECTION_LOST as exc:
        raise StorageUnavailableError(str(exc)) from exc


def replace_findings(
    url: str,
    *,
    run: int,
    analysed_at: datetime,
    findings: Iterable[AnalysisFinding],
    set_aside: Sequence[Mapping[str, Any]] = (),
) -> bool:
    """Replace all findings by those of a run, in one transaction.

    False: there are findings of a later analysis, and they stay. Blocking. StorageUnavailableError.
    """
    try:
        with _connect(url) as connection, connection.transaction():
            connection.execute(_LOCK)
            newer = connection.execute(_NEWER, (analysed_at,)).fetchone()
            if newer is not None and newer[0]:
                return False
            made = connection.execute(
                _RUN, (run, analysed_at, json.dumps(list(set_aside)))
            ).fetchone()
            assert made is not None
            connection.execute(_DELETE_ROWS)
            connection.execute(_DELETE_OLDER_RUNS, (made[0],))
            with connection.cursor().copy(_COPY_ROWS) as rows:
                for one in findings:
                    body = json.dumps(one.body, ensure_ascii=False)
                    columns = (
                        one.organisation,
                        one.kind,
                        one.number,
                        made[0],
                        list(one.rooms),
                        list(one.subscriptions),
                    )
                    rows.write_row((*columns, one.began, one.ended, body))
    except CONNECTION_LOST as exc:
        raise StorageUnavailableError(str(exc)) from exc
    return True


async def latest_run(connection: AsyncConnection) -> AnalysisRun | None:
    """Return the run of the stored findings; None: nothing was analysed yet."""
    found = (
        await connection.execute(select(analysis_runs).order_by(analysis_runs.c.id.desc()).limit(1))
    ).first()
    if found is None:
        return None
    return AnalysisRun(id=found.id, analysed_at=found.analysed_at, set_aside=found.set_aside)


async def findings_page(
    connection: AsyncConnection,
    principal: Principal,
    kind: str,
    wanted: FindingFilter,
    *,
    after: int,
    limit: int,
) -> Sequence[tuple[int, Mapping[str, Any]]]:
    """Return the next findings after the number `after`, each with its number.

    A restricted key gets those that are about nothing else than it may use.
    """
    rows = analysis_rows.c
    statement = (
        select(rows.number, rows.body)
        .where(
            rows.organisation_id == principal.organisation_id,
            rows.finding == kind,
            rows.number > after,
            *event_type_conditions(principal.event_types, rows.body["event_type"].astext),
        )
        .order_by(rows.number)
        .limit(limit)
    )
    # An index knows these operators of arrays, and none of `= ANY (column)`.
    if principal.rooms is not None:
        allowed = literal(sorted(principal.rooms), rows.rooms.type)
        statement = statement.where(rows.rooms.bool_op("<@")(allowed))
    if principal.subscriptions is not None:
        allowed = literal(sorted(principal.subscriptions), rows.subscriptions.type)
        statement = statement.where(
            rows.subscriptions.bool_op("<@")(allowed), func.cardinality(rows.subscriptions) > 0
        )
    if wanted.since is not None:
        statement = statement.where(or_(rows.ended.is_(None), rows.ended > wanted.since))
    if wanted.until is not None:
        statement = statement.where(rows.began < wanted.until)
    if wanted.room is not None:
        about = literal([wanted.room], rows.rooms.type)
        statement = statement.where(rows.rooms.bool_op("@>")(about))
    if wanted.subscription is not None:
        about = literal([wanted.subscription], rows.subscriptions.type)
        statement = statement.where(rows.subscriptions.bool_op("@>")(about))
    return [(row.number, row.body) for row in await connection.execute(statement)]


_NAMES: Final = text("""
SELECT s.id::text, s.name, r.name AS room, o.name AS organisation
FROM subscriptions s JOIN rooms r ON r.id = s.room_id JOIN organisations o ON o.id = s.organisation_id
WHERE s.id = ANY (CAST(:ids AS uuid[]))
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionName:
    """Hold the names of a subscription, of its room and of its organisation."""

    id: str
    name: str
    room: str
    organisation: str


async def subscription_names(
    connection: AsyncConnection, ids: Collection[str]
) -> list[SubscriptionName]:
    """Return the names of those that exist, of all organisations."""
    rows = await connection.execute(_NAMES, {"ids": list(ids)})
    return [SubscriptionName(**row) for row in rows.mappings()]
