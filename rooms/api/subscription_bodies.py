"""Define the bodies of subscriptions, and the rules across several fields."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from itertools import chain, islice
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from rooms.api.native_credentials import BrokerCredentials, native_problems
from rooms.api.params import time_problems
from rooms.api.subscription_fields import (
    LIFETIME,
    RETRY_OVERRIDES,
    CreateOverrides,
    Interests,
    PushHeaders,
    UpdateOverrides,
    hidden_headers,
    interest_problems,
    lifetime_problems,
    to_interests,
)
from rooms.api.throttle_bodies import (
    throttle_fields,
    throttle_problems,
)
from rooms.db.catalog.organisations import ListedOrganisation
from rooms.db.catalog.subscription_states import target_of, visible_proposal
from rooms.db.catalog.subscriptions import interests_to_json
from rooms.domain.names import MAX_NAME, NAME_PATTERN, check_name
from rooms.domain.push_url import MAX_URL, PushUrl
from rooms.domain.room import Subscription, destination_name, header_problems
from rooms.domain.state_machine import ENDED_STATUSES, SubscriptionStatus, SubscriptionType
from rooms.domain.subscription_status import Suspension
from rooms.domain.throttle import THROTTLE_SETTINGS
from rooms.errors import FieldProblem, InvalidError
from rooms.ports import BrokerUsers
from rooms.publishing.cel_filter import MAX_EXPRESSION, MessageFilter
from rooms.publishing.request import MAX_PROBLEMS

Native = Annotated[
    bool,
    Meta(
        description="PULL, where the broker is not PostgreSQL: its clients (STOMP, AMQP, JMS) "
        "read the queue with their own user. It cannot be changed."
    ),
]
_MAX_INT4: Final = 0x7FFF_FFFF
_HTTP_GONE: Final = 410

Name = Annotated[
    str,
    Meta(
        pattern=NAME_PATTERN, min_length=1, max_length=MAX_NAME, description="Unique in the room."
    ),
]
PushUrlText = Annotated[
    str, Meta(min_length=1, max_length=MAX_URL, description="The webhook's URL: http or https.")
]
Status = Annotated[int, Meta(ge=100, le=599)]
TerminalStatuses = Annotated[
    list[Status],
    Meta(max_length=500, description="Statuses that sideline at once. 410 always does."),
]
IgnorableStatuses = Annotated[
    list[Status], Meta(max_length=500, description="Statuses that drop the delivery.")
]
MaxReceives = Annotated[
    int,
    Meta(ge=1, le=_MAX_INT4, description="PULL: leases before it is sidelined; null: no limit."),
]
FilterExpression = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_EXPRESSION,
        description="A CEL expression over `payload`, `headers` (names in lower case), "
        "`event_type`, `event_version`, `ordering_key` and `priority`; messages are only "
        "delivered where it is true. null: all of them.",
    ),
]


EventItemField = Annotated[
    bool,
    Meta(
        description="PUSH: the body is GovStack's EventItem `{id, sequence, publisherId, eventType,"
        " event}`, with the payload as `event`."
    ),
]
AckByNextPull = Annotated[
    bool,
    Meta(
        description="PULL: a pull by `/rooms/{memberId}/{roomId}/pull` acknowledges what the "
        "last one with the same key and application returned. Pulls of `/v1` and `/r1` never do."
    ),
]
Operational = Annotated[
    bool,
    Meta(
        description="Receives operational events instead of messages: the room's owner those of "
        "the whole room, another organisation those about its own subscriptions. An organisation "
        "has at most one in a room."
    ),
]


class CreateSubscription(CreateOverrides, forbid_unknown_fields=True, kw_only=True):
    """Create a subscription.

    Fields about calls (`push_url` to `cloud_events`, throttling) are for PUSH.
    """

    name: Name
    type: SubscriptionType
    event_types: Interests | None = None
    filter: FilterExpression | None = None
    ordered: bool | None = None
    push_url: PushUrlText | None = None
    headers: PushHeaders | None = None
    terminal_statuses: TerminalStatuses | None = None
    ignorable_statuses: IgnorableStatuses | None = None
    cloud_events: bool | None = None
    event_item: EventItemField | None = None
    max_receives: MaxReceives | None = None
    ack_by_next_pull: AckByNextPull | None = None
    native: Native | None = None
    operational: Operational = False
    backfill: Annotated[
        bool,
        Meta(
            description="In another organisation's room: on approval, also deliver what was "
            "published since this request."
        ),
    ] = False
    start_at: (
        Annotated[
            datetime,
            Meta(
                tz=True,
                description="Also deliver what was published from this past time on, by a replay: "
                "what retention keeps and your organisation was entitled to. It comes in no order. "
                "Where the owner must approve, it comes on approval.",
            ),
        ]
        | None
    ) = None


class UpdateSubscription(UpdateOverrides, forbid_unknown_fields=True, kw_only=True):
    """Change the given fields of a subscription; null restores the default of a new one.

    `version`: only if it is still this one; else 409, and nothing changes.
    """

    version: (
        Annotated[int, Meta(ge=1, le=_MAX_INT4, description="The version that was read.")]
        | UnsetType
    ) = UNSET
    name: Name | UnsetType = UNSET
    event_types: Interests | UnsetType | None = UNSET
    filter: FilterExpression | UnsetType | None = UNSET
    ordered: bool | UnsetType | None = UNSET
    push_url: PushUrlText | UnsetType | None = UNSET
    headers: PushHeaders | UnsetType | None = UNSET
    terminal_statuses: TerminalStatuses | UnsetType | None = UNSET
    ignorable_statuses: IgnorableStatuses | UnsetType | None = UNSET
    cloud_events: bool | UnsetType | None = UNSET
    event_item: EventItemField | UnsetType | None = UNSET
    max_receives: MaxReceives | UnsetType | None = UNSET
    ack_by_next_pull: AckByNextPull | UnsetType | None = UNSET


class InterestResponse(Struct, kw_only=True, omit_defaults=True):
    """Describe a selected event type, in every version where none are named."""

    name: str
    versions: list[int] | None = None


class SubscriptionResponse(Struct, kw_only=True):
    """Describe a subscription. Overrides that are null follow the room.

    To the room's owner, what is the subscriber's own is null or empty: `push_url`, `filter`,
    headers and overrides. `target` is the scheme and host of the webhook. `proposal`: changes that
    wait for the owner's approval, which names the `version` that it saw. This grows with each
    change of the subscription, its status, its proposal and its room's defaults for deliveries. It
    does not when its endpoint fails or recovers.
    """

    id: str
    room_id: int
    organisation_id: str
    organisation: str | None
    member_id: str | None
    application: str | None
    version: int
    target: str | None
    filtered: bool
    own_status: SubscriptionStatus | None
    suspended_by: list[Suspension]
    proposal: dict[str, Any] | None
    backfill: bool
    start_at: datetime | None
    approved_at: datetime | None
    name: str
    type: SubscriptionType
    destination: str
    event_types: list[InterestResponse] | None
    filter: str | None
    ordered: bool | None
    push_url: str | None
    delivery_delay_ms: int | None
    delivery_delay_multiplier: float | None
    delivery_attempts: int | None
    delivery_max_delay_ms: int | None
    delivery_jitter: float | None
    message_expiration_ms: int | None
    headers: dict[str, str]
    terminal_statuses: list[int]
    ignorable_statuses: list[int]
    timeout_ms: int | None
    cloud_events: bool
    event_item: bool
    max_receives: int | None
    ack_by_next_pull: bool
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


class CreatedSubscription(SubscriptionResponse, kw_only=True):
    """Describe a new subscription; its `secret` (PUSH) or password (native) is only shown once."""

    secret: str | None
    login: BrokerCredentials | None = None


def provided_fields(data: CreateSubscription | UpdateSubscription) -> dict[str, Any]:
    """Return the given fields by name."""
    found = {name: getattr(data, name) for name in data.__struct_fields__}
    return {name: value for name, value in found.items() if value is not UNSET}


def to_columns(
    fields: Mapping[str, Any],
    *,
    subscription_type: SubscriptionType,
    current: Subscription | None,
    types: Mapping[str, frozenset[int]],
    room_expiration_ms: int | None,
    check_push_url: Callable[[PushUrl], None],
    broker_users: BrokerUsers | None = None,
    now: datetime | None = None,
) -> dict[str, Any]:
    """Return the column values of `fields`, for a new subscription or for `current`.

    `types`: the versions of each event type of the room. `room_expiration_ms`: the lifetime of its
    messages; None or 0: unlimited. `now`: for a new one. InvalidError names every problem, as far
    as an answer goes.
    """
    found = chain(
        _name_problems(fields),
        _type_problems(fields, subscription_type, new=current is None),
        native_problems(fields, subscription_type, current, broker_users),
        _url_problems(fields.get("push_url"), check_push_url),
        interest_problems(fields.get("event_types"), types),
        _operational_problems(fields, current),
        _start_problems(fields.get("start_at"), now),
        _filter_problems(fields.get("filter")),
        _status_problems(fields, current),
        lifetime_problems(fields.get(LIFETIME), room_expiration_ms),
        throttle_problems(fields),
        (
            FieldProblem(f"headers.{name}" if name else "headers", message)
            for name, message in header_problems(fields.get("headers") or {})
        ),
    )
    # A body may name a million versions that there are not.
    if problems := list(islice(found, MAX_PROBLEMS)):
        raise InvalidError(*problems)
    columns = {name: value for name, value in fields.items() if name != "native"}
    columns.pop("backfill", None)
    # Null in the API is a default value in these columns.
    for name, nothing in (
        ("headers", {}),
        ("terminal_statuses", []),
        ("ignorable_statuses", []),
        ("cloud_events", False),
        ("event_item", False),
        ("ack_by_next_pull", False),
    ):
        if name in columns and columns[name] is None:
            columns[name] = nothing
    for name in ("terminal_statuses", "ignorable_statuses"):
        if name in columns:
            columns[name] = sorted(set(columns[name]))
    if "event_types" in columns:
        columns["event_types"] = interests_to_json(to_interests(columns["event_types"]))
    return columns


_COMPUTED: Final = frozenset(
    {
        "destination",
        "organisation",
        "member_id",
        "target",
        "filtered",
        "headers",
        *THROTTLE_SETTINGS,
    }
)
_HIDDEN_FROM_OWNER: Final = frozenset(
    {
        "push_url",
        "filter",
        LIFETIME,
        *RETRY_OVERRIDES,
        "max_receives",
        *THROTTLE_SETTINGS,
    }
)


def to_response_fields(
    subscription: Subscription,
    *,
    member: ListedOrganisation | None = None,
    owner_view: bool = False,
) -> dict[str, Any]:
    """Return the fields of `SubscriptionResponse`.

    The values of headers are secrets, and never shown. `owner_view`: only what a room's owner
    may see of another organisation's subscription.
    """
    out: dict[str, Any] = {
        name: getattr(subscription, name)
        for name in SubscriptionResponse.__struct_fields__
        if name not in _COMPUTED
    }
    out["organisation"] = None if member is None else member.name
    out["member_id"] = None if member is None else member.member_id
    out["target"] = target_of(subscription.push_url)
    out["filtered"] = subscription.filter is not None
    out["suspended_by"] = sorted(subscription.suspended_by)
    if subscription.proposal is not None:
        out["proposal"] = visible_proposal(subscription.proposal)
    out |= throttle_fields(subscription.throttle)
    out["destination"] = destination_name(subscription.room_id, subscription.id)
    out["terminal_statuses"] = sorted(subscription.terminal_statuses)
    out["ignorable_statuses"] = sorted(subscription.ignorable_statuses)
    out["headers"] = hidden_headers(subscription)
    if subscription.event_types is not None:
        out["event_types"] = [
            msgspec.convert(entry, InterestResponse)
            for entry in interests_to_json(subscription.event_types) or ()
        ]
    if owner_view:
        out |= dict.fromkeys(_HIDDEN_FROM_OWNER)
        out |= {"headers": {}, "terminal_statuses": [], "ignorable_statuses": []}
        out["status_reason"] = _owner_reason(subscription)
    return out


def _owner_reason(subscription: Subscription) -> str | None:
    """Return the reason that an owner gave; what an endpoint answered is the subscriber's."""
    by_others = subscription.suspended_by or subscription.status in ENDED_STATUSES
    return subscription.status_reason if by_others else None


def _name_problems(fields: Mapping[str, Any]) -> Iterator[FieldProblem]:
    if "name" in fields:
        try:
            check_name(fields["name"])
        except ValueError as exc:
            yield FieldProblem("name", str(exc))


_PUSH_ONLY: Final = (
    *RETRY_OVERRIDES,
    "headers",
    "terminal_statuses",
    "ignorable_statuses",
    "cloud_events",
    "event_item",
    *THROTTLE_SETTINGS,
)


def _type_problems(
    fields: Mapping[str, Any], subscription_type: SubscriptionType, *, new: bool
) -> Iterator[FieldProblem]:
    url = fields.get("push_url")
    if subscription_type is SubscriptionType.PUSH:
        if url is None and (new or "push_url" in fields):
            yield FieldProblem("push_url", "a PUSH subscription needs one")
        if fields.get("max_receives") is not None:
            yield FieldProblem(
                "max_receives", "is for PULL subscriptions; PUSH counts delivery_attempts"
            )
        if fields.get("ack_by_next_pull"):
            yield FieldProblem("ack_by_next_pull", "is for PULL subscriptions")
        return
    if url is not None:
        yield FieldProblem("push_url", "a PULL subscription has none")
    for name in _PUSH_ONLY:
        if fields.get(name):
            yield FieldProblem(name, "is for PUSH subscriptions")


def _url_problems(
    url: str | None, check_push_url: Callable[[PushUrl], None]
) -> Iterator[FieldProblem]:
    if url is not None:
        try:
            check_push_url(PushUrl.parse(url))
        except ValueError as exc:
            yield FieldProblem("push_url", str(exc))


_NOT_OPERATIONAL: Final = ("event_types", "filter", "ordered", "native", "backfill", "start_at")


def _operational_problems(
    fields: Mapping[str, Any], current: Subscription | None
) -> Iterator[FieldProblem]:
    if fields.get("operational") or (current is not None and current.operational):
        for name in _NOT_OPERATIONAL:
            if fields.get(name) or (current is not None and name in fields):
                yield FieldProblem(name, "an operational subscription receives no messages")


def _start_problems(start_at: datetime | None, now: datetime | None) -> Iterator[FieldProblem]:
    if start_at is not None and now is not None and start_at > now:
        yield FieldProblem(
            "start_at", "is in the future: give a past time, or create the subscription then"
        )
    yield from time_problems({"start_at": start_at})


def _filter_problems(expression: str | None) -> Iterator[FieldProblem]:
    if expression is not None:
        try:
            MessageFilter(expression)
        except InvalidError as exc:
            yield from exc.problems


def _status_problems(
    fields: Mapping[str, Any], current: Subscription | None
) -> Iterator[FieldProblem]:
    ignorable = fields.get("ignorable_statuses", current.ignorable_statuses if current else ())
    terminal = fields.get("terminal_statuses", current.terminal_statuses if current else ())
    both = sorted(set(ignorable or ()) & set(terminal or ()))
    if both:
        message = ", ".join(map(str, both))
        name = "ignorable_statuses" if "ignorable_statuses" in fields else "terminal_statuses"
        yield FieldProblem(name, f"{message}: a status is either terminal or ignorable")
    if _HTTP_GONE in (fields.get("ignorable_statuses") or ()):
        yield FieldProblem(
            "ignorable_statuses", "410 always means that the endpoint is gone for good"
        )
