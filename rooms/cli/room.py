"""`rooms room`: rooms and their retry policy."""

from collections.abc import Callable
from typing import Any

import click

from rooms.cli.fields import changes, given, paged, sure
from rooms.cli.lane_options import CLEARABLE, lane_options
from rooms.cli.references import find_room
from rooms.cli.session import Group, Session, pass_session

_CLEARABLE = ("description", "message-expiration-ms", "delivery-max-delay-ms", "operational-url", *CLEARABLE)
_COLUMNS = {
    "id": "id",
    "name": "name",
    "delay ms": "delivery_delay_ms",
    "multiplier": "delivery_delay_multiplier",
    "attempts": "delivery_attempts",
    "expiration ms": "message_expiration_ms",
    "description": "description",
}


def _policy(*, create: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The fields of a room; a new one gets the defaults that stand here."""

    def option(name: str, kind: Any, text: str, default: object = None) -> Callable[..., Any]:
        shown = {"default": default, "show_default": True} if create and default is not None else {}
        return click.option(name, type=kind, help=text, **shown)  # type: ignore[arg-type]

    options: list[Callable[..., Any]] = [
        option("--description", str, "What the room is for."),
        option("--message-expiration-ms", click.IntRange(0), "Lifetime of a message; 0: for ever."),
        option("--delivery-delay-ms", click.IntRange(0), "Wait before the first redelivery.", 1000),
        option("--delivery-delay-multiplier", click.FloatRange(0), "Each further wait is longer by this.", 2.0),
        option("--delivery-attempts", click.IntRange(0), "Redeliveries; 0: none.", 5),
        option("--delivery-max-delay-ms", click.IntRange(0), "The longest wait."),
        option("--delivery-jitter", click.FloatRange(0, 1), "Share of a wait that is left to chance."),
        click.option(
            "--ordered/--not-ordered",
            "ordered",
            default=None,
            help="Whether subscriptions that say nothing get the messages of an ordering key one after the other.",
        ),
        option("--operational-url", str, "Where to tell of endpoints that were disabled."),
        lane_options,
    ]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for one in reversed(options):
            command = one(command)
        return command

    return add


@click.group(cls=Group)
def room() -> None:
    """Rooms and their retry policy."""


@room.command()
@click.argument("name")
@_policy(create=True)
@pass_session
def create(session: Session, /, *, name: str, **fields: Any) -> None:
    """Open a room."""
    with session.client() as client:
        session.output().resource(client.call("POST", "/rooms", json={"name": name, **given(**fields)}))


@room.command("list")
@paged
@pass_session
def list_rooms(session: Session, /, *, limit: int, cursor: str | None, whole: bool) -> None:
    """The rooms that the key may see."""
    with session.client() as client:
        page = client.page("/rooms", limit=limit, cursor=cursor, whole=whole)
    session.output().listing(page, _COLUMNS, empty="no rooms yet: `rooms room create NAME`")


@room.command()
@click.argument("room")
@pass_session
def show(session: Session, /, *, room: str) -> None:
    """One room, by id or name."""
    with session.client() as client:
        session.output().resource(find_room(client, room))


@room.command()
@click.argument("room")
@click.option("--name", help="A new name.")
@_policy(create=False)
@click.option("--clear", type=click.Choice(_CLEARABLE), multiple=True, help="Set a field back to nothing.")
@pass_session
def update(session: Session, /, *, room: str, clear: tuple[str, ...], **fields: Any) -> None:
    """Change a room; messages on their way follow the new policy."""
    body = changes(given(**fields), clear)
    with session.client() as client:
        found = find_room(client, room)
        session.output().resource(client.call("PATCH", f"/rooms/{found['id']}", json=body))


@room.command()
@click.argument("room")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def delete(session: Session, /, *, room: str, yes: bool) -> None:
    """Delete a room with everything in it; a job does it."""
    with session.client() as client:
        found = find_room(client, room)
        sure(f"Delete room {found['name']!r} with all its subscriptions and messages?", yes=yes)
        answer = client.call("DELETE", f"/rooms/{found['id']}", params={"confirm": found["name"]})
    if answer is not None:
        session.output().resource(answer)
