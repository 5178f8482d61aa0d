"""Define fields of a subscription: headers of its calls, overrides of the room's, event types.

The values of headers are secrets, which are never shown.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, Struct, UnsetType
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.api.room_bodies import (
    MAX_EXPIRATION_MS,
    DelayMs,
    DeliveryAttempts,
    Jitter,
    MaxDelayMs,
    Multiplier,
)
from rooms.api.throttle_bodies import CreateThrottle, UpdateThrottle
from rooms.db.catalog.subscriptions import read_headers
from rooms.db.encrypted_headers import encrypt_headers
from rooms.db.secrets import Cipher
from rooms.domain.event_type_pattern import check_pattern, is_pattern
from rooms.domain.ids import SubscriptionId
from rooms.domain.names import MAX_NAME
from rooms.domain.room import MAX_HEADERS, Interest, Subscription
from rooms.errors import ConflictError, FieldProblem, InvalidError

HIDDEN_VALUE: Final = "***"
"""Stands for the value of a header; sent back, it keeps the value."""
_MAX_SHOWN_NAME: Final = 128

PushHeaders = Annotated[
    dict[str, str],
    Meta(
        max_length=MAX_HEADERS,
        description="Sent with each call. Values are sealed, and shown as `***`; a change with "
        "`***` keeps the value of that name.",
    ),
]
Lifetime = Annotated[
    int,
    Meta(
        ge=1,
        le=MAX_EXPIRATION_MS,
        description="The lifetime of its deliveries in ms, from when their message is due: at most "
        "that of the room. Of both, and of the message's own, the shortest counts. null: the "
        "room's.",
    ),
]
RETRY_OVERRIDES: Final = (
    "delivery_delay_ms",
    "delivery_delay_multiplier",
    "delivery_attempts",
    "delivery_max_delay_ms",
    "delivery_jitter",
)
"""Fields that only PUSH has."""
LIFETIME: Final = "message_expiration_ms"
_MAX_INT4: Final = 0x7FFF_FFFF


def hidden_headers(subscription: Subscription) -> dict[str, str]:
    """Return the names of the headers of each call, with `***` as their values."""
    return dict.fromkeys(subscription.header_names, HIDDEN_VALUE)


def require_values(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a new subscription. InvalidError: a header has `***` as its value."""
    _merge_headers(fields.get("headers") or {}, {})
    return fields


async def keep_hidden_values(
    connection: AsyncConnection,
    cipher: Cipher,
    fields: Mapping[str, Any],
    current: Subscription,
) -> dict[str, Any]:
    """Return the fields of a request with stored values of headers in place of `***`.

    InvalidError: a name has no stored value. ConflictError: the stored values cannot be opened.
    """
    given: Mapping[str, str] = fields.get("headers") or {}
    if HIDDEN_VALUE not in given.values():
        return dict(fields)
    stored: Mapping[str, str] = {}
    if current.header_names:
        try:
            stored = await read_headers(connection, current, cipher)
        except ValueError as exc:
            raise ConflictError(
                "the values of its headers were sealed with a key that is not there: give them all"
            ) from exc
    return {**fields, "headers": _merge_headers(given, stored)}


def _merge_headers(given: Mapping[str, str], stored: Mapping[str, str]) -> dict[str, str]:
    values = {name.lower(): value for name, value in stored.items()}
    problems = (
        FieldProblem(
            f"headers.{name[:_MAX_SHOWN_NAME]}",
            f"{HIDDEN_VALUE} keeps the present value, and this name has none: give the value",
        )
        for name, value in given.items()
        if value == HIDDEN_VALUE and name.lower() not in values
    )
    if found := list(islice(problems, MAX_HEADERS)):
        raise InvalidError(*found)
    return {
        name: values[name.lower()] if value == HIDDEN_VALUE else value
        for name, value in given.items()
    }


def seal_header_columns(
    cipher: Cipher, identity: SubscriptionId, columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the columns of a subscription with its headers sealed, if they are among them."""
    if "headers" not in columns:
        return dict(columns)
    return {**columns, **encrypt_headers(cipher, identity, columns["headers"])}


class CreateOverrides(CreateThrottle, forbid_unknown_fields=True, kw_only=True):
    """Override the room's values; null follows the room."""

    delivery_delay_ms: DelayMs | None = None
    delivery_delay_multiplier: Multiplier | None = None
    delivery_attempts: DeliveryAttempts | None = None
    delivery_max_delay_ms: MaxDelayMs | None = None
    delivery_jitter: Jitter | None = None
    message_expiration_ms: Lifetime | None = None


class UpdateOverrides(UpdateThrottle, forbid_unknown_fields=True, kw_only=True):
    """Change the overrides."""

    delivery_delay_ms: DelayMs | UnsetType | None = UNSET
    delivery_delay_multiplier: Multiplier | UnsetType | None = UNSET
    delivery_attempts: DeliveryAttempts | UnsetType | None = UNSET
    delivery_max_delay_ms: MaxDelayMs | UnsetType | None = UNSET
    delivery_jitter: Jitter | UnsetType | None = UNSET
    message_expiration_ms: Lifetime | UnsetType | None = UNSET


def lifetime_problems(wanted: int | None, room_ms: int | None) -> Iterator[FieldProblem]:
    """Yield a problem for a lifetime above that of the room (None or 0: unlimited)."""
    if wanted is not None and room_ms and wanted > room_ms:
        yield FieldProblem(
            LIFETIME,
            f"only shortens the lifetime of the room's messages, {room_ms} ms: give at most that, "
            "or null",
        )


class InterestRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Select an event type, in every version where none are named.

    The name may be a pattern, `order.*` or `*`, which selects types that are added later, too.
    """

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    versions: (
        Annotated[
            list[Annotated[int, Meta(ge=1, le=_MAX_INT4)]], Meta(min_length=1, max_length=1000)
        ]
        | None
    ) = None


Interests = Annotated[
    list[InterestRequest],
    Meta(min_length=1, max_length=1000, description="null: every type of the room."),
]


def to_interests(found: list[InterestRequest] | None) -> list[Interest] | None:
    """Return the interests that a request selects; None: every event type."""
    if found is None:
        return None
    return [
        Interest(
            name=entry.name, versions=None if entry.versions is None else frozenset(entry.versions)
        )
        for entry in found
    ]


def interest_problems(
    found: list[InterestRequest] | None, types: Mapping[str, frozenset[int]]
) -> Iterator[FieldProblem]:
    """Yield what is wrong; `types`: the versions of each event type of the room."""
    seen: set[str] = set()
    for index, entry in enumerate(found or ()):
        at = f"event_types[{index}]"
        if is_pattern(entry.name):
            if entry.versions is not None:
                yield FieldProblem(f"{at}.versions", "a pattern takes every version")
            try:
                check_pattern(entry.name)
            except ValueError as exc:
                yield FieldProblem(f"{at}.name", str(exc))
            if entry.name in seen:
                yield FieldProblem(f"{at}.name", "is given twice")
        elif entry.name not in types:
            yield FieldProblem(f"{at}.name", "the room has no such event type")
        elif entry.name in seen:
            yield FieldProblem(f"{at}.name", "is given twice")
        else:
            for path, version in enumerate(entry.versions or ()):
                if version not in types[entry.name]:
                    yield FieldProblem(
                        f"{at}.versions[{path}]", f"{entry.name} has no version {version}"
                    )
        seen.add(entry.name)
