"""Handler queues: their organisation and settings. What is in them is in their magazines.

A queue's name is one in its organisation. Its key here is the name that its magazines' store knows it by (`store_name`):
for queues of before names were the organisations' own it is their name, for others it is made from an id. The
magazines' store has a record of each queue too, which is written from here: it cannot make a name unique, and what it
loses is written again.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, RowMapping, delete, false, insert, literal, literal_column, select, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql import func

from rooms.domain.ids import OrganisationId
from rooms.domain.names import NAME
from rooms.domain.queue import Queue, QueueSettings, ShovelPlan, new_store_name
from rooms.errors import ConflictError, NotFoundError
from rooms.storage.keys import DEFAULT_ORGANISATION
from rooms.storage.tables.magazines import queues
from rooms.storage.tables.organisations import organisations
from rooms.storage.transactions import transaction

_MOST: Final = 100_000

_ACTIVE: Final[ColumnElement[bool]] = literal_column(
    "coalesce(queues.created_at + make_interval(secs => (queues.settings ->> 'queue_expiry_s')::float8) > now(), true)"
).label("active")
_ALL: Final = (queues, _ACTIVE)
# As in the index.
_own_name: Final = func.coalesce(queues.c.display_name, queues.c.name)


async def create_queue(
    connection: AsyncConnection, organisation: OrganisationId, name: str, settings: QueueSettings, *, new_id: str
) -> Queue:
    """Make a new queue. ConflictError: the organisation has one of this name."""
    statement = insert(queues).values(
        name=new_store_name(new_id), display_name=name, organisation_id=organisation, settings=_json(settings)
    )
    try:
        row = await connection.execute(statement.returning(*_ALL))
    except IntegrityError as exc:
        raise ConflictError(f"there is a queue of the name {name!r}, or it is still being deleted") from exc
    return _queue(row.mappings().one())


async def find_queue(
    connection: AsyncConnection, organisation: OrganisationId, name: str, *, lock: bool = False
) -> Queue:
    """One queue of the organisation. NotFoundError, for text that can be no name too. `lock`: nobody else changes it in
    this transaction.
    """
    if not NAME.fullmatch(name):
        raise NotFoundError("there is no such queue")
    statement = select(*_ALL).where(
        _own_name == name, queues.c.organisation_id == organisation, queues.c.deleting.is_(False)
    )
    row = (await connection.execute(statement.with_for_update() if lock else statement)).mappings().one_or_none()
    if row is None:
        raise NotFoundError("there is no such queue")
    return _queue(row)


async def list_queues(
    connection: AsyncConnection, organisation: OrganisationId | None, *, after: str | None = None, limit: int
) -> Sequence[Queue]:
    """Return the organisation's queues by name, or (None) those of all by the name in the store."""
    order = queues.c.name if organisation is None else _own_name
    statement = select(*_ALL).where(queues.c.deleting.is_(False)).order_by(order).limit(limit)
    if organisation is not None:
        statement = statement.where(queues.c.organisation_id == organisation)
    if after is not None:
        statement = statement.where(order > after)
    return [_queue(row) for row in (await connection.execute(statement)).mappings()]


async def queues_to_serve(
    connection: AsyncConnection, organisation: str | None, names: Sequence[str]
) -> tuple[Sequence[Queue], frozenset[str]]:
    """Return the queues of these names that a process of the organisation (its name) serves, and the names that only others
    have.

    None: those of the organisation `default`, and those that have their name in the store from before names were the
    organisations' own. None of these can be made any more, so no organisation can bring itself into such a process.
    """
    own = organisations.c.name == (organisation or DEFAULT_ORGANISATION)
    statement = (
        select(
            *_ALL,
            (queues.c.display_name.is_(None) if organisation is None else false()).label("kept"),
            own.label("own"),
        )
        .join(organisations, organisations.c.id == queues.c.organisation_id)
        .where(_own_name.in_(names), queues.c.deleting.is_(False))
        .order_by("kept", "own", queues.c.name)
    )
    rows = (await connection.execute(statement)).mappings().all()
    # In this order, so that of several the one that was served before stays.
    served = {queue.name: queue for queue in (_queue(row) for row in rows if row["kept"] or row["own"])}
    return list(served.values()), frozenset({_queue(row).name for row in rows} - served.keys())


async def change_queue(connection: AsyncConnection, store_name: str, settings: QueueSettings) -> Queue:
    """Set a queue that is there anew (`find_queue` with `lock` in the same transaction)."""
    statement = (
        update(queues).where(queues.c.name == store_name).values(settings=_json(settings), updated_at=func.now())
    )
    return _queue((await connection.execute(statement.returning(*_ALL))).mappings().one())


async def end_shovel(connection: AsyncConnection, store_name: str, plan: ShovelPlan) -> bool:
    """A one-shot shovel had its pass; False where another one was set meanwhile."""
    statement = (
        update(queues)
        .where(queues.c.name == store_name, queues.c.settings["shovel"] == literal(msgspec.to_builtins(plan), JSONB))
        .values(settings=queues.c.settings.op("||")(literal({"shovel": None}, JSONB)), updated_at=func.now())
        .returning(queues.c.name)
    )
    return (await connection.execute(statement)).first() is not None


async def mark_deleting(connection: AsyncConnection, store_name: str) -> None:
    """Hide the queue, from the commit on, from all but its deletion; its name is free when that is done."""
    await connection.execute(
        update(queues).where(queues.c.name == store_name).values(deleting=True, updated_at=func.now())
    )


async def names_deleting(engine: AsyncEngine) -> Sequence[str]:
    """Return the queues whose deletion has begun, by their name in the store."""
    async with transaction(engine) as connection:
        rows = await connection.execute(select(queues.c.name).where(queues.c.deleting).order_by(queues.c.name))
        return [row[0] for row in rows]


async def forget_queue(connection: AsyncConnection, store_name: str) -> None:
    """Forget a queue of which nothing is left: its name is free."""
    await connection.execute(delete(queues).where(queues.c.name == store_name))


async def taken_names(connection: AsyncConnection, store_names: Sequence[str]) -> set[str]:
    """Return those of the names in the store that belong to a queue, one that is being deleted included."""
    rows = await connection.execute(select(queues.c.name).where(queues.c.name.in_(store_names)))
    return {row[0] for row in rows}


async def every_queue(engine: AsyncEngine) -> Sequence[Queue]:
    """The queues of the whole installation."""
    async with transaction(engine) as connection:
        return await list_queues(connection, None, limit=_MOST)


def _json(settings: QueueSettings) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(settings)
    return found


def _queue(row: RowMapping) -> Queue:
    return Queue(
        name=row["display_name"] or row["name"],
        store_name=row["name"],
        organisation_id=OrganisationId(row["organisation_id"]),
        settings=msgspec.convert(row["settings"], QueueSettings),
        active=row["active"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
