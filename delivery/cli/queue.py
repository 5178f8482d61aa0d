"""`rooms queue`: handler queues; `rooms handlers`: a process that serves them."""

import sys
from collections.abc import Callable
from typing import Any

import click

from rooms.cli.errors import CliError
from rooms.cli.fields import changes, given, paged, read_json, sure
from rooms.cli.progress import counting
from rooms.cli.references import segment
from rooms.cli.session import Command, Group, Session, pass_session

_BATCH = 1000
_CLEARABLE = ("message-expiry-s", "queue-expiry-s", "shovel", "batching")
_COLUMNS = {
    "name": "name",
    "active": "active",
    "shards": "shards",
    "consumers": "concurrency",
    "shovel": "shovel",
    "batching": "batching",
    "created": "created_at",
}
_FAILED = {
    "id": "id",
    "reason": "reason",
    "error": "error",
    "came back": "shovel_count",
    "sidelined": "sidelined_at",
    "payload": "payload",
}
_SHOVEL = ("shovel_interval_s", "shovel_concurrency", "shovel_max_shovels")


def _settings(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--batch-wait-ms", type=click.IntRange(0), help="The first of a batch waits so long for the others."
        ),
        click.option("--batch-size", type=click.IntRange(1), help="Messages for one call of a handler of batches."),
        click.option("--one-shot", is_flag=True, default=None, help="One pass of the shovel now, then none any more."),
        click.option(
            "--max-shovels", "shovel_max_shovels", type=click.IntRange(1), help="What came back so often stays."
        ),
        click.option("--shovel-concurrency", type=click.IntRange(1), help="Batches of the shovel under way at a time."),
        click.option("--shovel-interval-s", type=click.IntRange(1), help="Between two passes of the shovel."),
        click.option("--sweep-duration-s", type=click.IntRange(1), help="What a consumer has for longer is stuck."),
        click.option("--queue-expiry-s", type=click.IntRange(1), help="The queue's own lifetime."),
        click.option("--message-expiry-s", type=click.IntRange(1), help="Lifetime of a message."),
        click.option("--concurrency", type=click.IntRange(1), help="Consumers in each process, 1 to 100."),
    ):
        command = option(command)
    return command


def _body(*, batch_size: int | None, batch_wait_ms: int | None, one_shot: bool | None, **fields: Any) -> dict[str, Any]:
    if batch_wait_ms is not None and batch_size is None:
        raise click.UsageError("--batch-wait-ms goes with --batch-size")
    shovel = given(**{name.removeprefix("shovel_"): fields.pop(name) for name in _SHOVEL}, one_shot=one_shot)
    batching = given(max_size=batch_size, max_wait_ms=batch_wait_ms)
    return given(**fields, shovel=shovel or None, batching=batching or None)


@click.group(cls=Group)
def queue() -> None:
    """Handler queues: messages for functions in Python processes."""


@queue.command()
@click.argument("name")
@click.option("--shards", type=click.IntRange(1, 512), help="Of each of its magazines; fixed for good.")
@click.option("--no-shovel", is_flag=True, help="What was sidelined stays there.")
@_settings
@pass_session
def create(session: Session, /, *, name: str, no_shovel: bool, **fields: Any) -> None:
    """Make a queue."""
    body = {"name": name, **_body(**fields), **({"shovel": None} if no_shovel else {})}
    with session.client() as client:
        session.output().resource(client.call("POST", "/queues", json=body))


@queue.command("list")
@paged
@pass_session
def list_queues(session: Session, /, *, limit: int, cursor: str | None, whole: bool) -> None:
    """The queues of the organisation."""
    with session.client() as client:
        page = client.page("/queues", limit=limit, cursor=cursor, whole=whole)
    session.output().listing(page, _COLUMNS, empty="no queues yet: `rooms queue create NAME`")


@queue.command()
@click.argument("name")
@pass_session
def show(session: Session, /, *, name: str) -> None:
    """One queue, and how many messages are in it and in its sideline."""
    with session.client() as client:
        found: dict[str, Any] = client.call("GET", f"/queues/{segment(name)}")
        for which in ("magazine", "sideline"):
            try:
                magazine = client.call("GET", f"/magazines/{segment(found[which])}")
            except CliError:
                continue  # the key may not look into magazines
            found[f"{which}_depth"] = magazine["depth"]
    session.output().resource(found)


@queue.command("set")
@click.argument("name")
@_settings
@click.option("--clear", type=click.Choice(_CLEARABLE), multiple=True, help="Set back to nothing.")
@pass_session
def change(session: Session, /, *, name: str, clear: tuple[str, ...], **fields: Any) -> None:
    """Change a queue; whoever serves it follows at once. What is left out of a shovel or batching gets its default."""
    body = changes(_body(**fields), clear)
    with session.client() as client:
        session.output().resource(client.call("PATCH", f"/queues/{segment(name)}", json=body))


@queue.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def delete(session: Session, /, *, name: str, yes: bool) -> None:
    """Delete a queue and all that is in it."""
    sure(f"Delete the queue {name} and all that is in it?", yes=yes)
    with session.client() as client:
        session.output().resource(client.call("DELETE", f"/queues/{segment(name)}", params={"confirm": name}))


@queue.command()
@click.argument("name")
@click.argument("payloads", nargs=-1)
@click.option("--id", "identity", help="The message's id; with one payload only.")
@pass_session
def send(session: Session, /, *, name: str, payloads: tuple[str, ...], identity: str | None) -> None:
    """Put messages into a queue: each PAYLOAD is JSON, or @PATH of a file; without any, standard input has one a line."""
    texts = payloads or tuple(line for line in sys.stdin if line.strip())
    if not texts:
        raise click.UsageError("no payload was given")
    if identity is not None and len(texts) > 1:
        raise click.UsageError("--id goes with one payload")
    messages = [given(id=identity) | {"payload": read_json(text, "payload")} for text in texts]
    accepted: list[dict[str, Any]] = []
    with session.client() as client:
        for start in range(0, len(messages), _BATCH):
            batch = {"messages": messages[start : start + _BATCH]}
            accepted += client.call("POST", f"/queues/{segment(name)}/messages/batch", json=batch)["messages"]
    session.output().listing({"items": accepted, "next_cursor": None}, {"id": "id"}, empty="nothing was sent")


@queue.command()
@click.argument("name")
@paged
@pass_session
def sideline(session: Session, /, *, name: str, limit: int, cursor: str | None, whole: bool) -> None:
    """What handlers of a queue failed at, and why."""
    with session.client() as client:
        page = client.page(f"/queues/{segment(name)}/sideline", limit=limit, cursor=cursor, whole=whole)
    session.output().listing(page, _FAILED, empty="nothing was sidelined")


@queue.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def purge(session: Session, /, *, name: str, yes: bool) -> None:
    """End everything in a queue's sideline."""
    sure(f"End everything in the sideline of {name}?", yes=yes)
    purged, more = 0, True
    with session.client() as client, counting("messages ended", shown=not session.as_json) as progress:
        while more:
            told = client.call("POST", f"/queues/{segment(name)}/sideline/purge", params={"confirm": name})
            purged, more = purged + told["purged"], told["more"]
            progress(purged)
    session.output().resource({"purged": purged})


@click.command(cls=Command)
@click.argument("target")
@click.option(
    "--organisation",
    help="Whose queues.  [default, and those of every organisation from before names were the organisations' own]",
)
@pass_session
def handlers(session: Session, /, *, target: str, organisation: str | None) -> None:
    """Serve handler queues until SIGTERM or Ctrl-C. TARGET is MODULE:NAME of a delivery.handlers.Handlers."""
    from rooms.cli.backends import joined_installation
    from rooms.composition.handlers import find_handlers, run_handlers

    try:
        found = find_handlers(target)
    except ValueError as exc:
        raise CliError(str(exc)) from exc
    joined = joined_installation(session)
    run_handlers(joined.settings, joined.database_url, found, organisation=organisation)
