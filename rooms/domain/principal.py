"""Define the principal of a request."""

from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Final

from rooms.domain.event_type_pattern import covers, matches_any
from rooms.domain.ids import KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.quota import Quotas
from rooms.domain.state_machine import Scope

_PLATFORM_ONLY: Final = (Scope.PLATFORM,)


class Restriction(StrEnum):
    """Name a part of its organisation's resources that a key can be restricted to."""

    ROOMS = "rooms"
    EVENT_TYPES = "event_types"
    SUBSCRIPTIONS = "subscriptions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Hold the organisation and scopes of an API key, and what the key is restricted to.

    None: no restriction. What a key may not use is, to it, not there.
    """

    key_id: KeyId
    organisation_id: OrganisationId
    scopes: frozenset[Scope]
    key_name: str = ""
    member_id: str | None = None
    """The organisation's: `instance/class/code`."""
    application: str | None = None
    rooms: frozenset[RoomId] | None = None
    """A key that is only restricted to subscriptions has the rooms of these."""
    event_types: tuple[str, ...] | None = None
    """Patterns."""
    subscriptions: frozenset[SubscriptionId] | None = None
    networks: tuple[str, ...] | None = None
    """Addresses that may use the key, as CIDR."""
    suspended: bool = False
    """Its organisation is suspended: it reads, and changes nothing."""
    quotas: Quotas | None = None
    """The limits of its organisation; None: there are none."""
    is_session: bool = False
    """A person who signed in to the console; else a program with a key."""
    is_portal: bool = False
    """A session of a portal: it sees what its organisation receives, and nothing that it owns."""
    text_hash: bytes | None = field(default=None, repr=False)
    """Of the key's text that was presented; during a rotation a key has two."""

    def has_scope(self, *scopes: Scope) -> bool:
        """Return whether it has one of these scopes. `admin` includes all but `platform`."""
        return not self.scopes.isdisjoint(scopes) or (
            Scope.ADMIN in self.scopes and scopes != _PLATFORM_ONLY
        )

    def may_use_room(self, room: RoomId) -> bool:
        """Return whether the key's restrictions allow a room."""
        return self.rooms is None or room in self.rooms

    def may_use_subscription(self, room: RoomId, subscription: SubscriptionId) -> bool:
        """Return whether the key's restrictions allow a subscription and its room.

        A key that is restricted to event types publishes and reads events; what a subscription
        receives is not its business.
        """
        return (
            self.may_use_room(room)
            and self.event_types is None
            and (self.subscriptions is None or subscription in self.subscriptions)
        )

    def may_use_event_type(self, event_type: str) -> bool:
        """Return whether the key's restrictions allow an event type."""
        return matches_any(self.event_types, event_type)

    def includes(self, other: "Principal") -> bool:
        """Return whether this one may do all that `other` may, and from the same addresses."""
        return (
            self.organisation_id == other.organisation_id
            and all(self.has_scope(scope) for scope in other.scopes)
            and _contains(self.rooms, other.rooms)
            and _contains(self.subscriptions, other.subscriptions)
            and _includes_patterns(self.event_types, other.event_types)
            and _includes_networks(self.networks, other.networks)
        )

    @property
    def is_restricted(self) -> bool:
        """Return whether the key is restricted to a part of its organisation's resources."""
        return not (self.rooms is None and self.event_types is None and self.subscriptions is None)

    @property
    def is_subscriber_only(self) -> bool:
        """Return whether it looks at messages as their subscriber, never as the room's owner."""
        return self.is_portal or self.subscriptions is not None

    @property
    def restrictions(self) -> frozenset[Restriction]:
        """Return the kinds of restrictions that the key has."""
        return frozenset(kind for kind in Restriction if getattr(self, kind.value) is not None)

    @property
    def reads_payloads(self) -> bool:
        """Return whether this principal may read payloads and headers of messages at all."""
        return self.has_scope(Scope.MANAGE, Scope.OPERATE, Scope.SUBSCRIBE)

    @property
    def sees_due_only(self) -> bool:
        """Return whether deliveries are invisible to this principal until they are due."""
        return not self.has_scope(Scope.MANAGE, Scope.OPERATE, Scope.VIEW)


def _contains(allowed: frozenset[Any] | None, former: frozenset[Any] | None) -> bool:
    return allowed is None or (former is not None and former <= allowed)


def _includes_patterns(allowed: tuple[str, ...] | None, former: tuple[str, ...] | None) -> bool:
    if allowed is None or former is None:
        return allowed is None
    known = frozenset(allowed)
    return all(covers(known, pattern) for pattern in former)


def _includes_networks(allowed: tuple[str, ...] | None, former: tuple[str, ...] | None) -> bool:
    if allowed is None or former is None:
        return allowed is None
    networks = [ip_network(text) for text in allowed]
    return all(any(_is_part(ip_network(text), network) for network in networks) for text in former)


def _is_part(network: IPv4Network | IPv6Network, of: IPv4Network | IPv6Network) -> bool:
    return (
        network.version == of.version
        and network.network_address in of
        and network.prefixlen >= of.prefixlen
    )
