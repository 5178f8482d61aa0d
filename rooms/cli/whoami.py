"""Implement `rooms whoami`: the organisation and the key of the caller."""

import click

from rooms.cli.context import CliSession, Command, pass_session


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
