"""`rooms deliveries` and `rooms redeliver`."""

from typing import Any

import click

from rooms.cli.fields import filtered, given, paged
from rooms.cli.references import find_subscription, identity
from rooms.cli.session import Command, Session, pass_session

_COLUMNS = {
    "id": "id",
    "message": "message_id",
    "state": "state",
    "reason": "reason",
    "attempts": "attempts",
    "next": "next_attempt_at",
    "status": "last_status",
    "error": "last_error",
}


@click.command(cls=Command)
@click.argument("subscription")
@filtered
@paged
@pass_session
def deliveries(
    session: Session, /, *, subscription: str, limit: int, cursor: str | None, whole: bool, **wanted: Any
) -> None:
    """The deliveries of SUBSCRIPTION (an id, or ROOM/NAME), newest first."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        path = f"/subscriptions/{found['id']}/deliveries"
        page = client.page(path, params=given(**wanted), limit=limit, cursor=cursor, whole=whole)
    session.output().listing(page, _COLUMNS, empty="no deliveries")


@click.command(cls=Command)
@click.argument("delivery_id")
@pass_session
def redeliver(session: Session, /, *, delivery_id: str) -> None:
    """Send a delivery again, its attempts counted anew."""
    with session.client() as client:
        answer = client.call("POST", f"/deliveries/{identity(delivery_id)}/redeliver")
    if answer is not None:
        session.output().resource(answer)
