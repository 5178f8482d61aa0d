"""Serve `/v1/keys`: the organisation's API keys."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from litestar import Response, delete, get, patch, post
from litestar.params import JSONBody, QueryParameter
from msgspec import UNSET, Meta, Struct
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.auth import Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body, validate_name
from rooms.api.deps import ApiServices
from rooms.api.errors import documented_responses
from rooms.api.key_bodies import (
    CreatedKey,
    CreateKey,
    KeyResponse,
    UpdateKey,
    check_lasts_no_longer,
    check_may_give,
    now_utc,
    to_columns,
    to_fields,
    to_response,
)
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import IdPath, parse_id
from rooms.db.catalog import api_keys as records
from rooms.db.catalog.organisations import find_organisation
from rooms.db.catalog.sessions import find_presented
from rooms.db.connection import transaction
from rooms.domain.ids import OrganisationId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import ConflictError, ForbiddenError, NotFoundError

DEFAULT_OVERLAP_S: Final = 86_400
_LIST: Final = "keys"
_TAGS: Final = ["keys"]
_ADMIN: Final = require_scopes(Scope.ADMIN)
_COPIED: Final = (
    "scopes",
    "application",
    "rooms",
    "event_types",
    "subscriptions",
    "networks",
    "expires_at",
)


class KeyPage(Struct, kw_only=True):
    """List keys, newest first."""

    items: list[KeyResponse]
    next_cursor: str | None


class RotateKey(Struct, forbid_unknown_fields=True, kw_only=True):
    """Set how to rotate a key."""

    overlap_s: Annotated[
        int,
        Meta(ge=0, le=30 * 86_400, description="How long the old text is valid too, in seconds."),
    ] = DEFAULT_OVERLAP_S


@post(
    "/keys",
    dto=Body[CreateKey],
    return_dto=None,
    opt=_ADMIN,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Create a key",
)
async def create_key(
    data: JSONBody[CreateKey], services: ServicesDep, principal: Caller, change: ChangeDep
) -> Response[CreatedKey]:
    """Create a key and show its text.

    403: it would have a scope that this key lacks, be less restricted, or last longer than the key
    or its text; `admin` has all scopes but `platform`. 409: the organisation, or its application,
    has a client, or it has no member id.
    """
    async with change.transaction() as connection:
        made = await make_key(connection, services, principal, principal.organisation_id, data)
    return Response(made, headers={"Location": f"/v1/keys/{made.id}"})


async def make_key(
    connection: AsyncConnection,
    services: ApiServices,
    principal: Principal,
    organisation: OrganisationId,
    data: CreateKey,
) -> CreatedKey:
    """Create a key of an organisation. InvalidError, ForbiddenError."""
    validate_name(data.name)
    columns = to_columns(msgspec.structs.asdict(data), now_utc())
    if principal.organisation_id == organisation:
        await _check_may_give(connection, principal, columns)
    elif Scope.PLATFORM in data.scopes:
        # Another organisation's key may do everything there, but no more with the platform.
        await _check_may_give(connection, principal, {**columns, "scopes": [Scope.PLATFORM]})
    else:
        await _check_outlasts_no_former_text(connection, principal, columns)
    new_id = services.ids.generate_global(services.clock.now_ms())
    name, scopes = columns.pop("name"), [Scope(scope) for scope in columns.pop("scopes")]
    if columns.pop("kind") == records.KeyKind.CLIENT:
        return await _make_client(
            connection,
            new_id=new_id,
            organisation=organisation,
            name=name,
            scopes=scopes,
            restrictions=columns,
        )
    text = records.new_key(services.random)
    made = await records.create_key(
        connection,
        new_id=new_id,
        organisation=organisation,
        name=name,
        scopes=scopes,
        text=text,
        restrictions=columns,
    )
    return CreatedKey(**to_fields(made), key=text)


async def _make_client(
    connection: AsyncConnection,
    *,
    new_id: str,
    organisation: OrganisationId,
    name: str,
    scopes: Sequence[Scope],
    restrictions: Mapping[str, Any],
) -> CreatedKey:
    owner = await find_organisation(connection, organisation)
    if owner.member_id is None:
        raise ConflictError(
            "the organisation has no member id, so no certificate names it; the platform sets it"
        )
    made = await records.create_client(
        connection,
        new_id=new_id,
        organisation=organisation,
        name=name,
        scopes=scopes,
        restrictions=restrictions,
    )
    if made is None:
        application = restrictions.get("application")
        owner_name = "the organisation" if application is None else f"application {application}"
        raise ConflictError(f"{owner_name} has a client already; change or revoke it")
    return CreatedKey(**to_fields(made), key=None)


@get("/keys", opt=_ADMIN, tags=_TAGS, summary="List keys")
async def list_keys(
    *,
    services: ServicesDep,
    principal: Caller,
    limit: Limit = 50,
    cursor: Cursor = None,
    name: Annotated[str | None, QueryParameter(description="Only keys of this name.")] = None,
    prefix: Annotated[
        str | None,
        QueryParameter(description="Only the key whose text begins so: its first 14 characters."),
    ] = None,
) -> KeyPage:
    """List the organisation's keys, newest first, with revoked ones."""
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        found = await records.list_keys(
            connection,
            principal.organisation_id,
            before=page.after,
            limit=page.fetch_limit,
            name=name,
            prefix=prefix,
        )
    return page.respond(KeyPage, found, to_response, position=lambda key: key.id)


@get("/keys/{key_id:str}", opt=_ADMIN, tags=_TAGS, summary="Read a key")
async def read_key(services: ServicesDep, principal: Caller, key_id: IdPath) -> KeyResponse:
    """Return one key."""
    async with transaction(services.engine) as connection:
        return to_response(await _find(connection, principal, key_id))


@patch(
    "/keys/{key_id:str}",
    dto=Body[UpdateKey],
    return_dto=None,
    opt=_ADMIN,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Change a key",
)
async def change_key(
    data: JSONBody[UpdateKey],
    principal: Caller,
    change: ChangeDep,
    key_id: IdPath,
) -> KeyResponse:
    """Change what a key may do, within a second; its open streams end within five.

    409: it is revoked. 403: it would get what this key lacks, or has it already.
    """
    given = {
        name: value for name, value in msgspec.structs.asdict(data).items() if value is not UNSET
    }
    if "name" in given:
        validate_name(given["name"])
    columns = to_columns(given, now_utc())
    async with change.transaction() as connection:
        found = await _find_changeable(connection, principal, key_id)
        if found.kind is records.KeyKind.CLIENT and "application" in columns:
            raise ConflictError("application: a client keeps it; revoke it and create another one")
        await _check_may_give(connection, principal, _as_columns(found) | columns)
        change.before = {name: getattr(found, name) for name in columns}
        if columns:
            change.keys_of = principal.organisation_id
            found = await records.update_key(connection, found.id, columns)
    return to_response(found)


@post(
    "/keys/{key_id:str}/rotate",
    status_code=200,
    dto=Body[RotateKey | None],
    return_dto=None,
    opt=_ADMIN,
    responses=documented_responses(409),
    tags=_TAGS,
    summary="Rotate a key",
)
async def rotate_key(
    services: ServicesDep,
    principal: Caller,
    change: ChangeDep,
    key_id: IdPath,
    data: JSONBody[RotateKey | None] = None,
) -> CreatedKey:
    """Give a key a new text, and show it; the old text is valid too for a day, or `overlap_s`.

    A second rotation within that time ends the oldest text. 403: this key has less, or ends before
    it, as an old text does. 409: the key is revoked.
    """
    rotation = data or RotateKey()
    text = records.new_key(services.random)
    async with change.transaction() as connection:
        found = await _find_changeable(connection, principal, key_id)
        if found.kind is records.KeyKind.CLIENT:
            raise ConflictError("a client has no text; its authority renews its certificate")
        change.keys_of = principal.organisation_id
        rotated = await records.rotate_key(connection, found.id, text, overlap_s=rotation.overlap_s)
    return CreatedKey(**to_fields(rotated), key=text)


async def _find(
    connection: AsyncConnection, principal: Principal, key_id: str, *, lock: bool = False
) -> records.ApiKey:
    identity = parse_id(key_id, "key")
    found = await records.find_key(connection, principal.organisation_id, identity, lock=lock)
    if found is None or found.kind is records.KeyKind.SESSION:
        raise NotFoundError(f"there is no key {identity}")
    return found


async def _find_changeable(
    connection: AsyncConnection, principal: Principal, key_id: str
) -> records.ApiKey:
    """Return a key that this principal may change. ConflictError: it is revoked. ForbiddenError."""
    found = await _find(connection, principal, key_id, lock=True)
    if found.revoked_at is not None:
        raise ConflictError("the key is revoked for good; create another one")
    await _check_may_give(connection, principal, _as_columns(found))
    return found


async def find_own_key(connection: AsyncConnection, principal: Principal) -> records.ApiKey | None:
    """Return the key that the caller has, signed in with, or that made the link; None: none did.

    What a person creates may outlive the session, but not this key.
    """
    own = await records.find_key(connection, principal.organisation_id, principal.key_id)
    if own is not None and own.kind is records.KeyKind.SESSION:
        parent = own.parent_id
        own = (
            None
            if parent is None
            else await records.find_key(connection, principal.organisation_id, parent)
        )
    return own


async def _check_may_give(
    connection: AsyncConnection, principal: Principal, columns: Mapping[str, Any]
) -> None:
    """Check what a key would get against all that the caller's key has, and against its text's end.

    The text before a rotation must not keep itself alive: it may have been stolen. ForbiddenError;
    UnauthenticatedError: the caller's key was revoked or rotated a moment ago.
    """
    end = await _find_own_end(connection, principal)
    check_may_give(principal, columns, ends_at=None if end is None else end.at)


async def _check_outlasts_no_former_text(
    connection: AsyncConnection, principal: Principal, columns: Mapping[str, Any]
) -> None:
    """Check a key of another organisation, which may last longer than the platform's own key.

    But not than its text before a rotation, as above. ForbiddenError, UnauthenticatedError.
    """
    end = await _find_own_end(connection, principal)
    if end is not None and end.is_former:
        check_lasts_no_longer(columns, end.at)


async def _find_own_end(
    connection: AsyncConnection, principal: Principal
) -> records.TextEnd | None:
    """Return the end of the text by which the caller acts; None: it has no key.

    UnauthenticatedError: the key was revoked or rotated a moment ago.
    """
    own = await find_own_key(connection, principal)
    if own is None:
        return None
    presented = await find_presented(connection, principal)
    return await records.find_text_end(connection, own.id, presented)


def _as_columns(key: records.ApiKey) -> dict[str, Any]:
    return {name: getattr(key, name) for name in _COPIED}


@delete("/keys/{key_id:str}", opt=_ADMIN, tags=_TAGS, summary="Revoke a key")
async def revoke_key(principal: Caller, change: ChangeDep, key_id: IdPath) -> None:
    """Revoke a key within a second; it stays in the list with the time.

    403: it has the scope `platform`, and this key does not.
    """
    identity = parse_id(key_id, "key")
    async with change.transaction() as connection:
        found = await _find(connection, principal, identity)
        if Scope.PLATFORM in found.scopes and not principal.has_scope(Scope.PLATFORM):
            raise ForbiddenError("only a key with the scope platform revokes others with it")
        change.before = {"name": found.name, "prefix": found.prefix, "scopes": sorted(found.scopes)}
        change.keys_of = principal.organisation_id
        await records.revoke_key(connection, principal.organisation_id, identity)


ROUTES: Final = [create_key, list_keys, read_key, change_key, rotate_key, revoke_key]
