"""`rooms key`: API keys, made directly in the database, so that the first one needs no key."""

from typing import TYPE_CHECKING, Any

import click

from rooms.cli.errors import CliError
from rooms.cli.session import Group, Session, pass_session
from rooms.domain.states import Scope

if TYPE_CHECKING:
    from rooms.storage.keys import ApiKey

_organisation = click.option("--organisation", default="default", show_default=True, help="Whose key it is.")


@click.group(cls=Group)
def key() -> None:
    """API keys, made directly in the database (DATABASE_URL, or the embedded one while it runs)."""


@key.command()
@_organisation
@click.option("--name", required=True, help="What it is for.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice([scope.value for scope in Scope]),
    multiple=True,
    required=True,
    help="What it may do; may come again.",
)
@pass_session
def create(session: Session, /, *, organisation: str, name: str, scopes: tuple[str, ...]) -> None:
    """Make a key; its text is shown this once. The organisation is made where there is none of the name."""
    from rooms.cli import database

    wanted = [Scope(scope) for scope in dict.fromkeys(scopes)]
    made, text = database.create_key(session.answering_database_url(), organisation, name, wanted)
    session.output().resource({**_described(made), "key": text})


@key.command("list")
@_organisation
@pass_session
def list_keys(session: Session, /, *, organisation: str) -> None:
    """The keys of an organisation, newest first."""
    from rooms.cli import database

    found = [_described(one) for one in database.list_keys(session.answering_database_url(), organisation)]
    columns = {"id": "id", "name": "name", "scopes": "scopes", "created": "created_at", "revoked": "revoked_at"}
    session.output().listing({"items": found, "next_cursor": None}, columns, empty="no keys yet: `rooms key create`")


@key.command()
@click.argument("reference", metavar="KEY")
@_organisation
@pass_session
def revoke(session: Session, /, *, reference: str, organisation: str) -> None:
    """End a key, by its id or name; every process forgets it within a second or so."""
    from rooms.cli import database

    found = database.revoke_key(session.answering_database_url(), organisation, reference)
    if not found:
        raise CliError(f"organisation {organisation!r} has no living key {reference!r}; `rooms key list` shows them")
    out = session.output()
    if out.as_json:
        out.document({"revoked": [one.id for one in found]})
    for one in found:
        if not out.as_json:
            out.line(f"revoked {one.name} ({one.id})")


def _described(one: "ApiKey") -> dict[str, Any]:
    return {
        "id": one.id,
        "organisation_id": one.organisation_id,
        "name": one.name,
        "scopes": sorted(scope.value for scope in one.scopes),
        "created_at": one.created_at.isoformat(),
        "revoked_at": None if one.revoked_at is None else one.revoked_at.isoformat(),
    }
