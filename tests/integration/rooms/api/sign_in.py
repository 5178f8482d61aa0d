"""Sign people in, as the console does."""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Final

from rooms.db.catalog.api_keys import new_key
from rooms.db.catalog.sessions import Session, create_session
from rooms.db.catalog.sign_in_links import PORTAL_ENTRY_PATH, LinkKind, use_link
from rooms.db.connection import transaction
from rooms.domain.ids import KeyId, OrganisationId
from rooms.domain.role import Role, scopes_of
from tests.integration.rooms.api.conftest import Api

IDLE_S: Final = 1800
LASTING_S: Final = 43_200


async def begin(
    api: Api,
    organisation: str | None = None,
    *,
    name: str = "a person",
    roles: Iterable[Role] = (Role.VIEWER,),
    columns: dict[str, Any] | None = None,
    idle_s: int = IDLE_S,
    lasting_s: int = LASTING_S,
    parent: str | None = None,
    presented: bytes | None = None,
) -> tuple[Session, str]:
    """Store a session, of the default organisation by default, and return it with its text."""
    text = new_key(os.urandom)
    services = api.services
    if organisation is None:
        organisation = (await api.call("GET", "/whoami")).json()["organisation"]["id"]
    now = services.clock.now()
    async with transaction(services.engine) as connection:
        session = await create_session(
            connection,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            organisation=OrganisationId(str(organisation)),
            name=name,
            text=text,
            columns=columns or {"scopes": sorted(scopes_of(roles))},
            idle_s=idle_s,
            ends_at=now + timedelta(seconds=lasting_s),
            now=now,
            parent=None if parent is None else KeyId(parent),
            presented=presented,
        )
    return session, text


async def make_session(api: Api, organisation: str | None = None) -> str:
    """Return the id of a new session, of the default organisation by default."""
    session, _ = await begin(api, organisation)
    return session.id


def token_of(link: dict[str, Any]) -> str:
    """Return the token of a link that was created."""
    return str(link["path"]).partition("token=")[2]


def kind_of(link: dict[str, Any]) -> LinkKind:
    """Return what a link that was created opens."""
    is_portal = str(link["path"]).startswith(PORTAL_ENTRY_PATH)
    return LinkKind.PORTAL if is_portal else LinkKind.CONSOLE


async def follow(api: Api, link: dict[str, Any]) -> tuple[Session, str] | None:
    """Sign in by a link; None: it is not valid."""
    text = new_key(os.urandom)
    services = api.services
    now = services.clock.now()
    async with transaction(services.engine) as connection:
        found = await use_link(connection, token_of(link), kind_of(link))
        if found is None:
            return None
        session = await create_session(
            connection,
            new_id=services.ids.generate_global(services.clock.now_ms()),
            organisation=found.organisation_id,
            name=found.name,
            text=text,
            columns=found.columns,
            idle_s=IDLE_S,
            ends_at=found.session_end(now),
            now=now,
            presented=found.maker_hash,
            maker=found.maker,
            maker_session=found.maker_session,
        )
    return session, text
