"""Change the database directly: migrations, API keys, and the key of receipts.

Each change of a key is in the journal of its organisation, by the same transaction.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.cli.context import user_name
from rooms.cli.errors import CliError
from rooms.db.catalog import api_keys as keys
from rooms.db.catalog import sessions, sign_in_links
from rooms.db.catalog.organisations import (
    DEFAULT_ORGANISATION,
    ensure_organisation,
    find_organisation,
)
from rooms.db.connection import open_engine, transaction
from rooms.db.journal import append, bounded
from rooms.db.receipt_keys import Rotation, rotate_key
from rooms.db.schema import migrate
from rooms.db.secrets import KEY_FILE, open_cipher
from rooms.db.tables.organisations import api_keys, organisations
from rooms.domain.ids import IdGenerator, OrganisationId
from rooms.domain.journal import ActorKind, JournalEntry, Outcome
from rooms.domain.role import Role, scopes_of
from rooms.domain.similar_names import suggestion
from rooms.domain.state_machine import Scope
from rooms.errors import RoomsError

Result = TypeVar("Result")
_MAX_PAGE = 1000
_MAX_COMPARED = 10_000
"""Names of organisations with which a misspelt one is compared, in a tenth of a second."""


def _new_id() -> str:
    return IdGenerator(
        lambda bits: int.from_bytes(os.urandom(8), "big") >> (64 - bits)
    ).generate_global(time.time_ns() // 1_000_000)


def migrate_database(url: str) -> None:
    """Run the migrations that the database lacks."""
    with _translate_errors():
        migrate(url)


def create_key(
    url: str,
    organisation: str,
    name: str,
    scopes: Sequence[Scope],
    restrictions: Mapping[str, Any] | None = None,
    *,
    new_organisation: bool = False,
) -> tuple[keys.ApiKey, str]:
    """Create a key. Return it with its text, which is not kept.

    `restrictions`: columns of the key. `new_organisation`: create a missing organisation, too; the
    default one needs no request for that. CliError: there is no organisation of this name.
    """
    may_create = new_organisation or organisation == DEFAULT_ORGANISATION

    async def work(connection: AsyncConnection) -> tuple[keys.ApiKey, str]:
        if may_create:
            owner = await _ensure_organisation(connection, organisation)
        else:
            owner = await _organisation(
                connection, organisation, ": --create-organisation creates it with its first key"
            )
        return await _create_key(connection, owner, name, scopes, restrictions or {})

    return _run_in_database(url, work)


def create_client(
    url: str,
    organisation: str,
    name: str,
    scopes: Sequence[Scope],
    restrictions: Mapping[str, Any],
) -> keys.ApiKey:
    """Create a credential without a text. CliError: there is one, or no certificate can name it."""

    async def work(connection: AsyncConnection) -> keys.ApiKey:
        owner = await _organisation(connection, organisation)
        return await _create_client(connection, owner, name, scopes, restrictions)

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
            await _revoke_key(connection, key)
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
        owner = await _ensure_organisation(connection, DEFAULT_ORGANISATION)
        for key in await _read_keys(connection, owner):
            if key.name == name and key.revoked_at is None:
                await _revoke_key(connection, key)
        _, text = await _create_key(connection, owner, name, [Scope.ADMIN, Scope.PLATFORM], {})
        return text

    return _run_in_database(url, work)


def rotate_receipt_key(
    url: str, secret_key: str | None, data: Path, *, replace_lost: bool
) -> Rotation:
    """Retire the key of receipts and create another, encrypted by the installation's secret key."""
    if secret_key is None and not (data / KEY_FILE).exists():
        raise CliError(
            f"no secret key: set ROOMS_SECRET_KEY, or run this where {data / KEY_FILE} is"
        )
    cipher = open_cipher(secret_key, data)

    async def work(connection: AsyncConnection) -> Rotation:
        done = await rotate_key(connection, cipher, os.urandom, replace_lost=replace_lost)
        owner = await _ensure_organisation(connection, DEFAULT_ORGANISATION)
        await _record(
            connection,
            owner,
            "rotate_receipt_key",
            "/.well-known/jwks.json",
            before={"kid": done.retired},
            after={"kid": done.created},
        )
        return done

    return _run_in_database(url, work)


def create_sign_in_link(url: str, key: str, roles: Sequence[Role]) -> str:
    """Return the path of a link that signs the user in to the console, once, within 15 minutes.

    `key`: the text of the key in whose organisation it is, and with which it ends. An admin key
    without the scope `platform` gives no such role.
    """

    async def work(connection: AsyncConnection) -> str:
        maker_hash = keys.hash_key(key.encode())
        found = await connection.execute(
            select(api_keys.c.id, api_keys.c.organisation_id, api_keys.c.scopes).where(
                api_keys.c.key_hash == maker_hash
            )
        )
        maker = found.one()
        owner = OrganisationId(maker.organisation_id)
        text = keys.new_key(os.urandom)
        given = [role for role in roles if role is not Role.PLATFORM or role.value in maker.scopes]
        scopes = sorted(scope.value for scope in scopes_of(given))
        await sign_in_links.create_link(
            connection,
            text=text,
            kind=sign_in_links.LinkKind.CONSOLE,
            organisation=owner,
            fields={
                "name": user_name(),
                "scopes": scopes,
                "created_by": maker.id,
                "maker_hash": maker_hash,
                "expires_at": datetime.now(UTC) + timedelta(seconds=sign_in_links.DEFAULT_LINK_S),
                "session_s": sessions.DEFAULT_SESSION_S,
            },
        )
        after = {"name": user_name(), "roles": [role.value for role in given]}
        await _record(connection, owner, "create_sign_in_link", "/v1/sign-in-links", after=after)
        return sign_in_links.link_path(sign_in_links.LinkKind.CONSOLE, text)

    return _run_in_database(url, work)


async def _ensure_organisation(connection: AsyncConnection, name: str) -> OrganisationId:
    new_id = _new_id()
    found = await ensure_organisation(connection, name, new_id)
    if found == new_id:
        path = f"/v1/organisations/{found}"
        await _record(connection, found, "create_organisation", path, after={"name": name})
    return found


async def _create_key(
    connection: AsyncConnection,
    owner: OrganisationId,
    name: str,
    scopes: Sequence[Scope],
    restrictions: Mapping[str, Any],
) -> tuple[keys.ApiKey, str]:
    text = keys.new_key(os.urandom)
    key = await keys.create_key(
        connection,
        new_id=_new_id(),
        organisation=owner,
        name=name,
        scopes=scopes,
        text=text,
        restrictions=restrictions,
    )
    after = {"name": name, "scopes": sorted(key.scopes), **restrictions}
    await _record(connection, owner, "create_key", f"/v1/keys/{key.id}", after=after)
    return key, text


async def _create_client(
    connection: AsyncConnection,
    owner: OrganisationId,
    name: str,
    scopes: Sequence[Scope],
    restrictions: Mapping[str, Any],
) -> keys.ApiKey:
    if (await find_organisation(connection, owner)).member_id is None:
        raise CliError(
            "the organisation has no member id, so no certificate names it: "
            "`rooms organisation update --member-id`"
        )
    key = await keys.create_client(
        connection,
        new_id=_new_id(),
        organisation=owner,
        name=name,
        scopes=scopes,
        restrictions=restrictions,
    )
    if key is None:
        raise CliError("there is a client already; `rooms key list` shows it")
    after = {"name": name, "kind": "client", "scopes": sorted(key.scopes), **restrictions}
    await _record(connection, owner, "create_key", f"/v1/keys/{key.id}", after=after)
    return key


async def _revoke_key(connection: AsyncConnection, key: keys.ApiKey) -> None:
    await keys.revoke_key(connection, key.organisation_id, key.id)
    before = {"name": key.name, "scopes": sorted(key.scopes)}
    path = f"/v1/keys/{key.id}"
    await _record(connection, key.organisation_id, "revoke_key", path, before=before)


async def _record(
    connection: AsyncConnection,
    owner: OrganisationId,
    action: str,
    path: str,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Write a change into the journal of `owner`, in its transaction. The user is the actor.

    Actions and objects have the names that the API gives them.
    """
    entry = JournalEntry(
        id=_new_id(),
        organisation_id=owner,
        at=datetime.now(UTC),
        actor_kind=ActorKind.OPERATOR,
        actor_id=None,
        actor_name=user_name(),
        actor_organisation_id=None,
        application=None,
        source=None,
        request_id=None,
        action=action,
        object=path,
        before=None if before is None else bounded(before),
        after=None if after is None else bounded(after),
        outcome=Outcome.SUCCEEDED,
        reason=None,
    )
    await append(connection, entry)


async def _is_admin(connection: AsyncConnection, text: str) -> bool:
    active = select(api_keys.c.scopes).where(
        api_keys.c.key_hash == keys.hash_key(text.encode()), api_keys.c.revoked_at.is_(None)
    )
    return Scope.ADMIN.value in (await connection.scalar(active) or ())


async def _organisation(connection: AsyncConnection, name: str, remedy: str = "") -> OrganisationId:
    """Return the id of an organisation. CliError: there is none, with the `remedy`."""
    found = await connection.scalar(select(organisations.c.id).where(organisations.c.name == name))
    if found is None:
        known = await connection.scalars(select(organisations.c.name).limit(_MAX_COMPARED))
        like = suggestion(name, list(known))
        raise CliError(f"there is no organisation {name!r}{remedy}{like}")
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
