"""What the command line does in the database itself: the schema, and API keys."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.cli.errors import CliError
from rooms.domain.ids import IdMaker, OrganisationId
from rooms.domain.states import Scope
from rooms.errors import RoomsError
from rooms.storage import keys
from rooms.storage.engine import open_engine
from rooms.storage.schema import migrate
from rooms.storage.tables.organisations import api_keys, organisations
from rooms.storage.transactions import transaction

Result = TypeVar("Result")
_LARGEST_PAGE = 1000


def _new_id() -> str:
    return IdMaker(lambda bits: int.from_bytes(os.urandom(8), "big") >> (64 - bits)).global_id(
        time.time_ns() // 1_000_000
    )


def migrated(url: str) -> None:
    """Run what migrations the database lacks."""
    with _explained():
        migrate(url)


def create_key(url: str, organisation: str, name: str, scopes: Sequence[Scope]) -> tuple[keys.ApiKey, str]:
    """A new key and its text, which is kept nowhere; makes the organisation where there is none."""

    async def work(connection: AsyncConnection) -> tuple[keys.ApiKey, str]:
        owner = await keys.ensure_organisation(connection, organisation, _new_id())
        text = keys.new_key(os.urandom)
        key = await keys.create_key(
            connection, new_id=_new_id(), organisation=owner, name=name, scopes=scopes, text=text
        )
        return key, text

    return _run(url, work)


def list_keys(url: str, organisation: str) -> Sequence[keys.ApiKey]:
    """The keys of an organisation, revoked ones included, newest first."""

    async def work(connection: AsyncConnection) -> Sequence[keys.ApiKey]:
        return await _keys_of(connection, await _organisation(connection, organisation))

    return _run(url, work)


def revoke_key(url: str, organisation: str, reference: str) -> Sequence[keys.ApiKey]:
    """Revoke the key of this id, or every living one of this name; gives those that were."""

    async def work(connection: AsyncConnection) -> Sequence[keys.ApiKey]:
        owner = await _organisation(connection, organisation)
        found = [
            key
            for key in await _keys_of(connection, owner)
            if key.id == reference.lower() or (key.name == reference and key.revoked_at is None)
        ]
        for key in found:
            await keys.revoke_key(connection, owner, key.id)
        return found

    return _run(url, work)


def admin_key(url: str, name: str, known: str | None) -> str:
    """Return the text of a living admin key of the default organisation: the known one, or a new one under this name, all
    earlier ones of the name being revoked. A new one has the scope `platform` too.
    """

    async def work(connection: AsyncConnection) -> str:
        if known is not None and await _is_admin(connection, known):
            return known
        owner = await keys.ensure_organisation(connection, keys.DEFAULT_ORGANISATION, _new_id())
        for key in await _keys_of(connection, owner):
            if key.name == name and key.revoked_at is None:
                await keys.revoke_key(connection, owner, key.id)
        text = keys.new_key(os.urandom)
        await keys.create_key(
            connection, new_id=_new_id(), organisation=owner, name=name, scopes=[Scope.ADMIN, Scope.PLATFORM], text=text
        )
        return text

    return _run(url, work)


async def _is_admin(connection: AsyncConnection, text: str) -> bool:
    living = select(api_keys.c.scopes).where(
        api_keys.c.key_hash == keys.hash_key(text.encode()), api_keys.c.revoked_at.is_(None)
    )
    return Scope.ADMIN.value in (await connection.scalar(living) or ())


async def _organisation(connection: AsyncConnection, name: str) -> OrganisationId:
    found = await connection.scalar(select(organisations.c.id).where(organisations.c.name == name))
    if found is None:
        raise CliError(f"there is no organisation {name!r}")
    return OrganisationId(str(found))


async def _keys_of(connection: AsyncConnection, owner: OrganisationId) -> list[keys.ApiKey]:
    found: list[keys.ApiKey] = []
    while page := await keys.list_keys(connection, owner, before=found[-1].id if found else None, limit=_LARGEST_PAGE):
        found += page
    return found


def _run(url: str, work: Callable[[AsyncConnection], Awaitable[Result]]) -> Result:
    async def within() -> Result:
        async with _connection(url) as connection:
            return await work(connection)

    with _explained():
        return asyncio.run(within())


@asynccontextmanager
async def _connection(url: str) -> AsyncIterator[AsyncConnection]:
    engine = open_engine(url, size=1)
    try:
        async with transaction(engine) as connection:
            yield connection
    finally:
        await engine.dispose()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (RoomsError, SQLAlchemyError) as exc:
        reason = getattr(exc, "orig", None) or exc
        raise CliError(f"the database: {str(reason).strip()}") from exc
