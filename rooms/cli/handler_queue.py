"""Implement `rooms queue`: handler queues, their messages and their sidelines."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import click

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.errors import CliError, ProblemError, UnreachableError
from rooms.cli.job import progress_counter
from rooms.cli.options import (
    Paging,
    confirm_or_abort,
    paging_options,
    patch_body,
    path_segment,
    read_argument,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _RequestPart:
    """Name the messages of one request by their lines or payloads, and count those before them."""

    kind: Literal["lines", "payloads"]
    first: int
    last: int
    accepted_before: int

    def outcome(self, *, in_doubt: bool) -> str:
        """Say what became of the messages."""
        which = f"{self.kind} {self.first} to {self.last}"
        if in_doubt:
            return f"it is not known whether {which} were accepted"
        return f"{which} were not accepted"

    def remedy(self, *, in_doubt: bool) -> str:
        """Say how to go on without sending the messages before them twice."""
        if self.kind == "lines":
            how = f"continue with: --from-line {self.first}"
        else:
            how = "leave those out"
        twice = ", but what is in doubt may be handled twice then" if in_doubt else ""
        return f"{self.accepted_before} messages before them were accepted; {how}{twice}"


class _SendError(CliError):
    """Report which messages were not accepted, or may have been, and how to go on."""

    def __init__(self, cause: CliError, part: _RequestPart) -> None:
        self._cause = cause
        self._part = part
        self._in_doubt = _may_have_arrived(cause)
        super().__init__(f"{part.outcome(in_doubt=self._in_doubt)}: {cause.message}")

    def describe(self) -> dict[str, Any]:
        return {
            **self._cause.describe(),
            self._part.kind: [self._part.first, self._part.last],
            "accepted": self._part.accepted_before,
            "in_doubt": self._in_doubt,
        }

    def lines(self) -> list[str]:
        remedy = self._part.remedy(in_doubt=self._in_doubt)
        return [self.message, *self._cause.lines()[1:], remedy]


def _may_have_arrived(cause: CliError) -> bool:
    """Return whether messages may have been stored by a request that ended so."""
    if isinstance(cause, ProblemError):
        return cause.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return isinstance(cause, UnreachableError) and cause.may_have_arrived


def _read_messages(
    payloads: tuple[str, ...], identity: str | None, from_line: int
) -> list[tuple[int, bytes]]:
    """Return each message of a batch as JSON, with its number among the payloads or lines.

    UsageError: a payload is not JSON. Nothing that would be refused as that is sent.
    """
    from rooms.cli.bulk_publish import payload_parser

    wrap = payload_parser(set_fields(id=identity))
    if payloads:
        texts = ((at, read_argument(text, f"payload {at}")) for at, text in enumerate(payloads, 1))
    else:
        lines = enumerate(sys.stdin.buffer, 1)
        texts = ((at, line) for at, line in lines if at >= from_line and line.strip())
    found = []
    for at, text in texts:
        try:
            found.append((at, wrap(text.strip())))
        except ValueError as exc:
            raise click.UsageError(f"{'payload' if payloads else 'line'} {at} is {exc}") from exc
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

    Without a PAYLOAD, standard input has one JSON payload per line. What is not JSON is found
    before anything is sent.
    """
    found = _read_messages(payloads, identity, from_line)
    if not found:
        raise click.UsageError("no payload was given")
    if identity is not None and len(found) > 1:
        raise click.UsageError("--id needs exactly one payload")
    accepted: list[dict[str, Any]] = []
    with session.client() as client:
        for start in range(0, len(found), _MAX_BATCH):
            batch = found[start : start + _MAX_BATCH]
            part = _RequestPart(
                kind="payloads" if payloads else "lines",
                first=batch[0][0],
                last=batch[-1][0],
                accepted_before=len(accepted),
            )
            body = b'{"messages":[' + b",".join(message for _, message in batch) + b"]}"
            try:
                accepted += client.call(
                    "POST", f"/queues/{path_segment(name)}/messages/batch", body=body
                )["messages"]
            except CliError as exc:
                raise _SendError(exc, part) from exc
            except KeyboardInterrupt:
                outcome, remedy = part.outcome(in_doubt=True), part.remedy(in_doubt=True)
                session.output().note(f"stopped: {outcome}; {remedy}")
                raise
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
