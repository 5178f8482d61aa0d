"""Serve `/v1/sign-in-links`, `/v1/sessions`, `/v1/people`: who enters the console, and is in it."""

from datetime import datetime, timedelta
from typing import Annotated, Final

from litestar import Response, delete, get, post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.api.auth import Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.key_bodies import check_may_give
from rooms.api.keys import find_own_key
from rooms.api.pagination import Cursor, Limit, PageRequest
from rooms.api.params import IdPath, parse_id
from rooms.db.catalog import people
from rooms.db.catalog import sessions as records
from rooms.db.catalog import sign_in_links as links
from rooms.db.catalog.api_keys import new_key
from rooms.db.connection import transaction
from rooms.domain.role import Role, roles_in, scopes_of
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, ForbiddenError, InvalidError, NotFoundError
from rooms.safe_text import terminal_safe

_LIST: Final = "sessions"
_TAGS: Final = ["keys"]
_ADMIN: Final = require_scopes(Scope.ADMIN)
SIGN_IN_PATH: Final = links.SIGN_IN_PATH
PORTAL_PATH: Final = links.PORTAL_PATH
DEFAULT_SESSION_S: Final = records.DEFAULT_SESSION_S
MAX_PERSON: Final = 128
MAX_LINK_S: Final = 86_400
MAX_SESSION_S: Final = 86_400


PersonName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_PERSON,
        description="The person, such as an e-mail address, as the journal and the list of "
        "sessions name them.",
    ),
]
_MAX_JOURNAL_NAME: Final = 512


def check_person_name(name: str) -> None:
    """Raise InvalidError: the name has characters that a reader of the journal does not see."""
    if terminal_safe(name) != name or name.isspace():
        raise InvalidError(FieldProblem("name", "has characters that cannot be seen"))


class CreateSignInLink(Struct, forbid_unknown_fields=True, kw_only=True):
    """Let a person sign in to the console once."""

    name: PersonName
    roles: Annotated[list[Role], Meta(min_length=1, max_length=len(Role))]
    expires_s: Annotated[
        int, Meta(ge=10, le=MAX_LINK_S, description="Seconds for which the link is valid.")
    ] = links.DEFAULT_LINK_S
    session_s: Annotated[
        int, Meta(ge=60, le=MAX_SESSION_S, description="The longest time of the session.")
    ] = DEFAULT_SESSION_S


class SignInLinkResponse(Struct, kw_only=True):
    """Describe a link, which is only shown once: put the service's address before `path`."""

    path: str
    name: str
    scopes: list[Scope]
    expires_at: datetime


class SessionResponse(Struct, kw_only=True):
    """Describe a session: it ends at `expires_at` if it is not used, at `ends_at` in any case.

    `last_used_at`: to the hour, and not before `created_at`.
    """

    id: str
    name: str
    scopes: list[Scope]
    created_at: datetime
    last_used_at: datetime | None
    expires_at: datetime
    ends_at: datetime
    portal: Annotated[bool, Meta(description="It opens a portal, and not the console.")]
    is_own: bool


class SessionPage(Struct, kw_only=True):
    """List sessions, newest first."""

    items: list[SessionResponse]
    next_cursor: str | None


@post(
    "/sign-in-links",
    dto=Body[CreateSignInLink],
    return_dto=None,
    opt=_ADMIN,
    tags=_TAGS,
    summary="Create a link to sign in",
)
async def create_sign_in_link(
    data: JSONBody[CreateSignInLink], services: ServicesDep, principal: Caller, change: ChangeDep
) -> Response[SignInLinkResponse]:
    """Create a link that signs one person in to the console, once, with these roles.

    The link and its session end with this key. Its revocation voids the link, and so does its
    rotation, after the overlap. 403: a role has a scope that this key lacks.
    """
    check_person_name(data.name)
    scopes = sorted(scopes_of(data.roles))
    check_may_give(principal, {"scopes": scopes, "application": principal.application})
    text = new_key(services.random)
    expires_at = services.clock.now() + timedelta(seconds=data.expires_s)
    async with change.transaction() as connection:
        own = await find_own_key(connection, principal)
        ends_at = None if own is None else own.expires_at
        if ends_at is not None:
            expires_at = min(expires_at, ends_at)
        await links.create_link(
            connection,
            text=text,
            kind=links.LinkKind.CONSOLE,
            organisation=principal.organisation_id,
            fields={
                "name": data.name,
                "scopes": [scope.value for scope in scopes],
                "application": principal.application,
                "ends_at": ends_at,
                "created_by": None if own is None else own.id,
                "maker_hash": await records.find_presented(connection, principal),
                "expires_at": expires_at,
                "session_s": data.session_s,
            },
        )
    return Response(
        SignInLinkResponse(
            path=links.link_path(links.LinkKind.CONSOLE, text),
            name=data.name,
            scopes=scopes,
            expires_at=expires_at,
        )
    )


@get("/sessions", opt=_ADMIN, tags=_TAGS, summary="List sessions of the console")
async def list_sessions(
    services: ServicesDep, principal: Caller, limit: Limit = 50, cursor: Cursor = None
) -> SessionPage:
    """List the people who are signed in to the console, newest first."""
    page = PageRequest(services.cipher, _LIST, limit, cursor)
    async with transaction(services.engine) as connection:
        found = await records.list_sessions(
            connection, principal.organisation_id, before=page.after, limit=page.fetch_limit
        )
    return page.respond(
        SessionPage,
        found,
        lambda session: SessionResponse(
            id=session.id,
            name=session.name,
            scopes=sorted(session.scopes),
            created_at=session.created_at,
            last_used_at=session.last_used_at,
            expires_at=session.expires_at,
            ends_at=session.ends_at,
            portal=session.is_portal,
            is_own=session.id == principal.key_id,
        ),
        position=lambda session: session.id,
    )


@delete(
    "/sessions/{session_id:str}",
    opt=_ADMIN,
    tags=_TAGS,
    summary="End a session of the console",
)
async def end_session(principal: Caller, change: ChangeDep, session_id: IdPath) -> None:
    """Sign a person out of the console, within a second; open streams end within five.

    403: the session has the scope `platform`, and this key does not.
    """
    identity = parse_id(session_id, "session")
    async with change.transaction() as connection:
        ended = await records.end_session(connection, principal.organisation_id, identity)
        if ended is None:
            raise NotFoundError(f"there is no session {identity}")
        if Scope.PLATFORM in ended.scopes and not principal.has_scope(Scope.PLATFORM):
            raise ForbiddenError("only a key with the scope platform ends sessions with it")
        change.before = {"name": ended.name, "scopes": sorted(ended.scopes)}


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
        str,
        Meta(
            min_length=1, max_length=_MAX_JOURNAL_NAME, description="As the list of people has it."
        ),
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
        found = await people.list_people(
            connection, principal.organisation_id, after=page.after, limit=page.fetch_limit
        )
    return page.respond(PeoplePage, found, _to_person, position=lambda person: person.name)


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
        ended = await people.end_all_sessions(connection, principal.organisation_id, data.name)
        if not ended:
            raise NotFoundError("no session of this person is open")
        if not principal.has_scope(Scope.PLATFORM) and any(
            Scope.PLATFORM in scopes for scopes in ended
        ):
            raise ForbiddenError("only a key with the scope platform ends sessions with it")
        change.before = {"name": data.name, "sessions": len(ended)}
    return Response(EndedSessions(ended=len(ended)))


def _to_person(person: people.Person) -> PersonResponse:
    return PersonResponse(
        name=person.name,
        by=person.by,
        roles=roles_in(person.scopes),
        scopes=sorted(person.scopes),
        signed_in_at=person.signed_in_at,
        last_used_at=person.last_used_at,
        sessions=person.sessions,
    )


ROUTES: Final = [
    create_sign_in_link,
    list_sessions,
    end_session,
    list_people,
    end_sessions,
]
