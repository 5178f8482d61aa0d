"""Implement `rooms key`: API keys, by the service or directly in the database.

The first key needs no key, as it is created in the database. The options of a key, and the request
or the columns that they make, are also those of `rooms organisation`.
"""

from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.errors import CliError
from rooms.cli.options import (
    Paging,
    find_room,
    find_subscription,
    paging_options,
    parse_id,
    parse_time,
    patch_body,
    set_fields,
)
from rooms.domain.event_type_pattern import check_pattern
from rooms.domain.ids import MAX_ROOM, is_id
from rooms.domain.state_machine import Scope

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient
    from rooms.db.catalog.api_keys import ApiKey

RESTRICTIONS = (
    "application",
    "rooms",
    "event_types",
    "subscriptions",
    "networks",
    "expires_at",
)
"""The fields of a key that restrict it, in the API and in the database."""

name_option = click.option("--name", required=True, help="Purpose of the key.")
_COLUMNS = {
    "name": "name",
    "kind": "kind",
    "prefix": "prefix",
    "scopes": "scopes",
    "application": "application",
    "expires": "expires_at",
    "last used (hour)": "last_used_at",
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


def scopes_option(*, required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--scope` (as `scopes`)."""
    return click.option(
        "--scope",
        "scopes",
        type=click.Choice([scope.value for scope in Scope]),
        multiple=True,
        required=required,
        help="Permission of the key; repeatable.",
    )


client_option = click.option(
    "--client",
    "kind",
    flag_value="client",
    default=None,
    help="Without a text: for programs that a client certificate or a trusted proxy identifies as "
    "the organisation; with --application for that one only.",
)


def _checked(
    check: Callable[[str], object],
) -> Callable[[click.Context, click.Parameter, Sequence[str]], Sequence[str]]:
    def callback(
        ctx: click.Context, parameter: click.Parameter, values: Sequence[str]
    ) -> Sequence[str]:
        for value in values:
            try:
                check(value)
            except ValueError as exc:
                raise click.BadParameter(f"{value!r}: {exc}", ctx, parameter) from exc
        return values

    return callback


def key_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what a key may be restricted to, each named as its field of the request."""
    for option in reversed(
        [
            click.option(
                "--room", "rooms", multiple=True, help="Only this room, by id or name; repeatable."
            ),
            click.option(
                "--event-type",
                "event_types",
                metavar="PATTERN",
                callback=_checked(check_pattern),
                multiple=True,
                help="Only this event type, or `order.*`; repeatable.",
            ),
            click.option(
                "--subscription",
                "subscriptions",
                multiple=True,
                help="Only this subscription, by id or ROOM/NAME; repeatable.",
            ),
            click.option("--application", help="The part of the organisation that uses the key."),
            click.option(
                "--network",
                "networks",
                metavar="CIDR",
                callback=_checked(ip_network),
                multiple=True,
                help="Only clients with these addresses; repeatable.",
            ),
            click.option("--expires-at", callback=parse_time, help="End of the key (RFC 3339)."),
        ]
    ):
        command = option(command)
    return command


def key_fields(client: "ApiClient", fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a request for a key: names of rooms and subscriptions become ids."""
    body = _lists(fields)
    if "scopes" in body:
        body["scopes"] = list(dict.fromkeys(body["scopes"]))
    if "rooms" in body:
        body["rooms"] = [_room_id(client, one) for one in body["rooms"]]
    if "subscriptions" in body:
        body["subscriptions"] = [_subscription_id(client, one) for one in body["subscriptions"]]
    return body


def _room_id(client: "ApiClient", reference: str) -> int:
    """Return a room's id. Digits are an id: the key need not see the room."""
    return int(reference if _is_number(reference) else find_room(client, reference)["id"])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _lists(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given fields, with a list for each repeated option."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in set_fields(**fields).items()
    }


def _subscription_id(client: "ApiClient", reference: str) -> str:
    if is_id(reference):
        return reference.lower()
    return str(find_subscription(client, reference)["id"])


def key_columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a key's restrictions. Raise a usage error at a name that is no id."""
    from datetime import datetime

    columns = _lists(fields)
    if "rooms" in columns:
        for one in columns["rooms"]:
            if not _is_number(one) or not 0 < int(one) <= MAX_ROOM:
                raise click.UsageError(f"--room: {one!r} is no id; in the database give the id")
        columns["rooms"] = [int(one) for one in columns["rooms"]]
    if "subscriptions" in columns:
        columns["subscriptions"] = [parse_id(one) for one in columns["subscriptions"]]
    if "networks" in columns:
        columns["networks"] = [str(ip_network(one)) for one in columns["networks"]]
    if "expires_at" in columns:
        columns["expires_at"] = datetime.fromisoformat(columns["expires_at"])
    return columns


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
@click.option(
    "--create-organisation",
    is_flag=True,
    help="With --organisation: create the organisation, too, if there is none of this name.",
)
@name_option
@scopes_option(required=True)
@client_option
@key_options
@pass_session
def create(
    session: CliSession,
    /,
    *,
    organisation: str | None,
    create_organisation: bool,
    **fields: Any,
) -> None:
    """Create a key. Its text is shown only this once.

    In the database, rooms and subscriptions are named by id.
    """
    if create_organisation and organisation is None:
        raise click.UsageError("--create-organisation needs --organisation NAME")
    if _by_service(session, organisation):
        with session.client() as client:
            body = key_fields(client, fields)
            session.output().resource(client.call("POST", "/keys", json=body))
        return
    from rooms.cli import database

    name, scopes = fields.pop("name"), fields.pop("scopes")
    is_client = fields.pop("kind") is not None
    if is_client and create_organisation:
        raise click.UsageError(
            "--client needs an organisation with a member id: `rooms organisation create`"
        )
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
    made, text = database.create_key(*given, new_organisation=create_organisation)
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
