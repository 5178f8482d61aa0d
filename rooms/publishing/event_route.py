"""Hold the recipients of an event type and version, and everything that is built from them once."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from rooms.db import pg_arrays
from rooms.db.publish.request_rows import RouteRows
from rooms.db.publish.routing import SubscriptionRecord
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.room import destination_name
from rooms.domain.state_machine import SubscriptionType

RECIPIENT_BYTES: Final = 512
"""About so many bytes a route takes for each recipient, and once more for itself."""
_KEY_BYTES: Final = 64
"""About so many bytes an id takes in the key of a part of a route, or in the index of places."""
MAX_NAMED_DESTINATIONS: Final = 100
"""An answer names so many destinations, and says how many there are."""
_encode: Final = msgspec.json.encode


class EventRoute:
    """Hold the recipients of one event type and version, with everything built from them.

    Parts of it are built on first use, and kept as long as it is.
    """

    __slots__ = (
        "_event_type",
        "_hold_flags",
        "_on_growth",
        "_parts",
        "_places",
        "_room_id",
        "_saturated",
        "_tails",
        "answer_tail",
        "by_destination",
        "filtered",
        "prepared_filters",
        "pulls",
        "pushes",
        "recipients",
        "rows",
        "version",
    )  # fmt: skip

    def __init__(
        self,
        room: RoomId,
        event_type: str,
        version: int,
        recipients: Iterable[SubscriptionRecord],
        on_growth: Callable[[int], None],
    ) -> None:
        """Build the route. `on_growth`: called with about the bytes that it and its parts take."""
        self._room_id, self._event_type = room, event_type
        self._on_growth = on_growth
        self._parts: dict[tuple[bool, frozenset[SubscriptionId]], EventRoute] = {}
        """By whether the ids are those of its recipients, and the ids; else they are excluded."""
        self._places: dict[SubscriptionId, int] = {}
        """Where each recipient is in the order of all; built for the first choice of some."""
        self._saturated: frozenset[SubscriptionId] = frozenset()
        self._hold_flags = b""
        self.version = version
        self.recipients = tuple(recipients)
        self.by_destination: Mapping[str, SubscriptionRecord] = {
            destination_name(room, recipient.id): recipient for recipient in self.recipients
        }
        self.answer_tail = self._tail(self.by_destination)
        """End of an answer: the rest of a JSON object."""
        self._tails: dict[OrganisationId, bytes] = {}
        self.pushes = any(recipient.type is SubscriptionType.PUSH for recipient in self.recipients)
        self.pulls: frozenset[SubscriptionId] = frozenset(
            recipient.id for recipient in self.recipients if recipient.type is SubscriptionType.PULL
        )
        self.rows = RouteRows(
            room,
            event_type,
            version,
            [(recipient.id, recipient.type, recipient.version) for recipient in self.recipients],
            ordered=[recipient.ordered for recipient in self.recipients]
            if any(one.ordered for one in self.recipients)
            else (),
            expirations_ms=[recipient.expiration_ms for recipient in self.recipients]
            if any(one.expiration_ms is not None for one in self.recipients)
            else (),
        )
        self.filtered = tuple(
            recipient for recipient in self.recipients if recipient.filter is not None
        )
        self.prepared_filters: dict[int, int] = {}
        """So many filters, from the first on, are compiled, with their cost for payloads of a size.

        By the size's `bit_length`.
        """
        on_growth(RECIPIENT_BYTES * (1 + len(self.recipients)))

    def _tail(self, destinations: Iterable[str]) -> bytes:
        named = list(itertools.islice(destinations, MAX_NAMED_DESTINATIONS))
        total = str(len(self.recipients)).encode()
        return b',"destinations":' + _encode(named) + b',"destination_count":' + total + b"}"

    def answer_tail_for(self, organisation: OrganisationId) -> bytes:
        """Return the end of an answer that names only the organisation's own subscriptions."""
        tail = self._tails.get(organisation)
        if tail is None:
            own = (
                text
                for text, recipient in self.by_destination.items()
                if recipient.organisation_id == organisation
            )
            tail = self._tails[organisation] = self._tail(own)
            self._on_growth(RECIPIENT_BYTES + len(tail))
        return tail

    def hold_flags(self, saturated: frozenset[SubscriptionId]) -> bytes:
        """Return, as packed elements, whether each recipient's delivery is held at once.

        Empty if none is.
        """
        if saturated is not self._saturated:
            self._saturated = saturated
            held = [
                one.id in saturated and one.type is SubscriptionType.PUSH for one in self.recipients
            ]
            self._hold_flags = (
                b"".join(
                    [pg_arrays.TRUE_ELEMENT if hold else pg_arrays.FALSE_ELEMENT for hold in held]
                )
                if any(held)
                else b""
            )
        return self._hold_flags

    def excluding(self, excluded: frozenset[SubscriptionId]) -> "EventRoute":
        """Return this route without some recipients."""
        part = self._parts.get((False, excluded))
        if part is None:
            rest = (recipient for recipient in self.recipients if recipient.id not in excluded)
            part = self._add_part((False, excluded), rest)
        return part

    def restricted_to(self, destinations: Iterable[str]) -> "EventRoute":
        """Return this route with only these destinations, in its order. Unknown ones are ignored.

        The time is proportional to the number of these destinations, except for the first time.
        """
        chosen = {
            recipient.id: recipient
            for text in destinations
            if (recipient := self.by_destination.get(text)) is not None
        }
        key = (True, frozenset(chosen))
        part = self._parts.get(key)
        if part is None:
            if not self._places:
                self._places = {one.id: place for place, one in enumerate(self.recipients)}
                self._on_growth(_KEY_BYTES * len(self._places))
            in_order = sorted(chosen, key=self._places.__getitem__)
            part = self._add_part(key, (chosen[identity] for identity in in_order))
        return part

    def _add_part(
        self,
        key: tuple[bool, frozenset[SubscriptionId]],
        recipients: Iterable[SubscriptionRecord],
    ) -> "EventRoute":
        part = self._parts[key] = EventRoute(
            self._room_id, self._event_type, self.version, recipients, self._on_growth
        )
        self._on_growth(_KEY_BYTES * len(key[1]))
        return part
