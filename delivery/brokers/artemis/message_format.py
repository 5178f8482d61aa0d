"""Encode a copy as a STOMP message, and decode it: format 1, as the header `rooms-format` says.

The body is the payload, byte for byte. Rooms' own headers have the prefix `rooms-`; nothing else of
a received message is ever sent again. The publisher's headers are one header, a JSON object.

A copy for a native queue has more: `correlation-id` and `type`, for which AMQP and JMS have fields,
and each header again with underscores, since a hyphen ends an identifier in JMS. Artemis takes no
message id from STOMP.

Only copies for native queues are durable: PostgreSQL has every other delivery.

What comes behind others has a queue of its own. Older versions sent it with a `priority` that was
one less than the message's own, `rooms-priority`.

`rooms-publisher` is `owner` for what the room's owner published without an application, `none` for
what no publisher sent, and else the publisher. A copy of an older version has no such header, and
is read like `none`: it may be of any publisher. A copy with such properties has more headers.

The broker sends headers in few orders. The order of a copy that `decode_copy` read becomes one
pattern, which finds the values and the end of the head in one go. What no pattern matches, such as
an escape or a number out of range, is left to `decode_copy`.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from operator import itemgetter
from typing import Any, Final

from delivery.brokers.artemis.frames import Frame, escape, unescape
from rooms.domain.delivery_properties import DeliveryProperties, expiry_text, publisher_text
from rooms.domain.delivery_task import PRIORITIES, DeliveryTask
from rooms.domain.ids import (
    MAX_ROOM,
    DeliveryId,
    MessageId,
    OrganisationId,
    RoomId,
    SubscriptionId,
    is_id,
    is_replayed,
    room_of,
)
from rooms.domain.state_machine import SubscriptionType
from rooms.ports import MalformedMessage

FORMAT_VERSION: Final = "1"
MIN_FRAME_BYTES: Final = 640
"""The least size the broker counts for a copy; a window of this size times n lets out at most n."""
PUBLISHER: Final = "rooms-publisher"
OWNER: Final = "owner"
NO_PUBLISHER: Final = "none"
_ORDERING_KEY: Final = "rooms-ordering-key"
_BUSINESS_KEY: Final = "rooms-business-key"
_SEQUENCE: Final = "rooms-sequence"
_PRIORITY: Final = "rooms-priority"
BACKLOG_SUBSCRIPTION: Final = "2"
"""The id by which a consumer of both PUSH queues subscribes to the backlog."""
_KEYS: Final = (_ORDERING_KEY, _BUSINESS_KEY)
_MAX_INT: Final = 1 << 31
_NO_DEADLINE: Final = float("inf")
_ID_PREFIX: Final = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{4}"
_IDS_OF_ONE_ROOM: Final = re.compile(f"{_ID_PREFIX}([0-9a-f]{{8}}) {_ID_PREFIX}\\1 {_ID_PREFIX}\\1")


def encode_copy(
    copy: DeliveryTask, *, destination: str, not_before: datetime, now_ms: int, receipt: str | None
) -> bytes:
    """Return a SEND frame with `copy`. ValueError: a header cannot hold its value.

    `destination` is the result of `destination_headers`.
    """
    due_ms = math.ceil(
        not_before.timestamp() * 1000
    )  # rounded up: a copy must not come before its row is due
    optional = f"AMQ_SCHEDULED_TIME:{due_ms}\n" if due_ms > now_ms else ""
    if copy.expires_ms is not None:
        optional += f"expires:{copy.expires_ms}\n"
    if copy.headers is not None:
        optional += f"rooms-headers:{escape(copy.headers.decode())}\n"
    publisher = OWNER
    if copy.properties is not None:
        publisher = _publisher(copy.properties)
        optional += "".join(
            f"rooms-{name}:{escape(value)}\n" for name, value in _property_headers(copy.properties)
        )
    if copy.native:
        optional += _native_headers(copy)
    if receipt is not None:
        optional += f"receipt:{receipt}\n"
    head = (
        f"SEND\n{destination}priority:{copy.priority}\n"
        f"rooms-format:{FORMAT_VERSION}\nrooms-delivery-id:{copy.delivery_id}\n"
        f"rooms-message-id:{copy.message_id}\n"
        f"rooms-subscription-id:{copy.subscription_id}\nrooms-generation:{copy.generation}\n"
        f"rooms-delivery-attempt:{copy.attempt}\nrooms-delivery-delay:{copy.delay_ms}\n"
        f"rooms-event-type:{escape(copy.event_type)}\nrooms-event-version:{copy.event_version}\n"
        f"rooms-correlation-id:{escape(copy.correlation_id)}\n"
        f"rooms-published-ms:{copy.published_ms}\n{PUBLISHER}:{publisher}\n"
        f"{optional}content-length:{len(copy.payload)}\n\n"
    )
    return b"%b%b\0" % (head.encode(), copy.payload)


def _native_headers(copy: DeliveryTask) -> str:
    """Return the headers that only readers outside of Rooms need.

    ValueError: one cannot be encoded.
    """
    event_type, correlation = escape(copy.event_type), escape(copy.correlation_id)
    properties = copy.properties or DeliveryProperties()
    extra = "".join(
        f"rooms_{name.replace('-', '_')}:{escape(value)}\n"
        for name, value in _property_headers(properties)
    )
    if properties.has_publisher:
        extra += f"rooms_publisher:{_publisher(properties)}\n"
    if properties.expires_at_ms is not None:
        expiry = escape(expiry_text(properties.expires_at_ms))
        extra += f"rooms-expires-at:{expiry}\nrooms_expires_at:{expiry}\n"
    if is_replayed(copy.delivery_id, copy.message_id):
        extra += "rooms-replayed:true\nrooms_replayed:true\n"
    repeated = "" if copy.headers is None else f"rooms_headers:{escape(copy.headers.decode())}\n"
    # Nothing sends it again if the broker forgets it.
    durable = (
        f"persistent:true\n_AMQ_DUPL_ID:{copy.delivery_id}\\c{copy.generation}\\c{copy.attempt}\n"
    )
    return (
        f"{durable}correlation-id:{correlation}\ntype:{event_type}\n"
        f"rooms_format:{FORMAT_VERSION}\nrooms_delivery_id:{copy.delivery_id}\n"
        f"rooms_message_id:{copy.message_id}\n"
        f"rooms_subscription_id:{copy.subscription_id}\nrooms_generation:{copy.generation}\n"
        f"rooms_delivery_attempt:{copy.attempt}\nrooms_delivery_delay:{copy.delay_ms}\n"
        f"rooms_event_type:{event_type}\nrooms_event_version:{copy.event_version}\n"
        f"rooms_correlation_id:{correlation}\nrooms_published_ms:{copy.published_ms}\n{repeated}{extra}"
    )


def _property_headers(properties: DeliveryProperties) -> Iterator[tuple[str, str]]:
    """Yield what the worker cannot know otherwise, each with its name behind `rooms-`."""
    if properties.ordering_key is not None:
        yield "ordering-key", properties.ordering_key
    if properties.sequence is not None:
        yield "sequence", str(properties.sequence)
    if properties.business_key is not None:
        yield "business-key", properties.business_key


def _publisher(properties: DeliveryProperties) -> str:
    """Return the value of the header `PUBLISHER`; an application of the owner begins with `/`."""
    if not properties.has_publisher:
        return NO_PUBLISHER
    if properties.organisation is None and properties.application is None:
        return OWNER
    return publisher_text(properties.organisation or OrganisationId(""), properties.application)


def _read_properties(headers: Mapping[str, str]) -> DeliveryProperties | None:
    """Return the properties in the headers of a copy. ValueError: it is invalid."""
    publisher = headers.get(PUBLISHER, NO_PUBLISHER)
    keys = {name: unescape(headers[name]) for name in _KEYS if name in headers}
    sequence = headers.get(_SEQUENCE)
    if publisher == OWNER and not keys and sequence is None:
        return None
    organisation, slash, application = publisher.partition("/")
    known = publisher not in {OWNER, NO_PUBLISHER}
    if known and organisation and not is_id(organisation):
        raise ValueError("its publisher is not an organisation")
    return DeliveryProperties(
        ordering_key=keys.get(_ORDERING_KEY),
        sequence=None if sequence is None else int(sequence),
        business_key=keys.get(_BUSINESS_KEY),
        organisation=OrganisationId(organisation) if known and organisation else None,
        application=application if slash else None,
        has_publisher=publisher != NO_PUBLISHER,
    )


def decode_copy(frame: Frame, kind: SubscriptionType) -> tuple[DeliveryTask, str]:
    """Return the copy in a MESSAGE of a queue of that kind, and the name that acknowledges it.

    ValueError or KeyError: it is not a copy, or has another format.
    """
    # Only a publisher's values can hold an escape, so only those are searched for one.
    headers = dict([line.split(":", 1) for line in frame.head[1:-1].decode().split("\n")])
    get = headers.__getitem__
    if get("rooms-format") != FORMAT_VERSION:
        raise ValueError(f"its format is {get('rooms-format')[:32]!r}, not {FORMAT_VERSION}")
    delivery, message, subscription = (
        get("rooms-delivery-id"),
        get("rooms-message-id"),
        get("rooms-subscription-id"),
    )
    if _IDS_OF_ONE_ROOM.fullmatch(f"{delivery} {message} {subscription}") is None:
        raise ValueError("its ids are invalid, or of several rooms")
    generation, attempt = int(get("rooms-generation")), int(get("rooms-delivery-attempt"))
    delay_ms, version = int(get("rooms-delivery-delay")), int(get("rooms-event-version"))
    if not (
        0 <= generation < _MAX_INT
        and 0 <= attempt < _MAX_INT
        and delay_ms >= 0
        and 0 <= version < _MAX_INT
    ):
        raise ValueError("a number in its headers is out of range")
    event_type, correlation = get("rooms-event-type"), get("rooms-correlation-id")
    if "\\" in event_type or "\\" in correlation:
        event_type, correlation = unescape(event_type), unescape(correlation)
    expires, publisher_headers = get("expires"), headers.get("rooms-headers")
    priority = int(headers.get(_PRIORITY) or get("priority"))
    if not 0 <= priority < PRIORITIES:
        raise ValueError("its priority is out of range")
    copy = DeliveryTask(
        room_id=RoomId(int(delivery[-8:], 16) & MAX_ROOM),
        delivery_id=DeliveryId(delivery),
        message_id=MessageId(message),
        subscription_id=SubscriptionId(subscription),
        kind=kind,
        generation=generation,
        attempt=attempt,
        delay_ms=delay_ms,
        priority=priority,
        event_type=event_type,
        event_version=version,
        correlation_id=correlation,
        published_ms=int(get("rooms-published-ms")),
        expires_ms=int(expires) if expires != "0" else None,
        subscription_version=None,
        deadline=_NO_DEADLINE,
        headers=None if publisher_headers is None else _json_object(unescape(publisher_headers)),
        payload=frame.body,
        properties=_read_properties(headers),
        behind=headers.get("subscription") == BACKLOG_SUBSCRIPTION,
    )
    return copy, get("ack")


def _json_object(text: str) -> bytes:
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("its rooms-headers are not a JSON object of strings")
    return text.encode()


def decode_malformed(frame: Frame, reason: str) -> MalformedMessage:
    """Return what can be read of a message that is not a copy."""
    headers: dict[str, str] = {}
    for line in frame.head.split(b"\n"):
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.decode(errors="replace")] = value.decode(errors="replace")
    return MalformedMessage(
        reason=reason,
        delivery_id=_delivery_id(headers),
        generation=_optional_int(headers, "rooms-generation"),
        attempt=_optional_int(headers, "rooms-delivery-attempt"),
        headers=headers,
        body=frame.body,
    )


def _delivery_id(headers: Mapping[str, str]) -> DeliveryId | None:
    found = headers.get("rooms-delivery-id", "")
    try:
        room_of(found)
    except ValueError:
        return None
    return DeliveryId(found)


def _optional_int(headers: Mapping[str, str], name: str) -> int | None:
    found = headers.get(name, "")
    return int(found) if found.isdecimal() and int(found) < _MAX_INT else None


_CANONICAL_ID: Final = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_SMALL_NUMBER: Final = "[0-9]{1,9}"
_LARGE_NUMBER: Final = "[0-9]{1,15}"
_PLAIN_TEXT: Final = r"[^\\\n\x80-\xff]*"
_ANY: Final = r"[^\n]*"
_FIELD_PATTERNS: Final = {
    "rooms-delivery-id": _CANONICAL_ID,
    "rooms-message-id": _CANONICAL_ID,
    "rooms-subscription-id": _CANONICAL_ID,
    "rooms-generation": _SMALL_NUMBER,
    "rooms-delivery-attempt": _SMALL_NUMBER,
    "rooms-delivery-delay": _LARGE_NUMBER,
    "subscription": "[0-9]",
    "priority": "[0-9]",
    "rooms-event-type": _PLAIN_TEXT,
    "rooms-event-version": _SMALL_NUMBER,
    "rooms-correlation-id": _PLAIN_TEXT,
    "rooms-published-ms": _LARGE_NUMBER,
    "expires": _LARGE_NUMBER,
    "ack": "[!-~]*",
    "content-length": "[0-9]{1,9}",
}
_PUBLISHER_HEADERS: Final = "rooms-headers"
"""The publisher's own headers: JSON, which a pattern cannot validate."""
_IRREGULAR: Final = frozenset({_PUBLISHER_HEADERS, *_KEYS, _SEQUENCE, _PRIORITY})
"""Headers of copies that no pattern reads."""
_MAX_HEADER_ORDERS: Final = 8
_MAX_ROOMS: Final = 10_000
_ROOM_OFFSET: Final = 28

_Match = Callable[[str, int], re.Match[str] | None]
_Get = Callable[[re.Match[str]], tuple[Any, ...]]


class CopyDecoder:
    """Decode the MESSAGE frames of queues of one kind."""

    def __init__(self, kind: SubscriptionType) -> None:
        self._kind = kind
        self._header_orders: dict[tuple[str, ...], tuple[_Match, _Get]] = {}
        self._rooms: dict[str, RoomId] = {}

    def decode_fast(
        self, data: bytes, text: str, at: int
    ) -> tuple[tuple[DeliveryTask, str], int] | None:
        """Decode a copy with the name that acknowledges it; a `FastDecode`."""
        for match, get in self._header_orders.values():
            if (found := match(text, at)) is not None:
                return self._build(data, found.end(), get(found))
        return None

    def _build(
        self, data: bytes, body: int, values: tuple[Any, ...]
    ) -> tuple[tuple[DeliveryTask, str], int] | None:
        (
            delivery, message, subscription, generation, attempt, delay, received_by, priority,
            event_type, version, correlation, published, expires, ack, length,
        ) = values  # fmt: skip
        end = body + int(length)
        suffix = delivery[_ROOM_OFFSET:]
        if (
            end >= len(data)
            or data[end]
            or not suffix == message[_ROOM_OFFSET:] == subscription[_ROOM_OFFSET:]
        ):
            return None
        room = self._rooms.get(suffix)
        if room is None:
            room = self._cache_room(suffix)
        # By position, since twenty keywords cost four times as much.
        copy = DeliveryTask(
            room,
            delivery,
            message,
            subscription,
            self._kind,
            int(generation),
            int(attempt),
            int(delay),
            int(priority),
            event_type,
            int(version),
            correlation,
            int(published),
            int(expires) if expires != "0" else None,
            None,
            _NO_DEADLINE,
            None,
            data[body:end],
        )
        if received_by == BACKLOG_SUBSCRIPTION:
            copy.behind = True
        return (copy, ack), end + 1

    def _cache_room(self, suffix: str) -> RoomId:
        if len(self._rooms) >= _MAX_ROOMS:
            self._rooms.clear()
        room = self._rooms[suffix] = RoomId(int(suffix, 16) & MAX_ROOM)
        return room

    def decode(self, frame: Frame) -> tuple[DeliveryTask, str]:
        """Decode a copy, and learn its order of headers."""
        copy, ack = decode_copy(frame, self._kind)
        names = tuple([line.partition(":")[0] for line in frame.head.decode()[1:-1].split("\n")])
        wanted = [name for name in names if name in _FIELD_PATTERNS]
        each_once = (
            len(wanted) == len(_FIELD_PATTERNS) == len(set(wanted))
            and names.count("rooms-format") == names.count(PUBLISHER) == 1
        )
        if (
            each_once
            and _IRREGULAR.isdisjoint(names)
            and copy.properties is None
            and names not in self._header_orders
            and len(self._header_orders) < _MAX_HEADER_ORDERS
        ):
            values = {
                **{name: f"({value})" for name, value in _FIELD_PATTERNS.items()},
                "rooms-format": FORMAT_VERSION,
                PUBLISHER: OWNER,
            }
            lines = [f"{re.escape(name)}:{values.get(name, _ANY)}\n" for name in names]
            places = [wanted.index(name) + 1 for name in _FIELD_PATTERNS]
            pattern = re.compile("MESSAGE\n" + "".join(lines) + "\n").match, itemgetter(*places)
            # A new dictionary: another thread may iterate over the old one.
            self._header_orders = {**self._header_orders, names: pattern}
        return copy, ack
