"""Provide the options of API keys, and the request or the columns that they make."""

from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.options import find_room, find_subscription, parse_id, parse_time, set_fields
from rooms.domain.event_type_pattern import check_pattern
from rooms.domain.ids import MAX_ROOM, is_id
from rooms.domain.state_machine import Scope

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient

RESTRICTIONS = (
    "application",
    "rooms",
    "event_types",
    "subscriptions",
    "networks",
    "expires_at",
)
"""The fields of a key that restrict it, in the API and in the database."""

name_option = click.option("--name", required=True, help="Purpose of the key.")


def scopes_option(*, required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--scope` (as `scopes`)."""
    return click.option(
        "--scope",
        "scopes",
        type=click.Choice([scope.value for scope in Scope]),
        multiple=True,
        required=required,
        help="Permission of the key; repeatable.",
    )


client_option = click.option(
    "--client",
    "kind",
    flag_value="client",
    default=None,
    help="Without a text: for programs that a client certificate or a trusted proxy identifies as "
    "the organisation; with --application for that one only.",
)


def _checked(
    check: Callable[[str], object],
) -> Callable[[click.Context, click.Parameter, Sequence[str]], Sequence[str]]:
    def callback(
        ctx: click.Context, parameter: click.Parameter, values: Sequence[str]
    ) -> Sequence[str]:
        for value in values:
            try:
                check(value)
            except ValueError as exc:
                raise click.BadParameter(f"{value!r}: {exc}", ctx, parameter) from exc
        return values

    return callback


def key_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what a key may be restricted to, each named as its field of the request."""
    for option in reversed(
        [
            click.option(
                "--room", "rooms", multiple=True, help="Only this room, by id or name; repeatable."
            ),
            click.option(
                "--event-type",
                "event_types",
                metavar="PATTERN",
                callback=_checked(check_pattern),
                multiple=True,
                help="Only this event type, or `order.*`; repeatable.",
            ),
            click.option(
                "--subscription",
                "subscriptions",
                multiple=True,
                help="Only this subscription, by id or ROOM/NAME; repeatable.",
            ),
            click.option("--application", help="The part of the organisation that uses the key."),
            click.option(
                "--network",
                "networks",
                metavar="CIDR",
                callback=_checked(ip_network),
                multiple=True,
                help="Only clients with these addresses; repeatable.",
            ),
            click.option("--expires-at", callback=parse_time, help="End of the key (RFC 3339)."),
        ]
    ):
        command = option(command)
    return command


def key_fields(client: "ApiClient", fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request for a key: names of rooms and subscriptions become ids."""
    body = _lists(fields)
    if "scopes" in body:
        body["scopes"] = list(dict.fromkeys(body["scopes"]))
    if "rooms" in body:
        body["rooms"] = [_room_id(client, one) for one in body["rooms"]]
    if "subscriptions" in body:
        body["subscriptions"] = [_subscription_id(client, one) for one in body["subscriptions"]]
    return body


def _room_id(client: "ApiClient", reference: str) -> int:
    """Return a room's id. Digits are an id: the key need not see the room."""
    return int(reference if _is_number(reference) else find_room(client, reference)["id"])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _lists(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields, with a list for each repeated option."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in set_fields(**fields).items()
    }


def _subscription_id(client: "ApiClient", reference: str) -> str:
    if is_id(reference):
        return reference.lower()
    return str(find_subscription(client, reference)["id"])


def key_columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a key's restrictions. Raise a usage error at a name that is no id."""
    from datetime import datetime

    columns = _lists(fields)
    if "rooms" in columns:
        for one in columns["rooms"]:
            if not _is_number(one) or not 0 < int(one) <= MAX_ROOM:
                raise click.UsageError(f"--room: {one!r} is no id; in the database give the id")
        columns["rooms"] = [int(one) for one in columns["rooms"]]
    if "subscriptions" in columns:
        columns["subscriptions"] = [parse_id(one) for one in columns["subscriptions"]]
    if "networks" in columns:
        columns["networks"] = [str(ip_network(one)) for one in columns["networks"]]
    if "expires_at" in columns:
        columns["expires_at"] = datetime.fromisoformat(columns["expires_at"])
    return columns
