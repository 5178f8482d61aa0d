"""What the analysis found, for the API: small tables, a row an organisation's finding, all of one run at any time."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
from sqlalchemy import any_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.errors import StorageUnavailableError
from rooms.storage.engine import psycopg_url
from rooms.storage.tables.analysis import analysis_rows, analysis_runs

_LOCK: Final = "SELECT pg_advisory_xact_lock(7233390)"
_OWNERS: Final = "SELECT id, organisation_id::text FROM rooms"
_RUN: Final = "INSERT INTO analysis_runs (run, analysed_at) VALUES (%s, %s) RETURNING id"
_NEWER: Final = "SELECT EXISTS (SELECT FROM analysis_runs WHERE analysed_at > %s)"
_CLEAR: Final = "DELETE FROM analysis_rows"
_FORGET: Final = "DELETE FROM analysis_runs WHERE id < %s"
_COPY: Final = """
COPY analysis_rows (organisation_id, finding, number, run_id, rooms, subscriptions, began, ended, body) FROM STDIN
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something found about an organisation's rooms. `number` orders those of one `kind`, the first to be shown first."""

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
    """Which findings are meant; None: whatever it is. Those count that touch [since, until)."""

    since: datetime | None = None
    until: datetime | None = None
    room: RoomId | None = None
    subscription: SubscriptionId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The run that the findings are of."""

    id: int
    analysed_at: datetime


def owners(url: str) -> Mapping[RoomId, OrganisationId]:
    """Whose each room is. StorageUnavailableError."""
    try:
        with psycopg.connect(psycopg_url(url)) as connection:
            return {RoomId(room): OrganisationId(owner) for room, owner in connection.execute(_OWNERS)}
    except psycopg.OperationalError as exc:
        raise StorageUnavailableError(str(exc)) from exc


def swap(url: str, *, run: int, analysed_at: datetime, findings: Iterable[Finding]) -> bool:
    """Put the findings of a run in the place of those that are there, in one transaction.

    False: there are findings of a later analysis, and they stay. Blocking. StorageUnavailableError.
    """
    try:
        with psycopg.connect(psycopg_url(url)) as connection, connection.transaction():
            connection.execute(_LOCK)
            newer = connection.execute(_NEWER, (analysed_at,)).fetchone()
            if newer is not None and newer[0]:
                return False
            made = connection.execute(_RUN, (run, analysed_at)).fetchone()
            assert made is not None
            connection.execute(_CLEAR)
            connection.execute(_FORGET, (made[0],))
            with connection.cursor().copy(_COPY) as rows:
                for one in findings:
                    body = json.dumps(one.body, ensure_ascii=False)
                    told = one.organisation, one.kind, one.number, made[0], list(one.rooms), list(one.subscriptions)
                    rows.write_row((*told, one.began, one.ended, body))
    except psycopg.OperationalError as exc:
        raise StorageUnavailableError(str(exc)) from exc
    return True


async def latest_run(connection: AsyncConnection) -> Run | None:
    """The run whose findings are there; None: nothing was analysed yet."""
    found = (await connection.execute(select(analysis_runs).order_by(analysis_runs.c.id.desc()).limit(1))).first()
    return None if found is None else Run(id=found.id, analysed_at=found.analysed_at)


async def findings_page(
    connection: AsyncConnection,
    organisation: OrganisationId,
    kind: str,
    wanted: FindingFilter,
    *,
    after: int,
    limit: int,
) -> Sequence[tuple[int, Mapping[str, Any]]]:
    """The next findings behind the number `after`, each with its own."""
    rows = analysis_rows.c
    statement = (
        select(rows.number, rows.body)
        .where(rows.organisation_id == organisation, rows.finding == kind, rows.number > after)
        .order_by(rows.number)
        .limit(limit)
    )
    if wanted.since is not None:
        statement = statement.where(rows.ended > wanted.since)
    if wanted.until is not None:
        statement = statement.where(rows.began < wanted.until)
    if wanted.room is not None:
        statement = statement.where(any_(rows.rooms) == wanted.room)
    if wanted.subscription is not None:
        statement = statement.where(any_(rows.subscriptions) == wanted.subscription)
    return [(row.number, row.body) for row in await connection.execute(statement)]
