"""Route messages: which subscriptions of a room get an event type and version.

A `RoutingTable` holds one version of a room's routing.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter_ns
from typing import Final

from rooms.db.publish.routing import (
    InterestRecord,
    PublishGrantRecord,
    RoutingRecord,
    SubscriptionRecord,
)
from rooms.domain.event_type_pattern import covers, matches
from rooms.domain.ids import OrganisationId, SubscriptionId
from rooms.domain.message import MAX_DELAY_MS, DeliverySchedule
from rooms.domain.principal import Principal
from rooms.domain.similar_names import suggestion
from rooms.errors import (
    FieldProblem,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    SuspendedError,
)
from rooms.publishing.cel_filter import (
    FilterInput,
    FilterResult,
    MessageFilter,
    SandboxedFilter,
    load_filter,
)
from rooms.publishing.event_route import RECIPIENT_BYTES, EventRoute
from rooms.publishing.json_schema import MAX_SCHEMA_BYTES, PayloadSchema
from rooms.publishing.number_bounds import decode_json
from rooms.publishing.request import MessageRequest

_ENTRY_BYTES: Final = 512
"""About so many bytes a version or subscription takes beside its schema or filter."""
MAX_ROUTE_BYTES: Final = 64 * 1024 * 1024
"""About so many bytes of routes a table keeps, or four times those of a route to all, if more."""
_MAX_SEARCHED: Final = 50
"""Of so many event types at most, the one nearest to an unknown one is looked for, on the loop."""
_SCHEMA_FIELD: Final = "event_type"

FILTER_BYTES: Final = 512
"""About so many bytes a compiled filter takes for each of its characters."""
MAX_COMPILED_CHARACTERS: Final = 256 * 1024
"""Filters of so many characters are compiled of a room; the sandbox evaluates the others.

They take about 128 MiB in each process.
"""

CompiledFilters = Mapping[tuple[SubscriptionId, int], MessageFilter]
"""Filters by the subscription and its version."""


class UnroutableError(ValueError):
    """Report an event type or version that the room does not have, by `field`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


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

    def may_publish(self, event_type: str) -> bool:
        """Return whether the grants and the key include an event type."""
        return covers(self._granted, event_type) and covers(self._key, event_type)

    def may_name(self, recipient: SubscriptionRecord) -> bool:
        """Return whether a publish may name a subscription as its destination."""
        return self.sees_all or recipient.organisation_id == self.organisation

    def scope(self, text: str) -> str:
        """Return a publisher's own key or id as it is stored: apart from those of all others.

        An idempotency key has no spaces, so that the owner's keys are never equal to it.
        """
        return text if self.owns else f"{self.organisation} {text}"


class TableWeight:
    """Count about how many bytes a routing table takes: what it keeps, and routes built from it.

    `on_growth` is called with the bytes that are added, or (negative) freed; None: with none.
    """

    __slots__ = ("_kept_bytes", "bytes", "on_growth")

    def __init__(self, record_bytes: int) -> None:
        self._kept_bytes = self.bytes = record_bytes
        self.on_growth: Callable[[int], None] | None = None

    @property
    def route_bytes(self) -> int:
        """Return the bytes of routes, which the table may forget."""
        return self.bytes - self._kept_bytes

    def add(self, count: int) -> None:
        """Count the bytes of a route, or of what is built from it."""
        self.bytes += count
        if self.on_growth is not None:
            self.on_growth(count)

    def keep(self, count: int) -> None:
        """Count the bytes of something that is kept as long as the table."""
        self._kept_bytes += count
        self.add(count)

    def forget_routes(self) -> None:
        """Count only what is kept, because the table has no routes any more."""
        self.add(-self.route_bytes)


class RoutingTable:
    """Route the messages of a room, at one version of its routing.

    It includes paused and disabled subscriptions, whose deliveries are created and held later, and
    no deleted ones. Routes and schemas are built on first use, since most may be unused.
    """

    def __init__(
        self,
        record: RoutingRecord,
        *,
        compiled: CompiledFilters | None = None,
        max_schema_bytes: int = MAX_SCHEMA_BYTES,
    ) -> None:
        """Build a table. It takes filters of unchanged subscriptions from those `compiled`."""
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
        self._subscribe_grants = record.subscribe_grants
        self._listed = record.listed
        self._subscriptions = record.subscriptions
        self.weight = TableWeight(_weigh(record))
        self._max_route_bytes = max(
            MAX_ROUTE_BYTES, 4 * RECIPIENT_BYTES * len(record.subscriptions)
        )
        self._versions: dict[str, dict[int, str | None]] = {}
        for version in record.versions:
            self._versions.setdefault(version.name, {})[version.version] = version.schema
        self._routes: dict[tuple[str, int], EventRoute] = {}
        self._schemas: dict[tuple[str, int], PayloadSchema | InvalidError | None] = {}
        self.loaded_schemas = 0
        """Schemas that were built so far, each of which may take tens of milliseconds."""
        self.filters: dict[tuple[SubscriptionId, int], MessageFilter] = {}
        self._compiled_characters = 0
        if compiled:
            current = {(one.id, one.version) for one in record.subscriptions}
            for key, kept in compiled.items():
                # One that was left to the sandbox may be compiled now.
                if key in current and not isinstance(kept, SandboxedFilter):
                    self._add_filter(key, kept)

    def access(self, principal: Principal, now_ms: int) -> PublishAccess | None:
        """Return what a principal may publish here; None: everything.

        ForbiddenError: nothing at all. NotFoundError: neither does the room exist for it.
        SuspendedError: the room's owner is suspended.
        """
        owns = self.organisation_id == principal.organisation_id
        if owns and not principal.is_restricted:
            return None
        granted = None if owns else self._granted(principal.organisation_id, now_ms)
        if not principal.may_use_room(self.room_id):
            raise room_not_found()
        if granted == ():
            if not self._is_known_to(principal.organisation_id, now_ms):
                raise room_not_found()
            raise ForbiddenError("the room's owner did not grant publishing to your organisation")
        if not self._owner_active:
            raise SuspendedError("the organisation of this room is suspended")
        return PublishAccess(principal, granted, owns=owns, transparent=self._transparent)

    def _granted(self, organisation: OrganisationId, now_ms: int) -> tuple[str, ...] | None:
        granted: list[str] = []
        for grant in (*self._grants.get(organisation, ()), *self._grants.get(None, ())):
            if grant.is_valid(now_ms):
                if grant.event_types is None:
                    return None
                granted += grant.event_types
        return tuple(granted)

    def _is_known_to(self, organisation: OrganisationId, now_ms: int) -> bool:
        """Return whether the room exists for an organisation that may not publish here.

        `rooms.db.catalog.access` has the same rule. What waits for approval in a private room is
        left out, since routing does not read it: the answer is then that there is no room.
        """
        return (
            self._listed
            or any(
                grant.organisation_id in {None, organisation} and grant.is_valid(now_ms)
                for grant in self._subscribe_grants
            )
            or any(one.organisation_id == organisation for one in self._subscriptions)
        )

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
        if self.weight.route_bytes > self._max_route_bytes:
            self._routes.clear()
            self.weight.forget_routes()
        route = self._routes.get((event_type, version))
        if route is None:
            interested = (
                one
                for one in self._subscriptions
                if is_interested(one.event_types, event_type, version)
            )
            route = self._routes[event_type, version] = EventRoute(
                self.room_id, event_type, version, interested, self.weight.add
            )
        return route

    def event_type_advice(self, event_type: str, access: PublishAccess | None) -> str:
        """Return what ends the error for an unknown type: the nearest that `access` may publish."""
        names = list(self._versions) if len(self._versions) <= _MAX_SEARCHED else []
        known = [one for one in names if access is None or access.may_publish(one)]
        listed = f"GET /v1/rooms/{self.room_id}/event-types lists them"
        return f"{suggestion(event_type, known)}; {listed}"

    def prepare_filters(self, route: EventRoute, size: int, spend_ns: int) -> bool:
        """Compile the next filters of a route, and bound what they cost for payloads of a size.

        Return whether all are prepared. That of one takes up to 10 ms. At least one is prepared,
        and more within `spend_ns`.
        """
        magnitude = size.bit_length()
        prepared = route.prepared_filters.get(magnitude, 0)
        if prepared < len(route.filtered):
            ends_ns = perf_counter_ns() + spend_ns
            for recipient in itertools.islice(route.filtered, prepared, None):
                self._compiled_filter(recipient).cost_ns(size)
                prepared += 1
                if perf_counter_ns() >= ends_ns:
                    break
            route.prepared_filters[magnitude] = prepared
        return prepared == len(route.filtered)

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
            text = recipient.filter or "true"
            fits = self._compiled_characters + len(text) <= MAX_COMPILED_CHARACTERS
            found = load_filter(text) if fits else SandboxedFilter(text)
            self._add_filter(key, found)
        return found

    def _add_filter(self, key: tuple[SubscriptionId, int], added: MessageFilter) -> None:
        self.filters[key] = added
        if not isinstance(added, SandboxedFilter):
            self._compiled_characters += len(added.expression)
            self.weight.keep(FILTER_BYTES * len(added.expression))

    def schema(self, event_type: str, version: int) -> PayloadSchema | None:
        """Return the schema of an existing version; None: any payload is valid.

        InvalidError: the schema exceeds a bound, or does not compile.
        """
        key = (event_type, version)
        if key not in self._schemas:
            text = self._versions[event_type][version]
            if text is None:
                self._schemas[key] = None
            else:
                self.loaded_schemas += 1
                self._schemas[key] = self._load_schema(text)
        found = self._schemas[key]
        if isinstance(found, InvalidError):
            raise InvalidError(*found.problems)
        return found

    def _load_schema(self, text: str) -> PayloadSchema | InvalidError:
        # PostgreSQL adds spaces, at most as many bytes again. What is longer is not decoded: an
        # earlier version stored schemas whose numbers are fifty times as long as they were sent.
        if len(text) > 2 * self._max_schema_bytes:
            return InvalidError(
                FieldProblem(
                    _SCHEMA_FIELD,
                    "its schema cannot be used: it has more than"
                    f" {self._max_schema_bytes:,} bytes; make another version",
                )
            )
        try:
            return PayloadSchema(
                decode_json(text.encode()), field=_SCHEMA_FIELD, max_bytes=self._max_schema_bytes
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


def routing_problems(
    error: UnroutableError | InvalidError, prefix: str, advice: str = ""
) -> Iterator[FieldProblem]:
    """Name the fields for which a message has no route; `advice` ends the text of the first."""
    if isinstance(error, UnroutableError):
        yield FieldProblem(prefix + error.field, f"{error}{advice}")
    else:
        yield from (FieldProblem(prefix + one.field, one.message) for one in error.problems)


def delivery_schedule(message: MessageRequest) -> DeliverySchedule:
    """Return when a message is due."""
    return DeliverySchedule.from_request(delay_ms=message.delay_ms, deliver_at=message.deliver_at)


def message_problems(
    route: EventRoute,
    message: MessageRequest,
    prefix: str,
    now_ms: int,
    access: PublishAccess | None,
) -> Iterator[FieldProblem]:
    """Name what a room does not accept beside the payload."""
    if (
        message.deliver_at is not None
        and delivery_schedule(message).delay_from_ms(now_ms) > MAX_DELAY_MS
    ):
        yield FieldProblem(f"{prefix}deliver_at", "is more than ten years ahead")
    for index, text in enumerate(message.destinations or ()):
        recipient = route.by_destination.get(text)
        if recipient is None or (access is not None and not access.may_name(recipient)):
            field = f"{prefix}destinations[{index}]"
            yield FieldProblem(field, "unknown destination for this event type and version")
