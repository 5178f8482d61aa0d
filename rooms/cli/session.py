"""Implement `rooms whoami`, `rooms sign-in` and `rooms session`: the caller, and who signs in."""

from typing import TYPE_CHECKING, Any, Final

import click

from rooms.cli.context import CliSession, Command, Group, pass_session, user_name
from rooms.cli.options import Paging, find_subscription, paging_options, path_segment, set_fields
from rooms.domain.role import Role
from rooms.domain.state_machine import Scope

if TYPE_CHECKING:
    from rooms.cli.client import ApiClient


@click.command(cls=Command)
@pass_session
def whoami(session: CliSession) -> None:
    """Show the organisation of the key, and what the key may do."""
    with session.client() as client:
        found = client.call("GET", "/whoami")
    out = session.output()
    if out.as_json:
        out.document(found)
        return
    organisation = found.pop("organisation")
    shown = {
        "organisation": organisation["name"],
        "organisation_id": organisation["id"],
        "member_id": organisation["member_id"],
        "status": organisation["status"],
        **found,
    }
    out.resource(shown)


_COLUMNS: Final = {
    "name": "name",
    "scopes": "scopes",
    "signed in": "created_at",
    "last used (hour)": "last_used_at",
    "ends if idle": "expires_at",
    "ends": "ends_at",
    "portal": "portal",
    "own": "is_own",
    "id": "id",
}
_MAX_LINK_S: Final = 86_400
_MAX_PORTAL_S: Final = 30 * 86_400
_MAX_SESSION_S: Final = 86_400


@click.command(cls=Command)
@click.option("--name", help="The person, such as an e-mail address.  [default: your user name]")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice([role.value for role in Role]),
    help="What the person may do; repeatable.  [default: owner, and platform if the key has it]",
)
@click.option(
    "--expires",
    "expires_s",
    type=click.IntRange(10, _MAX_LINK_S),
    metavar="SECONDS",
    help="How long the link is valid.  [default: 900]",
)
@pass_session
def sign_in(
    session: CliSession, /, *, name: str | None, roles: tuple[str, ...], expires_s: int | None
) -> None:
    """Print a link that signs one person in to the console, once.

    It needs a key with the scope admin, and gives no more than this key has. The first person
    who opens the link is signed in: send it to no other.
    """
    with session.client() as client:
        given = list(dict.fromkeys(roles)) or _all_roles(client)
        body = {"name": name or user_name(), "roles": given, **set_fields(expires_s=expires_s)}
        made = client.call("POST", "/sign-in-links", json=body)
        link = f"{client.url}{made['path']}"
    out = session.output()
    if out.as_json:
        out.document({**made, "link": link})
    else:
        out.line(link)


@click.command(cls=Command)
@click.argument("subscriptions", metavar="[SUBSCRIPTION]...", nargs=-1)
@click.option("--name", help="The person, such as an e-mail address.  [default: your user name]")
@click.option(
    "--access",
    type=click.Choice(("read", "operate", "manage")),
    default="read",
    show_default=True,
    help="read: without payloads; operate: also redeliver and shovel; manage: also change.",
)
@click.option(
    "--expires",
    "expires_s",
    type=click.IntRange(60, _MAX_PORTAL_S),
    metavar="SECONDS",
    help="How long the link is valid.  [default: 86400]",
)
@click.option(
    "--session",
    "session_s",
    type=click.IntRange(60, _MAX_SESSION_S),
    metavar="SECONDS",
    help="How long a session lasts that the link begins; never longer than the link.  "
    "[default: 3600]",
)
@pass_session
def portal_link(
    session: CliSession,
    /,
    *,
    subscriptions: tuple[str, ...],
    name: str | None,
    access: str,
    expires_s: int | None,
    session_s: int | None,
) -> None:
    """Print a link by which people see subscriptions of your organisation; without any, all.

    SUBSCRIPTION is an id or ROOM/NAME. The link works until it expires, for each person who has it,
    also in a frame of the sites that ROOMS_FRAME_ANCESTORS names.
    """
    with session.client() as client:
        target: dict[str, Any] = (
            {"subscription_ids": [find_subscription(client, one)["id"] for one in subscriptions]}
            if subscriptions
            else {"organisation_id": client.call("GET", "/whoami")["organisation"]["id"]}
        )
        body = {"name": name or user_name(), "access": access, **target}
        body |= set_fields(expires_s=expires_s, session_s=session_s)
        made = client.call("POST", "/portal-links", json=body)
        link = f"{client.url}{made['path']}"
    out = session.output()
    if out.as_json:
        out.document({**made, "link": link})
    else:
        out.line(link)


def _all_roles(client: "ApiClient") -> list[str]:
    scopes = client.call("GET", "/whoami")["scopes"]
    platform = [Role.PLATFORM.value] if Scope.PLATFORM in scopes else []
    return [*platform, Role.OWNER.value]


@click.group("session", cls=Group)
def session_group() -> None:
    """List people who are signed in to the console, and end their sessions."""


@session_group.command("list")
@paging_options
@pass_session
def list_sessions(session: CliSession, /, *, paging: Paging) -> None:
    """List the sessions of your organisation that have not ended."""
    with session.client() as client:
        page = client.page("/sessions", **paging)
    session.output().listing(
        page, _COLUMNS, empty="no person is signed in: `rooms sign-in` prints a link"
    )


_PEOPLE_COLUMNS: Final = {
    "name": "name",
    "by": "by",
    "roles": "roles",
    "signed in": "signed_in_at",
    "last used (hour)": "last_used_at",
    "sessions": "sessions",
}


@session_group.command("people")
@paging_options
@pass_session
def list_people(session: CliSession, /, *, paging: Paging) -> None:
    """List the people who have signed in, as long as the journal is kept."""
    with session.client() as client:
        page = client.page("/people", **paging)
    session.output().listing(page, _PEOPLE_COLUMNS, empty="no person has signed in")


@session_group.command()
@click.argument("session_ids", metavar="[ID]...", nargs=-1)
@click.option("--person", help="All sessions of the person with this name, instead of ids.")
@pass_session
def end(session: CliSession, /, *, session_ids: tuple[str, ...], person: str | None) -> None:
    """Sign people out, within a second."""
    if bool(session_ids) == (person is not None):
        raise click.UsageError("give either ids of sessions, or --person")
    if person is not None:
        with session.client() as client:
            session.output().resource(
                client.call("POST", "/people/end-sessions", json={"name": person})
            )
        return
    ended: list[Any] = []
    with session.client() as client:
        for identity in session_ids:
            client.call("DELETE", f"/sessions/{path_segment(identity)}")
            ended.append(identity)
    out = session.output()
    if out.as_json:
        out.document({"ended": ended})
    else:
        for identity in ended:
            out.line(f"ended {identity}")
