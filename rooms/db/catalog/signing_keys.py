"""Store the public keys by which organisations sign their messages.

A revoked key is kept, because messages that it signed before are verified with it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import RowMapping, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.db.connection import transaction
from rooms.db.tables.organisations import organisations, signing_keys
from rooms.domain.ids import OrganisationId
from rooms.errors import ConflictError, NotFoundError

MAX_ACTIVE: Final = 20
MAX_KEPT: Final = 200
"""Keys of one organisation, with revoked ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKeyRecord:
    """Describe a public key of an organisation; `kid` is its thumbprint."""

    organisation_id: OrganisationId
    kid: str
    name: str
    jwk: Mapping[str, str]
    """The required members."""
    created_at: datetime
    revoked_at: datetime | None


async def register_key(
    connection: AsyncConnection,
    organisation: OrganisationId,
    *,
    kid: str,
    name: str,
    jwk: Mapping[str, str],
) -> SigningKeyRecord:
    """Store a public key.

    ConflictError: the organisation has registered it before, or has too many.
    """
    await connection.execute(
        select(organisations.c.id).where(organisations.c.id == organisation).with_for_update()
    )
    counts = select(func.count(), func.count().filter(signing_keys.c.revoked_at.is_(None))).where(
        signing_keys.c.organisation_id == organisation
    )
    kept, active = (await connection.execute(counts)).one()
    if active >= MAX_ACTIVE:
        raise ConflictError(f"{MAX_ACTIVE} keys are active; revoke one first")
    if kept >= MAX_KEPT:
        raise ConflictError(f"{MAX_KEPT} keys are kept, with revoked ones; no more can be added")
    made = await connection.execute(
        insert(signing_keys)
        .values(organisation_id=organisation, kid=kid, name=name, jwk=dict(jwk))
        .on_conflict_do_nothing()
        .returning(signing_keys)
    )
    row = made.mappings().one_or_none()
    if row is None:
        raise ConflictError(f"the key {kid} is registered; a revoked key cannot be used again")
    return _from_row(row)


async def list_keys(
    connection: AsyncConnection, organisation: OrganisationId, *, after: str | None, limit: int
) -> Sequence[SigningKeyRecord]:
    """Return keys, also revoked ones, in the order of their `kid`."""
    statement = select(signing_keys).where(signing_keys.c.organisation_id == organisation)
    if after is not None:
        statement = statement.where(signing_keys.c.kid > after)
    rows = await connection.execute(statement.order_by(signing_keys.c.kid).limit(limit))
    return [_from_row(row) for row in rows.mappings()]


async def find_key(
    connection: AsyncConnection, organisation: OrganisationId, kid: str
) -> SigningKeyRecord:
    """Return one key. NotFoundError: the organisation has none of this `kid`."""
    found = await _find(connection, organisation, [kid])
    if not found:
        raise NotFoundError("there is no such signing key")
    return found[kid]


async def revoke_key(
    connection: AsyncConnection, organisation: OrganisationId, kid: str
) -> SigningKeyRecord:
    """Revoke a key for good; repeating the call is harmless. NotFoundError."""
    await connection.execute(
        update(signing_keys)
        .where(signing_keys.c.organisation_id == organisation, signing_keys.c.kid == kid)
        .values(revoked_at=func.coalesce(signing_keys.c.revoked_at, func.now()))
    )
    return await find_key(connection, organisation, kid)


async def find_keys(
    engine: AsyncEngine, organisation: OrganisationId, kids: Collection[str]
) -> Mapping[str, SigningKeyRecord]:
    """Return those of an organisation's keys that are known, by `kid`.

    StorageUnavailableError, StorageRefusedError.
    """
    async with transaction(engine) as connection:
        return await _find(connection, organisation, kids)


async def _find(
    connection: AsyncConnection, organisation: OrganisationId, kids: Collection[str]
) -> dict[str, SigningKeyRecord]:
    statement = select(signing_keys).where(
        signing_keys.c.organisation_id == organisation, signing_keys.c.kid.in_(sorted(kids))
    )
    rows = (await connection.execute(statement)).mappings()
    return {row["kid"]: _from_row(row) for row in rows}


def _from_row(row: RowMapping) -> SigningKeyRecord:
    jwk: dict[str, Any] = row["jwk"]
    return SigningKeyRecord(
        organisation_id=OrganisationId(row["organisation_id"]),
        kid=row["kid"],
        name=row["name"],
        jwk=jwk,
        created_at=row["created_at"],
        revoked_at=row["revoked_at"],
    )
