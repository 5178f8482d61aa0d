"""Name the publishers of events as GovStack does: by member id and application."""

from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.organisations import find_members
from rooms.domain.govstack import ClientId
from rooms.domain.ids import OrganisationId


async def find_publisher(
    connection: AsyncConnection, organisation: OrganisationId | None, application: str | None
) -> ClientId | None:
    """Return the client that published an event; None: it is not known, or has no member id."""
    if organisation is None:
        return None
    member = (await find_members(connection, {organisation})).get(organisation)
    if member is None or member.member_id is None:
        return None
    return ClientId(member_id=member.member_id, application=application)
