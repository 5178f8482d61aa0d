"""Implement `rooms queue`: handler queues, their messages and their sidelines."""

import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.errors import CliError
from rooms.cli.job import progress_counter
from rooms.cli.options import (
    Paging,
    confirm_or_abort,
    paging_options,
    patch_body,
    path_segment,
    read_json,
    set_fields,
)

_MAX_BATCH = 1000
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
_FAILED_COLUMNS = {
    "id": "id",
    "reason": "reason",
    "error": "error",
    "shovels": "shovel_count",
    "sidelined": "sidelined_at",
    "payload": "payload",
}
_SHOVEL_FIELDS = ("shovel_interval_s", "shovel_concurrency", "shovel_max_shovels")


class _SendError(CliError):
    """Report which messages were not accepted, and how to go on without sending others twice."""

    def __init__(
        self, cause: CliError, at: tuple[int, int], *, accepted: int, of_lines: bool
    ) -> None:
        self._cause = cause
        self._at = at
        self._accepted = accepted
        self._of_lines = of_lines
        first, last = at
        which = "lines" if of_lines else "payloads"
        super().__init__(f"{which} {first} to {last} were not accepted: {cause.message}")

    def describe(self) -> dict[str, Any]:
        return {
            **self._cause.describe(),
            "lines" if self._of_lines else "payloads": list(self._at),
            "accepted": self._accepted,
        }

    def lines(self) -> list[str]:
        how = f"continue with: --from-line {self._at[0]}" if self._of_lines else "leave them out"
        return [
            self.message,
            *self._cause.lines()[1:],
            f"{self._accepted} messages before them were accepted; {how}",
        ]


def _read_lines(file: BinaryIO, first: int) -> list[tuple[int, Any]]:
    """Return the JSON of each line that is not blank, from line `first` on, with its number."""
    import json

    found = []
    for number, line in enumerate(file, 1):
        if number < first or not line.strip():
            continue
        try:
            found.append((number, json.loads(line)))
        except (ValueError, RecursionError) as exc:
            raise click.UsageError(f"line {number} is not JSON: {exc}") from exc
    return found


def _queue_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--batch-wait-ms",
            type=click.IntRange(0),
            help="Longest wait of the first message for a full batch.",
        ),
        click.option(
            "--batch-size",
            type=click.IntRange(1),
            help="Most messages in one call of a batch handler.",
        ),
        click.option(
            "--one-shot",
            is_flag=True,
            default=None,
            help="Shovel once now, and never again.",
        ),
        click.option(
            "--max-shovels",
            "shovel_max_shovels",
            type=click.IntRange(1),
            help="Leave messages that were shoveled this often.",
        ),
        click.option(
            "--shovel-concurrency",
            type=click.IntRange(1),
            help="Batches that the shovel moves at a time.",
        ),
        click.option(
            "--shovel-interval-s",
            type=click.IntRange(1),
            help="Seconds between two passes of the shovel.",
        ),
        click.option(
            "--sweep-duration-s",
            type=click.IntRange(1),
            help="Seconds after which a message with a consumer counts as stuck.",
        ),
        click.option("--queue-expiry-s", type=click.IntRange(1), help="Lifetime of the queue."),
        click.option("--message-expiry-s", type=click.IntRange(1), help="Lifetime of a message."),
        click.option(
            "--concurrency", type=click.IntRange(1), help="Consumers in each process, 1 to 100."
        ),
    ):
        command = option(command)
    return command


def _request_body(
    *, batch_size: int | None, batch_wait_ms: int | None, one_shot: bool | None, **fields: Any
) -> dict[str, Any]:
    if batch_wait_ms is not None and batch_size is None:
        raise click.UsageError("--batch-wait-ms needs --batch-size")
    shovel = set_fields(
        **{name.removeprefix("shovel_"): fields.pop(name) for name in _SHOVEL_FIELDS},
        one_shot=one_shot,
    )
    batching = set_fields(max_size=batch_size, max_wait_ms=batch_wait_ms)
    return set_fields(**fields, shovel=shovel or None, batching=batching or None)


@click.group(cls=Group)
def queue() -> None:
    """Create, configure and use handler queues: messages for functions in Python processes."""


@queue.command()
@click.argument("name")
@click.option(
    "--shards",
    type=click.IntRange(1, 512),
    help="Shards of each of its magazines. Cannot be changed later.",
)
@click.option("--no-shovel", is_flag=True, help="Never shovel sidelined messages automatically.")
@_queue_options
@pass_session
def create(session: CliSession, /, *, name: str, no_shovel: bool, **fields: Any) -> None:
    """Create a queue."""
    body = {"name": name, **_request_body(**fields), **({"shovel": None} if no_shovel else {})}
    with session.client() as client:
        session.output().resource(client.call("POST", "/queues", json=body))


@queue.command("list")
@paging_options
@pass_session
def list_queues(session: CliSession, /, *, paging: Paging) -> None:
    """List the queues of the organisation."""
    with session.client() as client:
        page = client.page("/queues", **paging)
    session.output().listing(page, _COLUMNS, empty="no queues yet: `rooms queue create NAME`")


@queue.command()
@click.argument("name")
@pass_session
def show(session: CliSession, /, *, name: str) -> None:
    """Show one queue, and the number of messages in it and in its sideline."""
    with session.client() as client:
        found: dict[str, Any] = client.call("GET", f"/queues/{path_segment(name)}")
        for which in ("magazine", "sideline"):
            try:
                magazine = client.call("GET", f"/magazines/{path_segment(found[which])}")
            except CliError:
                continue  # the key may not read magazines
            found[f"{which}_depth"] = magazine["depth"]
    session.output().resource(found)


@queue.command("set")
@click.argument("name")
@_queue_options
@click.option("--clear", type=click.Choice(_CLEARABLE), multiple=True, help="Remove a setting.")
@pass_session
def change(session: CliSession, /, *, name: str, clear: tuple[str, ...], **fields: Any) -> None:
    """Change a queue. Running handlers follow at once.

    Options of a shovel or of batching that are left out get their defaults.
    """
    body = patch_body(_request_body(**fields), clear)
    with session.client() as client:
        session.output().resource(client.call("PATCH", f"/queues/{path_segment(name)}", json=body))


@queue.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def delete(session: CliSession, /, *, name: str, yes: bool) -> None:
    """Delete a queue and every message in it."""
    confirm_or_abort(f"Delete the queue {name} and every message in it?", yes=yes)
    with session.client() as client:
        session.output().resource(
            client.call("DELETE", f"/queues/{path_segment(name)}", params={"confirm": name})
        )


@queue.command()
@click.argument("name")
@click.argument("payloads", nargs=-1)
@click.option("--id", "identity", help="Id of the message. Needs exactly one payload.")
@click.option(
    "--from-line",
    type=click.IntRange(1),
    default=1,
    help="Skip the lines of standard input before this one.",
)
@pass_session
def send(
    session: CliSession,
    /,
    *,
    name: str,
    payloads: tuple[str, ...],
    identity: str | None,
    from_line: int,
) -> None:
    """Put messages into a queue. Each PAYLOAD is JSON, or @PATH of a file.

    Without a PAYLOAD, standard input has one JSON payload per line. What is invalid is found before
    anything is sent.
    """
    found = (
        [(at, read_json(text, "payload")) for at, text in enumerate(payloads, 1)]
        if payloads
        else _read_lines(sys.stdin.buffer, from_line)
    )
    if not found:
        raise click.UsageError("no payload was given")
    if identity is not None and len(found) > 1:
        raise click.UsageError("--id needs exactly one payload")
    accepted: list[dict[str, Any]] = []
    with session.client() as client:
        for start in range(0, len(found), _MAX_BATCH):
            part = found[start : start + _MAX_BATCH]
            messages = [set_fields(id=identity) | {"payload": payload} for _, payload in part]
            try:
                accepted += client.call(
                    "POST",
                    f"/queues/{path_segment(name)}/messages/batch",
                    json={"messages": messages},
                )["messages"]
            except CliError as exc:
                at = part[0][0], part[-1][0]
                raise _SendError(exc, at, accepted=len(accepted), of_lines=not payloads) from exc
    session.output().listing(
        {"items": accepted, "next_cursor": None}, {"id": "id"}, empty="nothing was sent"
    )


@queue.command()
@click.argument("name")
@paging_options
@pass_session
def sideline(session: CliSession, /, *, name: str, paging: Paging) -> None:
    """List the messages that handlers of a queue failed to process, and why."""
    with session.client() as client:
        page = client.page(f"/queues/{path_segment(name)}/sideline", **paging)
    session.output().listing(page, _FAILED_COLUMNS, empty="nothing was sidelined")


@queue.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_session
def purge(session: CliSession, /, *, name: str, yes: bool) -> None:
    """Delete every message in the sideline of a queue."""
    confirm_or_abort(f"Delete every message in the sideline of {name}?", yes=yes)
    purged, more = 0, True
    with (
        session.client() as client,
        progress_counter("messages deleted", shown=not session.as_json) as progress,
    ):
        while more:
            result = client.call(
                "POST", f"/queues/{path_segment(name)}/sideline/purge", params={"confirm": name}
            )
            purged, more = purged + result["purged"], result["more"]
            progress(purged)
    session.output().resource({"purged": purged})
