"""`rooms job`: how far a long-running job is."""

from typing import TYPE_CHECKING, Any

import click

from rooms.cli import progress
from rooms.cli.references import identity
from rooms.cli.session import Command, Session, pass_session

if TYPE_CHECKING:
    from rooms.cli.client import Client


def ask(session: Session, client: "Client", answer: dict[str, Any], *, follow: bool) -> None:
    """Show the job that a 202 named, once it is over where that is to be followed. CliError where it failed."""
    found = client.call("GET", f"/jobs/{answer['job_id']}")
    if follow:
        found = progress.follow(client, found, shown=not session.as_json)
    session.output().resource(found)
    if not follow and not session.as_json:
        session.output().note(f"how far it is: rooms job {found['id']} --follow")
    progress.check(found)


@click.command(cls=Command)
@click.argument("job_id")
@click.option("--follow", is_flag=True, help="Wait for its end, with a progress bar.")
@pass_session
def job(session: Session, /, *, job_id: str, follow: bool) -> None:
    """A job, such as the deletion of a room. Exit code 1 where it failed."""
    with session.client() as client:
        found = client.call("GET", f"/jobs/{identity(job_id)}")
        if follow:
            found = progress.follow(client, found, shown=not session.as_json)
    session.output().resource(found)
    progress.check(found)
