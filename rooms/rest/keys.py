"""`/v1/keys`: the organisation's API keys."""

from datetime import datetime
from typing import Annotated, Any, Final

from litestar import Response, delete, get, post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.domain.states import Scope
from rooms.errors import ForbiddenError, NotFoundError
from rooms.rest.auth import Caller, Given, needs
from rooms.rest.bodies import Body, checked_name
from rooms.rest.pages import Cursor, Limit, cut, open_cursor, seal_cursor
from rooms.rest.paths import IdPath, parse_id
from rooms.rest.problems import documented
from rooms.rest.rooms import Name
from rooms.storage import keys as records
from rooms.storage.transactions import transaction

_LIST: Final = "keys"
_TAGS: Final = ["keys"]
_ADMIN: Final = needs(Scope.ADMIN)


class KeyNew(Struct, forbid_unknown_fields=True, kw_only=True):
    """A key to make."""

    name: Name
    scopes: Annotated[list[Scope], Meta(min_length=1, max_length=len(Scope))]


class KeyOut(Struct, kw_only=True):
    """A key, without its text, which is kept nowhere."""

    id: str
    name: str
    scopes: list[Scope]
    created_at: datetime
    revoked_at: datetime | None


class KeyMade(KeyOut, kw_only=True):
    """A new key; `key` is its text, shown this once."""

    key: str


class KeyPage(Struct, kw_only=True):
    """Keys, newest first."""

    items: list[KeyOut]
    next_cursor: str | None


@post("/keys", dto=Body[KeyNew], return_dto=None, opt=_ADMIN, responses=documented(), tags=_TAGS, summary="Make a key")
async def create_key(data: JSONBody[KeyNew], services: Given, principal: Caller) -> Response[KeyMade]:
    """201 with the key and its text. 403: it would have a scope that this key lacks; `admin` has all but `platform`."""
    checked_name(data.name)
    if lacking := [scope for scope in dict.fromkeys(data.scopes) if not principal.may(scope)]:
        raise ForbiddenError(f"only a key with the scope {lacking[0]} makes others with it")
    text = records.new_key(services.random)
    async with transaction(services.engine) as connection:
        made = await records.create_key(
            connection,
            new_id=services.ids.global_id(services.clock.now_ms()),
            organisation=principal.organisation_id,
            name=data.name,
            scopes=frozenset(data.scopes),
            text=text,
        )
    return Response(KeyMade(**_fields(made), key=text), headers={"Location": f"/v1/keys/{made.id}"})


@get("/keys", opt=_ADMIN, responses=documented(), tags=_TAGS, summary="List keys")
async def list_keys(services: Given, principal: Caller, limit: Limit = 50, cursor: Cursor = None) -> KeyPage:
    """The organisation's keys, revoked ones included, newest first."""
    before = open_cursor(services.seal, _LIST, cursor)
    async with transaction(services.engine) as connection:
        found = await records.list_keys(connection, principal.organisation_id, before=before, limit=limit + 1)
    page, last = cut(found, limit, lambda key: key.id)
    return KeyPage(
        items=[KeyOut(**_fields(key)) for key in page],
        next_cursor=seal_cursor(services.seal, _LIST, last),
    )


@get("/keys/{key_id:str}", opt=_ADMIN, responses=documented(), tags=_TAGS, summary="Read a key")
async def read_key(services: Given, principal: Caller, key_id: IdPath) -> KeyOut:
    """One key."""
    identity = parse_id(key_id, "key")
    async with transaction(services.engine) as connection:
        found = await records.find_key(connection, principal.organisation_id, identity)
    if found is None:
        raise NotFoundError(f"there is no key {identity}")
    return KeyOut(**_fields(found))


@delete("/keys/{key_id:str}", opt=_ADMIN, responses=documented(), tags=_TAGS, summary="Revoke a key")
async def revoke_key(services: Given, principal: Caller, key_id: IdPath) -> None:
    """204; within a second no request with it is let in. The key stays in the list, with the time. 403: it has the scope
    `platform`, and this key does not.
    """
    identity = parse_id(key_id, "key")
    async with transaction(services.engine) as connection:
        found = await records.find_key(connection, principal.organisation_id, identity)
        if found is None:
            raise NotFoundError(f"there is no key {identity}")
        if Scope.PLATFORM in found.scopes and not principal.may(Scope.PLATFORM):
            raise ForbiddenError("only a key with the scope platform revokes others with it")
        await records.revoke_key(connection, principal.organisation_id, identity)


def _fields(found: records.ApiKey) -> dict[str, Any]:
    return {
        "id": found.id,
        "name": found.name,
        "scopes": sorted(found.scopes),
        "created_at": found.created_at,
        "revoked_at": found.revoked_at,
    }


ROUTES: Final = [create_key, list_keys, read_key, revoke_key]
