"""Route messages: which subscriptions of a room get an event type and version.

A `RoutingTable` holds one version of a room's routing.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from rooms.db import pg_arrays
from rooms.db.publish.request_rows import RouteRows
from rooms.db.publish.routing import (
    InterestRecord,
    PublishGrantRecord,
    RoutingRecord,
    SubscriptionRecord,
)
from rooms.domain.event_type_pattern import covers, matches
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.room import destination_name
from rooms.domain.state_machine import SubscriptionType
from rooms.errors import (
    FieldProblem,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    SuspendedError,
)
from rooms.publishing.cel_filter import FilterInput, FilterResult, MessageFilter, load_filter
from rooms.publishing.json_schema import MAX_SCHEMA_BYTES, PayloadSchema

_ENTRY_BYTES: Final = 512
"""About so many bytes a version or subscription takes beside its schema or filter."""
_MAX_ROUTES: Final = 1000
_MAX_SUBSETS: Final = 64
_MAX_TAILS: Final = 100
MAX_NAMED_DESTINATIONS: Final = 100
"""An answer names so many destinations, and says how many there are."""
_SCHEMA_FIELD: Final = "event_type"
_encode: Final = msgspec.json.encode


class UnroutableError(ValueError):
    """Report an event type or version that the room does not have, by `field`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class EventRoute:
    """Hold the recipients of one event type and version, with everything built from them."""

    __slots__ = (
        "_event_type",
        "_hold_flags",
        "_room_id",
        "_saturated",
        "_subsets",
        "_tails",
        "answer_tail",
        "by_destination",
        "filtered",
        "pulls",
        "pushes",
        "recipients",
        "rows",
        "version",
    )  # fmt: skip

    def __init__(
        self, room: RoomId, event_type: str, version: int, recipients: Iterable[SubscriptionRecord]
    ) -> None:
        self._room_id, self._event_type = room, event_type
        self._subsets: dict[frozenset[SubscriptionId], EventRoute] = {}
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

    def _tail(self, destinations: Iterable[str]) -> bytes:
        named = list(itertools.islice(destinations, MAX_NAMED_DESTINATIONS))
        total = str(len(self.recipients)).encode()
        return b',"destinations":' + _encode(named) + b',"destination_count":' + total + b"}"

    def answer_tail_for(self, organisation: OrganisationId) -> bytes:
        """Return the end of an answer that names only the organisation's own subscriptions."""
        tail = self._tails.get(organisation)
        if tail is None:
            if len(self._tails) >= _MAX_TAILS:
                self._tails.clear()
            own = (
                text
                for text, recipient in self.by_destination.items()
                if recipient.organisation_id == organisation
            )
            tail = self._tails[organisation] = self._tail(own)
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
        """Return this route without some recipients. Routes are cached by those excluded."""
        part = self._subsets.get(excluded)
        if part is None:
            if len(self._subsets) >= _MAX_SUBSETS:
                self._subsets.clear()
            rest = (recipient for recipient in self.recipients if recipient.id not in excluded)
            part = self._subsets[excluded] = EventRoute(
                self._room_id, self._event_type, self.version, rest
            )
        return part


class PublishAccess:
    """Hold what a publisher may do in a room that it does not own, or with a narrow key."""

    __slots__ = ("_granted", "_key", "organisation", "owns", "sees_all")

    def __init__(
        self,
        principal: Principal,
        granted: tuple[str, ...] | None,
        *,
        owns: bool,
        transparent: bool,
    ) -> None:
        """Take the granted patterns of event types; None: all of them."""
        self.organisation = principal.organisation_id
        self.owns = owns
        self.sees_all = owns or transparent
        key = principal.event_types
        self._granted = None if granted is None else frozenset(granted)
        self._key = None if key is None else frozenset(key)

    def check_event_type(self, event_type: str) -> None:
        """Raise ForbiddenError where the grants or the key do not include an event type."""
        if not covers(self._granted, event_type):
            raise ForbiddenError(
                f"the room's owner did not grant publishing the event type {event_type!r}"
            )
        if not covers(self._key, event_type):
            raise ForbiddenError(f"this key may not publish the event type {event_type!r}")

    def may_name(self, recipient: SubscriptionRecord) -> bool:
        """Return whether a publish may name a subscription as its destination."""
        return self.sees_all or recipient.organisation_id == self.organisation

    def scope(self, text: str) -> str:
        """Return a publisher's own key or id as it is stored: apart from those of all others.

        An idempotency key has no spaces, so that the owner's keys are never equal to it.
        """
        return text if self.owns else f"{self.organisation} {text}"


class RoutingTable:
    """Route the messages of a room, at one version of its routing.

    It includes paused and disabled subscriptions, whose deliveries are created and held later, and
    no deleted ones. Routes and schemas are built on first use, since most may be unused.
    """

    def __init__(
        self,
        record: RoutingRecord,
        *,
        previous: "RoutingTable | None" = None,
        max_schema_bytes: int = MAX_SCHEMA_BYTES,
    ) -> None:
        """Build a table. It takes compiled filters of unchanged subscriptions from `previous`."""
        self._max_schema_bytes = max_schema_bytes
        self.has_costly_checks = False
        """A message's checks took longer than they may on the loop; set by the publisher."""
        self.room_id = record.room_id
        self.organisation_id: OrganisationId = record.organisation_id
        self.plan_version = record.plan_version
        self.expiration_ms = record.expiration_ms
        self.quotas = record.quotas
        self.tracks_completion = record.tracks_completion
        self._transparent = record.transparent
        self._owner_active = record.owner_active
        self._grants: Mapping[OrganisationId | None, Sequence[PublishGrantRecord]] = {
            key: tuple(found)
            for key, found in itertools.groupby(
                sorted(record.grants, key=_grantee), key=lambda grant: grant.organisation_id
            )
        }
        self._subscriptions = record.subscriptions
        self.weight = _weigh(record)
        """About so many bytes of memory."""
        self._versions: dict[str, dict[int, str | None]] = {}
        for version in record.versions:
            self._versions.setdefault(version.name, {})[version.version] = version.schema
        self._routes: dict[tuple[str, int], EventRoute] = {}
        self._schemas: dict[tuple[str, int], PayloadSchema | InvalidError | None] = {}
        self.filters: dict[tuple[SubscriptionId, int], MessageFilter] = {}
        if previous is not None and previous.filters:
            current = {(one.id, one.version) for one in record.subscriptions}
            self.filters = {key: kept for key, kept in previous.filters.items() if key in current}

    def access(self, principal: Principal, now_ms: int) -> PublishAccess | None:
        """Return what a principal may publish here; None: everything.

        NotFoundError: nothing at all, so the room does not exist for it. SuspendedError: the
        room's owner is suspended.
        """
        owns = self.organisation_id == principal.organisation_id
        if owns and not principal.is_restricted:
            return None
        granted = None if owns else self._granted(principal.organisation_id, now_ms)
        if granted == () or not principal.may_use_room(self.room_id):
            raise room_not_found()
        if not self._owner_active:
            raise SuspendedError("the organisation of this room is suspended")
        return PublishAccess(principal, granted, owns=owns, transparent=self._transparent)

    def _granted(self, organisation: OrganisationId, now_ms: int) -> tuple[str, ...] | None:
        granted: list[str] = []
        for grant in (*self._grants.get(organisation, ()), *self._grants.get(None, ())):
            if grant.starts_ms <= now_ms and (grant.until_ms is None or now_ms < grant.until_ms):
                if grant.event_types is None:
                    return None
                granted += grant.event_types
        return tuple(granted)

    def route(self, event_type: str, version: int | None) -> EventRoute:
        """Return the route of a type and version (None: the latest). UnroutableError: no such."""
        versions = self._versions.get(event_type)
        if not versions:
            raise UnroutableError("event_type", f"this room has no event type {event_type!r}")
        if version is None:
            version = max(versions)
        elif version not in versions:
            known = ", ".join(map(str, sorted(versions)[-10:]))
            raise UnroutableError(
                "version", f"{event_type!r} has no version {version}; it has {known}"
            )
        route = self._routes.get((event_type, version))
        if route is None:
            if len(self._routes) >= _MAX_ROUTES:
                self._routes.clear()
            interested = (
                one
                for one in self._subscriptions
                if is_interested(one.event_types, event_type, version)
            )
            route = self._routes[event_type, version] = EventRoute(
                self.room_id, event_type, version, interested
            )
        return route

    def restrict_to(
        self, route: EventRoute, event_type: str, destinations: Iterable[str]
    ) -> EventRoute:
        """Return a route to these destinations only, in its order. Unknown ones are ignored."""
        wanted = set(destinations)
        return EventRoute(
            self.room_id,
            event_type,
            route.version,
            (recipient for text, recipient in route.by_destination.items() if text in wanted),
        )

    def apply_filters(
        self,
        route: EventRoute,
        message: FilterInput,
        on_filter_error: Callable[[SubscriptionId, str], None] | None = None,
        evaluate: Callable[[MessageFilter, FilterInput], FilterResult] = MessageFilter.evaluate,
    ) -> EventRoute:
        """Return a route to the recipients whose filters match, or fail."""
        excluded: list[SubscriptionId] = []
        for recipient in route.filtered:
            result = evaluate(self._compiled_filter(recipient), message)
            if not result.matches:
                excluded.append(recipient.id)
            elif result.error is not None and on_filter_error is not None:
                on_filter_error(recipient.id, result.error)
        return route.excluding(frozenset(excluded)) if excluded else route

    def _compiled_filter(self, recipient: SubscriptionRecord) -> MessageFilter:
        key = (recipient.id, recipient.version)
        found = self.filters.get(key)
        if found is None:
            found = self.filters[key] = load_filter(recipient.filter or "true")
        return found

    def schema(self, event_type: str, version: int) -> PayloadSchema | None:
        """Return the schema of an existing version; None: any payload is valid.

        InvalidError: the schema exceeds a bound, or does not compile.
        """
        key = (event_type, version)
        if key not in self._schemas:
            text = self._versions[event_type][version]
            self._schemas[key] = None if text is None else self._load_schema(text)
        found = self._schemas[key]
        if isinstance(found, InvalidError):
            raise InvalidError(*found.problems)
        return found

    def _load_schema(self, text: str) -> PayloadSchema | InvalidError:
        try:
            return PayloadSchema(
                msgspec.json.decode(text), field=_SCHEMA_FIELD, max_bytes=self._max_schema_bytes
            )
        except InvalidError as exc:
            return InvalidError(
                *(
                    FieldProblem(_SCHEMA_FIELD, f"its schema cannot be used: {problem.message}")
                    for problem in exc.problems
                )
            )
        except (ValueError, RecursionError):
            return InvalidError(
                FieldProblem(_SCHEMA_FIELD, "its schema cannot be used: it is nested too deeply")
            )

    def effective_ttl_ms(self, ttl_ms: int | None) -> int | None:
        """Return the lifetime of a message. A publisher can only shorten the room's expiration."""
        if ttl_ms is None or self.expiration_ms is None:
            return self.expiration_ms if ttl_ms is None else ttl_ms
        return min(ttl_ms, self.expiration_ms)


def is_interested(
    interests: tuple[InterestRecord, ...] | None, event_type: str, version: int
) -> bool:
    """Return whether a subscription with these `event_types` gets a type and version.

    None means all types, and empty none.
    """
    if interests is None:
        return True
    return any(
        matches(interest.name, event_type)
        and (interest.versions is None or version in interest.versions)
        for interest in interests
    )


def _weigh(record: RoutingRecord) -> int:
    schemas = sum(len(one.schema or "") for one in record.versions)
    filters = sum(len(one.filter or "") for one in record.subscriptions)
    entries = len(record.versions) + len(record.subscriptions) + 1
    return schemas + filters + _ENTRY_BYTES * entries


def room_not_found() -> NotFoundError:
    """Build the error for a room that does not exist, or not for this publisher."""
    return NotFoundError("there is no such room")


def _grantee(grant: PublishGrantRecord) -> str:
    return grant.organisation_id or ""
