"""Implement `rooms search`, `rooms browse` and `rooms subscription consumers`."""

import click

from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.options import (
    Paging,
    find_subscription,
    list_of_subscription,
    paging_options,
    set_fields,
)

_FOUND_COLUMNS = {
    "kind": "kind",
    "id": "id",
    "name": "name",
    "by": "field",
    "room": "room_id",
    "at": "at",
}
_QUEUE_COLUMNS = {
    "delivery": "delivery_id",
    "event type": "event_type",
    "priority": "priority",
    "due": "due_at",
    "leased until": "leased_until",
    "consumer": "key_id",
    "attempt": "attempt",
    "ordering key": "ordering_key",
}


_CONSUMER_COLUMNS = {
    "key": "key_name",
    "id": "key_id",
    "leases": "leases",
    "oldest": "oldest_at",
    "first ends": "first_end",
    "last ends": "last_end",
}


@click.command(cls=Command)
@click.argument("text")
@pass_session
def search(session: CliSession, /, *, text: str) -> None:
    """Find TEXT: an id, a name or a part of one, a business key, or a publisher's own id.

    Correlation ids and ordering keys are found among the newest messages of your rooms.
    """
    with session.client() as client:
        found = client.call("GET", "/search", params={"q": text})
    session.output().listing(
        {**found, "next_cursor": None}, _FOUND_COLUMNS, empty="nothing was found"
    )


@click.command(cls=Command)
@click.argument("subscription")
@click.option("--leased", is_flag=True, help="What consumers have, instead of what waits.")
@paging_options
@pass_session
def browse(session: CliSession, /, *, subscription: str, leased: bool, paging: Paging) -> None:
    """Show what waits in the queue of SUBSCRIPTION (PULL), and take nothing."""
    list_of_subscription(
        session,
        subscription,
        "queue",
        _QUEUE_COLUMNS,
        empty="no consumer has a message" if leased else "nothing waits",
        paging=paging,
        **set_fields(state="leased" if leased else None),
    )


@click.command(cls=Command)
@click.argument("subscription")
@pass_session
def consumers(session: CliSession, /, *, subscription: str) -> None:
    """List who has messages of SUBSCRIPTION (PULL) now, and when their leases end.

    A consumer is an API key. Those that wait and have nothing are not listed.
    """
    with session.client() as client:
        found = find_subscription(client, subscription)
        queue = client.call("GET", f"/subscriptions/{found['id']}/consumers")
    output = session.output()
    output.listing(
        {"next_cursor": None, **queue}, _CONSUMER_COLUMNS, empty="no consumer has a message"
    )
    if not output.as_json:
        oldest = queue["oldest_due_at"]
        output.note("nothing waits" if oldest is None else f"the oldest was due at {oldest}")
        if not queue["complete"]:
            output.note("the room has more than 10,000 leases: others were not looked at")
