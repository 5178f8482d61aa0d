"""Implement `rooms room`: rooms and their retry policy."""

from collections.abc import Callable
from typing import Any

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.options import (
    CLEARABLE_THROTTLE,
    Paging,
    confirm_or_abort,
    every_option,
    find_room,
    paging_options,
    patch_body,
    set_fields,
    throttle_options,
)
from rooms.domain.operational_event import OperationalEvent
from rooms.domain.room import (
    DEFAULT_DELIVERY_ATTEMPTS,
    DEFAULT_DELIVERY_DELAY_MS,
    DEFAULT_DELIVERY_DELAY_MULTIPLIER,
)
from rooms.domain.sharing import ReapprovalField, SubscriptionPolicy, Visibility

_CLEARABLE = (
    "description",
    "message-expiration-ms",
    "delivery-max-delay-ms",
    "operational-url",
    *CLEARABLE_THROTTLE,
)
_NO_CHANGE = "none"
_COLUMNS = {
    "id": "id",
    "name": "name",
    "delay ms": "delivery_delay_ms",
    "multiplier": "delivery_delay_multiplier",
    "attempts": "delivery_attempts",
    "expiration ms": "message_expiration_ms",
    "visibility": "visibility",
    "description": "description",
}


def _parse_reapproval(
    ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> list[str] | None:
    if not values:
        return None
    if _NO_CHANGE not in values:
        return list(dict.fromkeys(values))
    if set(values) != {_NO_CHANGE}:
        raise click.BadParameter(f"{_NO_CHANGE} excludes the others", ctx, parameter)
    return []


def _room_options(*, create: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the fields of a room. A new room gets the defaults below."""

    def option(name: str, kind: Any, text: str, default: object = None) -> Callable[..., Any]:
        shown = {"default": default, "show_default": True} if create and default is not None else {}
        return click.option(name, type=kind, help=text, **shown)  # type: ignore[arg-type]

    options: list[Callable[..., Any]] = [
        option("--description", str, "Purpose of the room."),
        option(
            "--message-expiration-ms", click.IntRange(0), "Lifetime of a message; 0: unlimited."
        ),
        option(
            "--delivery-delay-ms",
            click.IntRange(0),
            "Wait before the first redelivery.",
            DEFAULT_DELIVERY_DELAY_MS,
        ),
        option(
            "--delivery-delay-multiplier",
            click.FloatRange(0),
            "Factor by which each further wait grows.",
            DEFAULT_DELIVERY_DELAY_MULTIPLIER,
        ),
        option(
            "--delivery-attempts",
            click.IntRange(0),
            "Redeliveries; 0: none.",
            DEFAULT_DELIVERY_ATTEMPTS,
        ),
        option("--delivery-max-delay-ms", click.IntRange(0), "Longest wait before a redelivery."),
        option("--delivery-jitter", click.FloatRange(0, 1), "Random share of each wait."),
        click.option(
            "--ordered/--not-ordered",
            "ordered",
            default=None,
            help="Default of `ordered` for the subscriptions of the room.",
        ),
        option("--operational-url", str, "URL that receives operational events."),
        click.option(
            "--operational-event",
            "operational_events",
            type=click.Choice(sorted(one.value for one in OperationalEvent)),
            multiple=True,
            help="Operational event that the room sends, instead of the defaults; repeatable.",
        ),
        option(
            "--visibility",
            click.Choice([one.value for one in Visibility]),
            "listed: all organisations find it by `rooms directory`.",
        ),
        option(
            "--subscription-policy",
            click.Choice([one.value for one in SubscriptionPolicy]),
            "Who may subscribe without a grant; approval: you approve each.",
        ),
        click.option(
            "--reapprove-on",
            type=click.Choice([*(one.value for one in ReapprovalField), _NO_CHANGE]),
            multiple=True,
            callback=_parse_reapproval,
            help="Change by an approved subscriber that you approve again; repeatable. "
            "push_url means its host.",
        ),
        click.option(
            "--transparent/--not-transparent",
            default=None,
            help="Publishers see the names of the subscriptions that get their messages.",
        ),
        click.option(
            "--govstack/--no-govstack",
            default=None,
            help="GovStack's interfaces serve the room; `rooms govstack show` prints the calls.",
        ),
        throttle_options,
    ]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for one in reversed(options):
            command = one(command)
        return command

    return add


@click.group(cls=Group)
def room() -> None:
    """Create and change rooms and their retry policy."""


@room.command()
@click.argument("name")
@_room_options(create=True)
@pass_session
def create(session: CliSession, /, *, name: str, **fields: Any) -> None:
    """Create a room."""
    with session.client() as client:
        session.output().settings(
            client.call("POST", "/rooms", json={"name": name, **set_fields(**fields)})
        )


@room.command("list")
@click.option(
    "--shared", is_flag=True, help="Rooms of others in which your organisation has a part."
)
@click.option("--contains", help="Only rooms whose name contains this.")
@paging_options
@pass_session
def list_rooms(
    session: CliSession, /, *, shared: bool, contains: str | None, paging: Paging
) -> None:
    """List the rooms of your organisation, or with --shared those of others."""
    params = {"shared": "true" if shared else None, "contains": contains}
    with session.client() as client:
        page = client.page("/rooms", params=params, **paging)
    session.output().listing(page, _COLUMNS, empty="no rooms yet: `rooms room create NAME`")


@room.command()
@click.argument("room")
@pass_session
def counts(session: CliSession, /, *, room: str) -> None:
    """Count the deliveries, messages and subscriptions that a room has."""
    with session.client() as client:
        found = find_room(client, room)
        session.output().resource(client.call("GET", f"/rooms/{found['id']}/counts"))


@room.command()
@click.argument("room")
@every_option
@pass_session
def show(session: CliSession, /, *, room: str, every: bool) -> None:
    """Show one room, by id or name: what is set."""
    with session.client() as client:
        session.output().settings(find_room(client, room), every=every)


@room.command()
@click.argument("room")
@click.option("--name", help="A new name.")
@_room_options(create=False)
@click.option(
    "--clear", type=click.Choice(_CLEARABLE), multiple=True, help="Remove the value of a field."
)
@pass_session
def update(session: CliSession, /, *, room: str, clear: tuple[str, ...], **fields: Any) -> None:
    """Change a room. Messages in flight follow the new policy."""
    body = patch_body(set_fields(**fields), clear)
    with session.client() as client:
        found = find_room(client, room)
        session.output().settings(client.call("PATCH", f"/rooms/{found['id']}", json=body))


@room.command()
@click.argument("room")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def delete(session: CliSession, /, *, room: str, yes: bool) -> None:
    """Delete a room with everything in it, by a job."""
    with session.client() as client:
        found = find_room(client, room)
        confirm_or_abort(
            f"Delete room {found['name']!r} with all its subscriptions and messages?", yes=yes
        )
        answer = client.call("DELETE", f"/rooms/{found['id']}", params={"confirm": found["name"]})
    if answer is not None:
        session.output().resource(answer)
