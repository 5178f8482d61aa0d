"""Implement `rooms ordering`: list the ordering keys of a subscription, and unblock one."""

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.options import find_subscription, paging_options, post_action, set_fields

_COLUMNS = {
    "ordering key": "ordering_key",
    "state": "state",
    "since": "since",
    "waiting": "waiting",
    "head": "head",
}


@click.group(cls=Group)
def ordering() -> None:
    """List the ordering keys of a subscription, and unblock one.

    SUBSCRIPTION is an id, or ROOM/NAME.
    """


@ordering.command()
@click.argument("subscription")
@click.option("--parked", is_flag=True, help="Only keys that a sidelined delivery blocks.")
@paging_options
@pass_session
def keys(
    session: CliSession,
    /,
    *,
    subscription: str,
    parked: bool,
    limit: int,
    cursor: str | None,
    whole: bool,
) -> None:
    """List the ordering keys that have unfinished deliveries."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        page = client.page(
            f"/subscriptions/{found['id']}/ordering-keys",
            params=set_fields(parked="true" if parked else None),
            limit=limit,
            cursor=cursor,
            whole=whole,
        )
    session.output().listing(page, _COLUMNS, empty="no ordering key has unfinished deliveries")


@ordering.command()
@click.argument("subscription")
@click.argument("ordering_key")
@pass_session
def skip(session: CliSession, /, *, subscription: str, ordering_key: str) -> None:
    """Unblock an ordering key whose first delivery is sidelined. That delivery stays sidelined."""
    post_action(session, subscription, "ordering-keys/skip", {"ordering_key": ordering_key})
