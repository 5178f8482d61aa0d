"""Describe what subscribers get to know of a message besides its type, ids and payload."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from urllib.parse import quote

from rooms.domain.ids import OrganisationId

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PLAIN_VALUE: Final = re.compile(r"[!#$&-~]*")
_SAFE: Final = "".join(map(chr, range(0x21, 0x7F))).translate({ord('"'): None, ord("%"): None})


@dataclass(slots=True)
class DeliveryProperties:
    """Hold the properties of a delivery, as AMQP and JMS call what is sent beside a body.

    A plain message has none: the room's owner published it, with neither application, keys nor
    expiry.
    """

    ordering_key: str | None = None
    sequence: int | None = None
    """The number within its subscription and ordering key."""
    business_key: str | None = None
    organisation: OrganisationId | None = None
    """The publishing organisation; None: the room's owner."""
    application: str | None = None
    """The application of the publisher's API key."""
    has_publisher: bool = True
    """False: the service itself published it, or the publisher is not known."""
    expires_at_ms: int | None = None
    """Expiry in epoch milliseconds on PostgreSQL's clock."""

    def publisher(self, owner: OrganisationId) -> str | None:
        """Return the publisher as text, in a room of this owner; None: there is none."""
        return (
            publisher_text(self.organisation or owner, self.application)
            if (self.has_publisher)
            else None
        )


def publisher_text(organisation: OrganisationId, application: str | None) -> str:
    """Return `ORGANISATION` or `ORGANISATION/APPLICATION`.

    The organisation is named by its id: a name can be changed, and then be another's.
    """
    return organisation if application is None else f"{organisation}/{application}"


def header_value(text: str) -> str:
    """Return a text as the value of an HTTP header.

    Spaces, quotation marks, percent signs and everything but visible ASCII are percent-encoded as
    UTF-8: the encoding of the HTTP binding of CloudEvents 1.0. Any percent-decoder returns the
    text. A character becomes 12 at most.
    """
    return text if _PLAIN_VALUE.fullmatch(text) else quote(text, safe=_SAFE)


def expiry_text(expires_at_ms: int) -> str:
    """Return a time as RFC 3339 in UTC, with milliseconds."""
    at = _EPOCH + timedelta(milliseconds=expires_at_ms)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
