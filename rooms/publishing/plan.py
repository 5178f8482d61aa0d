"""A room's plan: which subscriptions get a message of a type and version. Pure; made of one look at the room."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId
from rooms.domain.names import destination
from rooms.domain.states import SubscriptionType
from rooms.errors import FieldProblem, InvalidError
from rooms.publishing.filter import Judgement, MessageFilter, Subject, kept_filter
from rooms.publishing.schemas import MAX_SCHEMA_BYTES, PayloadSchema
from rooms.storage import arrays
from rooms.storage.plans import InterestRecord, PlanRecord, SubscriptionRecord
from rooms.storage.submission import RouteRows

_MOST_ROUTES: Final = 1000
_MOST_PARTS: Final = 64
_AT: Final = "event_type"
_encode: Final = msgspec.json.encode


class UnroutableError(ValueError):
    """The room has no such event type or version; `field` is the one that is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Route:
    """Where messages of one event type and version go, and everything about it that can be made beforehand."""

    __slots__ = (
        "_crowded", "_event_type", "_holds", "_parts", "_room", "by_destination", "filtered", "pulls", "pushes", "recipients", "rows", "told",
        "version",
    )  # fmt: skip

    def __init__(self, room: RoomId, event_type: str, version: int, recipients: Iterable[SubscriptionRecord]) -> None:
        self._room, self._event_type = room, event_type
        self._parts: dict[frozenset[SubscriptionId], Route] = {}
        self._crowded: frozenset[SubscriptionId] = frozenset()
        self._holds = b""
        self.version = version
        self.recipients = tuple(recipients)
        self.by_destination: Mapping[str, SubscriptionRecord] = {
            destination(room, recipient.id): recipient for recipient in self.recipients
        }
        self.told = b',"destinations":' + _encode(list(self.by_destination)) + b"}"
        """How an answer ends: the rest of a JSON object."""
        self.pushes = any(recipient.type is SubscriptionType.PUSH for recipient in self.recipients)
        self.pulls: frozenset[SubscriptionId] = frozenset(
            recipient.id for recipient in self.recipients if recipient.type is SubscriptionType.PULL
        )
        self.rows = RouteRows(
            room,
            event_type,
            version,
            [(recipient.id, recipient.type, recipient.version) for recipient in self.recipients],
            [recipient.ordered for recipient in self.recipients] if any(one.ordered for one in self.recipients) else (),
        )
        self.filtered = tuple(recipient for recipient in self.recipients if recipient.filter is not None)

    def holds(self, crowded: frozenset[SubscriptionId]) -> bytes:
        """For each recipient whether what it gets is held at once, packed elements; empty where none of them is crowded."""
        if crowded is not self._crowded:
            self._crowded = crowded
            held = [one.id in crowded and one.type is SubscriptionType.PUSH for one in self.recipients]
            self._holds = b"".join([arrays.TRUE if yes else arrays.FALSE for yes in held]) if any(held) else b""
        return self._holds

    def without(self, refused: frozenset[SubscriptionId]) -> "Route":
        """The part of this route that leaves these recipients out. The parts that come often are kept."""
        part = self._parts.get(refused)
        if part is None:
            if len(self._parts) >= _MOST_PARTS:
                self._parts.clear()
            rest = (recipient for recipient in self.recipients if recipient.id not in refused)
            part = self._parts[refused] = Route(self._room, self._event_type, self.version, rest)
        return part


class RoomPlan:
    """One room at one plan version.

    Paused and disabled subscriptions are in it: their deliveries are made and held later. Deleted ones are not. Routes
    and schemas are made when first asked for and kept, as a room may have thousands that nobody uses.
    """

    def __init__(
        self, record: PlanRecord, *, before: "RoomPlan | None" = None, max_schema_bytes: int = MAX_SCHEMA_BYTES
    ) -> None:
        """`before`: an older plan of the room, whose compiled filters are kept where their subscription is the same."""
        self._max_schema_bytes = max_schema_bytes
        self.room_id = record.room_id
        self.organisation_id: OrganisationId = record.organisation_id
        self.plan_version = record.plan_version
        self.expiration_ms = record.expiration_ms
        self._subscriptions = record.subscriptions
        self._versions: dict[str, dict[int, str | None]] = {}
        for version in record.versions:
            self._versions.setdefault(version.name, {})[version.version] = version.schema
        self._routes: dict[tuple[str, int], Route] = {}
        self._schemas: dict[tuple[str, int], PayloadSchema | InvalidError | None] = {}
        self.filters: dict[tuple[SubscriptionId, int], MessageFilter] = {}
        if before is not None and before.filters:
            current = {(one.id, one.version) for one in record.subscriptions}
            self.filters = {key: kept for key, kept in before.filters.items() if key in current}

    def route(self, event_type: str, version: int | None) -> Route:
        """The route of a type and version (None: the latest there is). UnroutableError where there is none."""
        versions = self._versions.get(event_type)
        if not versions:
            raise UnroutableError("event_type", f"this room has no event type {event_type!r}")
        if version is None:
            version = max(versions)
        elif version not in versions:
            known = ", ".join(map(str, sorted(versions)[-10:]))
            raise UnroutableError("version", f"{event_type!r} has no version {version}; it has {known}")
        route = self._routes.get((event_type, version))
        if route is None:
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.clear()
            wanting = (one for one in self._subscriptions if wants(one.event_types, event_type, version))
            route = self._routes[event_type, version] = Route(self.room_id, event_type, version, wanting)
        return route

    def only(self, route: Route, event_type: str, chosen: Iterable[str]) -> Route:
        """The part of a route that goes to the chosen destinations, in the route's order; the others do not count."""
        wanted = set(chosen)
        return Route(
            self.room_id,
            event_type,
            route.version,
            (recipient for text, recipient in route.by_destination.items() if text in wanted),
        )

    def sieve(
        self,
        route: Route,
        subject: Subject,
        failed: Callable[[SubscriptionId, str], None] | None = None,
        judge: Callable[[MessageFilter, Subject], Judgement] = MessageFilter.judge,
    ) -> Route:
        """The part of a route whose filters let the message pass; `failed` is called for filters that could not say."""
        refused: list[SubscriptionId] = []
        for recipient in route.filtered:
            judgement = judge(self._filter(recipient), subject)
            if not judgement.matches:
                refused.append(recipient.id)
            elif judgement.error is not None and failed is not None:
                failed(recipient.id, judgement.error)
        return route.without(frozenset(refused)) if refused else route

    def _filter(self, recipient: SubscriptionRecord) -> MessageFilter:
        key = (recipient.id, recipient.version)
        found = self.filters.get(key)
        if found is None:
            found = self.filters[key] = kept_filter(recipient.filter or "true")
        return found

    def schema(self, event_type: str, version: int) -> PayloadSchema | None:
        """The schema of a version that `route` found; None where any payload fits.

        InvalidError: it exceeds a bound, or does not compile; that is found once.
        """
        key = (event_type, version)
        if key not in self._schemas:
            text = self._versions[event_type][version]
            self._schemas[key] = None if text is None else self._kept_schema(text)
        found = self._schemas[key]
        if isinstance(found, InvalidError):
            raise InvalidError(*found.problems)
        return found

    def _kept_schema(self, text: str) -> PayloadSchema | InvalidError:
        try:
            return PayloadSchema(msgspec.json.decode(text), field=_AT, max_bytes=self._max_schema_bytes)
        except InvalidError as exc:
            return InvalidError(
                *(FieldProblem(_AT, f"its schema cannot be used: {problem.message}") for problem in exc.problems)
            )
        except (ValueError, RecursionError):
            return InvalidError(FieldProblem(_AT, "its schema cannot be used: it is nested too deeply"))

    def life_ms(self, ttl_ms: int | None) -> int | None:
        """How long a message lives: what its publisher says may shorten the room's expiration, never lengthen it."""
        if ttl_ms is None or self.expiration_ms is None:
            return self.expiration_ms if ttl_ms is None else ttl_ms
        return min(ttl_ms, self.expiration_ms)


def wants(interests: tuple[InterestRecord, ...] | None, event_type: str, version: int) -> bool:
    """Whether a subscription with these `event_types` gets the type and version. None: all; empty: none."""
    if interests is None:
        return True
    return any(
        interest.name == event_type and (interest.versions is None or version in interest.versions)
        for interest in interests
    )
