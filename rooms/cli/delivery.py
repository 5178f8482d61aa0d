"""`rooms deliveries` and `rooms redeliver`."""

from typing import Any

import click

from rooms.cli.fields import given, paged
from rooms.cli.references import find_subscription, identity
from rooms.cli.session import Command, Session, pass_session
from rooms.domain.states import State

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
@click.option("--state", type=click.Choice([state.value for state in State]), help="Only these.")
@click.option("--event-type", help="Only this type.")
@click.option("--version", type=click.IntRange(1), help="Only this version of it.")
@click.option("--correlation-id", help="Only this one.")
@click.option("--from", "since", help="Published at or after (RFC 3339).")
@click.option("--to", "until", help="Published before (RFC 3339).")
@paged
@pass_session
def deliveries(
    session: Session,
    /,
    *,
    subscription: str,
    since: str | None,
    until: str | None,
    limit: int,
    cursor: str | None,
    whole: bool,
    **wanted: Any,
) -> None:
    """The deliveries of SUBSCRIPTION (an id, or ROOM/NAME)."""
    with session.client() as client:
        found = find_subscription(client, subscription)
        path = f"/subscriptions/{found['id']}/deliveries"
        params = given(**wanted, **{"from": since, "to": until})
        page = client.page(path, params=params, limit=limit, cursor=cursor, whole=whole)
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
