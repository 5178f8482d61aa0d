"""Implement `rooms organisation`: the members of the installation, for its operators."""

from typing import Any

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.key import client_option, key_fields, key_options, name_option, scopes_option
from rooms.cli.options import (
    Paging,
    confirm_or_abort,
    find_organisation,
    paging_options,
    patch_body,
    reason_option,
    set_fields,
)

_COLUMNS = {
    "name": "name",
    "member id": "member_id",
    "status": "status",
    "reason": "status_reason",
    "contact": "contact",
    "created": "created_at",
    "id": "id",
}
_member_id_option = click.option("--member-id", help="instance/class/code, as in X-Road.")
_contact_option = click.option("--contact", help="Person or address for questions.")


@click.group(cls=Group)
def organisation() -> None:
    """Create, suspend and delete organisations. Needs a key with the scope platform.

    ORGANISATION is an id, a name or a member id.
    """


@organisation.command()
@click.argument("name")
@_member_id_option
@_contact_option
@pass_session
def create(
    session: CliSession, /, *, name: str, member_id: str | None, contact: str | None
) -> None:
    """Create an organisation. `rooms organisation key create` makes its first key."""
    body = {"name": name, **set_fields(member_id=member_id, contact=contact)}
    with session.client() as client:
        session.output().resource(client.call("POST", "/organisations", json=body))


@organisation.command("list")
@paging_options
@click.option("--name", help="Only the one of this name.")
@click.option("--member-id", help="Only the one of this member id.")
@pass_session
def list_organisations(
    session: CliSession, /, *, name: str | None, member_id: str | None, paging: Paging
) -> None:
    """List the organisations of the installation, newest first."""
    with session.client() as client:
        page = client.page(
            "/organisations", params={"name": name, "member_id": member_id}, **paging
        )
    session.output().listing(page, _COLUMNS, empty="no such organisation")


@organisation.command()
@click.argument("reference", metavar="ORGANISATION")
@pass_session
def show(session: CliSession, /, *, reference: str) -> None:
    """Show one organisation."""
    with session.client() as client:
        session.output().resource(find_organisation(client, reference))


@organisation.command()
@click.argument("reference", metavar="ORGANISATION")
@click.option("--name", help="A new name.")
@_member_id_option
@_contact_option
@click.option(
    "--clear",
    type=click.Choice(["member-id", "contact"]),
    multiple=True,
    help="Remove the value of a field.",
)
@pass_session
def update(
    session: CliSession, /, *, reference: str, clear: tuple[str, ...], **fields: Any
) -> None:
    """Change the name, member id or contact of an organisation."""
    body = patch_body(set_fields(**fields), clear)
    with session.client() as client:
        found = find_organisation(client, reference)
        session.output().resource(client.call("PATCH", f"/organisations/{found['id']}", json=body))


@organisation.command()
@click.argument("reference", metavar="ORGANISATION")
@reason_option
@pass_session
def suspend(session: CliSession, /, *, reference: str, reason: str | None) -> None:
    """Stop what an organisation publishes and receives, until `resume`. Nothing is lost.

    Its keys can only read. Its subscriptions, and those of others to its rooms, hold their
    messages.
    """
    with session.client() as client:
        found = find_organisation(client, reference)
        body = set_fields(reason=reason)
        session.output().resource(
            client.call("POST", f"/organisations/{found['id']}/suspend", json=body)
        )


@organisation.command()
@click.argument("reference", metavar="ORGANISATION")
@pass_session
def resume(session: CliSession, /, *, reference: str) -> None:
    """Let a suspended organisation continue: held messages are delivered."""
    with session.client() as client:
        found = find_organisation(client, reference)
        session.output().resource(client.call("POST", f"/organisations/{found['id']}/resume"))


@organisation.command()
@click.argument("reference", metavar="ORGANISATION")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def delete(session: CliSession, /, *, reference: str, yes: bool) -> None:
    """Delete an organisation with all that it owns, by a job. Its journal stays."""
    with session.client() as client:
        found = find_organisation(client, reference)
        confirm_or_abort(
            f"Delete organisation {found['name']!r} with all its rooms, subscriptions and keys?",
            yes=yes,
        )
        path = f"/organisations/{found['id']}"
        session.output().resource(client.call("DELETE", path, params={"confirm": found["name"]}))


@organisation.group(cls=Group)
def key() -> None:
    """Create keys of an organisation, such as its first one."""


@key.command("create")
@click.argument("reference", metavar="ORGANISATION")
@name_option
@scopes_option(required=True)
@client_option
@key_options
@pass_session
def create_key(session: CliSession, /, *, reference: str, **fields: Any) -> None:
    """Create a key of an organisation. Its text is shown only this once."""
    with session.client() as client:
        found = find_organisation(client, reference)
        body = key_fields(client, fields)
        session.output().resource(
            client.call("POST", f"/organisations/{found['id']}/keys", json=body)
        )
