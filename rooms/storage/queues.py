"""Handler queues: whose they are, and how they are set. What is in them is in their magazines.

The name is the key: it is one queue in the whole installation, whoever asks first. The magazines' store has a record of each
queue too, which is written from here: it cannot make a name unique, and what it loses is written again.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, RowMapping, delete, insert, literal, literal_column, select, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.sql import func

from rooms.domain.ids import OrganisationId
from rooms.domain.names import NAME
from rooms.domain.queue import Queue, QueueSettings, ShovelPlan
from rooms.errors import ConflictError, NotFoundError
from rooms.storage.tables.magazines import queues
from rooms.storage.transactions import transaction

_MOST: Final = 100_000

_ACTIVE: Final[ColumnElement[bool]] = literal_column(
    "coalesce(created_at + make_interval(secs => (settings ->> 'queue_expiry_s')::float8) > now(), true)"
).label("active")
_ALL: Final = (queues, _ACTIVE)


async def create_queue(
    connection: AsyncConnection, organisation: OrganisationId, name: str, settings: QueueSettings
) -> Queue:
    """A new queue. ConflictError: there is one of this name, whoever's."""
    statement = insert(queues).values(name=name, organisation_id=organisation, settings=_json(settings))
    try:
        row = await connection.execute(statement.returning(*_ALL))
    except IntegrityError as exc:
        raise ConflictError(f"the name {name!r} is taken: a queue's name is one in the whole installation") from exc
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
        queues.c.name == name, queues.c.organisation_id == organisation, queues.c.deleting.is_(False)
    )
    row = (await connection.execute(statement.with_for_update() if lock else statement)).mappings().one_or_none()
    if row is None:
        raise NotFoundError("there is no such queue")
    return _queue(row)


async def list_queues(
    connection: AsyncConnection, organisation: OrganisationId | None, *, after: str | None = None, limit: int
) -> Sequence[Queue]:
    """Queues by name: the organisation's, or everybody's."""
    statement = select(*_ALL).where(queues.c.deleting.is_(False)).order_by(queues.c.name).limit(limit)
    if organisation is not None:
        statement = statement.where(queues.c.organisation_id == organisation)
    if after is not None:
        statement = statement.where(queues.c.name > after)
    return [_queue(row) for row in (await connection.execute(statement)).mappings()]


async def queues_of_names(connection: AsyncConnection, names: Sequence[str]) -> Sequence[Queue]:
    """Those of the names that are queues, whoever's."""
    statement = select(*_ALL).where(queues.c.name.in_(names), queues.c.deleting.is_(False)).order_by(queues.c.name)
    return [_queue(row) for row in (await connection.execute(statement)).mappings()]


async def change_queue(connection: AsyncConnection, name: str, settings: QueueSettings) -> Queue:
    """New settings for a queue that is there (`find_queue` with `lock` in the same transaction)."""
    statement = update(queues).where(queues.c.name == name).values(settings=_json(settings), updated_at=func.now())
    return _queue((await connection.execute(statement.returning(*_ALL))).mappings().one())


async def end_shovel(connection: AsyncConnection, name: str, plan: ShovelPlan) -> bool:
    """A one-shot shovel had its pass; False where another one was set meanwhile."""
    statement = (
        update(queues)
        .where(queues.c.name == name, queues.c.settings["shovel"] == literal(msgspec.to_builtins(plan), JSONB))
        .values(settings=queues.c.settings.op("||")(literal({"shovel": None}, JSONB)), updated_at=func.now())
        .returning(queues.c.name)
    )
    return (await connection.execute(statement)).first() is not None


async def mark_deleting(connection: AsyncConnection, name: str) -> None:
    """From its commit on the queue is gone for everybody but its deletion; its name is free when that is done."""
    await connection.execute(update(queues).where(queues.c.name == name).values(deleting=True, updated_at=func.now()))


async def names_deleting(engine: AsyncEngine) -> Sequence[str]:
    """The queues that somebody began to delete."""
    async with transaction(engine) as connection:
        rows = await connection.execute(select(queues.c.name).where(queues.c.deleting).order_by(queues.c.name))
        return [row[0] for row in rows]


async def forget_queue(connection: AsyncConnection, name: str) -> None:
    """Nothing of it is left: its name is free."""
    await connection.execute(delete(queues).where(queues.c.name == name))


async def taken_names(connection: AsyncConnection, names: Sequence[str]) -> set[str]:
    """Those of the names that belong to a queue, one that is being deleted included."""
    rows = await connection.execute(select(queues.c.name).where(queues.c.name.in_(names)))
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
        name=row["name"],
        organisation_id=OrganisationId(row["organisation_id"]),
        settings=msgspec.convert(row["settings"], QueueSettings),
        active=row["active"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
