"""Serve `/v1/people`: who has signed in to the console, and the end of all their sessions."""

from datetime import datetime
from typing import Annotated, Final

from litestar import Response, get, post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.api.auth import Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.db.catalog import people as records
from rooms.db.connection import transaction
from rooms.domain.role import Role, roles_in
from rooms.domain.state_machine import Scope
from rooms.errors import ForbiddenError, NotFoundError

_TAGS: Final = ["keys"]
_ADMIN: Final = require_scopes(Scope.ADMIN)
_MAX_NAME: Final = 512


class PersonResponse(Struct, kw_only=True):
    """Describe a person, by the name that the journal has, as of the last sign-in.

    `by`: `console` is a link, `portal` a portal link, `key` an API key, `oidc` the identity
    provider. `roles` are those whose scopes it had. `sessions`: how many are open, up to 1,000;
    `last_used_at`: to the hour; null: not within a day.
    """

    name: str
    by: str | None
    roles: list[Role]
    scopes: list[Scope]
    signed_in_at: datetime
    last_used_at: datetime | None
    sessions: int


class PeoplePage(Struct, kw_only=True):
    """List people by name."""

    items: list[PersonResponse]
    next_cursor: str | None


class EndSessions(Struct, forbid_unknown_fields=True, kw_only=True):
    """Sign a person out everywhere."""

    name: Annotated[
        str, Meta(min_length=1, max_length=_MAX_NAME, description="As the list of people has it.")
    ]


class EndedSessions(Struct, kw_only=True):
    """Say how many sessions were ended."""

    ended: int


@get("/people", opt=_ADMIN, tags=_TAGS, summary="List people who have signed in")
async def list_people(
    services: ServicesDep, principal: Caller, limit: Limit = 50, cursor: Cursor = None
) -> PeoplePage:
    """List all people of the organisation who have signed in to the console, by name.

    Names are those of links, keys, and the identity provider. They come from the journal, so they
    are listed as long as it is kept.
    """
    page = PageRequest(services.cipher, "people", limit, cursor)
    async with transaction(services.engine) as connection:
        found = await records.list_people(
            connection, principal.organisation_id, after=page.after, limit=page.fetch_limit
        )
    return page.respond(PeoplePage, found, _to_response, position=lambda person: person.name)


@post(
    "/people/end-sessions",
    status_code=200,
    dto=Body[EndSessions],
    return_dto=None,
    opt=_ADMIN,
    tags=_TAGS,
    summary="End all sessions of a person",
)
async def end_sessions(
    data: JSONBody[EndSessions], principal: Caller, change: ChangeDep
) -> Response[EndedSessions]:
    """Sign a person out of the console everywhere, within a second; streams end within five.

    The person may sign in again where a link, a key or the identity provider still allows it. 403:
    a session has the scope `platform`, and this key does not. 404: no session of this name is open.
    """
    async with change.transaction() as connection:
        ended = await records.end_all_sessions(connection, principal.organisation_id, data.name)
        if not ended:
            raise NotFoundError("no session of this person is open")
        if not principal.has_scope(Scope.PLATFORM) and any(
            Scope.PLATFORM in scopes for scopes in ended
        ):
            raise ForbiddenError("only a key with the scope platform ends sessions with it")
        change.before = {"name": data.name, "sessions": len(ended)}
    return Response(EndedSessions(ended=len(ended)))


def _to_response(person: records.Person) -> PersonResponse:
    return PersonResponse(
        name=person.name,
        by=person.by,
        roles=roles_in(person.scopes),
        scopes=sorted(person.scopes),
        signed_in_at=person.signed_in_at,
        last_used_at=person.last_used_at,
        sessions=person.sessions,
    )


ROUTES: Final = [list_people, end_sessions]
