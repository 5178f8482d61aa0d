"""Implement `rooms govstack`: rooms on GovStack's interfaces, and the endpoint of its PUSH."""

from typing import Any, Final

import click

from rooms.cli.client import ApiClient
from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.errors import CliError
from rooms.cli.options import find_room
from rooms.cli.output import Output

_APPLICATION: Final = "app"
"""Stands for the caller's application in the calls that are shown, if its key has none."""
_TYPE: Final = "EVENT_TYPE"
_CALLS: Final[tuple[tuple[str, str, str, str | None], ...]] = (
    ("create an event type", "POST", "/api/v1/eventType", f'{{"eventType": "{_TYPE}"}}'),
    ("list event types", "GET", "/api/v1/eventType", None),
    (
        "subscribe",
        "POST",
        f"/api/v1/subs/{_TYPE}",
        f'{{"eventType": "{_TYPE}", "delivery": "PULL"}}',
    ),
    ("publish", "POST", f"/pub/v1/{_TYPE}", f'{{"eventType": "{_TYPE}", "event": {{"id": 1}}}}'),
    ("read the status", "GET", f"/pub/v1/{_TYPE}/EVENT_ID", None),
    ("stop it", "DELETE", f"/pub/v1/{_TYPE}/EVENT_ID", None),
    ("pull", "GET", f"/pull/v1/{_TYPE}", None),
    ("acknowledge", "DELETE", f"/pull/v1/{_TYPE}/EVENT_ID", None),
)
"""The purpose of each call, its method, its path below the room, and its body."""


@click.group(cls=Group)
def govstack() -> None:
    """Serve rooms on GovStack's interfaces, /r1 and /rooms, under their owner's member id."""


@govstack.command()
@click.argument("room")
@pass_session
def enable(session: CliSession, /, *, room: str) -> None:
    """Serve a room on GovStack's interfaces, and show what the calls look like."""
    with session.client() as client:
        found = find_room(client, room)
        changed = client.call("PATCH", f"/rooms/{found['id']}", json={"govstack": True})
        _show(session.output(), client, changed)


@govstack.command()
@click.argument("room")
@pass_session
def disable(session: CliSession, /, *, room: str) -> None:
    """Stop serving a room on GovStack's interfaces. Its subscriptions stay, and are served."""
    with session.client() as client:
        found = find_room(client, room)
        session.output().resource(
            client.call("PATCH", f"/rooms/{found['id']}", json={"govstack": False})
        )


@govstack.command()
@click.argument("room")
@pass_session
def show(session: CliSession, /, *, room: str) -> None:
    """Show what the calls for an own room look like."""
    with session.client() as client:
        found = find_room(client, room)
        if not found["govstack"]:
            raise CliError(f"the room is not served; run `rooms govstack enable {found['name']}`")
        _show(session.output(), client, found)


def _show(output: Output, client: ApiClient, room: dict[str, Any]) -> None:
    """Write one curl line for each call."""
    caller = client.call("GET", "/whoami")
    organisation = caller["organisation"]
    if organisation["id"] != room["organisation_id"]:
        raise CliError("the room belongs to another organisation, and so does its address")
    member_id = organisation["member_id"]
    if member_id is None:
        raise CliError(
            "your organisation has no member id, so the room has no address; set it by "
            f"`rooms organisation update {organisation['id']} --member-id INSTANCE/CLASS/CODE`"
        )
    base = f"{client.url}/r1/{member_id}/{room['name']}"
    client_id = f"{member_id}/{caller['application'] or _APPLICATION}"
    calls = [
        {"does": does, "method": method, "url": base + path, "body": body}
        for does, method, path, body in _CALLS
    ]
    if output.as_json:
        output.document({"base": base, "client": client_id, "calls": calls})
        return
    output.heading(f"{room['name']}, as {client_id}")
    for call in calls:
        output.line(f"# {call['does']}")
        output.line(_curl(call, client_id))
    output.heading("The interface of the first implementation")
    output.line(f"{client.url}/rooms/{member_id.replace('/', '%2F')}/{room['name']}/publish")


def _curl(call: dict[str, Any], client_id: str) -> str:
    parts = [
        'curl -H "Authorization: Bearer $ROOMS_API_KEY"',
        f"-H 'X-GovStack-Client: {client_id}'",
    ]
    if call["method"] != "GET":
        parts.append(f"-X {call['method']}")
    parts.append(call["url"])
    if call["body"] is not None:
        parts.append(f"-d '{call['body']}'")
    return " ".join(parts)


@govstack.group("endpoint", cls=Group)
def endpoint() -> None:
    """Register where GovStack's PUSH subscriptions of your organisation are sent."""


@endpoint.command("show")
@pass_session
def show_endpoint(session: CliSession) -> None:
    """Show the template of URLs."""
    with session.client() as client:
        session.output().resource(client.call("GET", "/push-template"))


@endpoint.command("set")
@click.argument("template")
@pass_session
def set_endpoint(session: CliSession, /, *, template: str) -> None:
    """Register a URL with placeholders in its path or query.

    They are {instanceId}, {memberClass}, {memberCode}, {applicationCode} and {eventType}. Later
    subscriptions use it.
    """
    with session.client() as client:
        session.output().resource(client.call("PUT", "/push-template", json={"template": template}))


@endpoint.command("clear")
@pass_session
def clear_endpoint(session: CliSession) -> None:
    """Remove the template. Subscriptions keep the URLs that they were made with."""
    with session.client() as client:
        client.call("DELETE", "/push-template")
    session.output().note("removed")
