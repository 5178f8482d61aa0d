"""`rooms status`: which subscriptions are failing."""

import click

from rooms.cli.session import Command, Session, pass_session

_COLUMNS = {
    "room": "room",
    "subscription": "name",
    "type": "type",
    "status": "status",
    "failing since": "failing_since",
    "sidelined": "sidelined",
    "retrying": "retrying",
    "host": "host",
    "last error": "last_error",
}


@click.command(cls=Command)
@click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True, help="Subscriptions to show.")
@pass_session
def status(session: Session, /, *, limit: int) -> None:
    """The subscriptions that are failing, since when and why, the longest failing first. Exit code 0 either way."""
    with session.client() as client:
        found = client.call("GET", "/status", params={"limit": limit})
    output = session.output()
    if output.as_json:
        output.document(found)
        return
    rows = [[one.get(field) for field in _COLUMNS.values()] for one in found["failing"]]
    output.table(list(_COLUMNS), rows, empty="no subscription is failing")
    if found["failing_total"] > len(rows):
        output.note(f"{len(rows)} of {found['failing_total']}; --limit shows more")
