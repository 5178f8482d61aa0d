"""A publish request as it is written: the rows of its messages and deliveries, packed.

A row is a tuple of packed elements, most of them packed once for a room's plan. A message's deliveries are one row, each of
its columns the elements of all of them. What few messages have stands in rows of its own beside them, which are made up
only where a group has any of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Raw

from rooms.domain.due import AT_ONCE, Due
from rooms.domain.ids import RoomId, SubscriptionId
from rooms.domain.place import Place
from rooms.domain.states import SubscriptionType
from rooms.storage import arrays
from rooms.storage.arrays import NULL, octets
from rooms.storage.order import digest

Row = tuple[bytes, ...]

_AT_ONCE: Final = (arrays.int8(0), NULL)
_NOTHING_MORE: Final = (*_AT_ONCE, NULL, NULL)
_KIND_NUMBERS: Final = {
    SubscriptionType.PUSH: arrays.int2(Place.PUSH_HERE),
    SubscriptionType.PULL: arrays.int2(Place.PULL_HERE),
}
_PRIORITIES: Final = tuple(arrays.int2(priority) for priority in range(10))


class RouteRows:
    """The packed elements that every message of one event type and version in one room shares."""

    __slots__ = (
        "count", "event_type", "event_version", "fanout", "kinds", "logged", "ordered", "policies", "room", "subscriptions",
    )  # fmt: skip

    def __init__(
        self,
        room: RoomId,
        event_type: str,
        event_version: int,
        recipients: Sequence[tuple[SubscriptionId, SubscriptionType, int]],
        ordered: Sequence[bool] = (),
    ) -> None:
        """`ordered`: for each recipient whether it gets what has a key in order; empty where none does."""
        self.ordered = tuple(ordered)
        self.room = arrays.room(room)
        self.event_type = arrays.octets(event_type.encode())
        self.event_version = arrays.int4(event_version)
        self.fanout = arrays.int4(len(recipients))
        self.count = len(recipients)
        subscriptions = [arrays.uuid_of(identity) for identity, _, _ in recipients]
        policies = [arrays.int4(version) for _, _, version in recipients]
        self.subscriptions = b"".join(subscriptions)
        self.kinds = b"".join([_KIND_NUMBERS[kind] for _, kind, _ in recipients])
        self.policies = b"".join(policies)
        self.logged = tuple(zip(map(arrays.bare, subscriptions), map(arrays.bare, policies), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """What few messages have."""

    due: Due = AT_ONCE
    business_key: str | None = None
    caller_id: str | None = None


@dataclass(frozen=True, slots=True)
class Name:
    """An id of the publisher's own with a hash of its message's content, and the answer that the first one got."""

    caller_id: str
    message: bytes
    content_hash: bytes
    answer: bytes


class Submission:
    """One request, ready to be written: whole or not at all. `begun_s`: when it came, on the monotonic clock."""

    __slots__ = (
        "answer", "begun_s", "deliveries", "fanouts", "hold_of_deliveries", "key", "later", "messages", "more_of_deliveries",
        "more_of_messages", "names", "order_of_deliveries", "plan_version", "pulls", "pushes", "request_hash", "room_id", "rows", "size",
    )  # fmt: skip

    def __init__(self, room_id: RoomId, plan_version: int) -> None:
        self.room_id = room_id
        self.plan_version = plan_version
        self.answer = b""
        self.key: str | None = None
        self.request_hash = b""
        self.begun_s = 0.0
        self.messages: list[Row] = []
        self.fanouts: list[int] = []
        """How many deliveries each message has."""
        self.deliveries: list[Row] = []
        """One for each message."""
        self.more_of_messages: list[Row] = []
        """Empty, or one for each message; likewise for its deliveries."""
        self.more_of_deliveries: list[Row] = []
        self.order_of_deliveries: list[Row] = []
        """Empty, or what stands for the key of each delivery, where its subscription is ordered; one for each message."""
        self.hold_of_deliveries: list[Row] = []
        """Empty, or for each delivery whether it is held at once; one for each message."""
        self.names: list[Name] = []
        self.rows = 0
        """Messages and deliveries."""
        self.size = 0
        """Bytes of payload."""
        self.pushes = False
        self.pulls: frozenset[SubscriptionId] = frozenset()
        self.later: list[tuple[int, frozenset[SubscriptionId]]] = []
        """PULL subscriptions that get something in so many ms, where that is soon."""

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
        more: More | None = None,
        held: bytes = b"",
    ) -> None:
        """Put in one message and a delivery for each recipient of its route.

        `identity` and `publisher` (the key that published) are packed elements, `deliveries` the ids of the deliveries, 16
        octets each. `life_ms`: how long it lives once it is due; None: it never expires. `held`: for each recipient whether
        its delivery is held at once, packed elements; empty where none is.
        """
        count = route.count
        if more is not None:
            self._extend(more, count)
        elif self.more_of_messages:
            self.more_of_messages.append(_NOTHING_MORE)
            self.more_of_deliveries.append(_times(count, _AT_ONCE))
        if route.ordered and ordering_key is not None:
            self._order(route, ordering_key)
        elif self.order_of_deliveries:
            self.order_of_deliveries.append((NULL * count,))
        if held:
            self.hold_of_deliveries += self._free_from(len(self.hold_of_deliveries))
            self.hold_of_deliveries.append((held,))
        correlation = octets(correlation_id)
        urgency = _PRIORITIES[priority]
        life = NULL if life_ms is None else arrays.int8(life_ms)
        room, event_type, version = route.room, route.event_type, route.event_version
        self.messages.append((
            room, identity, event_type, version, urgency, route.fanout, life, publisher, correlation,
            NULL if ordering_key is None else octets(ordering_key.encode()),
            NULL if headers is None else octets(headers),
            octets(payload), octets(b"".join(
                [subscription + born + policy for born, (subscription, policy) in zip(deliveries, route.logged, strict=True)]
            )),
        ))  # fmt: skip
        self.deliveries.append((
            room * count, arrays.uuids(deliveries), identity * count, route.subscriptions, route.kinds, urgency * count,
            life * count, route.policies, event_type * count, version * count, correlation * count,
        ))  # fmt: skip
        self.fanouts.append(count)
        self.rows += 1 + count
        self.size += len(payload)

    def _extend(self, more: More, recipients: int) -> None:
        if not self.more_of_messages:
            self.more_of_messages, self.more_of_deliveries = self._nothing_more()
        due = (arrays.int8(more.due.wait_ms), NULL if more.due.at_us is None else arrays.int8(more.due.at_us))
        self.more_of_messages.append((*due, _text(more.business_key), _text(more.caller_id)))
        self.more_of_deliveries.append(_times(recipients, due))

    def _order(self, route: RouteRows, ordering_key: str) -> None:
        if not self.order_of_deliveries:
            self.order_of_deliveries = self.all_order()
        key = octets(digest(ordering_key))
        self.order_of_deliveries.append((b"".join([key if ordered else NULL for ordered in route.ordered]),))

    def all_order(self) -> list[Row]:
        """`order_of_deliveries`, made up where there is nothing of the kind."""
        return self.order_of_deliveries or [(NULL * fanout,) for fanout in self.fanouts]

    def all_holds(self) -> list[Row]:
        """`hold_of_deliveries`, made up where it is short."""
        return self.hold_of_deliveries + self._free_from(len(self.hold_of_deliveries))

    def _free_from(self, message: int) -> list[Row]:
        return [(arrays.FALSE * fanout,) for fanout in self.fanouts[message:]]

    def all_more(self) -> tuple[list[Row], list[Row]]:
        """`more_of_messages` and `more_of_deliveries`, made up where there is nothing of the kind."""
        if self.more_of_messages:
            return self.more_of_messages, self.more_of_deliveries
        return self._nothing_more()

    def _nothing_more(self) -> tuple[list[Row], list[Row]]:
        return [_NOTHING_MORE] * len(self.messages), [_times(fanout, _AT_ONCE) for fanout in self.fanouts]

    def claims(self) -> list[tuple[RoomId, str, str | None]]:
        """What no other submission of a group may have too: its key, and the ids of its publisher's own."""
        claims: list[tuple[RoomId, str, str | None]] = [(self.room_id, name.caller_id, "id") for name in self.names]
        if self.key is not None:
            claims.append((self.room_id, self.key, None))
        return claims


def _times(count: int, row: Row) -> Row:
    return tuple([element * count for element in row])


def _text(value: str | None) -> bytes:
    return NULL if value is None else octets(value.encode())
