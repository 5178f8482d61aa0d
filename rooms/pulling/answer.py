"""Answers as JSON, put together from bytes: a payload goes out as it came in, and costs no decoding."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final

import msgspec

from rooms.pulling.receipt import ack_id
from rooms.storage.leases import Row
from rooms.storage.sift import Found

EMPTY: Final = b'{"messages":[]}'
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""Where PostgreSQL's timestamps begin."""
_encode: Final = msgspec.json.Encoder().encode


def messages_json(rows: Sequence[Row]) -> bytes:
    """`{"messages": […]}` of what was taken."""
    return b'{"messages":[' + b",".join(map(message_json, rows)) + b"]}" if rows else EMPTY


def browsed_json(found: Found) -> bytes:
    """A message that was only looked at: it has no ack id."""
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
    return _encode(fields if found.headers is None else fields | {"headers": msgspec.Raw(found.headers)})


def results_json(results: Iterable[tuple[str, str]]) -> bytes:
    """`{"results": […]}` of ack ids, which hold no character that JSON would escape, and statuses."""
    items = [f'{{"ack_id":"{text}","status":"{status}"}}' for text, status in results]
    return f'{{"results":[{",".join(items)}]}}'.encode()


def message_json(row: Row) -> bytes:
    """A message under its lease."""
    (
        delivery, generation, attempt, delivery_id, message_id, event_type, version, correlation_id, published_at,
        headers, payload,
    ) = row  # fmt: skip
    return (
        b'{"ack_id":"%b","delivery_id":"%b","message_id":"%b","attempt":%d,"event_type":%b,"version":%d,'
        b'"correlation_id":%b,"published_at":%b,"payload":%b%b}'
    ) % (
        ack_id(delivery, generation),
        delivery_id,
        message_id,
        int.from_bytes(attempt, "big"),
        _quoted(event_type),
        int.from_bytes(version, "big"),
        b'"%b"' % correlation_id if correlation_id == message_id else _encode(correlation_id.decode()),
        _time(published_at),
        payload,
        b"" if headers is None else b',"headers":' + headers,
    )


@lru_cache(maxsize=1000)
def _quoted(text: bytes) -> bytes:
    return _encode(text.decode())


# All messages of one commit carry the same time.
@lru_cache(maxsize=1000)
def _time(packed: bytes) -> bytes:
    return _encode(_EPOCH + timedelta(microseconds=int.from_bytes(packed, "big", signed=True)))
