"""Change the database directly: migrations and API keys."""

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
from rooms.db.catalog import api_keys as keys
from rooms.db.catalog.organisations import DEFAULT_ORGANISATION, ensure_organisation
from rooms.db.connection import open_engine, transaction
from rooms.db.schema import migrate
from rooms.db.tables.organisations import api_keys, organisations
from rooms.domain.ids import IdGenerator, OrganisationId
from rooms.domain.state_machine import Scope
from rooms.errors import RoomsError

Result = TypeVar("Result")
_MAX_PAGE = 1000


def _new_id() -> str:
    return IdGenerator(
        lambda bits: int.from_bytes(os.urandom(8), "big") >> (64 - bits)
    ).generate_global(time.time_ns() // 1_000_000)


def migrate_database(url: str) -> None:
    """Run the migrations that the database lacks."""
    with _translate_errors():
        migrate(url)


def create_key(
    url: str, organisation: str, name: str, scopes: Sequence[Scope]
) -> tuple[keys.ApiKey, str]:
    """Create a key, and its organisation if needed. Return it with its text, which is not kept."""

    async def work(connection: AsyncConnection) -> tuple[keys.ApiKey, str]:
        owner = await ensure_organisation(connection, organisation, _new_id())
        text = keys.new_key(os.urandom)
        key = await keys.create_key(
            connection, new_id=_new_id(), organisation=owner, name=name, scopes=scopes, text=text
        )
        return key, text

    return _run_in_database(url, work)


def list_keys(url: str, organisation: str) -> Sequence[keys.ApiKey]:
    """Return the keys of an organisation, revoked ones included, newest first."""

    async def work(connection: AsyncConnection) -> Sequence[keys.ApiKey]:
        return await _read_keys(connection, await _organisation(connection, organisation))

    return _run_in_database(url, work)


def revoke_key(url: str, organisation: str, reference: str) -> Sequence[keys.ApiKey]:
    """Revoke the key of this id, or every active key of this name. Return the revoked keys."""

    async def work(connection: AsyncConnection) -> Sequence[keys.ApiKey]:
        owner = await _organisation(connection, organisation)
        found = [
            key
            for key in await _read_keys(connection, owner)
            if key.id == reference.lower() or (key.name == reference and key.revoked_at is None)
        ]
        for key in found:
            await keys.revoke_key(connection, owner, key.id)
        return found

    return _run_in_database(url, work)


def admin_key(url: str, name: str, current: str | None) -> str:
    """Return the text of an active admin key of the default organisation.

    This is `current` if it is active. Otherwise a new key is created under this name with the
    scopes `admin` and `platform`, and earlier keys of the name are revoked.
    """

    async def work(connection: AsyncConnection) -> str:
        if current is not None and await _is_admin(connection, current):
            return current
        owner = await ensure_organisation(connection, DEFAULT_ORGANISATION, _new_id())
        for key in await _read_keys(connection, owner):
            if key.name == name and key.revoked_at is None:
                await keys.revoke_key(connection, owner, key.id)
        text = keys.new_key(os.urandom)
        await keys.create_key(
            connection,
            new_id=_new_id(),
            organisation=owner,
            name=name,
            scopes=[Scope.ADMIN, Scope.PLATFORM],
            text=text,
        )
        return text

    return _run_in_database(url, work)


async def _is_admin(connection: AsyncConnection, text: str) -> bool:
    active = select(api_keys.c.scopes).where(
        api_keys.c.key_hash == keys.hash_key(text.encode()), api_keys.c.revoked_at.is_(None)
    )
    return Scope.ADMIN.value in (await connection.scalar(active) or ())


async def _organisation(connection: AsyncConnection, name: str) -> OrganisationId:
    found = await connection.scalar(select(organisations.c.id).where(organisations.c.name == name))
    if found is None:
        raise CliError(f"there is no organisation {name!r}")
    return OrganisationId(str(found))


async def _read_keys(connection: AsyncConnection, owner: OrganisationId) -> list[keys.ApiKey]:
    found: list[keys.ApiKey] = []
    while page := await keys.list_keys(
        connection, owner, before=found[-1].id if found else None, limit=_MAX_PAGE
    ):
        found += page
    return found


def _run_in_database(url: str, work: Callable[[AsyncConnection], Awaitable[Result]]) -> Result:
    async def within() -> Result:
        async with _connection(url) as connection:
            return await work(connection)

    with _translate_errors():
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
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (RoomsError, SQLAlchemyError) as exc:
        reason = getattr(exc, "orig", None) or exc
        raise CliError(f"the database: {str(reason).strip()}") from exc
