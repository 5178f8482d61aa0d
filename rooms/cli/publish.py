"""Implement `rooms publish`: one message from the command line or standard input, or a file."""

import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import click

from rooms.cli.context import CliSession, Command, pass_session
from rooms.cli.errors import CliError
from rooms.cli.input_files import open_input
from rooms.cli.options import find_room, parse_pairs, read_argument, set_fields
from rooms.cli.unknown_names import event_type_advice
from rooms.safe_text import terminal_safe

if TYPE_CHECKING:
    from rich.console import Console

    from rooms.cli.bulk_publish import BatchFile, LineParser
    from rooms.cli.client import ApiClient

_CHUNK_BYTES = 1 << 20


@click.command(cls=Command)
@click.argument("room")
@click.argument("event_type", required=False)
@click.argument("payload", required=False)
@click.option("--version", type=click.IntRange(1), help="Version of the event type.  [the latest]")
@click.option(
    "--to", "destinations", multiple=True, help="Deliver only to this destination; repeatable."
)
@click.option("--correlation-id", help="Appears in every event of the message.")
@click.option("--priority", type=click.IntRange(0, 9), help="9 is delivered first.")
@click.option(
    "--ttl-ms", type=click.IntRange(1), help="Lifetime, if shorter than that of the room."
)
@click.option(
    "--header",
    "headers",
    metavar="NAME=VALUE",
    callback=parse_pairs,
    multiple=True,
    help="Header for the webhook; repeatable.",
)
@click.option("--ordering-key", help="Orders the messages of this key for `ordered` subscriptions.")
@click.option("--delay-ms", type=click.IntRange(0), help="Delay in milliseconds.")
@click.option("--deliver-at", metavar="TIME", help="Due time, such as 2026-01-31T12:00:00Z.")
@click.option("--business-key", help="Key to list messages by.")
@click.option(
    "--id",
    help="Id of your own. The same id publishes nothing while the message is kept.",
)
@click.option(
    "--signing-key",
    "signing_key_path",
    metavar="FILE",
    help="Sign with this private JWK; needs --version and --id.",
)
@click.option("--idempotency-key", help="The same key again publishes nothing.")
@click.option(
    "--file", "path", metavar="PATH", help="One message per line (NDJSON); '-' is standard input."
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, 1000),
    default=500,
    show_default=True,
    help="Messages per request; fewer where the service refuses so many.",
)
@click.option(
    "--idempotency-prefix", help="Prefix of each batch's key.  [from the content of the file]"
)
@click.option(
    "--from-line", type=click.IntRange(1), default=1, help="Skip the lines before this one."
)
@click.option("--check", is_flag=True, help="Only check the message, and publish nothing.")
@click.option("--again", is_flag=True, help="Publish lines again that an earlier run published.")
@pass_session
def publish(
    session: CliSession,
    /,
    *,
    room: str,
    event_type: str | None,
    payload: str | None,
    path: str | None,
    signing_key_path: str | None,
    idempotency_key: str | None,
    batch_size: int,
    idempotency_prefix: str | None,
    from_line: int,
    check: bool,
    again: bool,
    **fields: Any,
) -> None:
    """Publish PAYLOAD as EVENT_TYPE.

    PAYLOAD is JSON, or @FILE. It is read from standard input if it is missing or '-'.

    With --file, every line is a message {event_type, payload, …}. With --file and EVENT_TYPE, every
    line is a payload. An interrupted upload can be repeated within 24 hours:
    nothing is published twice. Later, continue with the --from-line that it names.
    """
    message = set_fields(event_type=event_type, **fields)
    if path is not None:
        if (payload, idempotency_key, signing_key_path) != (None, None, None) or check:
            raise click.UsageError(
                "--file takes neither PAYLOAD nor --idempotency-key, --signing-key or --check"
            )
        if event_type is None and message:
            raise click.UsageError(
                "options of a message need EVENT_TYPE; without it, each line is a whole message"
            )
        if "id" in message:
            raise click.UsageError(
                "--id needs a single message; in a file each line may have an 'id' of its own"
            )
        if again and idempotency_prefix is not None:
            raise click.UsageError(
                "--again takes a prefix of its own: leave out --again, or --idempotency-prefix"
            )
        _publish_file(
            session,
            room,
            path,
            message,
            prefix=secrets.token_hex(16) if again else idempotency_prefix,
            again=again,
            batch_size=batch_size,
            from_line=from_line,
        )
        return
    if event_type is None:
        raise click.UsageError("name an EVENT_TYPE, or a --file")
    if signing_key_path is not None and not message.keys() >= {"version", "id"}:
        raise click.UsageError("--signing-key needs --version and --id")
    raw = _read_payload(payload)
    body = _request_body(message, raw)
    headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    with session.client() as client:
        found = find_room(client, room)
        if signing_key_path is not None:
            signature = _sign(client, signing_key_path, found["id"], message, raw)
            body = _request_body({**message, "signature": signature}, raw)
        path = f"/rooms/{found['id']}/messages{'/check' if check else ''}"
        with event_type_advice(client, found):
            answer = client.call("POST", path, body=body, headers={} if check else headers)
    session.output().resource(answer)


def _sign(
    client: "ApiClient", path: str, room: int, message: dict[str, Any], payload: bytes
) -> str:
    from rooms.cli.signing_key import read_private_key
    from rooms.evidence.message_signature import MessageIdentity, sign_message

    key = read_private_key(path)
    identity = MessageIdentity(
        publisher=client.call("GET", "/whoami")["organisation"]["id"],
        room=room,
        event_type=message["event_type"],
        version=message["version"],
        id=message["id"],
        ordering_key=message.get("ordering_key"),
    )
    return sign_message(key, identity, payload, iat=int(time.time()))


def _read_payload(payload: str | None) -> bytes:
    if payload is None or payload == "-":
        if payload is None and sys.stdin.isatty():
            raise click.UsageError("give a PAYLOAD, or pipe one in")
        raw = sys.stdin.buffer.read()
    else:
        try:
            raw = read_argument(payload, "PAYLOAD")
        except CliError as exc:
            raise click.UsageError(exc.message) from exc
    return raw.strip()


def _request_body(message: dict[str, Any], payload: bytes) -> bytes:
    from rooms.cli.bulk_publish import payload_parser

    try:
        return payload_parser(message)(payload)
    except ValueError as exc:
        raise click.UsageError(f"PAYLOAD is {exc}") from exc


def _publish_file(
    session: CliSession,
    room: str,
    path: str,
    message: dict[str, Any],
    *,
    prefix: str | None,
    again: bool,
    batch_size: int,
    from_line: int,
) -> None:
    import json

    from rooms.cli.bulk_publish import (
        LineError,
        Upload,
        parse_message_line,
        payload_parser,
        read_batches,
        resume_hint,
        scan_file,
    )

    wrap: LineParser = payload_parser(message) if message else parse_message_line
    out = session.output()
    published = repeats = 0
    next_line = from_line
    found: BatchFile | None = None
    with _open_input(path) as file:
        try:
            found = scan_file(
                file,
                wrap,
                first_line=from_line,
                salt=json.dumps(message, sort_keys=True).encode() if message else b"",
            )
            prefix = prefix or found.digest
            with session.client() as client, _progress_bar(found, shown=not session.as_json) as bar:
                destination = f"/rooms/{find_room(client, room)['id']}/messages/batch"
                parts = read_batches(file, wrap, size=batch_size, first_line=from_line)
                upload = Upload(
                    client=client,
                    path=destination,
                    prefix=prefix,
                    again=again,
                    sleep=time.sleep,
                    warn=partial(_warn, bar.console),
                )
                for batch, repeated in upload.send_all(parts):
                    published += len(batch.messages)
                    next_line = batch.lines[-1] + 1
                    repeats += len(batch.messages) if repeated else 0
                    bar.update(bar.task_ids[0], advance=len(batch.messages))
        except LineError as exc:
            what = "the file has changed since" if published else "nothing was published"
            raise CliError(f"{path}, {exc}; {what}") from exc
        except KeyboardInterrupt:
            out.note(
                "stopped; nothing was published"
                if found is None
                else f"stopped after {published} messages;"
                f" {resume_hint(prefix or found.digest, next_line, again=again)}"
            )
            raise
    if session.as_json:
        out.document({"published": published, "repeated": repeats, "idempotency_prefix": prefix})
        return
    out.line(
        f"published {published} messages"
        + (f", {repeats} of them by an earlier run" if repeats else "")
    )


def _warn(console: "Console", text: str) -> None:
    # Text of the service may look like markup.
    console.print(terminal_safe(text), markup=False, highlight=False)


@contextmanager
def _open_input(path: str) -> Iterator[BinaryIO]:
    """Open the file. Standard input and pipes are copied to a temporary file, to be read twice."""
    try:
        opened = nullcontext(sys.stdin.buffer) if path == "-" else open_input(path)
    except OSError as exc:
        raise click.UsageError(f"{path} cannot be read: {exc.strerror}") from exc
    with opened as file:
        if path != "-" and file.seekable():
            yield file
            return
        with tempfile.SpooledTemporaryFile(max_size=_CHUNK_BYTES) as kept:
            while chunk := file.read(_CHUNK_BYTES):
                kept.write(chunk)
            yield cast("BinaryIO", kept)


def _progress_bar(batch_file: "BatchFile", *, shown: bool) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

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
    bar.add_task("publishing", total=batch_file.messages)
    return bar
