"""Describe who published a message."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from rooms.db.catalog.organisations import Member
from rooms.db.queries.message_scope import MessageScope
from rooms.db.queries.messages import MessageRecord
from rooms.domain.ids import OrganisationId

PUBLISHER_FIELDS: Final = (
    "publisher_id",
    "publisher_organisation_id",
    "publisher_organisation",
    "application",
)


def publishers(scope: MessageScope, found: Iterable[MessageRecord]) -> set[OrganisationId]:
    """Return the organisations that published these messages."""
    return {one for message in found if (one := _publisher_of(scope, message)) is not None}


def _publisher_of(scope: MessageScope, message: MessageRecord) -> OrganisationId | None:
    if message.publisher_id is None:
        return None  # Rooms itself published it
    return message.publisher_organisation_id or scope.room.organisation_id


def publisher_fields(
    scope: MessageScope,
    message: MessageRecord | None,
    members: Mapping[OrganisationId, Member],
) -> dict[str, Any]:
    """Return the values of `PUBLISHER_FIELDS`: null without a message, and of Rooms itself."""
    whose = None if message is None else _publisher_of(scope, message)
    member = None if whose is None else members.get(whose)
    return {
        "publisher_id": None if message is None else message.publisher_id,
        "publisher_organisation_id": whose,
        "publisher_organisation": None if member is None else member.name,
        "application": None if message is None else message.application,
    }
