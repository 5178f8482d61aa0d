"""Define how organisations share rooms: organisations, grants, and who may join a room."""

import re
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, NewType

from rooms.domain.event_type_pattern import matches_any
from rooms.domain.ids import OrganisationId, RoomId

GrantId = NewType("GrantId", str)

MEMBER_ID_PATTERN: Final = r"^[A-Za-z0-9_.\-]{1,64}(/[A-Za-z0-9_.\-]{1,64}){2}$"
_MEMBER_ID: Final = re.compile(MEMBER_ID_PATTERN.strip("^$"))
MEMBER_ID_RULE: Final = (
    "is instance/class/code as in X-Road (SE/GOV/1234), each part of 1 to 64 of the characters "
    "a-z, A-Z, 0-9, '_', '.' and '-'"
)
APPLICATION_PATTERN: Final = r"^[A-Za-z0-9_.\-]{1,64}$"
_APPLICATION: Final = re.compile(APPLICATION_PATTERN.strip("^$"))
EVERY_ORGANISATION: Final = "*"


class OrganisationStatus(StrEnum):
    """Name the status of an organisation.

    `suspended`: it publishes and receives nothing, and nothing of it is lost. `deleting`: a job
    deletes what it owns.
    """

    ACTIVE = "active"
    SUSPENDED = "suspended"
    DELETING = "deleting"


class Visibility(StrEnum):
    """Say who finds a room: its owner and those with a grant, or all by the directory."""

    PRIVATE = "private"
    LISTED = "listed"


class SubscriptionPolicy(StrEnum):
    """Say who may subscribe to a room, beside those with a grant to subscribe.

    `approval`: every organisation that sees the room, once the owner approves. `automatic`: without
    approval, of later changes neither.
    """

    OWNER_ONLY = "owner_only"
    APPROVAL = "approval"
    AUTOMATIC = "automatic"


class ReapprovalField(StrEnum):
    """Name a field whose change by the subscriber needs the owner's approval again.

    `push_url`: only if its host changes.
    """

    PUSH_URL = "push_url"
    EVENT_TYPES = "event_types"
    FILTER = "filter"


class GrantKind(StrEnum):
    """Name what a grant allows."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Organisation:
    """Describe a member of the installation."""

    id: OrganisationId
    name: str
    member_id: str | None
    """`instance/class/code`, as in X-Road."""
    contact: str | None
    status: OrganisationStatus
    status_reason: str | None
    status_since: datetime
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Describe what a room's owner allowed. It is valid in `starts_at` ≤ t < the earliest end."""

    id: GrantId
    room_id: RoomId
    organisation_id: OrganisationId | None
    """None: every organisation."""
    kind: GrantKind
    event_types: tuple[str, ...] | None
    """Patterns; None: every event type."""
    starts_at: datetime
    until: datetime | None
    created_at: datetime
    revoked_at: datetime | None

    def allows(self, organisation: OrganisationId, event_type: str, at: datetime) -> bool:
        """Return whether it allowed its kind to an organisation, for an event type, at a time."""
        return (
            self.organisation_id in {None, organisation}
            and self.starts_at <= at
            and (self.until is None or at < self.until)
            and (self.revoked_at is None or at < self.revoked_at)
            and matches_any(self.event_types, event_type)
        )


def is_member_id(text: str) -> bool:
    """Return whether a text has the form of a member id."""
    return _MEMBER_ID.fullmatch(text) is not None


def is_application(text: str) -> bool:
    """Return whether a text may name an application."""
    return _APPLICATION.fullmatch(text) is not None
