"""`rooms publish`: one message from the command line or standard input, or a file with one a line."""

import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import click

from rooms.cli.errors import CliError
from rooms.cli.fields import given, pairs
from rooms.cli.references import find_room
from rooms.cli.session import Command, Session, pass_session
from rooms.terminal import terminal_safe

if TYPE_CHECKING:
    from rich.console import Console

    from rooms.cli.ndjson import Survey, Wrap

_CHUNK_BYTES = 1 << 20


@click.command(cls=Command)
@click.argument("room")
@click.argument("event_type", required=False)
@click.argument("payload", required=False)
@click.option("--version", type=click.IntRange(1), help="Version of the event type.  [the latest]")
@click.option("--to", "destinations", multiple=True, help="Only to this destination; may come again.")
@click.option("--correlation-id", help="Runs through every step of the message.")
@click.option("--priority", type=click.IntRange(0, 9), help="9 goes first.")
@click.option("--ttl-ms", type=click.IntRange(1), help="A shorter lifetime than the room's.")
@click.option(
    "--header",
    "headers",
    metavar="NAME=VALUE",
    callback=pairs,
    multiple=True,
    help="Goes along to the webhook; may come again.",
)
@click.option("--ordering-key", help="Kept with the message.")
@click.option("--delay-ms", type=click.IntRange(0), help="Due so long from now.")
@click.option("--deliver-at", metavar="TIME", help="Due at this time, like 2026-01-31T12:00:00Z.")
@click.option("--business-key", help="To list it by.")
@click.option("--id", help="An id of your own: the same again publishes nothing, for as long as the message is kept.")
@click.option("--idempotency-key", help="The same key again publishes nothing.")
@click.option("--file", "path", metavar="PATH", help="One message a line (NDJSON); '-' is standard input.")
@click.option("--batch-size", type=click.IntRange(1, 1000), default=500, show_default=True, help="Messages a request.")
@click.option("--idempotency-prefix", help="Begins the key of each batch.  [from the content of the file]")
@click.option("--from-line", type=click.IntRange(1), default=1, help="Skip the lines before this one.")
@click.option("--again", is_flag=True, help="Publish even what an earlier run of the same file published.")
@pass_session
def publish(
    session: Session,
    /,
    *,
    room: str,
    event_type: str | None,
    payload: str | None,
    path: str | None,
    idempotency_key: str | None,
    batch_size: int,
    idempotency_prefix: str | None,
    from_line: int,
    again: bool,
    **fields: Any,
) -> None:
    """Publish PAYLOAD (JSON, or @FILE; from standard input where it is missing or '-') as EVENT_TYPE.

    With --file every line is a message {event_type, payload, …}; where EVENT_TYPE is given too, every line is a
    payload. A file that broke off half-way can be sent again: what was published is not published twice.
    """
    message = given(event_type=event_type, **fields)
    if path is not None:
        if payload is not None or idempotency_key is not None:
            raise click.UsageError("--file takes neither PAYLOAD nor --idempotency-key")
        if event_type is None and message:
            raise click.UsageError("without EVENT_TYPE the lines of the file say everything; no options of a message")
        if "id" in message:
            raise click.UsageError("--id is one message's; in a file each line may have an 'id' of its own")
        prefix = secrets.token_hex(16) if again else idempotency_prefix
        _publish_file(session, room, path, message, prefix=prefix, batch_size=batch_size, from_line=from_line)
        return
    if event_type is None:
        raise click.UsageError("name an EVENT_TYPE, or a --file")
    body = _body(message, payload)
    headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    with session.client() as client:
        found = find_room(client, room)
        answer = client.call("POST", f"/rooms/{found['id']}/messages", body=body, headers=headers)
    session.output().resource(answer)


def _body(message: dict[str, Any], payload: str | None) -> bytes:
    from rooms.cli.ndjson import payload_of

    if payload is None or payload == "-":
        if payload is None and sys.stdin.isatty():
            raise click.UsageError("give a PAYLOAD, or pipe one in")
        raw = sys.stdin.buffer.read()
    elif payload.startswith("@"):
        try:
            raw = Path(payload[1:]).read_bytes()
        except OSError as exc:
            raise click.UsageError(f"PAYLOAD: {payload[1:]} cannot be read: {exc.strerror}") from exc
    else:
        raw = payload.encode("utf-8", "surrogateescape")
    try:
        return payload_of(message)(raw.strip())
    except ValueError as exc:
        raise click.UsageError(f"PAYLOAD is {exc}") from exc


def _publish_file(
    session: Session,
    room: str,
    path: str,
    message: dict[str, Any],
    *,
    prefix: str | None,
    batch_size: int,
    from_line: int,
) -> None:
    import json

    from rooms.cli.ndjson import LineError, batches, payload_of, survey, whole_message
    from rooms.cli.upload import upload

    wrap: Wrap = payload_of(message) if message else whole_message
    out = session.output()
    published = repeats = 0
    with _opened(path) as file:
        try:
            found = survey(
                file, wrap, first_line=from_line, salt=json.dumps(message, sort_keys=True).encode() if message else b""
            )
            prefix = prefix or found.digest
            with session.client() as client, _bar(found, shown=not session.as_json) as bar:
                destination = f"/rooms/{find_room(client, room)['id']}/messages/batch"
                parts = batches(file, wrap, size=batch_size, first_line=from_line)
                for batch, repeated in upload(
                    client, destination, parts, prefix=prefix, pause=time.sleep, warn=partial(_warn, bar.console)
                ):
                    published += len(batch.messages)
                    repeats += len(batch.messages) if repeated else 0
                    bar.update(bar.task_ids[0], advance=len(batch.messages))
        except LineError as exc:
            what = "the file changed meanwhile" if published else "nothing was published"
            raise CliError(f"{path}, {exc}; {what}") from exc
        except KeyboardInterrupt:
            out.note(f"stopped after {published} messages; the same command again doubles nothing")
            raise
    if session.as_json:
        out.document({"published": published, "repeated": repeats, "idempotency_prefix": prefix})
        return
    out.line(f"published {published} messages" + (f", {repeats} of them by an earlier run" if repeats else ""))


def _warn(console: "Console", text: str) -> None:
    # What the service said is no markup of ours.
    console.print(terminal_safe(text), markup=False, highlight=False)


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """The file, or standard input kept aside, since it is read twice."""
    if path == "-":
        with tempfile.SpooledTemporaryFile(max_size=_CHUNK_BYTES) as kept:
            while chunk := sys.stdin.buffer.read(_CHUNK_BYTES):
                kept.write(chunk)
            yield cast("BinaryIO", kept)
        return
    try:
        file = Path(path).open("rb")  # noqa: SIM115 - closed below; only the opening is explained
    except OSError as exc:
        raise click.UsageError(f"{path} cannot be read: {exc.strerror}") from exc
    with file:
        yield file


def _bar(found: "Survey", *, shown: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("publishing"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )
    bar.add_task("publishing", total=found.messages)
    return bar
