"""Bound a batch: its messages and their lists before objects are made of them, and its deliveries.

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
MAX_DESTINATIONS: Final = 40_000
"""Most destinations that a message names: as many as a room has by default."""
MAX_OTHER_COMMAS: Final = 65_536
"""Most commas of a message outside of its payload and destinations.

Fields and headers take ten times as long as items of a list. Those that are allowed have 22,000.
"""
UNCOUNTED_BYTES: Final = 7 * MAX_OTHER_COMMAS
"""A message of so many bytes has fewer fields and headers: `"a":1,` has six."""
MAX_BATCH_DELIVERIES: Final = 100_000
"""Most deliveries of a batch, unless one message has more: it cannot be divided.

They are rows of one statement, and take about as much memory as all requests that may wait. So many
destinations are named at most, too.
"""


class _Batch(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    messages: Raw


class _List(msgspec.Struct, gc=False):
    messages: list[Raw]


class _Content(msgspec.Struct, gc=False):
    payload: Raw | UnsetType = UNSET
    destinations: Raw | UnsetType = UNSET


_batch_decoder: Final = msgspec.json.Decoder(_Batch)
_list_decoder: Final = msgspec.json.Decoder(_List)
_content_decoder: Final = msgspec.json.Decoder(_Content)


def bound_batch(body: bytes, limit: int) -> bytes | None:
    """Return the batch in a body, to be decoded; None: it has more than `limit` messages.

    It has `messages` once, also where they were sent several times: the last one counts. Raises
    what `msgspec.json.decode` raises.
    """
    if body.count(b",") <= MOST_COMMAS:
        return body
    messages = bytes(_batch_decoder.decode(body).messages)
    if messages.startswith(b"[") and _split(messages, limit) is None:
        return None
    return b'{"messages":%b}' % messages


def split_batch(body: bytes, limit: int) -> list[Raw] | None:
    """Return the messages of the batch in a body; None: it has more than `limit`.

    As `bound_batch` otherwise, but that it always looks.
    """
    messages = bytes(_batch_decoder.decode(body).messages)
    if not messages.startswith(b"["):
        return _list_decoder.decode(b'{"messages":%b}' % messages).messages
    return _split(messages, limit)


def _split(messages: bytes, limit: int) -> list[Raw] | None:
    items = _items_decoder(limit).decode(messages)
    if getattr(items, _item_name(limit)) is not UNSET:
        return None
    return [one for one in msgspec.structs.astuple(items) if one is not UNSET]


def check_message(message: bytes | Raw) -> None:
    """Raise TooLargeError if a message lists too much beside its payload to be decoded.

    Raises what `msgspec.json.decode` raises, too.
    """
    if memoryview(message).nbytes <= UNCOUNTED_BYTES:
        return
    text = bytes(message)
    commas = text.count(b",")
    if commas <= MAX_OTHER_COMMAS or not text.lstrip().startswith(b"{"):
        return
    # Of fields that are sent twice, the last counts; the others are decoded like all the rest.
    content = _content_decoder.decode(text)
    of_payload, of_destinations = (
        0 if isinstance(raw, UnsetType) else bytes(raw).count(b",")
        for raw in (content.payload, content.destinations)
    )
    if of_destinations >= MAX_DESTINATIONS:
        raise TooLargeError(f"destinations: a message names at most {MAX_DESTINATIONS:,}")
    if commas - of_payload - of_destinations > MAX_OTHER_COMMAS:
        raise TooLargeError(
            f"a message has more than {MAX_OTHER_COMMAS:,} commas beside its payload and"
            " destinations: it has too many fields or headers"
        )


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


def check_destinations(count: int) -> None:
    """Raise BatchTooCostlyError if the messages of a batch name so many destinations together."""
    if count > MAX_BATCH_DELIVERIES:
        raise BatchTooCostlyError(
            f"messages: they name more than {MAX_BATCH_DELIVERIES:,} destinations; publish fewer"
            " messages at a time"
        )
