"""`rooms listen`: a webhook receiver that shows what comes, verifies it, and can be told to fail."""

import json
import sys
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import click

from rooms.cli.errors import CliError
from rooms.cli.session import Command, Session, pass_session
from rooms.terminal import terminal_safe

if TYPE_CHECKING:
    from rooms.cli.output import Output
    from rooms.cli.receiver import Webhook

_SHOWN_BYTES = 4096
# What every request has says nothing about this one.
_DULL = {"host", "content-length", "connection", "accept", "accept-encoding", "user-agent"}


@click.command(cls=Command)
@click.option("--port", type=click.IntRange(0, 65535), default=9000, show_default=True, help="0: any that is free.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--secret", "secrets", multiple=True, help="whsec_…: what is not signed with it gets a 401; may come again."
)
@click.option(
    "--fail",
    type=click.IntRange(0),
    help="Fail the first so many attempts of each webhook.  [all with --status, --hang]",
)
@click.option("--status", type=click.IntRange(200, 599), help="What a failing attempt is answered with.  [503]")
@click.option("--hang", is_flag=True, help="A failing attempt gets no answer at all.")
@click.option("--delay-ms", type=click.IntRange(0), default=0, help="Wait before each answer.")
@click.option("--max", "most", type=click.IntRange(1), help="End after so many requests.")
@pass_session
def listen(
    session: Session,
    /,
    *,
    port: int,
    host: str,
    secrets: tuple[str, ...],
    fail: int | None,
    status: int | None,
    hang: bool,
    delay_ms: int,
    most: int | None,
) -> None:
    """Receive webhooks on this machine and show them; with --json, one a line. Ctrl-C ends it.

    A service started by `make run` may call it; any other needs ROOMS_ALLOW_TARGETS for it.
    """
    from rooms.cli.receiver import Behaviour, Receiver
    from rooms.cli.signature import secret_key

    if hang and status is not None:
        raise click.UsageError("--hang gives no answer, so --status has nothing to say")
    try:
        keys = tuple(secret_key(secret) for secret in secrets)
    except ValueError as exc:
        raise click.UsageError(f"--secret: {exc}") from exc
    if fail is None and not hang and status is None:
        fail = 0
    behaviour = Behaviour(keys=keys, fail=fail, status=status or 503, hang=hang, delay_ms=delay_ms)
    out = session.output()
    try:
        receiver = Receiver((host, port), behaviour, lambda webhook: _show(out, webhook), most=most)
    except OSError as exc:
        raise CliError(f"{host}:{port} cannot be listened on: {exc.strerror}; choose another --port") from exc
    with receiver:
        out.note(f"listening on {receiver.url}")
        receiver.serve()


def _show(out: "Output", webhook: "Webhook") -> None:
    if out.as_json:
        out.json_line(json.dumps(_described(webhook), ensure_ascii=False))
        sys.stdout.flush()
        return
    answer = "no answer" if webhook.answered is None else str(webhook.answered)
    title = (
        f"{webhook.at:%H:%M:%S.%f}"[:-3]
        + f"  {webhook.identity or 'no webhook-id'}  attempt {webhook.attempt}  → {answer}"
    )
    out.heading(title)
    if webhook.verdict is not None:
        good = webhook.verdict.genuine
        click.secho(
            terminal_safe(f"  signature {'valid' if good else f'REFUSED: {webhook.verdict.reason}'}"),
            fg="green" if good else "red",
        )
    for name, value in webhook.headers.items():
        if name not in _DULL:
            out.line(f"  {name}: {value}")
    out.content(_text(webhook.body))
    sys.stdout.flush()


def _text(body: bytes) -> str:
    shown = body[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    return shown if len(body) <= _SHOWN_BYTES else f"{shown}… ({len(body)} bytes)"


def _described(webhook: "Webhook") -> dict[str, Any]:
    try:
        body: dict[str, Any] = {"body": webhook.body.decode()}
    except UnicodeDecodeError:
        body = {"body_base64": b64encode(webhook.body).decode("ascii")}
    return {
        "received_at": webhook.at.isoformat(),
        "webhook_id": webhook.identity,
        "attempt": webhook.attempt,
        "verified": None if webhook.verdict is None else webhook.verdict.genuine,
        "reason": None if webhook.verdict is None else webhook.verdict.reason or None,
        "status": webhook.answered,
        "path": webhook.path,
        "headers": dict(webhook.headers),
        **body,
    }
