"""Implement `rooms key`: API keys, by the service or directly in the database.

The first key needs no key, as it is created in the database.
"""

from typing import TYPE_CHECKING, Any

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.errors import CliError
from rooms.cli.key_options import (
    RESTRICTIONS,
    client_option,
    key_columns,
    key_fields,
    key_options,
    name_option,
    scopes_option,
)
from rooms.cli.options import Paging, paging_options, patch_body, set_fields
from rooms.domain.ids import is_id
from rooms.domain.state_machine import Scope

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient
    from rooms.db.catalog.api_keys import ApiKey

_COLUMNS = {
    "name": "name",
    "kind": "kind",
    "prefix": "prefix",
    "scopes": "scopes",
    "application": "application",
    "expires": "expires_at",
    "last used": "last_used_at",
    "created": "created_at",
    "revoked": "revoked_at",
    "id": "id",
}
_PREFIX = "rooms_"
_PREFIX_LENGTH = 14

_DEFAULT_ORGANISATION = "default"
_organisation_option = click.option(
    "--organisation",
    help="Work in the database, on keys of this organisation.  "
    "[default: default, without --url and --key]",
)


def _by_service(session: CliSession, organisation: str | None) -> bool:
    """Return whether to call the service: with the key or address that was given."""
    return organisation is None and bool(session.key or session.url)


@click.group(cls=Group)
def key() -> None:
    """Create, restrict, rotate and revoke API keys.

    With --key or --url, keys of your organisation are managed by the service, which needs the scope
    admin. Without them, create, list and revoke work directly in the database, so that the first
    key needs none; it is DATABASE_URL, or the embedded one while it runs.
    """


@key.command()
@_organisation_option
@name_option
@scopes_option(required=True)
@client_option
@key_options
@pass_session
def create(session: CliSession, /, *, organisation: str | None, **fields: Any) -> None:
    """Create a key. Its text is shown only this once.

    In the database, rooms and subscriptions are named by id, and an organisation of this name is
    created if there is none.
    """
    if _by_service(session, organisation):
        with session.client() as client:
            body = key_fields(client, fields)
            session.output().resource(client.call("POST", "/keys", json=body))
        return
    from rooms.cli import database

    name, scopes = fields.pop("name"), fields.pop("scopes")
    is_client = fields.pop("kind") is not None
    given = (
        session.wait_for_database_url(),
        organisation or _DEFAULT_ORGANISATION,
        name,
        [Scope(scope) for scope in dict.fromkeys(scopes)],
        key_columns(fields),
    )
    if is_client:
        session.output().resource(_to_document(database.create_client(*given)))
        return
    made, text = database.create_key(*given)
    session.output().resource({**_to_document(made), "key": text})


@key.command("list")
@_organisation_option
@click.option("--name", help="Only keys of this name.")
@click.option("--prefix", help="Only the key whose text begins so.")
@paging_options
@pass_session
def list_keys(
    session: CliSession,
    /,
    *,
    organisation: str | None,
    name: str | None,
    prefix: str | None,
    paging: Paging,
) -> None:
    """List keys, newest first, with revoked ones. Last uses are rounded to the hour.

    In the database, all keys are listed at once.
    """
    shown_prefix = None if prefix is None else prefix[:_PREFIX_LENGTH]
    if _by_service(session, organisation):
        params = {"name": name, "prefix": shown_prefix}
        with session.client() as client:
            page = client.page("/keys", params=params, **paging)
    else:
        from rooms.cli import database

        url = session.wait_for_database_url()
        found = [
            _to_document(one)
            for one in database.list_keys(url, organisation or _DEFAULT_ORGANISATION)
            if name in {None, one.name} and shown_prefix in {None, one.prefix}
        ]
        page = {"items": found, "next_cursor": None}
    session.output().listing(page, _COLUMNS, empty="no keys yet: `rooms key create`")


@key.command()
@click.argument("reference", metavar="KEY")
@pass_session
def show(session: CliSession, /, *, reference: str) -> None:
    """Show one key without its text. KEY is an id, a name, or the first characters of a text."""
    with session.client() as client:
        session.output().resource(_find_key(client, reference))


@key.command()
@click.argument("reference", metavar="KEY")
@click.option("--name", help="A new name.")
@scopes_option(required=False)
@key_options
@click.option(
    "--clear",
    type=click.Choice([name.replace("_", "-") for name in RESTRICTIONS]),
    multiple=True,
    help="Remove a restriction.",
)
@pass_session
def update(
    session: CliSession, /, *, reference: str, clear: tuple[str, ...], **fields: Any
) -> None:
    """Change what a key may do. Takes effect in every process within about a second."""
    with session.client() as client:
        body = patch_body(key_fields(client, fields), clear)
        found = _find_key(client, reference)
        session.output().resource(client.call("PATCH", f"/keys/{found['id']}", json=body))


@key.command()
@click.argument("reference", metavar="KEY")
@click.option(
    "--overlap-s",
    type=click.IntRange(0),
    help="Seconds that the old text stays valid.  [default: a day]",
)
@pass_session
def rotate(session: CliSession, /, *, reference: str, overlap_s: int | None) -> None:
    """Give a key a new text, shown only this once. The old text stays valid for a while."""
    with session.client() as client:
        found = _find_key(client, reference)
        body = set_fields(overlap_s=overlap_s)
        session.output().resource(client.call("POST", f"/keys/{found['id']}/rotate", json=body))


@key.command()
@click.argument("reference", metavar="KEY")
@_organisation_option
@pass_session
def revoke(session: CliSession, /, *, reference: str, organisation: str | None) -> None:
    """Revoke a key, by its id or name. Takes effect in every process within about a second.

    A name in the database means all active keys of that name.
    """
    if _by_service(session, organisation):
        with session.client() as client:
            one = _find_key(client, reference)
            client.call("DELETE", f"/keys/{one['id']}")
        revoked = [(one["id"], one["name"])]
    else:
        from rooms.cli import database

        owner = organisation or _DEFAULT_ORGANISATION
        found = database.revoke_key(session.wait_for_database_url(), owner, reference)
        if not found:
            raise CliError(
                f"organisation {owner!r} has no active key {reference!r}; "
                "`rooms key list` shows its keys"
            )
        revoked = [(one.id, one.name) for one in found]
    out = session.output()
    if out.as_json:
        out.document({"revoked": [identity for identity, _ in revoked]})
        return
    for identity, name in revoked:
        out.line(f"revoked {name} ({identity})")


def _find_key(client: "ApiClient", reference: str) -> dict[str, Any]:
    """Return the key with this id, name or prefix. Of several of a name, the active one."""
    if is_id(reference):
        identified: dict[str, Any] = client.call("GET", f"/keys/{reference.lower()}")
        return identified
    # Of a whole key, only the part that every list shows is sent.
    query = (
        {"prefix": reference[:_PREFIX_LENGTH]}
        if reference.startswith(_PREFIX) and len(reference) >= _PREFIX_LENGTH
        else {"name": reference}
    )
    found = list(client.iter_items("/keys", query))
    found = [one for one in found if one["revoked_at"] is None] or found
    if not found:
        raise CliError(f"there is no key {query.popitem()[1]!r}; `rooms key list` shows the keys")
    if len(found) > 1:
        listed = ", ".join(one["id"] for one in found)
        raise CliError(f"there are {len(found)} keys {reference!r}; name one by its id: {listed}")
    return found[0]


def _to_document(record: "ApiKey") -> dict[str, Any]:
    names = (
        "id",
        "organisation_id",
        "name",
        "kind",
        "prefix",
        "scopes",
        *RESTRICTIONS,
        "last_used_at",
        "previous_until",
        "created_at",
        "revoked_at",
    )
    fields = {name: getattr(record, name) for name in names} | {"scopes": sorted(record.scopes)}
    return {
        name: value.isoformat() if name.endswith(("_at", "_until")) and value else _plain(value)
        for name, value in fields.items()
    }


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
