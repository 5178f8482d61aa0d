"""Name the queue that a request is for, and select messages by event type, header or payload value.

Every condition of a selector must hold. Values are compared as text: a string in the payload as it
is, a number, true, false or null as JSON writes it. A payload without the path does not match.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from rooms.db.leases.acquire import PackedTarget, SubscriptionAccess
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of
from rooms.domain.principal import Principal
from rooms.errors import ConflictError, NotFoundError, RoomsError
from rooms.publishing.number_bounds import decode_json

_decode_headers: Final = msgspec.json.Decoder(dict[str, str]).decode
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Selector:
    """Select messages: all conditions must hold; an empty one always does.

    `event_types`: any of these; `headers`: (lower-case name, value); `payload`: (object keys and
    list indexes, value).
    """

    event_types: frozenset[str] = frozenset()
    headers: tuple[tuple[str, str], ...] = ()
    payload: tuple[tuple[tuple[str, ...], str], ...] = ()

    def matches_type(self, event_type: str) -> bool:
        """Return whether a message of this type may match."""
        return not self.event_types or event_type in self.event_types

    def matches(self, event_type: str, headers: bytes | None, payload: bytes) -> bool:
        """Return whether this message matches."""
        return (
            self.matches_type(event_type)
            and self._matches_headers(headers)
            and self._matches_payload(payload)
        )

    def _matches_headers(self, headers: bytes | None) -> bool:
        if not self.headers:
            return True
        given = (
            {}
            if headers is None
            else {name.lower(): value for name, value in _decode_headers(headers).items()}
        )
        return all(given.get(name) == value for name, value in self.headers)

    def _matches_payload(self, payload: bytes) -> bool:
        if not self.payload:
            return True
        try:
            decoded = decode_json(payload, many=True)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # JSON whose numbers are too large, or lists too deep, has no comparable value.
            return False
        return all(_as_text(_value_at(decoded, path)) == value for path, value in self.payload)


def _value_at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        match value:
            case dict():
                value = value.get(key, _MISSING)
            case list():
                value = (
                    value[int(key)]
                    if key.isdecimal() and key.isascii() and int(key) < len(value)
                    else _MISSING
                )
            case _:
                return _MISSING
    return value


def _as_text(value: Any) -> str | None:
    match value:
        case str():
            return value
        case None | bool() | int() | float():
            return msgspec.json.encode(value).decode()
        case _:
            return None


@dataclass(frozen=True, slots=True)
class PullTarget:
    """Name a queue and the organisation that asks; the statement that serves it checks access."""

    room: RoomId
    subscription: SubscriptionId
    organisation: OrganisationId

    def to_row(self) -> PackedTarget:
        """Return the target as a statement's argument."""
        return PackedTarget.of(self.room, self.subscription, self.organisation)


@dataclass(frozen=True, slots=True)
class PullSelection:
    """Name a queue and which of its messages are wanted (None: any)."""

    target: PullTarget
    selector: Selector | None = None


def parse_target(principal: Principal, subscription_id: str) -> PullTarget:
    """Return the target of a path. NotFoundError: the text cannot be an id."""
    try:
        room = room_of(subscription_id)
    except ValueError as exc:
        raise _not_found(subscription_id) from exc
    if subscription_id != subscription_id.lower():
        raise _not_found(subscription_id)
    if not principal.may_use_subscription(room, SubscriptionId(subscription_id)):
        raise _not_found(subscription_id)
    return PullTarget(room, SubscriptionId(subscription_id), principal.organisation_id)


def access_error(access: SubscriptionAccess, key: PullTarget) -> RoomsError | None:
    """Return why a queue with this access serves no consumer; None if it does."""
    if access is SubscriptionAccess.NONE:
        return _not_found(key.subscription)
    if access is SubscriptionAccess.PUSH:
        return ConflictError(
            "this is a PUSH subscription: its messages are sent to its webhook, not pulled"
        )
    if access is SubscriptionAccess.NATIVE:
        return ConflictError(
            "this subscription is native: read its queue at the broker, as the user that was"
            " returned when the subscription was created"
        )
    return None


def _not_found(subscription_id: str) -> NotFoundError:
    return NotFoundError(f"there is no subscription {subscription_id[:64]}")
