"""Implement `rooms grant` and `rooms directory`: what owners of rooms allow other organisations."""

from collections.abc import Mapping
from typing import Any

import click

from rooms.cli.context import CliSession, Command, Group, pass_session
from rooms.cli.options import Paging, find_room, paging_options, parse_id, parse_time, set_fields
from rooms.cli.output import Column

_KINDS = click.Choice(["publish", "subscribe"])


def _organisation(grant: Mapping[str, Any]) -> object:
    return grant.get("organisation") or grant["organisation_id"]


def _event_type_names(entry: Mapping[str, Any]) -> str:
    names = [one["name"] for one in entry["event_types"]]
    more = entry["event_type_count"] - len(names)
    return ", ".join([*names, f"{more} more"] if more > 0 else names)


_COLUMNS: Mapping[str, Column] = {
    "organisation": _organisation,
    "kind": "kind",
    "event types": "event_types",
    "from": "starts_at",
    "until": "until",
    "revoked": "revoked_at",
    "id": "id",
}
_DIRECTORY_COLUMNS: Mapping[str, Column] = {
    "room": "room_id",
    "name": "name",
    "owner": "owner",
    "event types": _event_type_names,
    "how to join": "how_to_join",
    "description": "description",
}


@click.group(cls=Group)
def grant() -> None:
    """Allow other organisations to publish into a room, or to subscribe to it."""


@grant.command()
@click.argument("room")
@click.argument("kind", type=_KINDS)
@click.argument("organisation")
@click.option(
    "--event-type",
    "event_types",
    metavar="PATTERN",
    multiple=True,
    help="Only this event type, or `order.*`; repeatable.",
)
@click.option("--from", "starts_at", callback=parse_time, help="Start (RFC 3339).  [default: now]")
@click.option("--until", callback=parse_time, help="End (RFC 3339).  [default: none]")
@pass_session
def create(
    session: CliSession,
    /,
    *,
    room: str,
    kind: str,
    organisation: str,
    event_types: tuple[str, ...],
    starts_at: str | None,
    until: str | None,
) -> None:
    """Allow an organisation to publish into a room, or to subscribe to it without approval.

    ORGANISATION is an id, a name or a member id; '*' means every organisation.
    """
    with session.client() as client:
        found = find_room(client, room)
        body = {
            "organisation_id": organisation,
            "kind": kind,
            **set_fields(event_types=list(event_types) or None, starts_at=starts_at, until=until),
        }
        session.output().resource(client.call("POST", f"/rooms/{found['id']}/grants", json=body))


@grant.command("list")
@click.argument("room", required=False)
@click.option("--kind", type=_KINDS, help="Only this kind.")
@click.option("--organisation", metavar="ID", help="Only those of this organisation.")
@click.option("--ended", is_flag=True, help="Also those that are over.")
@paging_options
@pass_session
def list_grants(
    session: CliSession,
    /,
    *,
    room: str | None,
    kind: str | None,
    organisation: str | None,
    ended: bool,
    paging: Paging,
) -> None:
    """List the grants of a room, newest first; without ROOM those of all own rooms."""
    params = {
        "kind": kind,
        "organisation_id": None if organisation is None else parse_id(organisation),
        "ended": "true" if ended else None,
    }
    with session.client() as client:
        path = "/grants" if room is None else f"/rooms/{find_room(client, room)['id']}/grants"
        page = client.page(path, params=params, **paging)
    empty = "no grants: `rooms grant create ROOM publish ORGANISATION`"
    columns = {"room": "room", **_COLUMNS} if room is None else _COLUMNS
    session.output().listing(page, columns, empty=empty)


@grant.command()
@click.argument("room")
@click.argument("grant_id", metavar="GRANT")
@pass_session
def revoke(session: CliSession, /, *, room: str, grant_id: str) -> None:
    """End a grant, by its id. Later publishes are refused.

    Subscriptions that depended on it are suspended: their messages are held.
    """
    identity = parse_id(grant_id)
    with session.client() as client:
        found = find_room(client, room)
        client.call("DELETE", f"/rooms/{found['id']}/grants/{identity}")
    out = session.output()
    if out.as_json:
        out.document({"revoked": [identity]})
    else:
        out.line(f"revoked {identity}")


@click.command(cls=Command)
@click.option("--name", help="Only rooms whose name contains this.")
@click.option("--owner", help="Only of this organisation, by name or member id.")
@click.option("--event-type", help="Only rooms with this event type.")
@paging_options
@pass_session
def directory(
    session: CliSession,
    /,
    *,
    name: str | None,
    owner: str | None,
    event_type: str | None,
    paging: Paging,
) -> None:
    """List the rooms that other organisations share, and how to join them.

    With --json the latest schema of each event type is shown, too.
    """
    params = {"name": name, "owner": owner, "event_type": event_type}
    with session.client() as client:
        page = client.page("/directory", params=params, **paging)
    session.output().listing(page, _DIRECTORY_COLUMNS, empty="no other organisation shares a room")
