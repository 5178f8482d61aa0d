"""Store organisations: the members of the installation."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import RowMapping, Text, bindparam, cast, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql import func

from rooms.db.tables.organisations import organisations
from rooms.domain.ids import OrganisationId
from rooms.domain.sharing import Organisation, OrganisationStatus
from rooms.errors import ConflictError, NotFoundError

DEFAULT_ORGANISATION: Final = "default"
_MEMBER_ID_CONSTRAINT: Final = "organisations_member_id_key"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedOrganisation:
    """Name an organisation as others may see it."""

    id: OrganisationId
    name: str
    member_id: str | None
    is_suspended: bool


_MEMBERS: Final = select(
    organisations.c.id, organisations.c.name, organisations.c.member_id, organisations.c.status
)
_MEMBERS_BY_ID: Final = _MEMBERS.where(
    organisations.c.id.in_(bindparam("identities", expanding=True))
)

_LOCK_MEMBERS: Final = _MEMBERS_BY_ID.order_by(organisations.c.id).with_for_update(read=True)


def organisation_not_found(reference: object) -> NotFoundError:
    """Build the error for an organisation that is not there."""
    return NotFoundError(f"there is no organisation {reference}")


async def ensure_organisation(
    connection: AsyncConnection, name: str, new_id: str
) -> OrganisationId:
    """Return the organisation of this name. A missing one is created with `new_id`."""
    statement = (
        insert(organisations)
        .values(id=new_id, name=name)
        .on_conflict_do_update(
            index_elements=[organisations.c.name], set_={"name": organisations.c.name}
        )
        .returning(organisations.c.id)
    )
    return OrganisationId((await connection.execute(statement)).scalar_one())


async def create_organisation(
    connection: AsyncConnection, identity: OrganisationId, fields: Mapping[str, Any]
) -> Organisation:
    """Create an organisation. ConflictError: its name or member id is taken."""
    statement = insert(organisations).values(id=identity, **fields).returning(organisations)
    try:
        return _organisation((await connection.execute(statement)).mappings().one())
    except IntegrityError as exc:
        raise _taken(exc, fields) from exc


async def find_organisation(
    connection: AsyncConnection, identity: str, *, lock: bool = False
) -> Organisation:
    """Return one organisation. NotFoundError. `lock`: until the transaction ends.

    A locked one may still be referred to: a grant that is being written must not wait for it, while
    the lock's owner waits for the grant's room.
    """
    statement = select(organisations).where(organisations.c.id == identity)
    if lock:
        statement = statement.with_for_update(key_share=True)
    row = (await connection.execute(statement)).mappings().one_or_none()
    if row is None:
        raise organisation_not_found(identity)
    return _organisation(row)


async def lock_other(
    connection: AsyncConnection, identity: OrganisationId, caller: OrganisationId
) -> Organisation:
    """Return one organisation, locked together with the caller's.

    So two organisations cannot suspend or delete each other, and the caller's is always left.
    NotFoundError; ConflictError: the caller's is not active any more.
    """
    statement = (
        select(organisations)
        .where(organisations.c.id.in_([identity, caller]))
        .order_by(organisations.c.id)
        .with_for_update(key_share=True)
    )
    rows = (await connection.execute(statement)).mappings()
    found = {one.id: one for one in map(_organisation, rows)}
    if caller not in found or found[caller].status is not OrganisationStatus.ACTIVE:
        raise ConflictError("the organisation of this key is not active any more")
    if identity not in found:
        raise organisation_not_found(identity)
    return found[identity]


async def list_organisations(
    connection: AsyncConnection,
    *,
    name: str | None,
    member_id: str | None,
    before: str | None,
    limit: int,
) -> Sequence[Organisation]:
    """Return organisations, newest first."""
    statement = select(organisations).order_by(organisations.c.id.desc()).limit(limit)
    for column, value in ((organisations.c.name, name), (organisations.c.member_id, member_id)):
        if value is not None:
            statement = statement.where(column == value)
    if before is not None:
        statement = statement.where(organisations.c.id < before)
    return [_organisation(row) for row in (await connection.execute(statement)).mappings()]


async def update_organisation(
    connection: AsyncConnection, identity: OrganisationId, fields: Mapping[str, Any]
) -> Organisation:
    """Change columns. NotFoundError; ConflictError: the name or member id is taken."""
    statement = (
        update(organisations)
        .where(organisations.c.id == identity)
        .values(**fields, updated_at=func.now())
        .returning(organisations)
    )
    try:
        row = (await connection.execute(statement)).mappings().one_or_none()
    except IntegrityError as exc:
        raise _taken(exc, fields) from exc
    if row is None:
        raise organisation_not_found(identity)
    return _organisation(row)


async def set_organisation_status(
    connection: AsyncConnection,
    identity: OrganisationId,
    status: OrganisationStatus,
    reason: str | None,
) -> Organisation:
    """Set the status, since now."""
    fields = {"status": status.value, "status_reason": reason, "status_since": func.now()}
    return await update_organisation(connection, identity, fields)


async def resolve_organisation(
    connection: AsyncConnection, reference: str
) -> ListedOrganisation | None:
    """Return the organisation of this id, name or member id; None: there is none.

    An id counts more than a name, and a name more than a member id.
    """
    by_id = cast(organisations.c.id, Text) == reference
    by_name = organisations.c.name == reference
    statement = _MEMBERS.where(or_(by_id, by_name, organisations.c.member_id == reference))
    statement = statement.order_by(by_id.desc(), by_name.desc())
    row = (await connection.execute(statement.limit(1))).mappings().one_or_none()
    return None if row is None else _member(row)


async def find_members(
    connection: AsyncConnection, identities: Collection[OrganisationId]
) -> Mapping[OrganisationId, ListedOrganisation]:
    """Return the names of organisations."""
    if not identities:
        return {}
    rows = await connection.execute(_MEMBERS_BY_ID, {"identities": sorted(set(identities))})
    return {member.id: member for member in map(_member, rows.mappings())}


async def lock_members(
    connection: AsyncConnection, identities: Collection[OrganisationId]
) -> Mapping[OrganisationId, ListedOrganisation]:
    """Return organisations whose status stays as it is until the transaction ends.

    Call it before any room is locked: a change of the status locks the organisation first.
    """
    rows = await connection.execute(_LOCK_MEMBERS, {"identities": sorted(set(identities))})
    return {member.id: member for member in map(_member, rows.mappings())}


async def find_push_template(
    connection: AsyncConnection, identity: OrganisationId, *, lock: bool = False
) -> str | None:
    """Return the template of an organisation's push URLs; None: it has none. NotFoundError."""
    statement = select(organisations.c.push_template).where(organisations.c.id == identity)
    if lock:
        statement = statement.with_for_update(key_share=True)
    row = (await connection.execute(statement)).one_or_none()
    if row is None:
        raise organisation_not_found(identity)
    template: str | None = row.push_template
    return template


def _member(row: RowMapping) -> ListedOrganisation:
    return ListedOrganisation(
        id=OrganisationId(row["id"]),
        name=row["name"],
        member_id=row["member_id"],
        is_suspended=row["status"] != OrganisationStatus.ACTIVE.value,
    )


def _taken(error: IntegrityError, fields: Mapping[str, Any]) -> ConflictError:
    if _MEMBER_ID_CONSTRAINT in str(error.orig):
        return ConflictError(f"member_id: another organisation has {fields.get('member_id')}")
    return ConflictError(f"name: an organisation named {fields.get('name')} exists already")


def _organisation(row: RowMapping) -> Organisation:
    return Organisation(
        id=OrganisationId(row["id"]),
        name=row["name"],
        member_id=row["member_id"],
        contact=row["contact"],
        status=OrganisationStatus(row["status"]),
        status_reason=row["status_reason"],
        status_since=row["status_since"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )
