"""`rooms magazine`: the stores behind sidelines."""

from typing import Any

import click

from rooms.cli import progress
from rooms.cli.fields import paged
from rooms.cli.references import segment
from rooms.cli.session import Group, Session, pass_session

_COLUMNS = {"name": "name", "depth": "depth", "expected": "expected", "oldest": "oldest_at"}
_SHARD = ("shard", "load_pointer", "fire_pointer", "sweep_pointer", "loaded", "fired", "deleted", "reloaded", "epoch")


@click.group(cls=Group)
def magazine() -> None:
    """The stores behind sidelines. MAGAZINE is its name, such as subscription-{id}_SIDELINE."""


@magazine.command("list")
@paged
@pass_session
def list_magazines(session: Session, /, *, limit: int, cursor: str | None, whole: bool) -> None:
    """What ever held something: live entries, and how many PostgreSQL expects there."""
    with session.client() as client:
        page = client.page("/magazines", limit=limit, cursor=cursor, whole=whole)
    session.output().listing(page, _COLUMNS, empty="nothing was ever sidelined")


@magazine.command()
@click.argument("magazine")
@pass_session
def show(session: Session, /, *, magazine: str) -> None:
    """One magazine, with its shards."""
    with session.client() as client:
        found: dict[str, Any] = client.call("GET", f"/magazines/{segment(magazine)}")
    output = session.output()
    if output.as_json:
        output.document(found)
        return
    shards = found.pop("shards")
    output.resource(found)
    headings = [field.replace("_", " ") for field in _SHARD]
    output.table(headings, [[shard[field] for field in _SHARD] for shard in shards], empty="it never held anything")


@magazine.command()
@click.argument("magazine")
@click.option("--follow", is_flag=True, help="Wait for the end.")
@pass_session
def sweep(session: Session, /, *, magazine: str, follow: bool) -> None:
    """Look for stuck entries now, instead of when it is time."""
    with session.client() as client:
        answer = client.call("POST", f"/magazines/{segment(magazine)}/sweep")
        job = client.call("GET", f"/jobs/{answer['job_id']}")
        if follow:
            job = progress.follow(client, job, shown=not session.as_json)
    session.output().resource(job)
    progress.check(job)
