"""Build JSON responses from bytes: a payload is sent as it was published and is never decoded."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

import msgspec

from delivery.pull.requests import ack_id
from rooms.db.leases.acquire import LeasedRow
from rooms.db.leases.scan import ScannedMessage
from rooms.domain.ids import COUNTER_START, is_replayed

EMPTY_RESPONSE: Final = b'{"messages":[]}'
_POSTGRES_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""The origin of PostgreSQL's timestamps."""
_encode: Final = msgspec.json.Encoder().encode


def messages_json(rows: Sequence[LeasedRow]) -> bytes:
    """Return `{"messages": […]}` for leased messages."""
    return b'{"messages":[' + b",".join(map(message_json, rows)) + b"]}" if rows else EMPTY_RESPONSE


def peeked_json(found: ScannedMessage, sequence: int | None) -> bytes:
    """Return a message that was read without a lease, so without an ack id."""
    fields: dict[str, Any] = {
        "delivery_id": found.delivery,
        "message_id": found.message,
        "attempt": found.attempt,
        "event_type": found.event_type,
        "version": found.version,
        "correlation_id": found.correlation_id,
        "published_at": found.published_at,
        "priority": found.priority,
        "delay_ms": found.delay_ms,
        "payload": msgspec.Raw(found.payload or b"null"),
    }
    optional = {
        "expires_at": found.expires_at,
        "publisher": None if found.publisher is None else _publisher(found.publisher),
        "ordering_key": found.ordering_key,
        "sequence": sequence,
        "business_key": found.business_key,
        "replayed": is_replayed(found.delivery, found.message) or None,
        "headers": None if found.headers is None else msgspec.Raw(found.headers),
    }
    return _encode(fields | {name: one for name, one in optional.items() if one is not None})


def results_json(results: Iterable[tuple[str, str]]) -> bytes:
    """Return `{"results": […]}` for pairs of ack id and status, which never need escaping."""
    items = [f'{{"ack_id":"{text}","status":"{status}"}}' for text, status in results]
    return f'{{"results":[{",".join(items)}]}}'.encode()


def message_json(row: LeasedRow) -> bytes:
    """Return a message with the ack id of its lease."""
    (
        delivery, generation, attempt, delivery_id, message_id, event_type, version,
        correlation_id, published_at, priority, delay_ms, lease_until, expires_at, publisher,
        keys, headers, payload,
    ) = row  # fmt: skip
    extra = b""
    if publisher is not None:
        extra = _publisher_json(publisher)
    if expires_at is not None:
        extra += b',"expires_at":' + _timestamp_json(expires_at)
    if keys is not None:
        extra += b"," + keys[1:-1]
    # The start of a counter decides nearly always, as in `is_replayed`.
    if delivery_id[COUNTER_START] != message_id[COUNTER_START] and is_replayed(
        delivery_id.decode(), message_id.decode()
    ):
        extra += b',"replayed":true'
    if headers is not None:
        extra += b',"headers":' + headers
    return (
        b'{"ack_id":"%b","delivery_id":"%b","message_id":"%b","attempt":%d,"event_type":%b,"version":%d,'
        b'"correlation_id":%b,"published_at":%b,"priority":%d,"delay_ms":%d,"lease_until":%b,"payload":%b%b}'
    ) % (
        ack_id(delivery, generation),
        delivery_id,
        message_id,
        int.from_bytes(attempt, "big"),
        _quoted_json(event_type),
        int.from_bytes(version, "big"),
        b'"%b"' % correlation_id
        if correlation_id == message_id
        else _encode(correlation_id.decode()),
        _timestamp_json(published_at),
        int.from_bytes(priority, "big"),
        int.from_bytes(delay_ms, "big"),
        _timestamp_json(lease_until),
        payload,
        extra,
    )


def _publisher(text: str) -> dict[str, str]:
    """Return the publisher that `rooms.domain.delivery_properties.publisher_text` wrote."""
    organisation, slash, application = text.partition("/")
    fields = {"organisation_id": organisation}
    return fields | {"application": application} if slash else fields


@lru_cache(maxsize=1000)
def _publisher_json(text: bytes) -> bytes:
    return b',"publisher":' + _encode(_publisher(text.decode()))


@lru_cache(maxsize=1000)
def _quoted_json(text: bytes) -> bytes:
    return _encode(text.decode())


# All messages of one commit have the same time.
@lru_cache(maxsize=1000)
def _timestamp_json(packed: bytes) -> bytes:
    return _encode(
        _POSTGRES_EPOCH + timedelta(microseconds=int.from_bytes(packed, "big", signed=True))
    )
