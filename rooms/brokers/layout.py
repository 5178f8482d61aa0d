"""How a copy is laid out in a STOMP message: format 1, told by `rooms-format`.

The body is the payload, byte for byte. What is ours is in headers with the prefix `rooms-`; nothing else of a received
message is ever sent again. The publisher's own headers are one header, a JSON object.

A copy for a native queue has more: `correlation-id` and `type`, which AMQP and JMS have fields for, and each header once more
with underscores, since a hyphen ends an identifier in JMS. Artemis takes no message id from STOMP.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rooms.brokers.frames import Frame, escape, unescape
from rooms.domain.copy import Copy
from rooms.domain.ids import MAX_ROOM, DeliveryId, MessageId, RoomId, SubscriptionId, room_of
from rooms.domain.states import SubscriptionType
from rooms.ports import Unreadable

FORMAT: Final = "1"
LEAST_FRAME_BYTES: Final = 600
"""The broker counts no MESSAGE of ours as less (690 was seen): a window of so many bytes lets at most so many copies out."""
_MOST: Final = 1 << 31
_FOREVER: Final = float("inf")
_ID: Final = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{4}"
_OF_ONE_ROOM: Final = re.compile(f"{_ID}([0-9a-f]{{8}}) {_ID}\\1 {_ID}\\1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A queue by its fully qualified name."""

    address: str
    name: str
    routing: str
    """ANYCAST or MULTICAST."""

    @property
    def destination(self) -> str:
        return f"{self.address}::{self.name}"


@dataclass(frozen=True, slots=True)
class Queues:
    """The names of an installation's queues."""

    farm: str
    client: str

    @property
    def owner(self) -> str:
        """What marks a queue as this installation's: two may share a broker, and PULL names do not tell them apart."""
        return f"rooms {self.farm} {self.client}"

    @property
    def push(self) -> Queue:
        return self._own("push")

    @property
    def marker(self) -> Queue:
        return self._own("rooms-marker")

    @property
    def dead_letters(self) -> Queue:
        """Return the queue for what readers of native queues reject; it gets those of other installations as well."""
        return Queue(address=_DEAD_LETTERS, name=f"dead-letters-{self.farm}-{self.client}", routing="MULTICAST")

    @property
    def replies(self) -> str:
        """The address of management's answers."""
        return f"rooms-replies-{self.farm}-{self.client}"

    def _own(self, what: str) -> Queue:
        name = f"{what}-{self.farm}-{self.client}"
        return Queue(address=name, name=name, routing="ANYCAST")

    def pull(self, subscription: SubscriptionId) -> Queue:
        return Queue(address=f"room-{room_of(subscription)}", name=f"{PULL_PREFIX}{subscription}", routing="MULTICAST")

    def user(self, subscription: SubscriptionId) -> str:
        """The broker's user, and role, that may read a native subscription's queue."""
        return f"{self.user_prefix}{subscription}"

    @property
    def user_prefix(self) -> str:
        return f"{self.farm}-{self.client}-{PULL_PREFIX}"

    def of(self, copy: Copy) -> Queue:
        return self.push if copy.kind is SubscriptionType.PUSH else self.pull(copy.subscription_id)


PULL_PREFIX: Final = "subscription-"
_DEAD_LETTERS: Final = "rooms-dead-letters"
"""The dead-letter address of `rooms/embedded/broker.xml`."""


def destination_lines(queue: Queue) -> str:
    """The header lines that send to `queue`."""
    return f"destination:{escape(queue.destination)}\ndestination-type:{queue.routing}\n"


def encode_copy(copy: Copy, *, to: str, not_before: datetime, now_ms: int, receipt: str | None) -> bytes:
    """A SEND of `copy`; `to` is `destination_lines`. ValueError where a header cannot hold its value."""
    due_ms = math.ceil(not_before.timestamp() * 1000)  # up: a copy must not come before its row is due
    optional = f"AMQ_SCHEDULED_TIME:{due_ms}\n" if due_ms > now_ms else ""
    if copy.expires_ms is not None:
        optional += f"expires:{copy.expires_ms}\n"
    if copy.headers is not None:
        optional += f"rooms-headers:{escape(copy.headers.decode())}\n"
    if copy.native:
        optional += _native_lines(copy)
    if receipt is not None:
        optional += f"receipt:{receipt}\n"
    head = (
        f"SEND\n{to}persistent:true\npriority:{copy.priority}\n"
        f"_AMQ_DUPL_ID:{copy.delivery_id}\\c{copy.generation}\\c{copy.attempt}\n"
        f"rooms-format:{FORMAT}\nrooms-delivery-id:{copy.delivery_id}\nrooms-message-id:{copy.message_id}\n"
        f"rooms-subscription-id:{copy.subscription_id}\nrooms-generation:{copy.generation}\n"
        f"rooms-delivery-attempt:{copy.attempt}\nrooms-delivery-delay:{copy.delay_ms}\n"
        f"rooms-event-type:{escape(copy.event_type)}\nrooms-event-version:{copy.event_version}\n"
        f"rooms-correlation-id:{escape(copy.correlation_id)}\nrooms-published-ms:{copy.published_ms}\n"
        f"{optional}content-length:{len(copy.payload)}\n\n"
    )
    return b"%b%b\0" % (head.encode(), copy.payload)


def _native_lines(copy: Copy) -> str:
    """Return the header lines that only readers outside of Rooms need. ValueError where a header cannot hold its value."""
    event_type, correlation = escape(copy.event_type), escape(copy.correlation_id)
    own = "" if copy.headers is None else f"rooms_headers:{escape(copy.headers.decode())}\n"
    return (
        f"correlation-id:{correlation}\ntype:{event_type}\n"
        f"rooms_format:{FORMAT}\nrooms_delivery_id:{copy.delivery_id}\nrooms_message_id:{copy.message_id}\n"
        f"rooms_subscription_id:{copy.subscription_id}\nrooms_generation:{copy.generation}\n"
        f"rooms_delivery_attempt:{copy.attempt}\nrooms_delivery_delay:{copy.delay_ms}\n"
        f"rooms_event_type:{event_type}\nrooms_event_version:{copy.event_version}\n"
        f"rooms_correlation_id:{correlation}\nrooms_published_ms:{copy.published_ms}\n{own}"
    )


def decode_copy(frame: Frame, kind: SubscriptionType) -> tuple[Copy, str]:
    """The copy in a MESSAGE of a queue of that kind, and the name that acknowledges it.

    ValueError or KeyError: it is none of ours, or of another format.
    """
    # Only what a publisher chooses can hold an escape, so only that is searched for one.
    headers = dict([line.split(":", 1) for line in frame.head[1:-1].decode().split("\n")])
    get = headers.__getitem__
    if get("rooms-format") != FORMAT:
        raise ValueError(f"its format is {get('rooms-format')[:32]!r}, not {FORMAT}")
    delivery, message, subscription = get("rooms-delivery-id"), get("rooms-message-id"), get("rooms-subscription-id")
    if _OF_ONE_ROOM.fullmatch(f"{delivery} {message} {subscription}") is None:
        raise ValueError("its ids are none, or of several rooms")
    generation, attempt = int(get("rooms-generation")), int(get("rooms-delivery-attempt"))
    delay_ms, version = int(get("rooms-delivery-delay")), int(get("rooms-event-version"))
    if not (0 <= generation < _MOST and 0 <= attempt < _MOST and delay_ms >= 0 and 0 <= version < _MOST):
        raise ValueError("a number in its headers is out of range")
    event_type, correlation = get("rooms-event-type"), get("rooms-correlation-id")
    if "\\" in event_type or "\\" in correlation:
        event_type, correlation = unescape(event_type), unescape(correlation)
    expires, own = get("expires"), headers.get("rooms-headers")
    copy = Copy(
        room_id=RoomId(int(delivery[-8:], 16) & MAX_ROOM),
        delivery_id=DeliveryId(delivery),
        message_id=MessageId(message),
        subscription_id=SubscriptionId(subscription),
        kind=kind,
        generation=generation,
        attempt=attempt,
        delay_ms=delay_ms,
        priority=int(get("priority")),
        event_type=event_type,
        event_version=version,
        correlation_id=correlation,
        published_ms=int(get("rooms-published-ms")),
        expires_ms=int(expires) if expires != "0" else None,
        subscription_version=None,
        deadline=_FOREVER,
        headers=None if own is None else _json_object(unescape(own)),
        payload=frame.body,
    )
    return copy, get("ack")


def _json_object(text: str) -> bytes:
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("its rooms-headers are no JSON object of strings")
    return text.encode()


def decode_unreadable(frame: Frame, reason: str) -> Unreadable:
    """What can be told of a message that is no copy."""
    headers: dict[str, str] = {}
    for line in frame.head.split(b"\n"):
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.decode(errors="replace")] = value.decode(errors="replace")
    return Unreadable(
        reason=reason,
        delivery_id=_identity(headers),
        generation=_number(headers, "rooms-generation"),
        attempt=_number(headers, "rooms-delivery-attempt"),
        headers=headers,
        body=frame.body,
    )


def _identity(headers: Mapping[str, str]) -> DeliveryId | None:
    found = headers.get("rooms-delivery-id", "")
    try:
        room_of(found)
    except ValueError:
        return None
    return DeliveryId(found)


def _number(headers: Mapping[str, str], name: str) -> int | None:
    found = headers.get(name, "")
    return int(found) if found.isdecimal() and int(found) < _MOST else None
