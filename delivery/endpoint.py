"""One webhook endpoint: everything about it that does not change from message to message, worked out once."""

import json
from datetime import UTC, datetime
from typing import Final

from delivery.signing import Signer, parse_secret
from rooms.domain.copy import Copy
from rooms.domain.states import SubscriptionStatus
from rooms.domain.target import Target
from rooms.storage.endpoints import EndpointRecord
from rooms.storage.sealing import Seal

USER_AGENT: Final = "Rooms/1"


def _opened(secret: bytes, seal: Seal) -> str:
    try:
        return seal.open(secret).decode()
    except ValueError as exc:
        raise ValueError(
            "its signing secret was sealed under another key; put that key back (ROOMS_SECRET_KEY, or the file secret-key),"
            " or rotate the secret"
        ) from exc


class Endpoint:
    """Builds the header lines of each attempt; `record` holds the settings they come from."""

    __slots__ = ("_fixed", "_signer", "_source", "host", "organisation", "record", "target", "timeout_s")

    def __init__(self, record: EndpointRecord, seal: Seal) -> None:
        self.record = record
        self.target = Target.parse(record.push_url)
        self.host = self.target.host
        self.organisation = record.organisation_id
        self.timeout_s = record.lane.timeout_ms / 1000
        self._signer = Signer(tuple(parse_secret(_opened(secret, seal)) for secret in record.sealed_secrets))
        own = "".join(f"{name}: {value}\r\n" for name, value in record.headers.items())
        self._fixed = f"Content-Type: application/json\r\nUser-Agent: {USER_AGENT}\r\n{own}"
        self._source = f"/rooms/{record.room_id}" if record.cloud_events else None

    @property
    def active(self) -> bool:
        """Whether attempts may be made now."""
        return self.record.status is SubscriptionStatus.ACTIVE

    def probed_by(self, copy: Copy) -> bool:
        """Whether this is the one copy that may be sent while its circuit is open."""
        record = self.record
        return record.circuit_open and record.probe == (copy.delivery_id, copy.generation, copy.attempt)

    def headers(self, copy: Copy, now_s: int) -> bytes:
        """The header lines of this attempt, signed for `now_s` (epoch seconds)."""
        lines = (
            f"webhook-id: {copy.delivery_id}\r\n"
            f"webhook-timestamp: {now_s}\r\n"
            f"webhook-signature: {self._signer.sign(copy.delivery_id, now_s, copy.payload)}\r\n"
            f"Rooms-Delivery-Attempt: {copy.attempt}\r\n"
            f"Rooms-Delivery-Delay: {copy.delay_ms}\r\n"
            f"Rooms-Correlation-Id: {copy.correlation_id}\r\n"
            f"Rooms-Message-Id: {copy.message_id}\r\n"
            f"Rooms-Event-Type: {copy.event_type}\r\n"
            f"Rooms-Event-Version: {copy.event_version}\r\n"
            f"{self._fixed}"
        )
        if self._source is not None:
            lines += self._cloud_event(copy)
        if copy.headers is not None:
            lines += "".join(f"{name}: {value}\r\n" for name, value in json.loads(copy.headers).items())
        return lines.encode("latin-1")

    def _cloud_event(self, copy: Copy) -> str:
        """CloudEvents 1.0, binary content mode: the event's attributes as `ce-` headers, the payload untouched."""
        at = datetime.fromtimestamp(copy.published_ms / 1000, UTC).isoformat(timespec="milliseconds")
        return (
            "ce-specversion: 1.0\r\n"
            f"ce-id: {copy.message_id}\r\n"
            f"ce-source: {self._source}\r\n"
            f"ce-type: {copy.event_type}\r\n"
            f"ce-time: {at.replace('+00:00', 'Z')}\r\n"
        )
