"""What a subscription is made of on the wire, and the rules that no single field can tell (rows A2, A3)."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from rooms.domain.headers import header_problems
from rooms.domain.lane import LANE_SETTINGS
from rooms.domain.names import MAX_NAME, NAME_PATTERN, check_name, destination
from rooms.domain.room import Interest, Subscription
from rooms.domain.states import SubscriptionStatus, SubscriptionType
from rooms.domain.target import MAX_URL, Target
from rooms.errors import FieldProblem, InvalidError
from rooms.ports import Gate
from rooms.publishing.filter import MAX_EXPRESSION, MessageFilter
from rooms.rest.lane_fields import LaneChange, LaneNew, lane_out, lane_problems
from rooms.rest.native_fields import Login, Native, native_problems
from rooms.rest.rooms import Attempts, DelayMs, Multiplier
from rooms.storage.subscriptions import to_json

_MAX_INT4: Final = 0x7FFF_FFFF
_GONE: Final = 410
_HIDDEN: Final = "***"

Name = Annotated[str, Meta(pattern=NAME_PATTERN, min_length=1, max_length=MAX_NAME, description="Unique in the room.")]
PushUrl = Annotated[str, Meta(min_length=1, max_length=MAX_URL, description="Where to call: http or https.")]
Status = Annotated[int, Meta(ge=100, le=599)]
Terminal = Annotated[list[Status], Meta(max_length=500, description="Statuses that sideline at once. 410 always does.")]
Ignorable = Annotated[list[Status], Meta(max_length=500, description="Statuses that drop the delivery.")]
MaxReceives = Annotated[
    int, Meta(ge=1, le=_MAX_INT4, description="PULL: leases before it is sidelined; null: no limit.")
]
Headers = Annotated[dict[str, str], Meta(description="Sent with each call.")]

Filter = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_EXPRESSION,
        description="A CEL expression over `payload`, `headers` (names in lower case), `event_type`, `event_version`, "
        "`ordering_key` and `priority`; only messages for which it is true are delivered. null: all of them.",
    ),
]


class InterestIn(Struct, forbid_unknown_fields=True, kw_only=True):
    """An event type that is wanted; without `versions` in every version."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    versions: Annotated[list[Annotated[int, Meta(ge=1, le=_MAX_INT4)]], Meta(min_length=1, max_length=1000)] | None = (
        None
    )


Interests = Annotated[
    list[InterestIn], Meta(min_length=1, max_length=1000, description="null: every type of the room.")
]


class SubscriptionNew(LaneNew, forbid_unknown_fields=True, kw_only=True):
    """A subscription to make. Everything about calls (`push_url` to `cloud_events`, and how fast they are made) is for PUSH."""

    name: Name
    type: SubscriptionType
    event_types: Interests | None = None
    filter: Filter | None = None
    ordered: bool | None = None
    push_url: PushUrl | None = None
    delivery_delay_ms: DelayMs | None = None
    delivery_delay_multiplier: Multiplier | None = None
    delivery_attempts: Attempts | None = None
    headers: Headers | None = None
    terminal_statuses: Terminal | None = None
    ignorable_statuses: Ignorable | None = None
    cloud_events: bool | None = None
    max_receives: MaxReceives | None = None
    native: Native | None = None


class SubscriptionChange(LaneChange, forbid_unknown_fields=True, kw_only=True):
    """What to change of a subscription; what is left out stays, null sets it back to what a new one has."""

    name: Name | UnsetType = UNSET
    event_types: Interests | UnsetType | None = UNSET
    filter: Filter | UnsetType | None = UNSET
    ordered: bool | UnsetType | None = UNSET
    push_url: PushUrl | UnsetType | None = UNSET
    delivery_delay_ms: DelayMs | UnsetType | None = UNSET
    delivery_delay_multiplier: Multiplier | UnsetType | None = UNSET
    delivery_attempts: Attempts | UnsetType | None = UNSET
    headers: Headers | UnsetType | None = UNSET
    terminal_statuses: Terminal | UnsetType | None = UNSET
    ignorable_statuses: Ignorable | UnsetType | None = UNSET
    cloud_events: bool | UnsetType | None = UNSET
    max_receives: MaxReceives | UnsetType | None = UNSET


class InterestOut(Struct, kw_only=True, omit_defaults=True):
    """An event type that is wanted, in every version where none are named."""

    name: str
    versions: list[int] | None = None


class SubscriptionOut(Struct, kw_only=True):
    """A subscription. Overrides that are null follow the room."""

    id: str
    room_id: int
    name: str
    type: SubscriptionType
    destination: str
    event_types: list[InterestOut] | None
    filter: str | None
    ordered: bool | None
    push_url: str | None
    delivery_delay_ms: int | None
    delivery_delay_multiplier: float | None
    delivery_attempts: int | None
    headers: dict[str, str]
    terminal_statuses: list[int]
    ignorable_statuses: list[int]
    timeout_ms: int | None
    cloud_events: bool
    max_receives: int | None
    native: bool
    max_concurrency: int | None
    rate_per_s: float | None
    rate_burst: int | None
    circuit_failures: int | None
    circuit_window_ms: int | None
    circuit_open_ms: int | None
    drain_per_s: float | None
    disable_after_ms: int | None
    operational: bool
    status: SubscriptionStatus
    status_reason: str | None
    status_since: datetime
    created_at: datetime
    updated_at: datetime


class SubscriptionMade(SubscriptionOut, kw_only=True):
    """A new subscription; `secret` (PUSH) and the password in `login` (native) are shown this once."""

    secret: str | None
    login: Login | None = None


def given_fields(data: SubscriptionNew | SubscriptionChange) -> dict[str, Any]:
    """The fields that were given, by name."""
    found = {name: getattr(data, name) for name in data.__struct_fields__}
    return {name: value for name, value in found.items() if value is not UNSET}


def to_columns(
    fields: Mapping[str, Any],
    *,
    kind: SubscriptionType,
    now: Subscription | None,
    types: Mapping[str, frozenset[int]],
    check_target: Callable[[Target], None],
    gate: Gate | None = None,
) -> dict[str, Any]:
    """The column values that `fields` stand for, in a new subscription or in `now`. InvalidError names every problem.

    `types`: the versions of each event type of the room; `gate`: where native subscriptions get their users.
    """
    problems = [
        *_name_problems(fields),
        *_kind_problems(fields, kind, new=now is None),
        *native_problems(fields, kind, now, gate),
        *_url_problems(fields.get("push_url"), check_target),
        *_interest_problems(fields.get("event_types"), types),
        *_filter_problems(fields.get("filter")),
        *_status_problems(fields, now),
        *lane_problems(fields),
        *(
            FieldProblem(f"headers.{name}" if name else "headers", message)
            for name, message in header_problems(fields.get("headers") or {})
        ),
    ]
    if problems:
        raise InvalidError(*problems)
    columns = {name: value for name, value in fields.items() if name != "native"}
    # What is null on the wire has a value of its own in these columns.
    for name, nothing in (
        ("headers", {}),
        ("terminal_statuses", []),
        ("ignorable_statuses", []),
        ("cloud_events", False),
    ):
        if name in columns and columns[name] is None:
            columns[name] = nothing
    for name in ("terminal_statuses", "ignorable_statuses"):
        if name in columns:
            columns[name] = sorted(set(columns[name]))
    if "event_types" in columns:
        columns["event_types"] = to_json(_interests(columns["event_types"]))
    return columns


def to_out(found: Subscription, *, show_headers: bool) -> dict[str, Any]:
    """The fields of SubscriptionOut. Values of headers, which may be secrets, only for those who may change them."""
    out: dict[str, Any] = {
        name: getattr(found, name)
        for name in SubscriptionOut.__struct_fields__
        if name != "destination" and name not in LANE_SETTINGS
    }
    out |= lane_out(found.lane)
    out["destination"] = destination(found.room_id, found.id)
    out["terminal_statuses"] = sorted(found.terminal_statuses)
    out["ignorable_statuses"] = sorted(found.ignorable_statuses)
    out["headers"] = dict(found.headers) if show_headers else dict.fromkeys(found.headers, _HIDDEN)
    if found.event_types is not None:
        out["event_types"] = [msgspec.convert(entry, InterestOut) for entry in to_json(found.event_types) or ()]
    return out


def _interests(found: list[InterestIn] | None) -> list[Interest] | None:
    if found is None:
        return None
    return [
        Interest(name=entry.name, versions=None if entry.versions is None else frozenset(entry.versions))
        for entry in found
    ]


def _name_problems(fields: Mapping[str, Any]) -> Iterator[FieldProblem]:
    if "name" in fields:
        try:
            check_name(fields["name"])
        except ValueError as exc:
            yield FieldProblem("name", str(exc))


_PUSH_ONLY: Final = (
    "delivery_delay_ms",
    "delivery_delay_multiplier",
    "delivery_attempts",
    "headers",
    "terminal_statuses",
    "ignorable_statuses",
    "cloud_events",
    *LANE_SETTINGS,
)


def _kind_problems(fields: Mapping[str, Any], kind: SubscriptionType, *, new: bool) -> Iterator[FieldProblem]:
    url = fields.get("push_url")
    if kind is SubscriptionType.PUSH:
        if url is None and (new or "push_url" in fields):
            yield FieldProblem("push_url", "a PUSH subscription needs one")
        if fields.get("max_receives") is not None:
            yield FieldProblem("max_receives", "is for PULL subscriptions; PUSH counts delivery_attempts")
        return
    if url is not None:
        yield FieldProblem("push_url", "a PULL subscription has none")
    for name in _PUSH_ONLY:
        if fields.get(name):
            yield FieldProblem(name, "is for PUSH subscriptions")


def _url_problems(url: str | None, check_target: Callable[[Target], None]) -> Iterator[FieldProblem]:
    if url is not None:
        try:
            check_target(Target.parse(url))
        except ValueError as exc:
            yield FieldProblem("push_url", str(exc))


def _interest_problems(found: list[InterestIn] | None, types: Mapping[str, frozenset[int]]) -> Iterator[FieldProblem]:
    seen: set[str] = set()
    for index, entry in enumerate(found or ()):
        at = f"event_types[{index}]"
        if entry.name not in types:
            yield FieldProblem(f"{at}.name", "the room has no such event type")
        elif entry.name in seen:
            yield FieldProblem(f"{at}.name", "is there twice")
        else:
            for place, version in enumerate(entry.versions or ()):
                if version not in types[entry.name]:
                    yield FieldProblem(f"{at}.versions[{place}]", f"{entry.name} has no version {version}")
        seen.add(entry.name)


def _filter_problems(expression: str | None) -> Iterator[FieldProblem]:
    if expression is not None:
        try:
            MessageFilter(expression)
        except InvalidError as exc:
            yield from exc.problems


def _status_problems(fields: Mapping[str, Any], now: Subscription | None) -> Iterator[FieldProblem]:
    ignorable = fields.get("ignorable_statuses", now.ignorable_statuses if now else ())
    terminal = fields.get("terminal_statuses", now.terminal_statuses if now else ())
    both = sorted(set(ignorable or ()) & set(terminal or ()))
    if both:
        told = ", ".join(map(str, both))
        name = "ignorable_statuses" if "ignorable_statuses" in fields else "terminal_statuses"
        yield FieldProblem(name, f"{told}: a status is either terminal or ignorable")
    if _GONE in (fields.get("ignorable_statuses") or ()):
        yield FieldProblem("ignorable_statuses", "410 always means that the endpoint is gone for good")
