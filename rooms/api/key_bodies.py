"""Define the bodies of API keys, and check what they may be restricted to."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from rooms.api.params import time_problems
from rooms.api.room_bodies import Name
from rooms.db.catalog.api_keys import ApiKey, KeyKind
from rooms.domain.event_type_pattern import MAX_PATTERNS, PATTERN, check_pattern, covers
from rooms.domain.ids import MAX_ROOM, is_id, room_of
from rooms.domain.principal import Principal
from rooms.domain.sharing import APPLICATION_PATTERN, is_application
from rooms.domain.state_machine import Scope
from rooms.errors import FieldProblem, ForbiddenError, InvalidError

_MAX_LISTED: Final = 1000
_MAX_NETWORKS: Final = 64
_RESTRICTIONS: Final = ("rooms", "event_types", "subscriptions", "networks")

Scopes = Annotated[list[Scope], Meta(min_length=1, max_length=len(Scope))]
Application = Annotated[
    str,
    Meta(
        pattern=APPLICATION_PATTERN,
        description="The part of the organisation that uses the key; it is named wherever an "
        "actor is.",
    ),
]
RoomIds = Annotated[
    list[Annotated[int, Meta(ge=1, le=MAX_ROOM)]],
    Meta(min_length=1, max_length=_MAX_LISTED, description="Only these rooms; null: all."),
]
EventTypes = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=128, pattern=PATTERN)]],
    Meta(
        min_length=1,
        max_length=MAX_PATTERNS,
        description="Only these event types: names, `order.*`, or `*`; null: all.",
    ),
]
SubscriptionIds = Annotated[
    list[Annotated[str, Meta(min_length=36, max_length=36)]],
    Meta(min_length=1, max_length=_MAX_LISTED, description="Only these; null: all."),
]
Networks = Annotated[
    list[Annotated[str, Meta(min_length=2, max_length=64)]],
    Meta(
        min_length=1,
        max_length=_MAX_NETWORKS,
        description="Only clients with these addresses (CIDR); null: any. Behind a proxy it is "
        "the proxy's address that counts.",
    ),
]
ExpiresAt = Annotated[datetime, Meta(tz=True, description="The key's end; null: none.")]


class CreateKey(Struct, forbid_unknown_fields=True, kw_only=True):
    """Create a key."""

    name: Name
    scopes: Scopes
    kind: Annotated[
        Literal["key", "client"],
        Meta(
            description="`client`: a credential without a text, for programs that a client "
            "certificate or a trusted proxy identifies as this organisation; with `application` "
            "for that one only."
        ),
    ] = "key"
    application: Application | None = None
    rooms: RoomIds | None = None
    event_types: EventTypes | None = None
    subscriptions: SubscriptionIds | None = None
    networks: Networks | None = None
    expires_at: ExpiresAt | None = None


class UpdateKey(Struct, forbid_unknown_fields=True, kw_only=True):
    """Change the given fields of a key; null removes a restriction."""

    name: Name | UnsetType = UNSET
    scopes: Scopes | UnsetType = UNSET
    application: Application | UnsetType | None = UNSET
    rooms: RoomIds | UnsetType | None = UNSET
    event_types: EventTypes | UnsetType | None = UNSET
    subscriptions: SubscriptionIds | UnsetType | None = UNSET
    networks: Networks | UnsetType | None = UNSET
    expires_at: ExpiresAt | UnsetType | None = UNSET


class KeyResponse(Struct, kw_only=True):
    """Describe a key without its secret text, which is not stored.

    `last_used_at`: to the hour, and not before `created_at`.
    """

    id: str
    name: str
    kind: KeyKind
    prefix: str | None
    scopes: list[Scope]
    application: str | None
    rooms: list[int] | None
    event_types: list[str] | None
    subscriptions: list[str] | None
    networks: list[str] | None
    expires_at: datetime | None
    last_used_at: datetime | None
    previous_until: datetime | None
    created_at: datetime
    revoked_at: datetime | None


class CreatedKey(KeyResponse, kw_only=True):
    """Describe a key with its text, `key`, which is only shown once; a client has none."""

    key: str | None


def to_fields(key: ApiKey) -> dict[str, Any]:
    """Return the fields of `KeyResponse`."""
    fields = {name: getattr(key, name) for name in KeyResponse.__struct_fields__}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()
    } | {"scopes": sorted(key.scopes)}


def to_response(key: ApiKey) -> KeyResponse:
    """Return a key as the API shows it."""
    return KeyResponse(**to_fields(key))


def to_columns(fields: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the column values of given fields. InvalidError names every problem."""
    problems = list(_problems(fields, now))
    if problems:
        raise InvalidError(*problems)
    columns = dict(fields)
    if columns.get("networks") is not None:
        columns["networks"] = [str(ip_network(text)) for text in columns["networks"]]
    if "scopes" in columns:
        columns["scopes"] = sorted({scope.value for scope in columns["scopes"]})
    return columns


def _problems(fields: Mapping[str, Any], now: datetime) -> Iterator[FieldProblem]:
    if not is_application(fields.get("application") or "none"):
        yield FieldProblem("application", "contains a line end")
    for index, pattern in enumerate(fields.get("event_types") or ()):
        try:
            check_pattern(pattern)
        except ValueError as exc:
            yield FieldProblem(f"event_types[{index}]", str(exc))
    for index, identity in enumerate(fields.get("subscriptions") or ()):
        if not is_id(identity) or identity != identity.lower():
            yield FieldProblem(f"subscriptions[{index}]", "is no subscription's id (a UUID)")
    for index, text in enumerate(fields.get("networks") or ()):
        try:
            ip_network(text)
        except ValueError as exc:
            yield FieldProblem(f"networks[{index}]", f"is no network like 192.0.2.0/24: {exc}")
    expires_at = fields.get("expires_at")
    if expires_at is not None and expires_at <= now:
        yield FieldProblem("expires_at", "is past; a key ends in the future")
    yield from time_problems({"expires_at": expires_at})


def check_may_give(
    principal: Principal, columns: Mapping[str, Any], *, ends_at: datetime | None = None
) -> None:
    """Raise ForbiddenError where a key would get what the caller's key lacks.

    `columns`: all of the key's, as it will be. `ends_at`: the end of the caller's key, or of the
    text by which it acts.
    """
    for scope in columns["scopes"]:
        if not principal.has_scope(Scope(scope)):
            raise ForbiddenError(
                f"scopes: only a key with the scope {scope} creates others with it"
            )
    for name in _RESTRICTIONS:
        own, given = getattr(principal, name), columns.get(name)
        if name == "rooms" and given is None and columns.get("subscriptions") is not None:
            given = [room_of(identity) for identity in columns["subscriptions"]]
        if own is not None and not _is_within(name, own, given):
            raise ForbiddenError(
                f"{name}: this key is restricted, and gives others no more than it has"
            )
    if principal.application is not None and columns.get("application") != principal.application:
        raise ForbiddenError(f"application: this key is bound to {principal.application}")
    check_lasts_no_longer(columns, ends_at)


def check_lasts_no_longer(columns: Mapping[str, Any], ends_at: datetime | None) -> None:
    """Raise ForbiddenError where a key would last longer than `ends_at` (None: it has no end)."""
    given_end = columns.get("expires_at")
    if ends_at is not None and (given_end is None or given_end > ends_at):
        raise ForbiddenError(
            f"expires_at: this key, or its text since a rotation, ends at {ends_at.isoformat()}, "
            "and lets no other last longer"
        )


def _is_within(name: str, own: Any, given: Any) -> bool:
    if given is None:
        return False
    if name == "event_types":
        known = frozenset(own)
        return all(covers(known, pattern) for pattern in given)
    if name == "networks":
        wide = [ip_network(text) for text in own]
        return all(
            any(_contains(outer, inner) for outer in wide) for inner in map(ip_network, given)
        )
    return set(given) <= set(own)


def _contains(outer: IPv4Network | IPv6Network, inner: IPv4Network | IPv6Network) -> bool:
    return (
        outer.version == inner.version
        and outer.prefixlen <= inner.prefixlen
        and inner.network_address in outer
    )


def now_utc() -> datetime:
    """Return the time now."""
    return datetime.now(UTC)
