"""Take the headers of a subscription's calls, whose values are secrets and never shown."""

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Final

from msgspec import Meta
from sqlalchemy.ext.asyncio import AsyncConnection

from rooms.db.catalog.subscriptions import read_headers
from rooms.db.sealing import seal_headers
from rooms.db.secrets import Cipher
from rooms.domain.ids import SubscriptionId
from rooms.domain.room import MAX_HEADERS, Subscription
from rooms.errors import ConflictError, FieldProblem, InvalidError

HIDDEN_VALUE: Final = "***"
"""Stands for the value of a header; sent back, it keeps the value."""
_MAX_SHOWN_NAME: Final = 128

PushHeaders = Annotated[
    dict[str, str],
    Meta(
        description="Sent with each call. Values are sealed, and shown as `***`; a change with "
        "`***` keeps the value of that name."
    ),
]


def hidden_headers(subscription: Subscription) -> dict[str, str]:
    """Return the names of the headers of each call, with `***` as their values."""
    return dict.fromkeys(subscription.header_names, HIDDEN_VALUE)


def require_values(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a new subscription. InvalidError: a header has `***` as its value."""
    _merge(fields.get("headers") or {}, {})
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
    return {**fields, "headers": _merge(given, stored)}


def _merge(given: Mapping[str, str], stored: Mapping[str, str]) -> dict[str, str]:
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
    return {**columns, **seal_headers(cipher, identity, columns["headers"])}
