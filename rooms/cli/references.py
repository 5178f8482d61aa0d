"""Things by the names that people give them: a room by id or name, a subscription by id or `room/name`."""

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from rooms.cli.errors import CliError, ProblemError

if TYPE_CHECKING:
    from rooms.cli.client import Client

_ID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_LARGEST_ROOM = 0x7FFF_FFFF


def identity(text: str) -> str:
    """An id as part of a path; a usage error where it is none."""
    if not _ID.fullmatch(text):
        raise click.UsageError(f"{text!r} is no id")
    return text.lower()


def segment(text: str) -> str:
    """A name as one part of a path."""
    return quote(text, safe="")


def find_room(client: "Client", reference: str) -> dict[str, Any]:
    """The room that an id or name stands for. A name of digits alone is found when no room has it as id."""
    if reference.isascii() and reference.isdigit() and int(reference) <= _LARGEST_ROOM:
        try:
            found: dict[str, Any] = client.call("GET", f"/rooms/{int(reference)}")
        except ProblemError as exc:
            if exc.status != HTTPStatus.NOT_FOUND:
                raise
        else:
            return found
    for room in client.each("/rooms", {"name": reference}):
        if room["name"] == reference:
            return room
    raise CliError(f"there is no room {reference!r}; `rooms room list` shows those of this key")


def find_subscription(client: "Client", reference: str) -> dict[str, Any]:
    """The subscription that an id or `room/name` stands for."""
    if _ID.fullmatch(reference):
        found: dict[str, Any] = client.call("GET", f"/subscriptions/{reference.lower()}")
        return found
    room_reference, slash, name = reference.partition("/")
    if not slash or not room_reference or not name:
        raise click.UsageError(f"{reference!r} is neither a subscription's id nor ROOM/NAME")
    room = find_room(client, room_reference)
    for subscription in client.each(f"/rooms/{room['id']}/subscriptions", {"name": name}):
        if subscription["name"] == name:
            return subscription
    raise CliError(f"room {room['name']!r} has no subscription {name!r}")


def find_message(client: "Client", reference: str) -> str:
    """Our id of the message that an id, or `room/id` with an id of its publisher's own, stands for."""
    room_reference, slash, own = reference.partition("/")
    if not slash:
        return identity(reference)
    room = find_room(client, room_reference)
    for message in client.each(f"/rooms/{room['id']}/messages", {"id": own}):
        return str(message["id"])
    raise CliError(f"room {room['name']!r} has no message that its publisher called {own!r}")
