"""`rooms event-type`: event types and the versions of their schema."""

import click

from rooms.cli.fields import given, paged, read_json
from rooms.cli.references import find_room, segment
from rooms.cli.session import Group, Session, pass_session

_SCHEMA_HELP = "JSON Schema (2020-12 or draft-07), or @FILE."


@click.group("event-type", cls=Group)
def event_type() -> None:
    """Event types and the versions of their schema."""


@event_type.command()
@click.argument("room")
@click.argument("name")
@click.option("--schema", help=f"{_SCHEMA_HELP}  [any JSON where it is missing]")
@pass_session
def create(session: Session, /, *, room: str, name: str, schema: str | None) -> None:
    """Make an event type with its version 1."""
    body = {"name": name, **given(schema=None if schema is None else read_json(schema, "--schema"))}
    with session.client() as client:
        found = find_room(client, room)
        session.output().resource(client.call("POST", f"/rooms/{found['id']}/event-types", json=body))


@event_type.command("list")
@click.argument("room")
@paged
@pass_session
def list_event_types(session: Session, /, *, room: str, limit: int, cursor: str | None, whole: bool) -> None:
    """The event types of a room."""
    with session.client() as client:
        found = find_room(client, room)
        page = client.page(f"/rooms/{found['id']}/event-types", limit=limit, cursor=cursor, whole=whole)
    columns = {"name": "name", "latest": "latest_version", "versions": "versions", "created": "created_at", "id": "id"}
    session.output().listing(page, columns, empty="no event types yet: `rooms event-type create ROOM NAME`")


@event_type.command()
@click.argument("room")
@click.argument("name")
@pass_session
def show(session: Session, /, *, room: str, name: str) -> None:
    """One event type."""
    with session.client() as client:
        found = find_room(client, room)
        session.output().resource(client.call("GET", f"/rooms/{found['id']}/event-types/{segment(name)}"))


@event_type.command("add-version")
@click.argument("room")
@click.argument("name")
@click.option("--schema", required=True, help=_SCHEMA_HELP)
@pass_session
def add_version(session: Session, /, *, room: str, name: str, schema: str) -> None:
    """Add a version; publishes that name none are checked against it from now on."""
    body = {"schema": read_json(schema, "--schema")}
    with session.client() as client:
        found = find_room(client, room)
        path = f"/rooms/{found['id']}/event-types/{segment(name)}/versions"
        session.output().resource(client.call("POST", path, json=body))


@event_type.command()
@click.argument("room")
@click.argument("name")
@click.option("--version", type=click.IntRange(1), help="Only this version, which no message used.")
@pass_session
def delete(session: Session, /, *, room: str, name: str, version: int | None) -> None:
    """Delete an event type, or one of its versions."""
    with session.client() as client:
        found = find_room(client, room)
        path = f"/rooms/{found['id']}/event-types/{segment(name)}"
        answer = client.call("DELETE", path if version is None else f"{path}/versions/{version}")
    if answer is not None:
        session.output().resource(answer)
