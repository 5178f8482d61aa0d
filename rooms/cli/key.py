"""Implement `rooms key`: API keys, created in the database, so that the first one needs no key."""

from typing import TYPE_CHECKING, Any

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.errors import CliError
from rooms.domain.state_machine import Scope

if TYPE_CHECKING:
    from rooms.db.catalog.api_keys import ApiKey

_organisation_option = click.option(
    "--organisation", default="default", show_default=True, help="Organisation that owns the key."
)


@click.group(cls=Group)
def key() -> None:
    """Create, list and revoke API keys, directly in the database.

    The database is DATABASE_URL, or the embedded one while it runs.
    """


@key.command()
@_organisation_option
@click.option("--name", required=True, help="Purpose of the key.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice([scope.value for scope in Scope]),
    multiple=True,
    required=True,
    help="Permission of the key; repeatable.",
)
@pass_session
def create(
    session: CliSession, /, *, organisation: str, name: str, scopes: tuple[str, ...]
) -> None:
    """Create a key. Its text is shown only this once.

    An organisation of this name is created if there is none.
    """
    from rooms.cli import database

    wanted = [Scope(scope) for scope in dict.fromkeys(scopes)]
    made, text = database.create_key(session.wait_for_database_url(), organisation, name, wanted)
    session.output().resource({**_to_document(made), "key": text})


@key.command("list")
@_organisation_option
@pass_session
def list_keys(session: CliSession, /, *, organisation: str) -> None:
    """List the keys of an organisation, newest first."""
    from rooms.cli import database

    found = [
        _to_document(one)
        for one in database.list_keys(session.wait_for_database_url(), organisation)
    ]
    columns = {
        "id": "id",
        "name": "name",
        "scopes": "scopes",
        "created": "created_at",
        "revoked": "revoked_at",
    }
    session.output().listing(
        {"items": found, "next_cursor": None}, columns, empty="no keys yet: `rooms key create`"
    )


@key.command()
@click.argument("reference", metavar="KEY")
@_organisation_option
@pass_session
def revoke(session: CliSession, /, *, reference: str, organisation: str) -> None:
    """Revoke a key, by its id or name. Takes effect in every process within about a second."""
    from rooms.cli import database

    found = database.revoke_key(session.wait_for_database_url(), organisation, reference)
    if not found:
        raise CliError(
            f"organisation {organisation!r} has no active key {reference!r}; "
            "`rooms key list` shows its keys"
        )
    out = session.output()
    if out.as_json:
        out.document({"revoked": [one.id for one in found]})
    for one in found:
        if not out.as_json:
            out.line(f"revoked {one.name} ({one.id})")


def _to_document(key_record: "ApiKey") -> dict[str, Any]:
    return {
        "id": key_record.id,
        "organisation_id": key_record.organisation_id,
        "name": key_record.name,
        "scopes": sorted(scope.value for scope in key_record.scopes),
        "created_at": key_record.created_at.isoformat(),
        "revoked_at": None if key_record.revoked_at is None else key_record.revoked_at.isoformat(),
    }
