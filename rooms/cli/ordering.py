"""Implement `rooms ordering`: list the ordering keys of a subscription, and unblock one."""

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.options import Paging, list_of_subscription, paging_options, post_action

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
def keys(session: CliSession, /, *, subscription: str, parked: bool, paging: Paging) -> None:
    """List the ordering keys that have unfinished deliveries."""
    list_of_subscription(
        session,
        subscription,
        "ordering-keys",
        _COLUMNS,
        empty="no ordering key is parked"
        if parked
        else "no ordering key has unfinished deliveries",
        parked="true" if parked else None,
        paging=paging,
    )


@ordering.command()
@click.argument("subscription")
@click.argument("ordering_key")
@pass_session
def skip(session: CliSession, /, *, subscription: str, ordering_key: str) -> None:
    """Unblock an ordering key whose first delivery is sidelined. That delivery stays sidelined."""
    post_action(session, subscription, "ordering-keys/skip", {"ordering_key": ordering_key})
