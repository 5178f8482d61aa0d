"""`rooms job`: how far a long-running job is."""

import click

from rooms.cli import progress
from rooms.cli.references import identity
from rooms.cli.session import Command, Session, pass_session


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
