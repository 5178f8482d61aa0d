"""Define quotas: what an organisation may use at most, and what others may use of a room."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, Self

from rooms.domain.ids import OrganisationId, RoomId


class QuotaLimit(StrEnum):
    """Name a limit, as problems and metrics do."""

    MESSAGES_PER_S = "messages_per_s"
    MESSAGES_PER_DAY = "messages_per_day"
    BYTES_PER_DAY = "bytes_per_day"
    PAYLOAD_BYTES = "payload_bytes"
    STORED_MESSAGES = "stored_messages"
    SUBSCRIPTIONS = "subscriptions"
    EXPIRATION_MS = "expiration_ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Hold the limits of an organisation or a room; None: no limit. Bytes are those of payloads."""

    messages_per_s: int | None = None
    messages_per_day: int | None = None
    bytes_per_day: int | None = None
    payload_bytes: int | None = None
    stored_messages: int | None = None
    subscriptions: int | None = None
    expiration_ms: int | None = None
    """The longest lifetime of messages in an organisation's rooms; a room has a setting for it."""

    @classmethod
    def from_document(cls, document: Mapping[str, Any] | None) -> Self | None:
        """Return the limits that are stored; None: there are none."""
        known = {one.name for one in fields(cls)}
        found = {name: value for name, value in (document or {}).items() if name in known}
        return cls(**found) if found else None

    def to_document(self) -> dict[str, int] | None:
        """Return what is stored; None: no limit is set."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in found.items() if value is not None} or None

    @property
    def counts_days(self) -> bool:
        """Return whether what is published in a day is limited."""
        return self.messages_per_day is not None or self.bytes_per_day is not None


Subject = str
"""`organisation:ID` or `room:ID`, by which counters are kept."""
ORGANISATION: Final = "organisation"
ROOM: Final = "room"


def organisation_subject(organisation: OrganisationId) -> Subject:
    """Return the subject of an organisation's quotas."""
    return f"{ORGANISATION}:{organisation}"


def room_subject(room: RoomId) -> Subject:
    """Return the subject of a room's quotas."""
    return f"{ROOM}:{room}"
