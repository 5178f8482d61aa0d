"""`rooms job`: how far a long-running job is, and an end to one that is not wanted."""

from typing import TYPE_CHECKING, Any

import click

from rooms.cli import progress
from rooms.cli.references import identity
from rooms.cli.session import Group, Session, pass_session

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


class _JobGroup(Group):
    """`rooms job ID` is `rooms job show ID`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands:
            args = ["show", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_JobGroup)
def job() -> None:
    """A job, such as a restore or the deletion of a room: rooms job ID shows it."""


@job.command()
@click.argument("job_id")
@click.option("--follow", is_flag=True, help="Wait for its end, with a progress bar.")
@pass_session
def show(session: Session, /, *, job_id: str, follow: bool) -> None:
    """How far a job is. Exit code 1 where it failed."""
    with session.client() as client:
        found = client.call("GET", f"/jobs/{identity(job_id)}")
        if follow:
            found = progress.follow(client, found, shown=not session.as_json)
    session.output().resource(found)
    progress.check(found)


@job.command()
@click.argument("job_id")
@pass_session
def cancel(session: Session, /, *, job_id: str) -> None:
    """Stop a restore, clear, replay, recovery, shovel or purge before its next step. What it has done stays."""
    with session.client() as client:
        session.output().resource(client.call("POST", f"/jobs/{identity(job_id)}/cancel"))
