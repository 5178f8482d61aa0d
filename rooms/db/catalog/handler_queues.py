"""Store handler queues: their organisation and settings.

Their messages are in their magazines.

An organisation has one queue of a name. The key of a row is `store_name`, under which the magazine
store knows the queue. It is made from an id; queues that are older than organisations' own names
keep their name as key. The magazine store also has a record of each queue, which is written from
these rows: it cannot make a name unique, and what it loses is written again.
"""

# ruff: noqa: E501 - SQL statements keep their lines

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple, Self

import msgspec
from sqlalchemy import (
    ARRAY,
    ColumnElement,
    Double,
    RowMapping,
    Text,
    any_,
    case,
    delete,
    exists,
    false,
    insert,
    literal,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql import func

from rooms.db.catalog.organisations import DEFAULT_ORGANISATION
from rooms.db.connection import transaction
from rooms.db.tables.magazines import queues
from rooms.db.tables.organisations import jobs, organisations
from rooms.domain.handler_queue import HandlerQueue, QueueSettings, ShovelSettings, new_store_name
from rooms.domain.ids import OrganisationId
from rooms.domain.job import JobKind, JobState
from rooms.domain.names import NAME_CHARACTERS
from rooms.errors import ConflictError, NotFoundError

_ACTIVE: Final[ColumnElement[bool]] = literal_column(
    "coalesce(queues.created_at + make_interval(secs => (queues.settings ->> 'queue_expiry_s')::float8) > now(), true)"
).label("active")
_COLUMNS: Final = (queues, _ACTIVE)
_RECORD_SHOVEL_WAITS: Final = text("""
WITH v AS MATERIALIZED (
    SELECT q.name, v.wait_s
    FROM unnest(CAST(:names AS text[]), CAST(:waits AS float8[])) AS v (name, wait_s) JOIN queues q USING (name)
    ORDER BY q.name FOR NO KEY UPDATE OF q
)
UPDATE queues q SET shovel_next_at = now() + make_interval(secs => v.wait_s) FROM v
WHERE q.name = v.name AND (q.settings -> 'shovel' ->> 'one_shot') IS DISTINCT FROM 'true'
""")
# The expression of the index.
_display_name: Final = func.coalesce(queues.c.display_name, queues.c.name)


async def check_queue_count(
    connection: AsyncConnection, organisation: OrganisationId, most: int
) -> None:
    """Check that the organisation may have another queue. ConflictError: it has `most`.

    Those that are being deleted count. Creations at the same moment may exceed the bound by their
    number: a lock on the organisation would last until the store has the magazines.
    """
    count = select(func.count()).where(queues.c.organisation_id == organisation)
    if (await connection.scalar(count) or 0) >= most:
        raise ConflictError(
            f"an organisation has at most {most:,} handler queues (ROOMS_MAX_HANDLER_QUEUES); "
            "delete some of them"
        )


async def create_queue(
    connection: AsyncConnection,
    organisation: OrganisationId,
    name: str,
    settings: QueueSettings,
    *,
    new_id: str,
) -> HandlerQueue:
    """Create a queue. ConflictError: the organisation has one of this name."""
    statement = insert(queues).values(
        name=new_store_name(new_id),
        display_name=name,
        organisation_id=organisation,
        settings=_json(settings),
    )
    try:
        row = await connection.execute(statement.returning(*_COLUMNS))
    except IntegrityError as exc:
        raise ConflictError(
            f"a queue named {name!r} exists already, or is still being deleted"
        ) from exc
    return _queue(row.mappings().one())


async def find_queue(
    connection: AsyncConnection, organisation: OrganisationId, name: str, *, lock: bool = False
) -> HandlerQueue:
    """Return one queue of the organisation.

    NotFoundError, also for text that can be no name. `lock`: no other transaction changes it before
    this one ends.
    """
    if not NAME_CHARACTERS.fullmatch(name):
        raise NotFoundError("there is no such queue")
    statement = select(*_COLUMNS).where(
        _display_name == name,
        queues.c.organisation_id == organisation,
        queues.c.deleting.is_(False),
    )
    row = (
        (await connection.execute(statement.with_for_update() if lock else statement))
        .mappings()
        .one_or_none()
    )
    if row is None:
        raise NotFoundError("there is no such queue")
    return _queue(row)


async def list_queues(
    connection: AsyncConnection, organisation: OrganisationId, *, after: str | None, limit: int
) -> Sequence[HandlerQueue]:
    """Return the organisation's queues by name."""
    statement = (
        select(*_COLUMNS)
        .where(queues.c.organisation_id == organisation, queues.c.deleting.is_(False))
        .order_by(_display_name)
        .limit(limit)
    )
    if after is not None:
        statement = statement.where(_display_name > after)
    return [_queue(row) for row in (await connection.execute(statement)).mappings()]


async def queues_to_serve(
    connection: AsyncConnection, organisation: str | None, names: Sequence[str]
) -> tuple[Sequence[HandlerQueue], frozenset[str]]:
    """Return the queues of these names that a process of `organisation` (its name) serves.

    Also return the names that only other organisations have. None: the queues of the organisation
    `default`, and queues whose name in the store is older than organisations' own names. No such
    queue can be created any more, so no organisation can bring its queue into such a process.
    """
    own = organisations.c.name == (organisation or DEFAULT_ORGANISATION)
    statement = (
        select(
            *_COLUMNS,
            (queues.c.display_name.is_(None) if organisation is None else false()).label("kept"),
            own.label("own"),
        )
        .join(organisations, organisations.c.id == queues.c.organisation_id)
        .where(_display_name.in_(names), queues.c.deleting.is_(False))
        .order_by("kept", "own", queues.c.name)
    )
    rows = (await connection.execute(statement)).mappings().all()
    # In this order, so that of several queues the one that was served before stays.
    served = {
        queue.name: queue for queue in (_queue(row) for row in rows if row["kept"] or row["own"])
    }
    return list(served.values()), frozenset({_queue(row).name for row in rows} - served.keys())


async def update_queue(
    connection: AsyncConnection,
    store_name: str,
    settings: QueueSettings,
    *,
    shovel_requested: bool = False,
) -> HandlerQueue:
    """Replace the settings of a queue. The interval of a changed shovel starts anew.

    `shovel_requested`: the request names the shovel, so a one-shot shovel makes another pass though
    one with equal settings is under way. The same transaction must have called `find_queue` with
    `lock`.
    """
    values = _json(settings)
    is_same = queues.c.settings["shovel"] == literal(values["shovel"], JSONB)
    kept = case((is_same, queues.c.shovel_next_at), else_=None)
    is_request = shovel_requested and settings.shovel is not None and settings.shovel.one_shot
    statement = (
        update(queues)
        .where(queues.c.name == store_name)
        .values(
            settings=values,
            # Of two requests, the time of the later one differs: it waited for the row's lock.
            shovel_next_at=func.clock_timestamp() if is_request else kept,
            updated_at=func.now(),
        )
    )
    return _queue((await connection.execute(statement.returning(*_COLUMNS))).mappings().one())


async def read_shovel_request(connection: AsyncConnection, store_name: str) -> datetime | None:
    """Return when a one-shot shovel was requested last; None: when the queue was created."""
    statement = select(queues.c.shovel_next_at).where(queues.c.name == store_name)
    found: datetime | None = await connection.scalar(statement)
    return found


async def clear_one_shot_shovel(
    connection: AsyncConnection,
    store_name: str,
    schedule: ShovelSettings,
    requested_at: datetime | None,
) -> bool:
    """Remove a one-shot shovel schedule after its pass.

    `requested_at`: what `read_shovel_request` returned before the pass. Return False if it was
    replaced or requested again meanwhile.
    """
    statement = (
        update(queues)
        .where(
            queues.c.name == store_name,
            queues.c.settings["shovel"] == literal(msgspec.to_builtins(schedule), JSONB),
            queues.c.shovel_next_at.is_not_distinct_from(requested_at),
        )
        .values(
            settings=queues.c.settings.op("||")(literal({"shovel": None}, JSONB)),
            shovel_next_at=None,
            updated_at=func.now(),
        )
        .returning(queues.c.name)
    )
    return (await connection.execute(statement)).first() is not None


async def read_shovel_waits(
    connection: AsyncConnection, store_names: Sequence[str]
) -> dict[str, float]:
    """Return the seconds until the next shovel, of those queues for which a time was recorded."""
    wait_s = func.extract("epoch", queues.c.shovel_next_at - func.now()).cast(Double)
    statement = select(queues.c.name, wait_s).where(
        _is_named(store_names), queues.c.shovel_next_at.is_not(None)
    )
    return {row[0]: row[1] for row in await connection.execute(statement)}


async def record_shovel_waits(connection: AsyncConnection, waits_s: Mapping[str, float]) -> None:
    """Record the seconds until the next shovel of these queues, by their name in the store."""
    # In one order everywhere, so that no two statements deadlock.
    names = sorted(waits_s)
    await connection.execute(
        _RECORD_SHOVEL_WAITS, {"names": names, "waits": [waits_s[name] for name in names]}
    )


async def hold_queue(connection: AsyncConnection, store_name: str) -> bool:
    """Let no deletion of the queue begin before the transaction ends; False: one has begun."""
    statement = select(queues.c.name).where(
        queues.c.name == store_name, queues.c.deleting.is_(False)
    )
    return (await connection.execute(statement.with_for_update(read=True))).first() is not None


async def mark_deleting(
    connection: AsyncConnection, store_name: str, *, unchanged_since: datetime | None = None
) -> bool:
    """Hide the queue from everything but its deletion; its name is free when that is done.

    `unchanged_since`: only if it was not changed after that time. Return False where it is not
    there, was changed, or is being deleted already.
    """
    statement = update(queues).where(queues.c.name == store_name, queues.c.deleting.is_(False))
    if unchanged_since is not None:
        statement = statement.where(queues.c.updated_at == unchanged_since)
    statement = statement.values(deleting=True, updated_at=func.now())
    return (await connection.execute(statement.returning(queues.c.name))).first() is not None


async def list_interrupted_deletions(engine: AsyncEngine) -> Sequence[str]:
    """Return the queues in deletion that no open job deletes: theirs has failed, or is gone."""
    arguments = jobs.c.arguments
    # Jobs of earlier versions have only one name.
    deleted = func.coalesce(arguments["store_name"].astext, arguments["queue"].astext)
    job = exists().where(
        jobs.c.kind == JobKind.DELETE_QUEUE.value,
        jobs.c.state.in_((JobState.QUEUED, JobState.RUNNING)),
        deleted == queues.c.name,
    )
    statement = select(queues.c.name).where(queues.c.deleting, ~job).order_by(queues.c.name)
    async with transaction(engine) as connection:
        return [row[0] for row in await connection.execute(statement)]


async def delete_queue(connection: AsyncConnection, store_name: str) -> None:
    """Delete the row of a queue that is empty, so that its name is free."""
    await connection.execute(delete(queues).where(queues.c.name == store_name))


async def existing_names(connection: AsyncConnection, store_names: Sequence[str]) -> set[str]:
    """Return those of the names in the store that belong to a queue, also to one being deleted."""
    rows = await connection.execute(select(queues.c.name).where(_is_named(store_names)))
    return {row[0] for row in rows}


class QueueVersion(NamedTuple):
    """Identify the state in which a queue was read."""

    name: str
    """Its name in the store."""
    updated_at: datetime
    active: bool

    @classmethod
    def of(cls, queue: HandlerQueue) -> Self:
        """Return the version of a queue that was read."""
        return cls(queue.store_name, queue.updated_at, queue.active)


async def list_versions(
    connection: AsyncConnection, *, after: str, limit: int
) -> Sequence[QueueVersion]:
    """Return the queues of the whole installation by their name in the store."""
    statement = (
        select(queues.c.name, queues.c.updated_at, _ACTIVE)
        .where(queues.c.deleting.is_(False), queues.c.name > after)
        .order_by(queues.c.name)
        .limit(limit)
    )
    return [QueueVersion(*row) for row in await connection.execute(statement)]


async def read_queues(
    connection: AsyncConnection, store_names: Sequence[str]
) -> Sequence[HandlerQueue]:
    """Return those of these queues that exist and are not being deleted."""
    statement = select(*_COLUMNS).where(_is_named(store_names), queues.c.deleting.is_(False))
    return [_queue(row) for row in (await connection.execute(statement)).mappings()]


def _is_named(store_names: Sequence[str]) -> ColumnElement[bool]:
    return queues.c.name == any_(literal(list(store_names), ARRAY(Text)))


def _json(settings: QueueSettings) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(settings)
    return found


def _queue(row: RowMapping) -> HandlerQueue:
    return HandlerQueue(
        name=row["display_name"] or row["name"],
        store_name=row["name"],
        organisation_id=OrganisationId(row["organisation_id"]),
        settings=msgspec.convert(row["settings"], QueueSettings),
        active=row["active"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
