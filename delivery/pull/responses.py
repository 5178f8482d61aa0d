"""Build JSON responses from bytes: a payload is sent as it was published and is never decoded."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

import msgspec

from delivery.pull.requests import ack_id
from rooms.db.leases.acquire import LeasedRow
from rooms.db.leases.scan import ScannedMessage

EMPTY_RESPONSE: Final = b'{"messages":[]}'
_POSTGRES_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""The origin of PostgreSQL's timestamps."""
_encode: Final = msgspec.json.Encoder().encode


def messages_json(rows: Sequence[LeasedRow]) -> bytes:
    """Return `{"messages": […]}` for leased messages."""
    return b'{"messages":[' + b",".join(map(message_json, rows)) + b"]}" if rows else EMPTY_RESPONSE


def peeked_json(found: ScannedMessage) -> bytes:
    """Return a message that was read without a lease, so without an ack id."""
    fields = {
        "delivery_id": found.delivery,
        "message_id": found.message,
        "attempt": found.attempt,
        "event_type": found.event_type,
        "version": found.version,
        "correlation_id": found.correlation_id,
        "published_at": found.published_at,
        "payload": msgspec.Raw(found.payload or b"null"),
    }
    return _encode(
        fields if found.headers is None else fields | {"headers": msgspec.Raw(found.headers)}
    )


def results_json(results: Iterable[tuple[str, str]]) -> bytes:
    """Return `{"results": […]}` for pairs of ack id and status, which never need escaping."""
    items = [f'{{"ack_id":"{text}","status":"{status}"}}' for text, status in results]
    return f'{{"results":[{",".join(items)}]}}'.encode()


def message_json(row: LeasedRow) -> bytes:
    """Return a message with the ack id of its lease."""
    (
        delivery, generation, attempt, delivery_id, message_id, event_type, version,
        correlation_id, published_at, headers, payload,
    ) = row  # fmt: skip
    return (
        b'{"ack_id":"%b","delivery_id":"%b","message_id":"%b","attempt":%d,"event_type":%b,"version":%d,'
        b'"correlation_id":%b,"published_at":%b,"payload":%b%b}'
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
        payload,
        b"" if headers is None else b',"headers":' + headers,
    )


@lru_cache(maxsize=1000)
def _quoted_json(text: bytes) -> bytes:
    return _encode(text.decode())


# All messages of one commit have the same time.
@lru_cache(maxsize=1000)
def _timestamp_json(packed: bytes) -> bytes:
    return _encode(
        _POSTGRES_EPOCH + timedelta(microseconds=int.from_bytes(packed, "big", signed=True))
    )
