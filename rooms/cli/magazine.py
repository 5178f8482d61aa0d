"""Implement `rooms magazine`: the stores of sidelined deliveries."""

from typing import Any

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.job import follow_job, raise_if_failed
from rooms.cli.options import Paging, paging_options, path_segment

_COLUMNS = {
    "name": "name",
    "subscription": "subscription_name",
    "queue": "queue",
    "depth": "depth",
    "expected": "expected",
    "oldest": "oldest_at",
}
_SHARD_COLUMNS = (
    "shard",
    "load_pointer",
    "fire_pointer",
    "sweep_pointer",
    "loaded",
    "fired",
    "deleted",
    "reloaded",
    "epoch",
)


@click.group(cls=Group)
def magazine() -> None:
    """Inspect the stores of sidelined deliveries.

    MAGAZINE is a name such as subscription-{id}_SIDELINE.
    """


@magazine.command("list")
@paging_options
@pass_session
def list_magazines(session: CliSession, /, *, paging: Paging) -> None:
    """List the magazines, with their live entries and the number that PostgreSQL expects."""
    with session.client() as client:
        page = client.page("/magazines", **paging)
    session.output().listing(page, _COLUMNS, empty="nothing was ever sidelined")


@magazine.command()
@click.argument("magazine")
@pass_session
def show(session: CliSession, /, *, magazine: str) -> None:
    """Show one magazine with its shards."""
    with session.client() as client:
        found: dict[str, Any] = client.call("GET", f"/magazines/{path_segment(magazine)}")
    output = session.output()
    if output.as_json:
        output.document(found)
        return
    shards = found.pop("shards")
    output.resource(found)
    headings = [field.replace("_", " ") for field in _SHARD_COLUMNS]
    output.table(
        headings,
        [[shard[field] for field in _SHARD_COLUMNS] for shard in shards],
        empty="it never held an entry",
    )


@magazine.command()
@click.argument("magazine")
@click.option("--follow", is_flag=True, help="Wait for its end.")
@pass_session
def sweep(session: CliSession, /, *, magazine: str, follow: bool) -> None:
    """Look for stuck entries now, instead of waiting for the next sweep."""
    with session.client() as client:
        answer = client.call("POST", f"/magazines/{path_segment(magazine)}/sweep")
        job = client.call("GET", f"/jobs/{answer['job_id']}")
        if follow:
            job = follow_job(client, job, shown=not session.as_json)
    session.output().resource(job)
    raise_if_failed(job)
