"""Pack a publish request as rows of its messages and deliveries, ready to be written.

A row is a tuple of packed elements, most of them packed once for a room's plan. A message's
deliveries are one row: each of its columns holds the elements of all of them. What few messages
have is in separate rows, which exist only if any message of the group has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from msgspec import Raw

from rooms.db import pg_arrays
from rooms.db.pg_arrays import NULL_ELEMENT, bytes_element
from rooms.db.queue.ordering import key_digest
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.message import IMMEDIATE, DeliverySchedule
from rooms.domain.state_machine import SubscriptionType
from rooms.domain.work_location import WorkLocation

PackedRow = tuple[bytes, ...]

_DUE_NOW: Final = (pg_arrays.int8_element(0), NULL_ELEMENT)
_NO_EXTENSION: Final = (*_DUE_NOW, *[NULL_ELEMENT] * 4, pg_arrays.FALSE_ELEMENT)
_KIND_NUMBERS: Final = {
    SubscriptionType.PUSH: pg_arrays.int2_element(WorkLocation.PUSH_LOCAL),
    SubscriptionType.PULL: pg_arrays.int2_element(WorkLocation.PULL_LOCAL),
}
_PRIORITIES: Final = tuple(pg_arrays.int2_element(priority) for priority in range(10))


class RouteRows:
    """Hold the packed elements that all messages of one event type and version in a room share."""

    __slots__ = (
        "event_type",
        "event_version",
        "expirations_ms",
        "fanout",
        "kinds",
        "log_elements",
        "ordered",
        "policies",
        "recipient_count",
        "room",
        "subscriptions",
    )  # fmt: skip

    def __init__(
        self,
        room: RoomId,
        event_type: str,
        event_version: int,
        recipients: Sequence[tuple[SubscriptionId, SubscriptionType, int]],
        *,
        ordered: Sequence[bool] = (),
        expirations_ms: Sequence[int | None] = (),
    ) -> None:
        """Pack the elements of a route.

        `ordered`: for each recipient whether it gets messages with an ordering key in order; empty
        if none does. `expirations_ms`: for each recipient the longest lifetime of its deliveries
        (None: that of the message); empty if none has one.
        """
        self.ordered = tuple(ordered)
        self.expirations_ms = tuple(expirations_ms)
        self.room = pg_arrays.room_element(room)
        self.event_type = pg_arrays.bytes_element(event_type.encode())
        self.event_version = pg_arrays.int4_element(event_version)
        self.fanout = pg_arrays.int4_element(len(recipients))
        self.recipient_count = len(recipients)
        subscriptions = [pg_arrays.uuid_from_text(identity) for identity, _, _ in recipients]
        policies = [pg_arrays.int4_element(version) for _, _, version in recipients]
        self.subscriptions = b"".join(subscriptions)
        self.kinds = b"".join([_KIND_NUMBERS[kind] for _, kind, _ in recipients])
        self.policies = b"".join(policies)
        self.log_elements = tuple(
            zip(
                map(pg_arrays.element_value, subscriptions),
                map(pg_arrays.element_value, policies),
                strict=True,
            )
        )

    def lives(self, life_ms: int | None) -> bytes:
        """Return the packed lifetimes of the deliveries of a message that lives for `life_ms`."""
        if not self.expirations_ms:
            return _life(life_ms) * self.recipient_count
        longest = inf if life_ms is None else life_ms
        return b"".join(
            [
                _life(one if one is not None and one < longest else life_ms)
                for one in self.expirations_ms
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendedColumns:
    """Hold what few messages have."""

    due: DeliverySchedule = IMMEDIATE
    business_key: str | None = None
    caller_id: str | None = None
    """As it is stored: that of another organisation begins with the organisation."""
    publisher_organisation: OrganisationId | None = None
    """None: the room's owner."""
    application: str | None = None
    directed: bool = False
    """It has chosen destinations."""


@dataclass(frozen=True, slots=True)
class CallerId:
    """Hold a caller's id, a hash of its message's content, and the answer to its first request."""

    caller_id: str
    message_id: bytes
    content_hash: bytes
    answer: bytes


class InsertRows:
    """Hold one request, written as a whole or not at all.

    `started_s`: its arrival on the monotonic clock; `organisation`: the publisher's.
    """

    __slots__ = (
        "answer",
        "caller_ids",
        "deliveries",
        "delivery_holds",
        "delivery_ordering",
        "due_soon",
        "extended_deliveries",
        "extended_messages",
        "fanouts",
        "has_push",
        "key",
        "messages",
        "organisation",
        "payload_bytes",
        "plan_version",
        "pull_subscriptions",
        "request_hash",
        "room_id",
        "row_count",
        "started_s",
        "tracks_completion",
    )  # fmt: skip

    def __init__(self, room_id: RoomId, plan_version: int) -> None:
        self.room_id = room_id
        self.plan_version = plan_version
        self.answer = b""
        self.key: str | None = None
        self.request_hash = b""
        self.started_s = 0.0
        self.organisation: OrganisationId | None = None
        self.messages: list[PackedRow] = []
        self.fanouts: list[int] = []
        """The number of deliveries of each message."""
        self.deliveries: list[PackedRow] = []
        """One for each message."""
        self.extended_messages: list[PackedRow] = []
        """Empty, or one for each message; likewise for its deliveries."""
        self.extended_deliveries: list[PackedRow] = []
        self.delivery_ordering: list[PackedRow] = []
        """Empty, or one for each message: the digest of the key of each delivery whose subscription
        is ordered.
        """
        self.delivery_holds: list[PackedRow] = []
        """Empty, or one for each message: for each delivery whether it is held at once."""
        self.caller_ids: list[CallerId] = []
        self.row_count = 0
        """The number of messages and deliveries."""
        self.payload_bytes = 0
        """Bytes of payload."""
        self.has_push = False
        self.pull_subscriptions: frozenset[SubscriptionId] = frozenset()
        self.due_soon: list[tuple[int, frozenset[SubscriptionId]]] = []
        """PULL subscriptions that get a message in so many ms, if that is soon."""
        self.tracks_completion = False
        """The room asked for the operational event of completed messages."""

    def add(
        self,
        route: RouteRows,
        *,
        identity: bytes,
        publisher: bytes,
        correlation_id: bytes,
        priority: int,
        life_ms: int | None,
        ordering_key: str | None,
        headers: bytes | None,
        payload: bytes | Raw,
        deliveries: Sequence[bytes],
        extension: ExtendedColumns | None = None,
        held: bytes = b"",
    ) -> None:
        """Add one message and a delivery for each recipient of its route.

        `identity` and `publisher` (the API key that published) are packed elements; `deliveries`
        are the ids of the deliveries, 16 octets each. `life_ms`: how long it lives once it is due;
        None: it never expires. `held`: for each recipient whether its delivery is held at once, as
        packed elements; empty if none is.
        """
        count = route.recipient_count
        if extension is not None:
            self._extend(extension, count)
        elif self.extended_messages:
            self.extended_messages.append(_NO_EXTENSION)
            self.extended_deliveries.append(_repeat(count, _DUE_NOW))
        if route.ordered and ordering_key is not None:
            self._add_ordering(route, ordering_key)
        elif self.delivery_ordering:
            self.delivery_ordering.append((NULL_ELEMENT * count,))
        if held:
            self.delivery_holds += self._unheld_from(len(self.delivery_holds))
            self.delivery_holds.append((held,))
        correlation = bytes_element(correlation_id)
        urgency = _PRIORITIES[priority]
        room, event_type, version = route.room, route.event_type, route.event_version
        self.messages.append((
            room, identity, event_type, version, urgency, route.fanout, _life(life_ms), publisher,
            correlation,
            NULL_ELEMENT if ordering_key is None else bytes_element(ordering_key.encode()),
            NULL_ELEMENT if headers is None else bytes_element(headers),
            bytes_element(payload), bytes_element(b"".join([
                subscription + delivery + policy
                for delivery, (subscription, policy) in zip(
                    deliveries, route.log_elements, strict=True
                )
            ])),
        ))  # fmt: skip
        self.deliveries.append((
            room * count, pg_arrays.uuid_elements(deliveries), identity * count,
            route.subscriptions, route.kinds, urgency * count, route.lives(life_ms), route.policies,
            event_type * count, version * count, correlation * count,
        ))  # fmt: skip
        self.fanouts.append(count)
        self.row_count += 1 + count
        self.payload_bytes += len(payload)

    def _extend(self, extension: ExtendedColumns, recipients: int) -> None:
        if not self.extended_messages:
            self.extended_messages, self.extended_deliveries = self._no_extensions()
        due = (
            pg_arrays.int8_element(extension.due.delay_ms),
            NULL_ELEMENT
            if extension.due.at_us is None
            else pg_arrays.int8_element(extension.due.at_us),
        )
        organisation = extension.publisher_organisation
        self.extended_messages.append(
            (
                *due,
                _text(extension.business_key),
                _text(extension.caller_id),
                NULL_ELEMENT if organisation is None else pg_arrays.uuid_from_text(organisation),
                _text(extension.application),
                pg_arrays.TRUE_ELEMENT if extension.directed else pg_arrays.FALSE_ELEMENT,
            )
        )
        self.extended_deliveries.append(_repeat(recipients, due))

    def _add_ordering(self, route: RouteRows, ordering_key: str) -> None:
        if not self.delivery_ordering:
            self.delivery_ordering = self.all_ordering()
        key = bytes_element(key_digest(ordering_key))
        self.delivery_ordering.append(
            (b"".join([key if ordered else NULL_ELEMENT for ordered in route.ordered]),)
        )

    def all_ordering(self) -> list[PackedRow]:
        """Return `delivery_ordering`, filled with nulls where it is empty."""
        return self.delivery_ordering or [(NULL_ELEMENT * fanout,) for fanout in self.fanouts]

    def all_holds(self) -> list[PackedRow]:
        """Return `delivery_holds`, filled with false where it is short."""
        return self.delivery_holds + self._unheld_from(len(self.delivery_holds))

    def _unheld_from(self, message: int) -> list[PackedRow]:
        return [(pg_arrays.FALSE_ELEMENT * fanout,) for fanout in self.fanouts[message:]]

    def all_extended(self) -> tuple[list[PackedRow], list[PackedRow]]:
        """Return `extended_messages` and `extended_deliveries`, or defaults if they are empty."""
        if self.extended_messages:
            return self.extended_messages, self.extended_deliveries
        return self._no_extensions()

    def _no_extensions(self) -> tuple[list[PackedRow], list[PackedRow]]:
        return [_NO_EXTENSION] * len(self.messages), [
            _repeat(fanout, _DUE_NOW) for fanout in self.fanouts
        ]

    @property
    def takes_locks(self) -> bool:
        """Return whether its statement waits for others with the same key of any kind."""
        return bool(self.key is not None or self.caller_ids or self.delivery_ordering)

    def unique_keys(self) -> list[tuple[RoomId, str, str | None]]:
        """Return what no other request of a group may also have: its key, and its caller's ids."""
        keys: list[tuple[RoomId, str, str | None]] = [
            (self.room_id, name.caller_id, "id") for name in self.caller_ids
        ]
        if self.key is not None:
            keys.append((self.room_id, self.key, None))
        return keys


def _repeat(count: int, row: PackedRow) -> PackedRow:
    return tuple([element * count for element in row])


def _life(life_ms: int | None) -> bytes:
    return NULL_ELEMENT if life_ms is None else pg_arrays.int8_element(life_ms)


def _text(value: str | None) -> bytes:
    return NULL_ELEMENT if value is None else bytes_element(value.encode())
