"""Bound a batch: its messages before any object is made of them, and its deliveries.

A body of 16 MiB may have eight million items. As objects they take 0.7 s and 600 MB, only to be
refused for their number. What a batch costs in its room depends on the subscribers, not on the
request.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from rooms.errors import TooLargeError

MOST_COMMAS: Final = 65_536
"""Each item but the first has one before it; so many items are decoded in some 50 ms."""
MAX_BATCH_DELIVERIES: Final = 100_000
"""Most deliveries of a batch, unless one message has more: it cannot be divided.

They are rows of one statement, and take about as much memory as all requests that may wait.
"""


class _Batch(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    messages: Raw


_batch_decoder: Final = msgspec.json.Decoder(_Batch)


def bound_batch(body: bytes, limit: int) -> bytes | None:
    """Return the batch in a body, to be decoded; None: it has more than `limit` messages.

    It has `messages` once, also where they were sent several times: the last one counts. Raises
    what `msgspec.json.decode` raises.
    """
    if body.count(b",") <= MOST_COMMAS:
        return body
    messages = bytes(_batch_decoder.decode(body).messages)
    if messages.startswith(b"["):
        items = _items_decoder(limit).decode(messages)
        if getattr(items, _item_name(limit)) is not UNSET:
            return None
    return b'{"messages":%b}' % messages


@cache
def _items_decoder(limit: int) -> msgspec.json.Decoder[Any]:
    """Return a decoder of `limit` items and one more. What follows is looked through only."""
    fields: list[tuple[str, Any, Any]] = [
        (_item_name(number), Raw | UnsetType, UNSET) for number in range(limit + 1)
    ]
    return msgspec.json.Decoder(msgspec.defstruct("Items", fields, array_like=True, gc=False))


def _item_name(number: int) -> str:
    return f"item_{number}"


class BatchTooCostlyError(TooLargeError):
    """Report a batch that makes too much work in its room, and may succeed in parts."""


def check_deliveries(recipients: Iterable[int]) -> None:
    """Raise BatchTooCostlyError if messages with so many recipients each make too many deliveries.

    A single message is never refused.
    """
    total = largest = 0
    for count in recipients:
        total += count
        largest = max(largest, count)
    if total > max(MAX_BATCH_DELIVERIES, largest):
        raise BatchTooCostlyError(
            f"messages: they make {total} deliveries, and a batch makes at most"
            f" {MAX_BATCH_DELIVERIES}; publish fewer messages at a time"
        )
