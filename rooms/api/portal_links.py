"""Serve `/v1/portal-links`: links by which a subscriber's people see their own subscriptions."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Final

from litestar import Response, post
from litestar.params import JSONBody
from msgspec import Meta, Struct

from rooms.api.auth import OF_SUBSCRIPTIONS, Caller, ServicesDep, require_scopes
from rooms.api.changes import ChangeDep
from rooms.api.codec import Body
from rooms.api.key_bodies import check_may_give
from rooms.api.keys import find_own_key
from rooms.api.params import parse_id
from rooms.api.sessions import MAX_SESSION_S, PersonName, check_person_name
from rooms.db.catalog import sessions as records
from rooms.db.catalog import sign_in_links as links
from rooms.db.catalog.api_keys import new_key
from rooms.db.catalog.organisations import organisation_not_found
from rooms.db.catalog.subscriptions import find_subscription
from rooms.domain.ids import SubscriptionId
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, InvalidError

MAX_PORTAL_S: Final = 30 * 86_400
DEFAULT_PORTAL_S: Final = 86_400
DEFAULT_PORTAL_SESSION_S: Final = 3600
_MAX_SUBSCRIPTIONS: Final = 100


class Access(StrEnum):
    """Name what the people of a portal may do with their subscriptions."""

    READ = "read"
    """See state, deliveries and errors, without payloads."""
    OPERATE = "operate"
    """Also read payloads, redeliver, shovel, pause and resume."""
    MANAGE = "manage"
    """Also change how the subscription is called, test its webhook, and rotate its secret."""


_SCOPES: Final[Mapping[Access, frozenset[Scope]]] = {
    Access.READ: frozenset({Scope.VIEW}),
    Access.OPERATE: frozenset({Scope.VIEW, Scope.OPERATE}),
    Access.MANAGE: frozenset({Scope.VIEW, Scope.OPERATE, Scope.MANAGE}),
}


class CreatePortalLink(Struct, forbid_unknown_fields=True, kw_only=True):
    """Let people see some subscriptions, or all of your organisation. Give one of the two."""

    name: PersonName
    subscription_ids: (
        Annotated[list[str], Meta(min_length=1, max_length=_MAX_SUBSCRIPTIONS)] | None
    ) = None
    organisation_id: Annotated[str, Meta(min_length=36, max_length=36)] | None = None
    access: Access = Access.READ
    expires_s: Annotated[
        int, Meta(ge=60, le=MAX_PORTAL_S, description="Seconds for which the link is valid.")
    ] = DEFAULT_PORTAL_S
    session_s: Annotated[
        int, Meta(ge=60, le=MAX_SESSION_S, description="The longest time of a session.")
    ] = DEFAULT_PORTAL_SESSION_S


class PortalLinkResponse(Struct, kw_only=True):
    """Describe a link, which is only shown once: put the service's address before `path`."""

    path: str
    name: str
    scopes: list[Scope]
    subscription_ids: list[str] | None
    expires_at: datetime


@post(
    "/portal-links",
    dto=Body[CreatePortalLink],
    return_dto=None,
    opt=require_scopes(Scope.MANAGE, allows=OF_SUBSCRIPTIONS),
    tags=["keys"],
    summary="Create a link to a portal",
)
async def create_portal_link(
    data: JSONBody[CreatePortalLink], services: ServicesDep, principal: Caller, change: ChangeDep
) -> Response[PortalLinkResponse]:
    """Create a link to your organisation's subscriptions, which works until it expires.

    It opens the portal, also in a frame of the sites that `ROOMS_FRAME_ANCESTORS` names. Its people
    see what your organisation receives, and nothing that it owns.

    Only the subscriber makes links to a subscription: the room's owner may not see all of it, and
    gives no other organisation a view of it (404). The link and its sessions end with this key.
    Made in a session without `admin`, they also end when that is signed out or ended, and at its
    last moment. The key's revocation voids the link, and so does its rotation, after the overlap.
    403: the access has a scope that this key lacks.
    """
    check_person_name(data.name)
    if (data.subscription_ids is None) is (data.organisation_id is None):
        raise InvalidError(
            FieldProblem("subscription_ids", "give either subscription_ids or organisation_id")
        )
    # A key that manages sees what `view` does.
    given = sorted(_SCOPES[data.access] - {Scope.VIEW})
    wanted = data.subscription_ids
    subscriptions = (
        None
        if wanted is None
        else [SubscriptionId(parse_id(one, "subscription")) for one in dict.fromkeys(wanted)]
    )
    text = new_key(services.random)
    expires_at = services.clock.now() + timedelta(seconds=data.expires_s)
    async with change.transaction() as connection:
        if data.organisation_id not in {None, principal.organisation_id}:
            raise organisation_not_found(data.organisation_id)
        for identity in subscriptions or ():
            found = await find_subscription(connection, principal, identity)
            if found.belongs_to_room:
                raise InvalidError(
                    FieldProblem(
                        "subscription_ids",
                        f"no portal shows {found.name}, which belongs to the room: leave it out",
                    )
                )
        check_may_give(
            principal,
            {
                "scopes": given,
                "subscriptions": subscriptions,
                "application": principal.application,
            },
        )
        own = await find_own_key(connection, principal)
        if own is not None and own.expires_at is not None:
            expires_at = min(expires_at, own.expires_at)
        ending_session = None
        if principal.is_session and not principal.has_scope(Scope.ADMIN):
            # Else the people of a portal would let themselves in again and again.
            ending_session = principal.key_id
            session_end = await records.find_session_end(connection, principal.key_id)
            expires_at = min(expires_at, session_end or expires_at)
        scopes = sorted(_SCOPES[data.access])
        await links.create_link(
            connection,
            text=text,
            kind=links.LinkKind.PORTAL,
            organisation=principal.organisation_id,
            fields={
                "name": data.name,
                "scopes": [scope.value for scope in scopes],
                "subscriptions": subscriptions,
                "application": principal.application,
                "ends_at": expires_at,
                "created_by": None if own is None else own.id,
                "maker_hash": await records.find_presented(connection, principal),
                "session_id": ending_session,
                "expires_at": expires_at,
                "session_s": data.session_s,
            },
        )
    return Response(
        PortalLinkResponse(
            path=links.link_path(links.LinkKind.PORTAL, text),
            name=data.name,
            scopes=scopes,
            subscription_ids=None if subscriptions is None else list(subscriptions),
            expires_at=expires_at,
        )
    )


ROUTES: Final = (create_portal_link,)
