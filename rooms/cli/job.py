"""`rooms job`: how far a long-running job is."""

import sys
import time
from typing import Any

import click

from rooms.cli.errors import CliError
from rooms.cli.references import identity
from rooms.cli.session import Command, Session, pass_session

_POLL_S = 0.5
_RUNNING = {"queued", "running"}


@click.command(cls=Command)
@click.argument("job_id")
@click.option("--follow", is_flag=True, help="Wait for its end, with a progress bar.")
@pass_session
def job(session: Session, /, *, job_id: str, follow: bool) -> None:
    """A job, such as the deletion of a room. Exit code 1 where it failed."""
    path = f"/jobs/{identity(job_id)}"
    with session.client() as client:
        found = client.call("GET", path)
        if follow and found["state"] in _RUNNING:
            with _bar(shown=not session.as_json) as bar:
                task = bar.add_task(str(found.get("kind", "job")), total=None)
                while found["state"] in _RUNNING:
                    bar.update(task, completed=found.get("done") or 0, total=found.get("total"))
                    time.sleep(_POLL_S)
                    found = client.call("GET", path)
    session.output().resource(found)
    if found["state"] == "failed":
        raise CliError(f"the job failed: {found.get('error') or 'no reason was kept'}")


def _bar(*, shown: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (shown and sys.stderr.isatty()),
    )
