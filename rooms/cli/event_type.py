"""Implement `rooms event-type`: event types and the versions of their schemas."""

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.options import Paging, find_room, paging_options, path_segment, read_json, set_fields
from rooms.cli.unknown_names import event_type_advice

_SCHEMA_HELP = "JSON Schema (2020-12 or draft-07), or @FILE."


@click.group("event-type", cls=Group)
def event_type() -> None:
    """Create and change event types and the versions of their schemas."""


@event_type.command()
@click.argument("room")
@click.argument("name")
@click.option("--schema", help=f"{_SCHEMA_HELP}  [default: any JSON]")
@pass_session
def create(session: CliSession, /, *, room: str, name: str, schema: str | None) -> None:
    """Create an event type with its version 1."""
    body = {
        "name": name,
        **set_fields(schema=None if schema is None else read_json(schema, "--schema")),
    }
    with session.client() as client:
        found = find_room(client, room)
        session.output().resource(
            client.call("POST", f"/rooms/{found['id']}/event-types", json=body)
        )


@event_type.command("list")
@click.argument("room")
@paging_options
@pass_session
def list_event_types(session: CliSession, /, *, room: str, paging: Paging) -> None:
    """List the event types of a room."""
    with session.client() as client:
        found = find_room(client, room)
        page = client.page(f"/rooms/{found['id']}/event-types", **paging)
    columns = {
        "name": "name",
        "latest": "latest_version",
        "versions": "versions",
        "created": "created_at",
        "id": "id",
    }
    session.output().listing(
        page, columns, empty="no event types yet: `rooms event-type create ROOM NAME`"
    )


@event_type.command()
@click.argument("room")
@click.argument("name")
@pass_session
def show(session: CliSession, /, *, room: str, name: str) -> None:
    """Show one event type."""
    with session.client() as client:
        found = find_room(client, room)
        path = f"/rooms/{found['id']}/event-types/{path_segment(name)}"
        with event_type_advice(client, found, name):
            session.output().resource(client.call("GET", path))


@event_type.command("add-version")
@click.argument("room")
@click.argument("name")
@click.option("--schema", required=True, help=_SCHEMA_HELP)
@pass_session
def add_version(session: CliSession, /, *, room: str, name: str, schema: str) -> None:
    """Add a version. It becomes the default for messages that name no version."""
    body = {"schema": read_json(schema, "--schema")}
    with session.client() as client:
        found = find_room(client, room)
        path = f"/rooms/{found['id']}/event-types/{path_segment(name)}/versions"
        with event_type_advice(client, found, name):
            session.output().resource(client.call("POST", path, json=body))


@event_type.command()
@click.argument("room")
@click.argument("name")
@click.option(
    "--version", type=click.IntRange(1), help="Delete only this version. No message may use it."
)
@pass_session
def delete(session: CliSession, /, *, room: str, name: str, version: int | None) -> None:
    """Delete an event type, or one of its versions."""
    with session.client() as client:
        found = find_room(client, room)
        path = f"/rooms/{found['id']}/event-types/{path_segment(name)}"
        with event_type_advice(client, found, name):
            answer = client.call(
                "DELETE", path if version is None else f"{path}/versions/{version}"
            )
    if answer is not None:
        session.output().resource(answer)
